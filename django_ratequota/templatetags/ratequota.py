"""``{% load ratequota %}``: how much of its limits the page's caller has used."""

from __future__ import annotations

from typing import Any

from django import template
from django.core.exceptions import SynchronousOnlyOperation
from django.db import Error as DatabaseError

from ..exceptions import StoreError
from ..operations.caller_limits import caller_limits, describe_limit
from ..policies.requests.caller import Caller
from ..runtime import default_limiter

register = template.Library()


@register.simple_tag(takes_context=True)
def ratequota_usage(context: Any, scope: str | None = None) -> dict[str, Any] | None:
    """``{% ratequota_usage "search" as usage %}``: the usage of the page's caller at the endpoint; consumes nothing.

    At every endpoint without a name. What ``describe_limit`` says of the limit with the smallest share left;
    ``limits`` has the same of every limit. None where no limit applies, no endpoint has that name, or Redis or the
    database is down.
    """
    request = context.get("request")
    if request is None:
        return None
    try:
        if any(breaker.open for breaker in default_limiter().store.breakers):
            return None  # a page must not wait for a server that is known to be down
        found = caller_limits(Caller(request), scope)
    except (LookupError, StoreError, DatabaseError, SynchronousOnlyOperation):
        return None
    known = [(bucket, status) for bucket, status in found.limits if status is not None]
    known.sort(key=lambda one: (one[1].remaining / one[1].limit, one[1].remaining))
    limits = [describe_limit(bucket, status, found.at_us) for bucket, status in known]
    return {**limits[0], "limits": limits} if limits else None
