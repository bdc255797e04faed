"""Decisions by endpoint and by policy since the process began, added up from what ``collecting`` noted of them."""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ..monitoring import collector as collecting
from ..policies.cache import policies
from ..utils.locks import ForkSafeLock

#: Combinations of labels that are told apart; those beyond it are counted as one, for operators may rename for ever.
MAX_SERIES = 5_000
#: No endpoint and no plan can be called so.
NONE, ANY, OTHER, OVERRIDES = "(none)", "(any)", "(other)", "(overrides)"


class Tally:
    """Counts that only grow, as monitoring systems want them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """As if nothing had been decided: for a forked child, and for tests."""
        self._lock = ForkSafeLock()
        self._endpoints: Counter[tuple[str, ...]] = Counter()
        self._policies: Counter[tuple[str, ...]] = Counter()
        # Those no longer there are remembered: what they decided may come to be counted just after.
        self._endpoint_names: dict[int, str] = {}
        self._policy_names: dict[int, tuple[str, str]] = {}
        self._named: tuple[object, ...] = ()

    def by_endpoint(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """((endpoint, outcome), requests)"""
        with self._lock:
            return list(self._endpoints.items())

    def by_policy(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """((endpoint, policy, outcome), requests)"""
        with self._lock:
            return list(self._policies.items())

    def add(self, notes: Mapping[tuple[Any, ...], int]) -> None:
        """Count notes, each as often as it was made."""
        # Callers differ, what became of their requests seldom does: that is added up first, and then spelled out.
        alike: Counter[tuple[Any, ...]] = Counter()
        for (_, _, _, _, endpoint_ids, _, policy_ids, allowed, against), times in notes.items():
            alike[endpoint_ids, policy_ids, allowed, against] += times
        with self._lock:
            self._learn_names()
            for (endpoint_ids, policy_ids, allowed, against), times in alike.items():
                outcome = "refused" if not allowed else "would_refuse" if against else "admitted"
                for endpoint in [self._endpoint_names.get(one, OTHER) for one in endpoint_ids] or [NONE]:
                    _count(self._endpoints, (endpoint, outcome), times)
                for policy_id in policy_ids:
                    # What another policy refused says nothing of this one.
                    if allowed or policy_id in against:
                        own = outcome if policy_id in against else "admitted"
                        name = self._policy_names.get(policy_id, (ANY, OVERRIDES))
                        _count(self._policies, (*name, own), times)

    def _learn_names(self) -> None:
        snapshot = policies.current()
        if snapshot is None:
            return
        named = (snapshot.plans, snapshot.endpoints, snapshot.groups)
        if len(self._named) == len(named) and all(map(operator.is_, named, self._named)):
            return
        self._named = named
        self._endpoint_names |= {endpoint.id: endpoint.name for endpoint in snapshot.endpoints.values()}
        for endpoint_id, groups in snapshot.groups.items():
            endpoint = "all" if endpoint_id is None else self._endpoint_names.get(endpoint_id, OTHER)
            # A policy for one subject would tell of that subject, and there may be very many.
            for rivals in (rivals for group in groups.values() for rivals in group.by_plan.values()):
                for policy in rivals:
                    plan = None if policy.plan_id is None else snapshot.plans.get(policy.plan_id)
                    self._policy_names[policy.id] = (endpoint, f"{plan.slug if plan else 'everyone'}-{policy.id}")


def _count(counts: Counter[tuple[str, ...]], labels: tuple[str, ...], times: int) -> None:
    if labels not in counts and len(counts) >= MAX_SERIES:
        labels = (*[OTHER] * (len(labels) - 1), labels[-1])
    counts[labels] += times


#: This process's.
tally = Tally()
collecting.listeners.append(tally.add)
os.register_at_fork(after_in_child=tally.forget)
