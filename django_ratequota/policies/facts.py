"""Plans, endpoints, policies and list members as the resolver needs them: immutable, made from database rows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import ip_network
from socket import AF_INET, inet_pton
from typing import Any

from django.conf import settings as django_settings
from django.utils import timezone

from ..engine.rates import Rate, parse_rates
from ..exceptions import InvalidRate
from ..utils.addresses import network_from, unmap_network

#: Id of an unsaved policy: the highest, as if it were saved now.
_NEW_ID = 2**63
#: ``PolicyFacts.rates`` if this version cannot read the text: ``on_error`` decides.
UNREADABLE = "unreadable"
#: A network: address length in bits, host bits, network number. A tenth of the memory of an ``IPv4Network``.
NetworkKey = tuple[int, int, int]
#: What may follow an IPv4 address -> host bits of the network.
_IPV4_HOSTS = {"": 0, **{f"/{32 - hosts}": hosts for hosts in range(33)}}
#: The key of policies for everyone.
EVERYONE = "everyone"
#: What an index counts: (name, value).
Trait = tuple[str, Any]
#: What an index finds an entry by: a subject such as ``tenant:acme``, a network, or the trait of a list or plan.
Key = str | NetworkKey | Trait


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """A plan as the resolver needs it."""

    id: int
    name: str
    slug: str
    #: Callers on it without an assignment: authenticated, anonymous, or "" = nobody.
    default_for: str = ""


# Compared by identity, as UserEntry is, because both are parts of keys that every request looks up.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointFacts:
    """An endpoint as the resolver needs it; ``methods`` empty = all."""

    id: int
    name: str
    routes: tuple[str, ...]
    methods: frozenset[str]
    cost: int
    #: Statuses of the responses that are charged, such as 401 and 5xx; empty = all.
    charged_statuses: frozenset[str] = frozenset()
    #: Which policies limit its requests, whatever other endpoints they match: those for all endpoints ``besides`` its
    #: own; ``own`` = those for all endpoints stand back, other than blocks; ``none`` = no policy at all.
    limits: str = "besides"


class _Dated:
    """Something that starts and ends; times in µs since the Unix epoch, None = open."""

    __slots__ = ()
    starts_us: int | None
    ends_us: int | None

    @property
    def dated(self) -> bool:
        """Whether it has a start or an end: a dated policy outranks an open one."""
        return self.starts_us is not None or self.ends_us is not None

    def active(self, now_us: int) -> bool:
        """Whether it applies at ``now_us``."""
        return (self.starts_us is None or self.starts_us <= now_us) and (
            self.ends_us is None or now_us < self.ends_us
        )


# Not frozen only because that triples the time of making one, and a process loads 10^5.
@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class PolicyFacts(_Dated):
    """A policy as the resolver needs it; times in µs since the Unix epoch, None = open."""

    id: int
    endpoint_id: int | None
    user: str
    subject: str
    plan_id: int | None
    counted_per: str
    #: The stored text of ``rates``.
    text: str
    #: The rates, or one of the words unlimited, blocked and ``UNREADABLE``.
    rates: tuple[Rate, ...] | str
    mode: str
    on_error: str
    starts_us: int | None
    ends_us: int | None
    #: The addresses of a subject ``ip:...``; None for other audiences.
    network: NetworkKey | None = None
    #: Whether counts of its calendar windows outlive the store's data; None = those of verified subjects.
    durable: bool | None = False
    #: Whether X-RateLimit-* describe its first rate.
    leads_headers: bool = False
    #: The subject list whose members it is for; None for other audiences.
    list_id: int | None = None

    @property
    def key(self) -> Key | None:
        """Return what the index of its group finds it by; None if it is off."""
        if self.mode == "off":
            return None
        if self.network is not None:
            return self.network
        if self.list_id is not None:
            return "list", self.list_id
        return self.subject or (EVERYONE if self.plan_id is None else ("plan", self.plan_id))

    @property
    def traits(self) -> list[Trait]:
        """Return what the index of its group counts: kinds of subjects, networks' sizes, lists, plans, months.

        Identifiers, lists and plans are counted once more for policies that are enforced.
        """
        found: list[Trait] = []
        if self.mode == "off":
            return found
        if self.subject:
            found.append(("subject", self.subject.partition(":")[0]))
        if self.network is not None:
            found.append(("network", self.network[:2]))
        if self.list_id is not None:
            found.append(("list", self.list_id))
        if self.plan_id is not None:
            found.append(("plan", self.plan_id))
        if self.mode == "enforce":
            found += [(f"enforced {name}", value) for name, value in found if name != "network" and value != "ip"]
        if isinstance(self.rates, tuple) and "month" in [rate.calendar for rate in self.rates]:
            found.append(("month", True))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts(_Dated):
    """An entry of a subject list as the resolver needs it."""

    id: int
    list_id: int
    #: ``user:42``, ``tenant:acme``, or a network.
    key: str | NetworkKey
    starts_us: int | None
    ends_us: int | None

    @property
    def kind(self) -> str:
        """Return ``ip``, ``user`` or a name of IDENTIFIERS."""
        return self.key.partition(":")[0] if isinstance(self.key, str) else "ip"

    @property
    def traits(self) -> list[Trait]:
        """Return what the index counts: the members of a list by kind, and networks' sizes."""
        member = ("member", (self.list_id, self.kind))
        return [member] if isinstance(self.key, str) else [member, ("network", self.key[:2])]

    def __str__(self) -> str:
        """Return the subject as text."""
        if isinstance(self.key, str):
            return self.key
        network = network_from(*self.key)
        return f"ip:{network}".removesuffix(f"/{network.max_prefixlen}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment(_Dated):
    """A user's or a subject's plan from ``starts_us`` until ``ends_us``, in µs since the Unix epoch; None = open."""

    plan_id: int
    starts_us: int
    ends_us: int | None
    id: int = 0
    #: Day of the month on which the customer's calendar months begin; 0 = that of the customer's other assignments.
    anchor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UserEntry:
    """One user's own policies and plan assignments, or the assignments of one subject such as ``tenant:acme``."""

    policies: tuple[PolicyFacts, ...] = ()
    assignments: tuple[Assignment, ...] = ()

    def assignment(self, now_us: int) -> Assignment | None:
        """Return the one that gives the plan at ``now_us``."""
        return next((one for one in self._begun(now_us) if one.active(now_us)), None)

    def anchor(self, now_us: int) -> int:
        """Return the day on which months begin at ``now_us``: that of the first assignment that names one.

        If none does, 1; or 0 if none is active either, because somebody else's may tell then.
        """
        named = (one.anchor for one in self._begun(now_us) if one.anchor)
        return next(named, 1 if self.assignment(now_us) else 0)

    def _begun(self, now_us: int) -> list[Assignment]:
        """Return the assignments that have begun: those that are active, then the others, the last to end first.

        Of the active ones, dated before open, then the latest start, then the highest id.
        """

        def rank(one: Assignment) -> tuple[int, ...]:
            active = one.active(now_us)
            return active, one.ends_us is not None if active else one.ends_us or 0, one.starts_us, one.id

        return sorted([one for one in self.assignments if one.starts_us <= now_us], key=rank, reverse=True)


NOBODY = UserEntry()


def entry_of(policies: tuple[PolicyFacts, ...], assignments: tuple[Assignment, ...], settled_us: int) -> UserEntry:
    """Return the entry of a user or subject; one object for all who are on a plan and have nothing else.

    ``settled_us`` is a time so long ago that when an assignment began before it does not matter.
    """
    if not policies and len(assignments) == 1:
        [only] = assignments
        if only.ends_us is None and only.starts_us < settled_us:
            return _on_plan(only.plan_id, only.anchor)
    return UserEntry(policies=policies, assignments=assignments) if policies or assignments else NOBODY


@lru_cache(maxsize=4096)
def _on_plan(plan_id: int, anchor: int) -> UserEntry:
    return UserEntry(assignments=(Assignment(plan_id=plan_id, starts_us=0, ends_us=None, anchor=anchor),))


#: (kind, value) of a subject on a plan, such as ("tenant", "acme"). No user's primary key is a tuple.
SubjectKey = tuple[str, str]
#: (kind, entry) of a caller's user and subjects, in the order in which plans are looked for.
Assigned = tuple[tuple[str, UserEntry], ...]


def subject_key(subject: str) -> SubjectKey:
    """Return the kind and the value of a subject such as ``tenant:acme``."""
    kind, _colon, value = subject.partition(":")
    return kind, value


#: The columns of Plan that are the arguments of ``PlanFacts``.
PLAN_COLUMNS = ("id", "name", "slug", "default_for")
#: The columns of Endpoint that ``endpoint_facts`` reads.
ENDPOINT_COLUMNS = ("pk", "name", "routes", "methods", "cost", "charged_statuses", "limits")


def endpoint_facts(endpoint: Any) -> EndpointFacts:
    """Return the facts of an ``Endpoint``, which may be a named row."""
    return EndpointFacts(
        id=endpoint.pk,
        name=endpoint.name,
        routes=tuple(endpoint.routes.split()),
        methods=frozenset(endpoint.methods.split()),
        cost=endpoint.cost,
        charged_statuses=frozenset(endpoint.charged_statuses.replace(",", " ").split()),
        limits=endpoint.limits,
    )


def assignment_facts(row: Any) -> Assignment:
    """Return the facts of a ``PlanAssignment``, which may be a named row."""
    pk, ends_us = _NEW_ID if row.pk is None else row.pk, row.ends_at and to_us(row.ends_at)
    starts_us, anchor = to_us(row.starts_at), row.anchor or 0
    return Assignment(id=pk, plan_id=row.plan_id, starts_us=starts_us, ends_us=ends_us, anchor=anchor)


#: The columns of RatePolicy that ``policy_facts`` reads.
POLICY_COLUMNS = (
    *("pk", "endpoint_id", "user_id", "subject", "plan_id", "counted_per", "rates", "algorithm", "mode", "on_error"),
    *("starts_at", "ends_at", "durable", "leads_headers", "subject_list_id"),
)


def policy_facts(policy: Any) -> PolicyFacts:
    """Return the facts of a ``RatePolicy``, saved or not, which may be a named row."""
    return PolicyFacts(
        id=_NEW_ID if policy.pk is None else policy.pk,
        endpoint_id=policy.endpoint_id,
        user="" if policy.user_id is None else str(policy.user_id),
        subject=policy.subject,
        plan_id=policy.plan_id,
        counted_per=policy.counted_per,
        text=policy.rates,
        rates=read_rates(policy.rates, policy.algorithm),
        mode=policy.mode,
        on_error=policy.on_error,
        starts_us=policy.starts_at and to_us(policy.starts_at),
        ends_us=policy.ends_at and to_us(policy.ends_at),
        network=_network(policy.subject),
        durable=policy.durable,
        leads_headers=policy.leads_headers,
        list_id=policy.subject_list_id,
    )


#: The columns of ListMember that ``member_facts`` reads, in the order of its arguments.
MEMBER_COLUMNS = ("pk", "subject_list_id", "user_id", "subject", "starts_at", "ends_at")


def member_facts(
    pk: int, list_id: int, user_id: Any, subject: str | None, starts_at: Any, ends_at: Any
) -> MemberFacts:
    """Return the facts of a ``ListMember`` from its columns."""
    network = _network(subject or "")
    return MemberFacts(
        id=pk,
        list_id=list_id,
        key=network or subject or f"user:{user_id}",
        starts_us=starts_at and to_us(starts_at),
        ends_us=ends_at and to_us(ends_at),
    )


def read_rates(text: Any, algorithm: Any) -> tuple[Rate, ...] | str:
    """Parse a policy's rates; ``UNREADABLE`` if this version cannot read the text."""
    try:
        return parse_rates(text, algorithm)  # which holds each of the few dozen texts once
    except InvalidRate:
        return UNREADABLE


def to_us(moment: datetime) -> int:
    """Return µs since the Unix epoch."""
    return round(moment.timestamp() * 10**6)


def to_datetime(at_us: int) -> datetime:
    """Return a model field's value for µs since the Unix epoch: aware, unless USE_TZ is off."""
    aware = datetime.fromtimestamp(at_us / 10**6, tz=UTC)
    return aware if django_settings.USE_TZ else timezone.make_naive(aware)


def as_stored(moment: datetime) -> datetime:
    """Return a model field's value for a moment; a naive one is in the current time zone."""
    return to_datetime(to_us(moment if timezone.is_aware(moment) else timezone.make_aware(moment)))


def _network(subject: str) -> NetworkKey | None:
    if not subject.startswith("ip:"):
        return None
    value = subject[3:]
    first, slash, length = value.partition("/")
    hosts = _IPV4_HOSTS.get(slash + length)
    try:
        if ":" not in first and hosts is not None:  # ip_network takes ten times as long
            number = int.from_bytes(inet_pton(AF_INET, first))
            return (32, hosts, number >> hosts) if number >> hosts << hosts == number else None
        network = unmap_network(ip_network(value))
    except (OSError, ValueError):  # stored without the model's validation: it matches nobody
        return None
    hosts = network.max_prefixlen - network.prefixlen
    return network.max_prefixlen, hosts, int(network.network_address) >> hosts
