"""Callers and refusals as tables show them, with links to Explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext

from ...models import RatePolicy
from ...monitoring.refusals import Refusal
from ..formatting import moment, number_text, shown
from ..names import caller_text, deleted, limits_text
from ..pages import model_url


def explain_url(site: Any, caller: str, endpoint: str = "") -> str:
    """Return the link to Explain for the caller, at the endpoint of this name; "" for a caller without a value."""
    kind, _colon, value = caller.partition(":")
    if not value:
        return ""
    query = {kind: value} if kind in ("user", "ip") else {"caller": caller}
    return model_url(site, RatePolicy, "explain", query={**query, "endpoint": endpoint} if endpoint else query)


def endpoint_name(pk: int, names: Mapping[int, str]) -> str:
    """Return the endpoint's name; 0 stands for requests at no endpoint."""
    if not pk:
        return gettext("no endpoint")
    return shown(names[pk]) if pk in names else deleted(pk)


def refusal_row(site: Any, refusal: Refusal, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what a table shows of a refusal; ``names`` are those of its caller (see ``caller_names``)."""
    return {
        "id": refusal.id,
        "explain": model_url(site, RatePolicy, "explain", query={"id": refusal.id}),
        "at": moment(refusal.at, seconds=True),
        "count": number_text(refusal.count),
        "caller": caller_text(refusal.caller, names),
        "url": explain_url(site, refusal.caller),
        "what": shown(f"{refusal.method} {refusal.scope or refusal.route}"),
        "violated": limits_text(refusal.limits),
        "error": shown(refusal.error),
    }
