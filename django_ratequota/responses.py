"""Refusals outside DRF: 429, or 503 while the store is down, as problem+json, HTML or plain text."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .headers import add_headers, retry_after_seconds
from .types import Decision

_TYPES = "https://iana.org/assignments/http-problem-types#"
#: What is offered, the default first.
_MEDIA_TYPES = ["application/problem+json", "application/json", "text/html", "text/plain"]


def status_code(decision: Decision) -> int:
    """429 for a quota or a block, 503 when policies deny only because the store is down."""
    return 503 if decision.denied_by and not decision.blocked_by else 429


def refusal_text(decision: Decision) -> str:
    """The refusal in a sentence or two, for people."""
    if status_code(decision) == 503:
        text = _("Requests cannot be counted right now.")
    elif decision.blocked_by:
        text = _("Requests are blocked.")
    else:
        text = _("Too many requests.")
    wait = retry_after_seconds(decision)
    if wait is not None:
        again = ngettext("Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait) % {"wait": wait}
        text = f"{text} {again}"
    if decision.refusal_id:
        # Not within an f-string: there gettext's own tools do not find what is to be translated.
        reference = _("Reference: %(id)s.") % {"id": decision.refusal_id}
        text = f"{text} {reference}"
    return text


def problem(decision: Decision) -> dict[str, Any]:
    """The refusal as a problem details object (RFC 9457)."""
    unavailable = status_code(decision) == 503
    return {
        "type": _TYPES + ("temporary-reduced-capacity" if unavailable else "quota-exceeded"),
        "title": _("Temporarily reduced capacity") if unavailable else _("Quota exceeded"),
        "status": status_code(decision),
        "detail": refusal_text(decision),
        "violated-policies": list(decision.violated),
        "retry_after": retry_after_seconds(decision),
        **({"refusal_id": decision.refusal_id} if decision.refusal_id else {}),
    }


def refusal_response(request: Any, decision: Decision) -> HttpResponse:
    """The response to a refused request, in the media type the client prefers."""
    media_type = request.get_preferred_type(_MEDIA_TYPES) or _MEDIA_TYPES[0]
    content: str
    if media_type == "text/html":
        content = format_html(
            "<!doctype html>\n<title>{title}</title>\n<h1>{title}</h1>\n<p>{text}</p>\n",
            title=problem(decision)["title"],
            text=refusal_text(decision),
        )
    elif media_type == "text/plain":
        content = refusal_text(decision) + "\n"
    else:
        media_type, content = _MEDIA_TYPES[0], json.dumps(problem(decision))
    if media_type.startswith("text/"):
        media_type += "; charset=utf-8"
    response = HttpResponse(content, status=status_code(decision), content_type=media_type)
    response["Vary"] = "Accept"
    add_headers(response, decision)
    return response
