"""Policies whose rates this version cannot read, as raw SQL or a newer version wrote them: ``on_error`` decides."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db.models import Min

from ..engine.rates import show
from .facts import UNREADABLE, read_rates

#: Most policies in ``find_unreadable``.
_LISTED = 20


def find_unreadable() -> list[Any]:
    """Return a RatePolicy for each unreadable text, at most ``_LISTED``. Raises ``django.db.Error``."""
    policies = apps.get_model("django_ratequota", "RatePolicy").objects
    texts = policies.order_by().values_list("rates", "algorithm").annotate(Min("pk"))
    bad = [pk for rates, algorithm, pk in texts if read_rates(rates, algorithm) == UNREADABLE][:_LISTED]
    related = policies.select_related("endpoint", "user", "subject_list", "plan")
    return list(related.filter(pk__in=bad).order_by("pk"))


def describe_unreadable(policy: Any) -> str:
    """Return a sentence about one of ``find_unreadable`` for developers."""
    place = f"{policy.audience} for {policy.endpoint or 'all endpoints'}"
    return f"Policy {policy.pk} ({place}): rates {show(policy.rates)} cannot be read, so on_error applies."
