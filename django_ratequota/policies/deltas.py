"""Applies changes of some rows to a snapshot: what they do not touch is shared with the one before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from .facts import EndpointFacts, PlanFacts, PolicyFacts
from .snapshot import Group, Snapshot

Facts = TypeVar("Facts")
#: Rows that may have changed, by id, as the database holds them now; None = it holds no such row.
Rows = Mapping[int, Facts | None]
Groups = Mapping[int | None, Mapping[str, Group]]


def changed(
    snapshot: Snapshot, *, plans: Rows[PlanFacts], endpoints: Rows[EndpointFacts], policies: Rows[PolicyFacts]
) -> Snapshot:
    """Return the snapshot with these rows; the same object where they say what it holds already."""
    groups = _regrouped(snapshot.groups, policies)
    if plans or endpoints:
        return replace(
            snapshot,
            plans=_merged(snapshot.plans, plans),
            defaults=_defaults(snapshot.defaults, plans),
            endpoints=_merged(snapshot.endpoints, endpoints),
            groups=groups,
            loaded_at=time.time(),
        )
    return snapshot if groups is snapshot.groups else snapshot.with_groups(groups)


def _merged(known: Mapping[int, Facts], rows: Rows[Facts]) -> Mapping[int, Facts]:
    if not rows:
        return known
    merged = {pk: facts for pk, facts in known.items() if pk not in rows}
    return merged | {pk: facts for pk, facts in rows.items() if facts is not None}


def _defaults(known: Mapping[str, int], plans: Rows[PlanFacts]) -> dict[str, int]:
    kept = {audience: pk for audience, pk in known.items() if pk not in plans}
    return kept | {plan.default_for: pk for pk, plan in plans.items() if plan is not None and plan.default_for}


def _regrouped(groups: Groups, policies: Rows[PolicyFacts]) -> Groups:
    """Return the groups with the policies where they belong now; the same object where nothing has changed."""
    come: dict[tuple[int | None, str], dict[int, PolicyFacts]] = {}
    for pk, policy in policies.items():
        if policy is not None:
            come.setdefault((policy.endpoint_id, policy.counted_per), {})[pk] = policy
    touched: dict[tuple[int | None, str], Group] = {}
    for endpoint_id, rivals in groups.items():
        for counted_per, group in rivals.items():
            # Not by what a policy was, which its change says: by where it is.
            gone = group.by_id.common(policies.keys())
            new = come.pop((endpoint_id, counted_per), {})
            if {pk: group.by_id[pk] for pk in gone} != new:
                touched[endpoint_id, counted_per] = group.changed(gone, new)
    touched |= {place: Group(new.values()) for place, new in come.items()}
    if not touched:
        return groups
    regrouped = dict(groups)
    for (endpoint_id, counted_per), group in touched.items():
        rivals = {**regrouped.get(endpoint_id, {}), counted_per: group}
        regrouped[endpoint_id] = {name: one for name, one in rivals.items() if one.by_id}
        if not regrouped[endpoint_id]:
            del regrouped[endpoint_id]
    return regrouped
