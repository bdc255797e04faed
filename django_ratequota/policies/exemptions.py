"""Exempts views from policies for all endpoints: the pages of Django's admin, and the usage endpoint.

Otherwise such policies could lock operators out of the admin, and a client could not see that its quota is used up.
Policies that name an endpoint apply everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from django.utils.translation import gettext as _

from ..engine.rates import Rate
from ..engine.types import Bucket
from .explain import Candidate
from .facts import PolicyFacts
from .requests.caller import Caller
from .requests.routes import is_admin_page
from .requests.view_declarations import shows_usage
from .resolver import Resolution

#: The built-in rate per caller at the usage endpoint, used if no policy is enforced for it.
USAGE_RATE = Rate.parse("60/min")


def exempt(resolution: Resolution, name: str | None, view: Any, caller: Caller) -> Resolution:
    """Return the resolution without the policies that the view is exempt from; ``name`` is its URL name."""
    shows = shows_usage(view)
    if not shows and not is_admin_page(name):
        return resolution
    own = narrow(resolution, lambda policy: policy.endpoint_id is not None)
    if not shows or any(policy.mode == "enforce" for policy in own.winners):
        return own
    # Without an endpoint id, its key differs from those of policies for all endpoints.
    bucket = Bucket(caller.name, USAGE_RATE, scope="usage", counted_per="caller", on_error="allow")
    return replace(own, buckets=(*own.buckets, bucket))


def exempt_candidate(candidate: Candidate, name: str | None, view: Any) -> Candidate:
    """Return the candidate; it has lost if the view is exempt from its policy. ``name`` is the view's URL name."""
    if candidate.policy.endpoint_id is not None:
        return candidate
    if shows_usage(view):
        why = _("policies for all endpoints do not apply to the usage endpoint")
    elif is_admin_page(name):
        why = _("policies for all endpoints do not apply to pages of the admin")
    else:
        return candidate
    return replace(candidate, won=False, buckets=(), reason=_("lost: %(why)s") % {"why": why})


def narrow(resolution: Resolution, only: Callable[[PolicyFacts], bool]) -> Resolution:
    """Return the resolution with the policies for which ``only`` is true, without built-in buckets."""
    winners = tuple(policy for policy in resolution.winners if only(policy))
    ids = {policy.id for policy in winners}
    buckets = tuple(bucket for bucket in resolution.buckets if bucket.policy_id in ids)
    if len(winners) == len(resolution.winners) and len(buckets) == len(resolution.buckets):
        return resolution
    blocked = zip(resolution.blocked_by, resolution.blocking, strict=True)
    return replace(
        resolution,
        buckets=buckets,
        blocked_by=tuple(name for name, policy_id in blocked if policy_id in ids),
        blocking=tuple(policy_id for policy_id in resolution.blocking if policy_id in ids),
        would_block=tuple(policy_id for policy_id in resolution.would_block if policy_id in ids),
        winners=winners,
        policy_ids=tuple(policy.id for policy in winners),
        unreadable=tuple((name, policy) for name, policy in resolution.unreadable if policy.id in ids),
    )
