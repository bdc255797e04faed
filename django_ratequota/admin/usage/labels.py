"""Callers and endpoints as tables show them, with links to Explain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext

from ...models import RatePolicy
from ...operations.explain_query import caller_params
from ..formatting import shown
from ..names import deleted
from ..pages import model_url


def explain_url(site: Any, caller: str, endpoint: str = "") -> str:
    """Return the link to Explain for the caller, at the endpoint of this name; "" for a caller without a value."""
    query = caller_params(caller)
    if query and endpoint:
        query["endpoint"] = endpoint
    return model_url(site, RatePolicy, "explain", query=query) if query else ""


def endpoint_name(pk: int, names: Mapping[int, str]) -> str:
    """Return the endpoint's name; 0 stands for requests at no endpoint."""
    if not pk:
        return gettext("no endpoint")
    return shown(names[pk]) if pk in names else deleted(pk)
