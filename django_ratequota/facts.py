"""Plans, endpoints and policies as the resolver needs them: immutable, and made from rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

from .conf import Network
from .exceptions import InvalidRate
from .rates import Rate, parse_rates
from .recent import Recent

#: A policy that is not stored yet comes after all that are.
_NEW_ID = 2**63
#: What a snapshot remembers of late: matches of routes, places, resolutions (about 1 kB each).
_MATCHES, _PLACES, _RESOLUTIONS = 4096, 4096, 8192

logger = logging.getLogger("django_ratequota")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """A plan as the resolver needs it."""

    id: int
    name: str
    slug: str


# Told apart by identity, as users' entries are: they are parts of keys that every request looks up.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndpointFacts:
    """An endpoint as the resolver needs it; ``methods`` empty = all but OPTIONS."""

    id: int
    name: str
    routes: tuple[str, ...]
    methods: frozenset[str]
    cost: int
    #: Statuses of the responses that count, such as 401 and 5xx; empty = every request counts.
    charged_statuses: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """A policy as the resolver needs it; times in µs since the Unix epoch, None = open."""

    id: int
    endpoint_id: int | None
    user: str
    subject: str
    plan_id: int | None
    counted_per: str
    text: str
    #: The rates to count by, or the words unlimited and blocked.
    rates: tuple[Rate, ...] | str
    mode: str
    on_error: str
    starts_us: int | None
    ends_us: int | None
    #: The addresses that a subject ``ip:...`` stands for; None for other audiences.
    network: Network | None = None

    @property
    def dated(self) -> bool:
        """Whether it has a start or an end: a dated policy beats an open one."""
        return self.starts_us is not None or self.ends_us is not None

    def active(self, now_us: int) -> bool:
        """Whether it counts at ``now_us``."""
        return (self.starts_us is None or self.starts_us <= now_us) and (
            self.ends_us is None or now_us < self.ends_us
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A user's plan for a time."""

    plan_id: int
    starts_us: int
    ends_us: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UserEntry:
    """What belongs to one user only."""

    policies: tuple[PolicyFacts, ...] = ()
    assignments: tuple[Assignment, ...] = ()

    def plan_id(self, now_us: int) -> int | None:
        """The plan assigned at ``now_us``: a dated assignment beats an open one, then the latest start."""
        active = [a for a in self.assignments if a.starts_us <= now_us and (a.ends_us is None or now_us < a.ends_us)]
        best = max(active, key=lambda a: (a.ends_us is not None, a.starts_us), default=None)
        return None if best is None else best.plan_id


NOBODY = UserEntry()


class Group:
    """The policies that compete for one endpoint and counted_per, indexed by audience; users' own left out."""

    __slots__ = ("by_network", "by_plan", "by_subject", "everyone", "kinds", "policies")

    def __init__(self, policies: Iterable[PolicyFacts]) -> None:
        #: All of them, those that are off included, for ``explain``.
        self.policies = tuple(policies)
        self.by_subject: dict[str, list[PolicyFacts]] = {}
        #: Kinds of the subjects above.
        self.kinds: tuple[str, ...] = ()
        #: (bits of an address, bits of these that tell hosts apart) -> the other bits -> policies
        self.by_network: dict[tuple[int, int], dict[int, list[PolicyFacts]]] = {}
        self.by_plan: dict[int, list[PolicyFacts]] = {}
        self.everyone: list[PolicyFacts] = []
        for policy in self.policies:
            if policy.mode == "off":
                continue
            network = policy.network
            if network is not None:
                hosts = network.max_prefixlen - network.prefixlen
                alike = self.by_network.setdefault((network.max_prefixlen, hosts), {})
                alike.setdefault(int(network.network_address) >> hosts, []).append(policy)
            elif policy.subject:
                self.by_subject.setdefault(policy.subject, []).append(policy)
            elif policy.plan_id is not None:
                self.by_plan.setdefault(policy.plan_id, []).append(policy)
            else:
                self.everyone.append(policy)
        self.kinds = tuple({subject.partition(":")[0] for subject in self.by_subject})

    def containing(self, address: IPv4Address | IPv6Address) -> Iterator[PolicyFacts]:
        """The policies for networks that the address is in."""
        bits, value = address.max_prefixlen, int(address)
        for (length, hosts), policies in self.by_network.items():
            if length == bits:
                yield from policies.get(value >> hosts, ())


class Memo:
    """What was worked out from one snapshot lately, by ``resolver``: bounded, and gone with the snapshot."""

    __slots__ = ("matches", "places", "resolutions")

    def __init__(self) -> None:
        self.matches: Recent[tuple[EndpointFacts, ...]] = Recent(_MATCHES)
        self.places: Recent[Any] = Recent(_PLACES)
        self.resolutions: Recent[Any] = Recent(_RESOLUTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is not one user's own, as the database held it at ``revision`` or later."""

    revision: int
    plans: Mapping[int, PlanFacts]
    #: default_for -> plan id
    defaults: Mapping[str, int]
    endpoints: Mapping[int, EndpointFacts]
    #: endpoint id (None = all endpoints) -> counted_per -> the policies that compete there.
    groups: Mapping[int | None, Mapping[str, Group]]
    loaded_at: float = field(default_factory=time.time)
    #: The endpoints' names, and the methods that some endpoint is particular about.
    names: frozenset[str] = field(init=False, repr=False)
    methods: frozenset[str] = field(init=False, repr=False)
    #: Whether some endpoint counts only responses of some statuses.
    by_outcome: bool = field(init=False, repr=False)
    #: A copy with other policies remembers nothing of these.
    memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        endpoints = self.endpoints.values()
        object.__setattr__(self, "by_outcome", any(endpoint.charged_statuses for endpoint in endpoints))
        object.__setattr__(self, "names", frozenset(endpoint.name for endpoint in endpoints))
        object.__setattr__(self, "methods", frozenset(["OPTIONS"]).union(*[one.methods for one in endpoints]))

    def at(self, revision: int) -> Snapshot:
        """The same, read at this revision as of now."""
        same = replace(self, revision=revision, loaded_at=time.time())
        object.__setattr__(same, "memo", self.memo)
        return same

    def plan_by_slug(self, slug: str) -> PlanFacts | None:
        """The plan that code calls ``slug``."""
        return next((plan for plan in self.plans.values() if plan.slug == slug), None)


def group_policies(policies: Iterable[PolicyFacts]) -> dict[int | None, dict[str, Group]]:
    """``Snapshot.groups`` of policies that are no user's own."""
    groups: dict[int | None, dict[str, list[PolicyFacts]]] = {}
    for policy in policies:
        groups.setdefault(policy.endpoint_id, {}).setdefault(policy.counted_per, []).append(policy)
    return {
        endpoint_id: {counted_per: Group(rivals) for counted_per, rivals in competing.items()}
        for endpoint_id, competing in groups.items()
    }


def endpoint_facts(endpoint: Any) -> EndpointFacts:
    """What an Endpoint row says."""
    return EndpointFacts(
        id=endpoint.pk,
        name=endpoint.name,
        routes=tuple(endpoint.routes.split()),
        methods=frozenset(endpoint.methods.split()),
        cost=endpoint.cost,
        charged_statuses=frozenset(endpoint.charged_statuses.replace(",", " ").split()),
    )


#: What ``policy_facts`` reads of a RatePolicy.
POLICY_COLUMNS = (
    *("pk", "endpoint_id", "user_id", "subject", "plan_id", "counted_per", "rates", "algorithm", "mode", "on_error"),
    *("starts_at", "ends_at"),
)


def policy_facts(policy: Any) -> PolicyFacts:
    """What a RatePolicy says, given as the object or as a row of ``POLICY_COLUMNS``."""
    return PolicyFacts(
        id=_NEW_ID if policy.pk is None else policy.pk,
        endpoint_id=policy.endpoint_id,
        user="" if policy.user_id is None else str(policy.user_id),
        subject=policy.subject,
        plan_id=policy.plan_id,
        counted_per=policy.counted_per,
        text=policy.rates,
        rates=_read_rates(policy),
        mode=policy.mode,
        on_error=policy.on_error,
        starts_us=policy.starts_at and to_us(policy.starts_at),
        ends_us=policy.ends_at and to_us(policy.ends_at),
        network=_network(policy.subject),
    )


def to_us(moment: datetime) -> int:
    """µs since the Unix epoch."""
    return round(moment.timestamp() * 10**6)


def _network(subject: str) -> Network | None:
    kind, _, value = subject.partition(":")
    if kind != "ip":
        return None
    try:
        return ip_network(value)
    except ValueError:  # written past the model's validation: it matches nobody
        return None


def _read_rates(policy: Any) -> tuple[Rate, ...] | str:
    try:
        return _parse(policy.rates, policy.algorithm)
    except InvalidRate as error:
        # Written past the model's validation; limiting nobody by it beats failing every request.
        logger.error("policy %s is left out, its rates %r cannot be read: %s", policy.pk, policy.rates, error)
        return ()


# Thousands of policies say a few dozen rates among them: parsed once, and held once.
_parse = lru_cache(maxsize=1024)(parse_rates)
