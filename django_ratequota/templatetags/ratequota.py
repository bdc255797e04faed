"""``{% load ratequota %}``: how much of its limits the page's caller has used."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django import template
from django.core.exceptions import SynchronousOnlyOperation
from django.db import Error as DatabaseError
from django.utils import timezone

from ..engine.types import BucketStatus
from ..exceptions import StoreError
from ..operations.caller_limits import caller_limits
from ..policies.requests.caller import Caller
from ..runtime import default_limiter

register = template.Library()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How much of one limit is used; of several, the one with the smallest share left."""

    #: The limit's name, as clients see it in headers: ``search/min``.
    name: str
    #: Units: the limit, those still free, and those used, which may be more than the limit after a downgrade.
    limit: int
    remaining: int
    used: int
    #: When all units are free again, and when one is; now or in the past if they are.
    reset: datetime
    retry_at: datetime
    #: Every limit that applies, this one included; ``()`` in each of these.
    limits: tuple[Usage, ...] = ()


@register.simple_tag(takes_context=True)
def ratequota_usage(context: Any, scope: str | None = None) -> Usage | None:
    """``{% ratequota_usage "search" as usage %}``: the usage of the page's caller at the endpoint; consumes nothing.

    At every endpoint without a name. None where no limit applies, no endpoint has that name, or Redis or the database
    is down.
    """
    request = context.get("request")
    if request is None:
        return None
    try:
        if any(breaker.open for breaker in default_limiter().store.breakers):
            return None  # a page must not wait for a server that is known to be down
        limits = caller_limits(Caller(request), scope).limits
    except (LookupError, StoreError, DatabaseError, SynchronousOnlyOperation):
        return None
    now = timezone.now()
    found = sorted(
        (status for _, status in limits if status is not None), key=lambda s: (s.remaining / s.limit, s.remaining)
    )
    usages = tuple(_usage(status, now) for status in found)
    return replace(usages[0], limits=usages) if usages else None


def _usage(status: BucketStatus, now: datetime) -> Usage:
    def after(us: int | None) -> datetime:
        return timezone.localtime((now + timedelta(microseconds=us or 0)).astimezone(UTC))

    return Usage(
        name=status.bucket.title,
        limit=status.limit,
        remaining=status.remaining,
        used=status.used + status.debt,
        reset=after(status.reset_after_us),
        retry_at=after(status.retry_after_us),
    )
