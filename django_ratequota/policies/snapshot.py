"""The immutable snapshot that requests are resolved by: plans, endpoints, lists, and policies indexed by audience.

``with_rows`` applies changed rows to a snapshot; the result shares with it what the rows do not touch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ..utils.bounded_cache import BoundedCache
from .audience_index import Group, Members
from .facts import EndpointFacts, MemberFacts, PlanFacts, PolicyFacts, UserEntry

#: Most entries of each kind in a ``Memo``, about 1 kB each.
_ENDPOINTS, _POLICIES, _RESOLUTIONS = 4096, 4096, 16_384
#: Most ``MatchedPolicies`` in an overview's memo, about 10 kB each.
_OVERVIEWS = 16

Facts = TypeVar("Facts")
#: id -> the row as the database holds it now; None = the database has no such row.
Rows = Mapping[int, Facts | None]
_NO_ROWS: Rows[Any] = MappingProxyType({})
#: Endpoint id (None = all endpoints) -> counted_per -> the policies that compete there.
Groups = Mapping[int | None, Mapping[str, Group]]
Matches = BoundedCache[tuple[EndpointFacts, ...]]


class Memo:
    """Recent results of ``matching`` and ``resolver`` for one snapshot: bounded, and discarded with the snapshot.

    ``endpoints`` (those that match a route) is shared by snapshots that have the same endpoints.
    """

    __slots__ = ("endpoints", "overview", "places", "policies", "resolutions", "shapes", "standings")

    def __init__(self, endpoints: Matches | None = None, policies: int = _POLICIES) -> None:
        self.endpoints: Matches = BoundedCache(_ENDPOINTS) if endpoints is None else endpoints
        self.policies: BoundedCache[Any] = BoundedCache(policies)
        self.places: BoundedCache[Any] = BoundedCache(policies)
        self.resolutions: BoundedCache[Any] = BoundedCache(_RESOLUTIONS)
        self.standings: BoundedCache[Any] = BoundedCache(_RESOLUTIONS)
        self.shapes: BoundedCache[Any] = BoundedCache(_POLICIES)
        #: ``Snapshot.overview`` once it was read.
        self.overview: Overview | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All plans, endpoints, lists and shared policies, as the database held them at ``revision`` or later."""

    revision: int
    plans: Mapping[int, PlanFacts] = field(default_factory=dict)
    endpoints: Mapping[int, EndpointFacts] = field(default_factory=dict)
    groups: Groups = field(default_factory=dict)
    #: List id -> name
    lists: Mapping[int, str] = field(default_factory=dict)
    members: Members = field(default_factory=Members)
    loaded_at: float = field(default_factory=time.time)
    #: default_for -> plan id
    defaults: Mapping[str, int] = field(init=False, repr=False)
    #: The endpoints' names, and all methods that some endpoint names.
    names: frozenset[str] = field(init=False, repr=False)
    methods: frozenset[str] = field(init=False, repr=False)
    #: Whether an endpoint has ``charged_statuses``.
    by_outcome: bool = field(init=False, repr=False)
    #: Not copied to a snapshot with other policies.
    memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        endpoints, plans = self.endpoints.values(), self.plans.values()
        object.__setattr__(self, "defaults", {plan.default_for: plan.id for plan in plans if plan.default_for})
        object.__setattr__(self, "by_outcome", any(endpoint.charged_statuses for endpoint in endpoints))
        object.__setattr__(self, "names", frozenset(endpoint.name for endpoint in endpoints))
        object.__setattr__(self, "methods", frozenset[str]().union(*[endpoint.methods for endpoint in endpoints]))

    @property
    def overview(self) -> Overview:
        """The endpoints sorted and by name, for evaluating many of them at once; made once per snapshot."""
        if self.memo.overview is None:
            # No request belongs to all of these, so ``own`` must not hide the policies for all endpoints here.
            endpoints = {
                pk: replace(endpoint, limits="besides") if endpoint.limits == "own" else endpoint
                for pk, endpoint in self.endpoints.items()
                if endpoint.limits != "none"
            }
            limited = (endpoint for endpoint in endpoints.values() if endpoint.id in self.groups)
            self.memo.overview = Overview(
                snapshot=self.copied(memo=Memo(self.memo.endpoints, policies=_OVERVIEWS)),
                endpoints=endpoints,
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
    #: The endpoints that are not exempt, by id, as if policies for all endpoints applied besides those of each.
    endpoints: Mapping[int, EndpointFacts]
    #: Those of them that have shared policies, sorted by name.
    limited: tuple[EndpointFacts, ...]
    by_name: Mapping[str, EndpointFacts]

    def limiting(self, entry: UserEntry, most: int) -> tuple[tuple[EndpointFacts, ...], bool]:
        """Return the endpoints that may limit this user, sorted by name, and whether there are more than ``most``.

        Those with the user's own policies are among them.
        """
        name, endpoints = attrgetter("name"), self.endpoints
        ids = {policy.endpoint_id for policy in entry.policies if policy.endpoint_id is not None}
        own = [endpoints[pk] for pk in ids if pk in endpoints]
        others = (endpoint for endpoint in self.limited[: most + 1 + len(own)] if endpoint.id not in ids)
        found = [*sorted(own, key=name), *others]
        return tuple(sorted(found[:most], key=name)), len(found) > most


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
    groups, present = regrouped(snapshot.groups, policies), snapshot.members.changed(members)
    if plans or endpoints or lists:
        return replace(
            snapshot,
            plans=_merged(snapshot.plans, plans),
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


def regrouped(groups: Groups, policies: Rows[PolicyFacts]) -> Groups:
    """Return the groups with each policy in its present group; the same object if nothing has changed."""
    present: dict[tuple[int | None, str], dict[int, PolicyFacts]] = {}
    for pk, policy in policies.items():
        if policy is not None:
            present.setdefault((policy.endpoint_id, policy.counted_per), {})[pk] = policy
    touched: dict[tuple[int | None, str], Group] = {}
    for endpoint_id, rivals in groups.items():
        for counted_per, group in rivals.items():
            # Where a policy is now, whatever its change says about where it was.
            rows = dict.fromkeys(group.by_id.common(policies.keys())) | present.pop((endpoint_id, counted_per), {})
            if (changed := group.changed(rows)) is not group:
                touched[endpoint_id, counted_per] = changed
    touched |= {key: Group(new.values()) for key, new in present.items()}
    if not touched:
        return groups
    found = dict(groups)
    for (endpoint_id, counted_per), group in touched.items():
        rivals = {**found.pop(endpoint_id, {}), counted_per: group}
        if filled := {name: held for name, held in rivals.items() if held}:
            found[endpoint_id] = filled
    return found
