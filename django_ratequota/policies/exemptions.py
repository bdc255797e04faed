"""Exempts views from policies: those under ``@exempt`` from all, others from policies for all endpoints.

The others are the pages of Django's admin and the usage endpoint. Otherwise such policies could lock operators out of
the admin, and a client could not see that its quota is used up. Policies that name an endpoint apply there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from ..engine.rates import Rate
from ..engine.types import Bucket
from .explain import Candidate, lost
from .facts import PolicyFacts
from .requests.caller import Caller
from .requests.routes import is_admin_page
from .requests.view_declarations import handlers_of, shows_usage, view_class
from .resolver import Resolution

#: Set by ``@exempt`` on views, on classes, and on methods of classes.
EXEMPT_ATTRIBUTE = "ratequota_exempt"
#: The built-in rate per caller at the usage endpoint, used if no policy is enforced for it.
USAGE_RATE = Rate.parse("60/min")


class Exemption(NamedTuple):
    """What the code exempts a view from."""

    #: Methods of the requests that nothing limits; None = all methods.
    methods: frozenset[str] | None
    shows_usage: bool

    def covers(self, method: str) -> bool:
        """Return whether nothing limits the view's requests of this method."""
        return self.methods is None or method in self.methods


def exemption_of(view: Any) -> Exemption | None:
    """Return what the code exempts the view from; None for most views. ``view`` is a function, or a class."""
    try:
        return _cached_exemption(view)
    except TypeError:  # the view is not hashable
        return _cached_exemption.__wrapped__(view)


def exemption_of_instance(view: Any) -> Exemption | None:
    """Return what the code exempts an instance of one of REST framework's classes from, for its present action."""
    action = getattr(view, "action", None)  # of a ViewSet
    if action and _is_marked(getattr(view, action, None)):
        return Exemption(None, False)
    return exemption_of(type(view))


def exempt(resolution: Resolution, name: str | None, exemption: Exemption | None, caller: Caller) -> Resolution:
    """Return the resolution without the policies that the view is exempt from; ``name`` is its URL name."""
    shows = exemption is not None and exemption.shows_usage
    if resolution.exempt or not (shows or is_admin_page(name)):
        return resolution
    own = narrow(resolution, lambda policy: policy.endpoint_id is not None)
    if not shows or any(policy.mode == "enforce" for policy in own.winners):
        return own
    # Without an endpoint id, its key differs from those of policies for all endpoints.
    bucket = Bucket(caller.name, USAGE_RATE, scope="usage", counted_per="caller", on_error="allow")
    return replace(own, buckets=(*own.buckets, bucket))


def skips_all_endpoints(name: str | None, view: Any) -> bool:
    """Return whether policies for all endpoints do not apply to a view; ``name`` is its URL name."""
    return shows_usage(view) or is_admin_page(name)


def exempt_candidate(candidate: Candidate, name: str | None, exemption: Exemption | None) -> Candidate:
    """Return the candidate; it has lost if the view is exempt from its policy. ``name`` is the view's URL name."""
    if candidate.policy.endpoint_id is not None:
        return candidate
    if exemption is not None and exemption.shows_usage:
        return lost(candidate.policy, _("policies for all endpoints do not apply to the usage endpoint"))
    if is_admin_page(name):
        return lost(candidate.policy, _("policies for all endpoints do not apply to pages of the admin"))
    return candidate


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


@lru_cache(maxsize=4096)
def _cached_exemption(view: Any) -> Exemption | None:
    if _is_marked(view) or _is_marked(view_class(view)):
        return Exemption(None, False)
    methods = frozenset(method for method, handler in handlers_of(view).items() if _is_marked(handler))
    shows = shows_usage(view)
    return Exemption(methods, shows) if methods or shows else None


def _is_marked(one: Any) -> bool:
    return getattr(one, EXEMPT_ATTRIBUTE, False) is True
