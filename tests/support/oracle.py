"""Which policies apply, told a second time from the documentation alone (docs/reference/policies.md), to be compared.

Nothing here imports the package. Times are hours from now; every row is known by its position in its list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from hypothesis import strategies as st


@dataclass(frozen=True, kw_only=True)
class Dated:
    """Something that starts and ends."""

    starts: int | None = None
    ends: int | None = None

    def active(self, at: float) -> bool:
        return (self.starts is None or self.starts <= at) and (self.ends is None or at < self.ends)


@dataclass(frozen=True, kw_only=True)
class Policy(Dated):
    """``audience`` is ``user:…``, ``tenant:…``, ``ip:…``, ``list:…``, ``plan:…``, or "" = everyone."""

    number: int
    endpoint: str | None
    audience: str
    counted_per: str
    rates: str
    mode: str

    @property
    def kind(self) -> str:
        return self.audience.partition(":")[0]

    @property
    def refuses_whoever_it_names(self) -> bool:
        return self.rates == "blocked" and self.mode == "enforce" and self.kind not in ("", "plan")


@dataclass(frozen=True, kw_only=True)
class Row(Dated):
    """A member of a list, or a subject's plan: ``of`` is the list's or the plan's name, ``who`` as an audience."""

    of: str
    who: str
    #: The day on which the months of the one on a plan begin; 0 = that of the other rows.
    day: int = 0


@dataclass(frozen=True, kw_only=True)
class Client:
    """Who sends a request. ``identifiers`` are the values of IDENTIFIERS; a user or an address may be missing."""

    user: str | None = None
    address: str | None = None
    identifiers: tuple[tuple[str, str], ...] = ()

    def value(self, kind: str) -> str | None:
        """What the client is called by this kind of subject; all addresses of an IPv6 /64 are one client."""
        if kind == "ip" and self.address is not None and ":" in self.address:
            return str(ip_network(f"{self.address}/64", strict=False))
        return {"user": self.user, "ip": self.address, **dict(self.identifiers)}.get(kind)

    def is_named_by(self, subject: str) -> bool:
        kind, _, value = subject.partition(":")
        if kind == "ip":
            return self.address is not None and ip_address(self.address) in ip_network(value)
        return self.value(kind) == value


@dataclass(frozen=True, kw_only=True)
class World:
    """All rows, the settings CALLER and IDENTIFIERS, and the slugs that code returns for ``CLIENTS``."""

    caller: tuple[str, ...]
    identifiers: tuple[str, ...]
    #: Name -> ``default_for``, and name -> the endpoint's ``limits``.
    plans: dict[str, str]
    endpoints: dict[str, str]
    assignments: tuple[Row, ...]
    members: tuple[Row, ...]
    policies: tuple[Policy, ...]
    #: Same order as ``CLIENTS``; None = no opinion.
    slugs: tuple[str | None, ...] = (None,) * 5

    def slug(self, client: Client) -> str | None:
        """What PLAN_RESOLVER returns for the client."""
        return dict(zip(CLIENTS, self.slugs, strict=True)).get(client)

    def assigned(self, client: Client, at: float) -> list[tuple[str, list[Row]]]:
        """The assignments of each of the client's names that have begun, the one that applies first.

        The names are in the order in which plans are looked for: along CALLER, the user, IDENTIFIERS.
        """

        def rank(row: Row) -> tuple[object, ...]:
            ends = row.ends is not None if row.active(at) else row.ends
            return row.active(at), ends, row.starts, self.assignments.index(row)

        kinds = dict.fromkeys([*self.caller, "user", *self.identifiers])
        begun = [row for row in self.assignments if row.starts is None or row.starts <= at]
        own = {kind: [row for row in begun if row.who == f"{kind}:{client.value(kind)}"] for kind in kinds}
        return [(kind, sorted(rows, key=rank, reverse=True)) for kind, rows in own.items() if rows]

    def plan_of(self, client: Client, at: float) -> str | None:
        """The plan that code names, else of the first who is on one, else the default plan."""
        slug = self.slug(client)
        if slug in self.plans:
            return slug
        for _kind, rows in self.assigned(client, at):
            if rows[0].active(at):
                return rows[0].of
        wanted = "anonymous" if client.user is None else "authenticated"
        return next((name for name, default_for in self.plans.items() if default_for == wanted), None)

    def subject(self, counted_per: str, client: Client, plan: str | None) -> str | None:
        """Whom the counter is for; None = the client has no such name, so that the policy counts nothing."""
        if counted_per == "everyone":
            return "everyone"
        if counted_per == "plan":
            return None if plan is None else f"plan:{plan}"
        kinds = self.caller if counted_per == "caller" else (counted_per,)
        names = [f"{kind}:{client.value(kind)}" for kind in kinds if client.value(kind) is not None]
        return next(iter(names), "ip:unknown" if counted_per in ("caller", "ip") else None)

    def month_day(self, subject: str, client: Client, at: float) -> int:
        """On which day of the month the subject's months begin, whatever names the client's plan.

        The subject's own assignments say it, else those of the first who is on a plan, else any other.
        """
        kind = subject.partition(":")[0]
        if kind in ("everyone", "plan", "ip"):
            return 1
        found = self.assigned(client, at)
        on_plans = [name for name, rows in found if rows[0].active(at)]
        order = [kind, *on_plans[:1], *(name for name, _rows in found)]
        days = {name: next((r.day for r in rows if r.day), int(rows[0].active(at))) for name, rows in found}
        return next((days[name] for name in order if days.get(name)), 1)

    def includes(self, policy: Policy, client: Client, plan: str | None, at: float) -> bool:
        """Whether the client is in the policy's audience."""
        if policy.kind == "list":
            own = (row for row in self.members if f"list:{row.of}" == policy.audience and row.active(at))
            return any(client.is_named_by(row.who) for row in own)
        if policy.kind == "plan":
            return policy.audience == f"plan:{plan}"
        return not policy.kind or client.is_named_by(policy.audience)

    def strength(self, policy: Policy) -> tuple[object, ...]:
        """A key by which the stronger of two policies in one group is the greater."""
        kinds = [kind for kind in dict.fromkeys([*self.caller, *self.identifiers]) if kind in self.identifiers]
        weakest_first = ["", "plan", "list", "ip", *reversed(kinds), "user"]
        prefix = ip_network(policy.audience[3:]).prefixlen if policy.kind == "ip" else 0
        dated = policy.starts is not None or policy.ends is not None
        since = float("-inf") if policy.starts is None else policy.starts
        rank = weakest_first.index(policy.kind)
        return policy.refuses_whoever_it_names, rank, prefix, dated, since, policy.mode == "log", policy.number

    def winners(self, client: Client, scope: str | None, at: float = 0, plan: str | None = None) -> dict[Policy, str]:
        """The policies that apply to a request, each with the subject that it counts; ``plan`` instead of its own."""
        limits = self.endpoints.get(scope or "")
        if limits == "none":
            return {}
        plan = plan or self.plan_of(client, at)
        groups: dict[tuple[str | None, str], list[Policy]] = {}
        for policy in self.policies:
            applies = policy.mode != "off" and policy.active(at) and policy.endpoint in (None, scope)
            if applies and self.includes(policy, client, plan, at):
                groups.setdefault((policy.endpoint, policy.counted_per), []).append(policy)
        winners = [max(rivals, key=self.strength) for rivals in groups.values()]
        # A log-only policy never takes the place of an enforced one.
        enforced = [[policy for policy in rivals if policy.mode == "enforce"] for rivals in groups.values()]
        winners = [*dict.fromkeys([*winners, *(max(rivals, key=self.strength) for rivals in enforced if rivals)])]
        if limits == "own":
            winners = [policy for policy in winners if policy.endpoint or policy.rates == "blocked"]
        subjects = {policy: self.subject(policy.counted_per, client, plan) for policy in winners}
        return {policy: subject for policy, subject in subjects.items() if subject is not None}


USERS, LISTS = ("alice", "bob"), ("bots", "partners")
NETWORKS = ("203.0.113.7/32", "203.0.113.0/24", "203.0.0.0/16", "198.51.100.0/24", "2001:db8::/48")
SUBJECTS = (*(f"ip:{text}" for text in NETWORKS), "tenant:acme", "tenant:globex", "api_key:k")
CLIENTS = (
    Client(user="alice", address="203.0.113.7", identifiers=(("tenant", "acme"),)),
    Client(user="bob", address="203.0.7.1"),
    Client(address="203.0.113.7", identifiers=(("tenant", "globex"), ("api_key", "k"))),
    Client(address="2001:db8::", identifiers=(("tenant", "acme"),)),
    Client(),
)
_FEW, _WHO = st.sampled_from([None, None, None, -3, -2, -1]), st.sampled_from([*SUBJECTS, "user:alice", "user:bob"])
_LIMITS = st.sampled_from(["besides", "besides", "own", "own", "none"])
_LATER = st.sampled_from([None, None, None, -1, 1, 3])


@st.composite
def policies(draw: st.DrawFn) -> tuple[Policy, ...]:
    """Policies of a few groups, so that most of them meet others."""
    places = st.tuples(
        st.sampled_from([None, "search", "export"]),
        st.sampled_from(["caller", "caller", "ip", "plan", "everyone", "tenant"]),
    )
    audiences = [f"user:{USERS[0]}", *SUBJECTS, *(f"list:{name}" for name in LISTS), "plan:free", "plan:pro", "", ""]
    groups = draw(st.lists(places, min_size=1, max_size=4, unique=True))
    found: dict[tuple[object, ...], Policy] = {}
    for number in range(draw(st.integers(1, 16))):
        (endpoint, counted_per), audience = draw(st.sampled_from(groups)), draw(st.sampled_from(audiences))
        starts, ends = draw(_FEW | st.just(1)), draw(_LATER)
        if starts is not None and ends is not None and starts >= ends:
            continue
        policy = Policy(
            number=number,
            endpoint=endpoint,
            audience=audience,
            counted_per=counted_per,
            rates=draw(st.sampled_from([f"{number + 50}/hour", f"{number + 50}/month", "blocked", "unlimited"])),
            mode=draw(st.sampled_from(["enforce", "enforce", "enforce", "log", "off"])),
            starts=starts,
            ends=ends,
        )
        # The database has no two of them, but a log-only one next to another.
        found.setdefault((endpoint, counted_per, audience, starts, ends, policy.mode == "log"), policy)
    return tuple(found.values())


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Everything that decides, small enough that policies and callers meet."""

    def rows(names: tuple[str, ...], most: int) -> Iterator[Row]:
        taken = set()
        for _ in range(draw(st.integers(0, most))):
            who, of = draw(_WHO), draw(st.sampled_from(names))
            starts, ends = draw(_FEW), draw(_LATER)
            if (of, who) not in taken and (starts is None or ends is None or starts < ends):
                taken.add((of, who))
                yield Row(of=of, who=who, starts=starts, ends=ends)

    def on_plans() -> Iterator[Row]:
        for row in rows(("free", "pro"), 4):
            if not row.who.startswith("ip:"):  # no address is on a plan
                starts, day = -4 if row.starts is None else row.starts, draw(st.sampled_from([0, 0, 13, 20]))
                yield Row(of=row.of, who=row.who, starts=starts, ends=row.ends, day=day)

    return World(
        caller=draw(st.sampled_from([("user", "ip"), ("tenant", "user", "ip"), ("api_key", "ip"), ("ip", "tenant")])),
        identifiers=("tenant", "api_key"),
        plans={"free": draw(st.sampled_from(["", "anonymous"])), "pro": draw(st.sampled_from(["", "authenticated"]))},
        endpoints={"search": draw(_LIMITS), "export": draw(st.sampled_from(["besides", "own"]))},
        assignments=tuple(on_plans()),
        members=tuple(rows(LISTS, 5)),
        policies=draw(policies()),
        slugs=draw(st.just((None,) * 5) | st.tuples(*[st.sampled_from([None, None, "free", "pro", "gone"])] * 5)),
    )
