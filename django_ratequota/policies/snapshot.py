"""The immutable snapshot that requests are resolved by: plans, endpoints, lists, and policies indexed by audience.

``with_rows`` applies changed rows to a snapshot; the result shares with it what the rows do not touch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ..utils.bounded_cache import BoundedCache
from ..utils.chunked_mapping import ChunkedMapping
from .facts import EndpointFacts, MemberFacts, PlanFacts, PolicyFacts
from .members import Members

#: Most entries of each kind in a ``Memo``, about 1 kB each.
_ENDPOINTS, _POLICIES, _RESOLUTIONS = 4096, 4096, 8192
#: Most ``MatchedPolicies`` in an overview's memo, about 10 kB each.
_OVERVIEWS = 16
#: Three of a group's indexes. The others hold the networks of one size each.
_SUBJECTS, _PLANS, _LISTS = "subjects", "plans", "lists"

Facts = TypeVar("Facts")
#: id -> the row as the database holds it now; None = the database has no such row.
Rows = Mapping[int, Facts | None]
_NO_ROWS: Rows[Any] = MappingProxyType({})
#: endpoint id (None = all endpoints) -> counted_per -> the policies that compete there.
Groups = Mapping[int | None, Mapping[str, "Group"]]
Matches = BoundedCache[tuple[EndpointFacts, ...]]


class Group:
    """The policies of one endpoint and counted_per, indexed by audience; policies of users are not included.

    Immutable: ``changed`` returns a new group.
    """

    __slots__ = ("by_id", "by_list", "by_network", "by_plan", "by_subject", "everyone", "kinds", "monthly")

    def __init__(self, policies: Iterable[PolicyFacts]) -> None:
        #: All policies of the group, including those that are off.
        self.by_id: ChunkedMapping[int, PolicyFacts] = ChunkedMapping({})
        self.by_subject: ChunkedMapping[str, list[PolicyFacts]] = ChunkedMapping({})
        #: (address length in bits, host bits) -> network number -> policies
        self.by_network: dict[tuple[int, int], ChunkedMapping[int, list[PolicyFacts]]] = {}
        #: List id -> policies.
        self.by_list: ChunkedMapping[int, list[PolicyFacts]] = ChunkedMapping({})
        #: Plan id -> policies; None -> the policies for everyone.
        self.by_plan: ChunkedMapping[int | None, list[PolicyFacts]] = ChunkedMapping({})
        #: Kind of subject -> number of its subjects in ``by_subject``.
        self.kinds: Counter[str] = Counter()
        #: Whether a policy has calendar months; may stay True after its removal, which only costs a lookup.
        self.monthly = False
        self._fill(frozenset(), {policy.id: policy for policy in policies})

    @property
    def policies(self) -> Collection[PolicyFacts]:
        """All policies of the group, including those that are off, for ``explain``."""
        return self.by_id.values()

    @property
    def has_plans(self) -> bool:
        """Whether a policy of the group is for a plan."""
        return len(self.by_plan) > (None in self.by_plan)

    def changed(self, removed: Set[int], added: Mapping[int, PolicyFacts]) -> Group:
        """Return a copy without the policies whose ids are in ``removed``, and with those in ``added`` (by id)."""
        group = copy(self)
        group._fill(removed, added)
        return group

    def _fill(self, removed: Set[int], added: Mapping[int, PolicyFacts]) -> None:
        """Change the group in place. Indexes that a copy shares are replaced, never changed."""
        #: Index -> key -> the policies that the index will hold under that key.
        indexed: dict[Any, dict[Any, list[PolicyFacts]]] = {}
        for policy in (self.by_id[pk] for pk in removed):
            if policy.mode != "off":
                index, key = _index_of(policy)
                indexed.setdefault(index, {}).setdefault(key, [])
        for policy in added.values():
            if policy.mode != "off":
                index, key = _index_of(policy)
                indexed.setdefault(index, {}).setdefault(key, []).append(policy)
        for index, rivals in indexed.items():
            self._replace(index, rivals, removed)
        self.monthly = self.monthly or any(
            rate.calendar == "month" for p in added.values() if isinstance(p.rates, tuple) for rate in p.rates
        )
        self.by_id = self.by_id.changed(removed, added)
        self.everyone = self.by_plan.get(None, [])

    def _replace(self, index: Any, rivals: dict[Any, list[PolicyFacts]], removed: Set[int]) -> None:
        indexes: dict[Any, Any] = {_SUBJECTS: self.by_subject, _PLANS: self.by_plan, _LISTS: self.by_list}
        known = {**indexes, **self.by_network}.get(index, ChunkedMapping({}))
        if known:
            for key, own in rivals.items():
                own[:0] = [policy for policy in known.get(key, ()) if policy.id not in removed]
        filled = {key: own for key, own in rivals.items() if own}
        changed = known.changed(rivals.keys() - filled.keys(), filled)
        if index == _SUBJECTS:
            kinds = Counter(self.kinds)
            kinds.update(key.partition(":")[0] for key in filled if key not in known)
            kinds.subtract(key.partition(":")[0] for key in rivals if key in known and key not in filled)
            self.by_subject, self.kinds = changed, +kinds
        elif index == _PLANS:
            self.by_plan = changed
        elif index == _LISTS:
            self.by_list = changed
        else:
            networks = {**self.by_network, index: changed}
            self.by_network = {size: policies for size, policies in networks.items() if policies}

    def containing(self, address: IPv4Address | IPv6Address) -> Iterator[PolicyFacts]:
        """Yield the policies for networks that contain the address."""
        bits, value = address.max_prefixlen, int(address)
        for (length, hosts), policies in self.by_network.items():
            if length == bits:
                yield from policies.get(value >> hosts, ())


class Memo:
    """Recent results of ``matching`` and ``resolver`` for one snapshot: bounded, and discarded with the snapshot.

    ``endpoints`` (those that match a route) is shared by snapshots that have the same endpoints.
    """

    __slots__ = ("endpoints", "overview", "policies", "resolutions")

    def __init__(self, endpoints: Matches | None = None, policies: int = _POLICIES) -> None:
        self.endpoints: Matches = BoundedCache(_ENDPOINTS) if endpoints is None else endpoints
        self.policies: BoundedCache[Any] = BoundedCache(policies)
        self.resolutions: BoundedCache[Any] = BoundedCache(_RESOLUTIONS)
        #: ``Snapshot.overview`` once it was read.
        self.overview: Overview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All plans, endpoints, lists and shared policies, as the database held them at ``revision`` or later."""

    revision: int
    plans: Mapping[int, PlanFacts]
    #: default_for -> plan id
    defaults: Mapping[str, int]
    endpoints: Mapping[int, EndpointFacts]
    groups: Groups
    #: List id -> name
    lists: Mapping[int, str] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    loaded_at: float = field(default_factory=time.time)
    #: The endpoints' names, and all methods that some endpoint names.
    names: frozenset[str] = field(init=False, repr=False)
    methods: frozenset[str] = field(init=False, repr=False)
    #: Whether an endpoint has ``charged_statuses``.
    by_outcome: bool = field(init=False, repr=False)
    #: Not copied to a snapshot with other policies.
    memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        endpoints = self.endpoints.values()
        object.__setattr__(self, "by_outcome", any(endpoint.charged_statuses for endpoint in endpoints))
        object.__setattr__(self, "names", frozenset(endpoint.name for endpoint in endpoints))
        object.__setattr__(self, "methods", frozenset[str]().union(*[endpoint.methods for endpoint in endpoints]))

    def at(self, revision: int) -> Snapshot:
        """Return the same snapshot for this revision, loaded now."""
        return self.copied(revision=revision)

    @property
    def overview(self) -> Overview:
        """The endpoints sorted and by name, for evaluating many of them at once; made once per snapshot."""
        if self.memo.overview is None:
            endpoints = self.endpoints.values()
            limited = (endpoint for endpoint in endpoints if endpoint.id in self.groups and not endpoint.exempt)
            self.memo.overview = Overview(
                snapshot=self.copied(memo=Memo(self.memo.endpoints, policies=_OVERVIEWS)),
                limited=tuple(sorted(limited, key=lambda endpoint: endpoint.name)),
                by_name={endpoint.name: endpoint for endpoint in self.endpoints.values()},
            )
        return self.memo.overview

    def copied(self, **fields: Any) -> Snapshot:
        """Return a copy, loaded now, with these fields."""
        # No ``dataclasses.replace``, because ``__post_init__`` would go through all endpoints again.
        other = copy(self)
        for name, value in {"loaded_at": time.time(), **fields}.items():
            object.__setattr__(other, name, value)
        return other

    def plan_by_slug(self, slug: str) -> PlanFacts | None:
        """Return the plan with this slug; None if there is none."""
        return next((plan for plan in self.plans.values() if plan.slug == slug), None)


class Overview(NamedTuple):
    """A snapshot's endpoints, for evaluating many of them at once."""

    #: A copy with its own memo, because the results for many endpoints would evict those that requests use.
    snapshot: Snapshot
    #: The endpoints that have shared policies and are not exempt, sorted by name.
    limited: tuple[EndpointFacts, ...]
    by_name: Mapping[str, EndpointFacts]


def group_policies(policies: Iterable[PolicyFacts]) -> Groups:
    """Return ``Snapshot.groups`` of shared policies."""
    groups: dict[int | None, dict[str, list[PolicyFacts]]] = {}
    for policy in policies:
        groups.setdefault(policy.endpoint_id, {}).setdefault(policy.counted_per, []).append(policy)
    return {
        endpoint_id: {counted_per: Group(rivals) for counted_per, rivals in competing.items()}
        for endpoint_id, competing in groups.items()
    }


def with_rows(
    snapshot: Snapshot,
    *,
    plans: Rows[PlanFacts] = _NO_ROWS,
    endpoints: Rows[EndpointFacts] = _NO_ROWS,
    policies: Rows[PolicyFacts] = _NO_ROWS,
    lists: Rows[str] = _NO_ROWS,
    members: Rows[MemberFacts] = _NO_ROWS,
) -> Snapshot:
    """Return the snapshot with these rows; the same object if it holds them already."""
    groups, present = _regrouped(snapshot.groups, policies), snapshot.members.changed(members)
    if plans or endpoints or lists:
        return replace(
            snapshot,
            plans=_merged(snapshot.plans, plans),
            defaults=_defaults(snapshot.defaults, plans),
            endpoints=_merged(snapshot.endpoints, endpoints),
            groups=groups,
            lists=_merged(snapshot.lists, lists),
            members=present,
            loaded_at=time.time(),
        )
    if groups is snapshot.groups and present is snapshot.members:
        return snapshot
    return snapshot.copied(groups=groups, members=present, memo=Memo(snapshot.memo.endpoints))


def _merged(known: Mapping[int, Facts], rows: Rows[Facts]) -> Mapping[int, Facts]:
    if not rows:
        return known
    merged = {pk: facts for pk, facts in known.items() if pk not in rows}
    return merged | {pk: facts for pk, facts in rows.items() if facts is not None}


def _defaults(known: Mapping[str, int], plans: Rows[PlanFacts]) -> dict[str, int]:
    kept = {audience: pk for audience, pk in known.items() if pk not in plans}
    return kept | {plan.default_for: pk for pk, plan in plans.items() if plan is not None and plan.default_for}


def _regrouped(groups: Groups, policies: Rows[PolicyFacts]) -> Groups:
    """Return the groups with each policy in its present group; the same object if nothing has changed."""
    added: dict[tuple[int | None, str], dict[int, PolicyFacts]] = {}
    for pk, policy in policies.items():
        if policy is not None:
            added.setdefault((policy.endpoint_id, policy.counted_per), {})[pk] = policy
    touched: dict[tuple[int | None, str], Group] = {}
    for endpoint_id, rivals in groups.items():
        for counted_per, group in rivals.items():
            # Where a policy is now, whatever its change says about where it was.
            removed = group.by_id.common(policies.keys())
            new = added.pop((endpoint_id, counted_per), {})
            if {pk: group.by_id[pk] for pk in removed} != new:
                touched[endpoint_id, counted_per] = group.changed(removed, new)
    touched |= {key: Group(new.values()) for key, new in added.items()}
    if not touched:
        return groups
    regrouped = dict(groups)
    for (endpoint_id, counted_per), group in touched.items():
        rivals = {**regrouped.get(endpoint_id, {}), counted_per: group}
        regrouped[endpoint_id] = {name: held for name, held in rivals.items() if held.by_id}
        if not regrouped[endpoint_id]:
            del regrouped[endpoint_id]
    return regrouped


def _index_of(policy: PolicyFacts) -> tuple[Any, Any]:
    """Return the index of the group that the policy belongs to, and its key in that index."""
    network = policy.network
    if network is not None:
        hosts = network.max_prefixlen - network.prefixlen
        return (network.max_prefixlen, hosts), int(network.network_address) >> hosts
    if policy.list_id is not None:
        return _LISTS, policy.list_id
    return (_SUBJECTS, policy.subject) if policy.subject else (_PLANS, policy.plan_id)
