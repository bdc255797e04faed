"""Policies whose rates this version cannot read: stored without the model's validation, or by a newer version during
an upgrade.

The newest readable rates in the policy's history apply. Without any, its ``on_error`` decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from django.apps import apps
from django.db.models import Count, Min

from ..changes.writer import BATCH, in_batches
from ..engine.rates import Rate, show
from .change_feed import POLICY
from .facts import UNREADABLE, PolicyFacts, policy_facts, read_rates

logger = logging.getLogger("django_ratequota")

#: Most texts in ``find_unreadable``.
_LISTED = 20


class Unreadable(NamedTuple):
    """A rate text that this version cannot read, and a policy that has it."""

    #: One of the policies with the text (a RatePolicy), and how many others have it.
    policy: Any
    others: int
    #: The policy's last readable rates as text; "" = none: ``on_error`` decides.
    last_rates: str

    def __str__(self) -> str:
        others = f" and {self.others} more" if self.others else ""
        fallback = f"{self.last_rates} goes on" if self.last_rates else "on_error decides"
        policy = self.policy
        place = f"{policy.audience} at {policy.endpoint or 'all endpoints'}"
        return f"Policy {policy.pk} ({place}){others}: rates {show(policy.rates)} cannot be read; {fallback}."


def with_readable_rates(policies: list[PolicyFacts]) -> list[PolicyFacts]:
    """Return the policies, unreadable rates replaced by the last readable ones. Log an error for each such policy.

    Raises ``django.db.Error``.
    """
    unread = [policy for policy in policies if policy.rates == UNREADABLE]
    if not unread:
        return policies
    last = _recorded(policy.id for policy in unread)
    for policy in unread:
        fallback = f"{last[policy.id][0]!r} goes on" if policy.id in last else "its on_error decides"
        logger.error("policy %s: its rates %s cannot be read; %s", policy.id, show(policy.unread), fallback)
    replaced = {p.id: replace(p, text=last[p.id][0], rates=last[p.id][1]) for p in unread if p.id in last}
    return [replaced.get(policy.id, policy) for policy in policies]


def find_unreadable() -> list[Unreadable]:
    """Return the unreadable texts in the database, at most ``_LISTED``. Raises ``django.db.Error``."""
    model = apps.get_model("django_ratequota", "RatePolicy")
    texts = model.objects.order_by().values_list("rates", "algorithm")
    bad: dict[int, int] = {}
    for rates, algorithm, first, count in texts.annotate(Min("pk"), Count("pk")):
        if read_rates(rates, algorithm) is None and len(bad) < _LISTED:
            bad[first] = count
    last = _recorded(bad)
    rows = model.objects.filter(pk__in=list(bad)).select_related("endpoint", "user", "subject_list", "plan")
    return [
        Unreadable(policy, others=bad[policy.pk] - 1, last_rates=last.get(policy.pk, ("",))[0])
        for policy in rows.order_by("pk")
    ]


def readable_facts(policy: Any) -> PolicyFacts:
    """Return the facts of a RatePolicy, unreadable rates replaced by the last readable ones in its history."""
    return with_readable_rates([policy_facts(policy)])[0]


def _recorded(ids: Iterable[int]) -> dict[int, tuple[str, tuple[Rate, ...] | str]]:
    """Return policy id -> (text, rates) of the newest readable state in its history."""
    found: dict[int, tuple[str, tuple[Rate, ...] | str]] = {}
    changes = apps.get_model("django_ratequota", "PolicyChange").objects.filter(model=POLICY).order_by("-pk")
    for batch in in_batches(list(ids)):
        wanted = {str(pk) for pk in batch}
        rows = changes.filter(object_id__in=wanted).values_list("object_id", "after", "before")
        for object_id, *states in rows.iterator(chunk_size=BATCH):
            for state in states if object_id in wanted else ():
                text = str(state.get("rates")) if state else ""
                rates = read_rates(text, state.get("algorithm")) if state else None
                if rates is not None:
                    found[int(object_id)] = text, rates
                    wanted.discard(object_id)
                    break
            if not wanted:
                break
    return found
