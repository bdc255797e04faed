"""Today's names of what is recorded by id: related objects, and callers such as ``user:42``, who link to Explain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.utils.translation import gettext

from ..models import Endpoint, RatePolicy
from ..operations.recorded import deleted as deleted
from ..operations.subjects import named, names_of, subject_names
from .formatting import isolated, shown, shown_subject
from .pages import model_url


def caller_names(callers: Iterable[str]) -> dict[str, str]:
    """Return caller -> user name or display name, as pages show it (see ``names_of``)."""
    return {caller: shown(name) for caller, name in names_of(callers).items()}


def caller_text(caller: str, names: Mapping[str, str]) -> str:
    """``user alice`` or ``Acme GmbH (tenant:acme)`` for callers in ``names``; the subject itself for others."""
    if caller in names:
        if caller.startswith("user:"):
            return gettext("user %s") % names[caller]
        return named(shown_subject(caller), names[caller])
    return shown_subject(caller) if caller else gettext("unknown")


def audience_text(policy: RatePolicy, names: Mapping[str, str]) -> str:
    """Return the policy's audience; a subject with its display name."""
    return caller_text(policy.subject, names) if policy.subject else shown(policy.audience)


def limits_text(names: Iterable[str]) -> str:
    """Return the names of limits (see ``limit_name``) in a line, which right-to-left pages do not reverse."""
    return ", ".join(isolated(shown(name)) for name in names)


def endpoint_text(endpoint: Endpoint | None) -> str:
    """Return the name of a policy's endpoint."""
    return gettext("all endpoints") if endpoint is None else shown(endpoint.name)


def endpoint_name(pk: int, names: Mapping[int, str]) -> str:
    """Return the endpoint's name; 0 stands for requests at no endpoint."""
    if not pk:
        return gettext("no endpoint")
    return shown(names[pk]) if pk in names else deleted(pk)


def explain_url(site: Any, caller: str, endpoint: str = "") -> str:
    """Return the link to Explain for the caller, at the endpoint of this name; "" for a caller without a value."""
    from ..operations.explain import caller_params  # which setting up Django does not need

    query = caller_params(caller)
    if query and endpoint:
        query["endpoint"] = endpoint
    return model_url(site, RatePolicy, "explain", query=query) if query else ""


def set_display_names(rows: Iterable[Any]) -> None:
    """Set ``display_name`` of rows with a subject, for ``with_display_name``."""
    rows = list(rows)
    names = subject_names(row.subject for row in rows if row.subject)
    for row in rows:
        row.display_name = names.get(row.subject, "")


def with_display_name(row: Any, text: Any) -> str:
    """Return ``text``, which shows the row's user or subject, with the display name of the subject."""
    return named(shown(text), getattr(row, "display_name", ""))
