"""Exempts views from policies: those under ``@exempt`` from all, others from policies for all endpoints.

The others are the pages of Django's admin and the usage endpoint. Otherwise such policies could lock operators out of
the admin, and a client could not see that its quota is used up. Policies that name an endpoint apply there.
Preflights of CORS are exempt as well, because browsers report a refused one as a failure of CORS; blocks still apply.
"""

from __future__ import annotations

from dataclasses import replace

from django.utils.translation import gettext as _

from ..engine.rates import BLOCKED, Rate
from ..engine.types import Bucket
from .requests.caller import Caller
from .requests.routes import is_admin_page
from .requests.view_facts import Exemption
from .resolver import Resolution, narrow

#: The built-in rate per caller at the usage endpoint, used if no policy is enforced for it.
USAGE_RATE = Rate.parse("60/min")


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


def exempt_preflight(resolution: Resolution) -> Resolution:
    """Return the resolution without the policies for all endpoints, other than blocks."""
    return narrow(resolution, lambda policy: policy.endpoint_id is not None or policy.rates == BLOCKED)


def why_skipped(name: str | None, exemption: Exemption | None) -> str:
    """Return why policies for all endpoints do not apply to a view, "" where they do; ``name`` is its URL name."""
    if exemption is not None and exemption.shows_usage:
        return _("policies for all endpoints do not apply to the usage endpoint")
    return _("policies for all endpoints do not apply to pages of the admin") if is_admin_page(name) else ""
