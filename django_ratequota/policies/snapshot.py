"""The policies of all endpoints, indexed by audience, and the snapshot that requests are checked by: immutable."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address
from typing import Any, NamedTuple

from ..utils.bounded_cache import BoundedCache
from ..utils.chunked_mapping import ChunkedMapping
from .facts import EndpointFacts, PlanFacts, PolicyFacts

#: What a snapshot remembers of late: matches of routes, places, resolutions (about 1 kB each).
_ENDPOINTS, _POLICIES, _RESOLUTIONS = 4096, 4096, 8192
#: Places of many endpoints at once that are remembered (about 10 kB each).
_OVERVIEWS = 16
#: Indexes of a group; the others are of networks of one size.
_SUBJECTS, _PLANS = "subjects", "plans"


class Group:
    """The policies that compete for one endpoint and counted_per, indexed by audience; users' own left out.

    Immutable: ``changed`` makes another one.
    """

    __slots__ = ("by_id", "by_network", "by_plan", "by_subject", "everyone", "kinds")

    def __init__(self, policies: Iterable[PolicyFacts]) -> None:
        #: All of them, those that are off included.
        self.by_id: ChunkedMapping[int, PolicyFacts] = ChunkedMapping({})
        self.by_subject: ChunkedMapping[str, list[PolicyFacts]] = ChunkedMapping({})
        #: (address length in bits, host bits) -> network number -> policies
        self.by_network: dict[tuple[int, int], ChunkedMapping[int, list[PolicyFacts]]] = {}
        #: Plan id -> policies; those for everyone under None.
        self.by_plan: ChunkedMapping[int | None, list[PolicyFacts]] = ChunkedMapping({})
        #: Kinds of the subjects above -> how many subjects.
        self.kinds: Counter[str] = Counter()
        self._fill(frozenset(), {policy.id: policy for policy in policies})

    @property
    def policies(self) -> Collection[PolicyFacts]:
        """All policies of the group, those that are off included, for ``explain``."""
        return self.by_id.values()

    @property
    def has_plans(self) -> bool:
        """Whether a policy of the group is for a plan."""
        return len(self.by_plan) > (None in self.by_plan)

    def changed(self, gone: Set[int], come: Mapping[int, PolicyFacts]) -> Group:
        """Return a copy without the policies with the ids ``gone``, and with those that ``come``, by id."""
        group = copy(self)
        group._fill(gone, come)
        return group

    def _fill(self, gone: Set[int], come: Mapping[int, PolicyFacts]) -> None:
        """``changed`` in place; replaces what a copy shares, and changes none of it."""
        #: Index -> key -> the policies there are to be.
        indexed: dict[Any, dict[Any, list[PolicyFacts]]] = {}
        for policy in (self.by_id[pk] for pk in gone):
            if policy.mode != "off":
                index, key = _place(policy)
                indexed.setdefault(index, {}).setdefault(key, [])
        for policy in come.values():
            if policy.mode != "off":
                index, key = _place(policy)
                indexed.setdefault(index, {}).setdefault(key, []).append(policy)
        for index, rivals in indexed.items():
            self._replace(index, rivals, gone)
        self.by_id = self.by_id.changed(gone, come)
        self.everyone = self.by_plan.get(None, [])

    def _replace(self, index: Any, rivals: dict[Any, list[PolicyFacts]], gone: Set[int]) -> None:
        indexes: dict[Any, Any] = {_SUBJECTS: self.by_subject, _PLANS: self.by_plan, **self.by_network}
        known = indexes.get(index, ChunkedMapping({}))
        if known:
            for key, own in rivals.items():
                own[:0] = [policy for policy in known.get(key, ()) if policy.id not in gone]
        filled = {key: own for key, own in rivals.items() if own}
        changed = known.changed(rivals.keys() - filled.keys(), filled)
        if index == _SUBJECTS:
            kinds = Counter(self.kinds)
            kinds.update(_kind(key) for key in filled if key not in known)
            kinds.subtract(_kind(key) for key in rivals if key in known and key not in filled)
            self.by_subject, self.kinds = changed, +kinds
        elif index == _PLANS:
            self.by_plan = changed
        else:
            networks = {**self.by_network, index: changed}
            self.by_network = {size: one for size, one in networks.items() if one}

    def containing(self, address: IPv4Address | IPv6Address) -> Iterator[PolicyFacts]:
        """The policies for networks that the address is in."""
        bits, value = address.max_prefixlen, int(address)
        for (length, hosts), policies in self.by_network.items():
            if length == bits:
                yield from policies.get(value >> hosts, ())


class Memo:
    """What was worked out from one snapshot lately, by ``resolver``: bounded, and gone with the snapshot.

    ``endpoints`` depend on endpoints only: snapshots with the same endpoints share them.
    """

    __slots__ = ("endpoints", "overview", "policies", "resolutions")

    def __init__(
        self,
        endpoints: BoundedCache[tuple[EndpointFacts, ...]] | None = None,
        policies: int = _POLICIES,
    ) -> None:
        self.endpoints: BoundedCache[tuple[EndpointFacts, ...]] = (
            BoundedCache(_ENDPOINTS) if endpoints is None else endpoints
        )
        self.policies: BoundedCache[Any] = BoundedCache(policies)
        self.resolutions: BoundedCache[Any] = BoundedCache(_RESOLUTIONS)
        #: See ``Snapshot.overview``; None = not made yet.
        self.overview: Overview | None = None


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
        object.__setattr__(self, "methods", frozenset[str]().union(*[one.methods for one in endpoints]))

    def at(self, revision: int) -> Snapshot:
        """The same, read at this revision as of now."""
        return self._with(revision=revision)

    def with_groups(self, groups: Mapping[int | None, Mapping[str, Group]]) -> Snapshot:
        """The same plans and endpoints with other policies; remembers which endpoints match a route."""
        return self._with(groups=groups, memo=Memo(self.memo.endpoints))

    @property
    def overview(self) -> Overview:
        """The endpoints as looks at many of them need them; sorted once per snapshot."""
        if self.memo.overview is None:
            limited = (endpoint for endpoint in self.endpoints.values() if endpoint.id in self.groups)
            self.memo.overview = Overview(
                snapshot=self._with(memo=Memo(self.memo.endpoints, policies=_OVERVIEWS)),
                limited=tuple(sorted(limited, key=lambda endpoint: endpoint.name)),
                by_name={endpoint.name: endpoint for endpoint in self.endpoints.values()},
            )
        return self.memo.overview

    def _with(self, **fields: Any) -> Snapshot:
        # A copy: what ``__post_init__`` finds out about a thousand endpoints stays as it is.
        other = copy(self)
        for name, value in {"loaded_at": time.time(), **fields}.items():
            object.__setattr__(other, name, value)
        return other

    def plan_by_slug(self, slug: str) -> PlanFacts | None:
        """The plan that code calls ``slug``."""
        return next((plan for plan in self.plans.values() if plan.slug == slug), None)


class Overview(NamedTuple):
    """A snapshot's endpoints as looks at many of them need them."""

    #: A copy with a memo of its own: places of many endpoints would evict the places that requests use.
    snapshot: Snapshot
    #: The endpoints that have policies, users' own policies left out; sorted by name.
    limited: tuple[EndpointFacts, ...]
    by_name: Mapping[str, EndpointFacts]


def group_policies(policies: Iterable[PolicyFacts]) -> dict[int | None, dict[str, Group]]:
    """``Snapshot.groups`` of policies that are no user's own."""
    groups: dict[int | None, dict[str, list[PolicyFacts]]] = {}
    for policy in policies:
        groups.setdefault(policy.endpoint_id, {}).setdefault(policy.counted_per, []).append(policy)
    return {
        endpoint_id: {counted_per: Group(rivals) for counted_per, rivals in competing.items()}
        for endpoint_id, competing in groups.items()
    }


def _place(policy: PolicyFacts) -> tuple[Any, Any]:
    """The index of a group that the policy belongs to, and its key there."""
    network = policy.network
    if network is not None:
        hosts = network.max_prefixlen - network.prefixlen
        return (network.max_prefixlen, hosts), int(network.network_address) >> hosts
    return (_SUBJECTS, policy.subject) if policy.subject else (_PLANS, policy.plan_id)


def _kind(subject: str) -> str:
    return subject.partition(":")[0]
