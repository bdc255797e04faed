"""Refusals outside DRF: 429, or 503 while the store is down, as problem+json, HTML or plain text."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest, HttpResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from .engine.types import Decision
from .headers import add_headers, retry_after_seconds

_TYPES = "https://iana.org/assignments/http-problem-types#"
#: What is offered, the default first.
_HTML = "text/html"
_MEDIA_TYPES = ["application/problem+json", "application/json", _HTML, "text/plain"]
#: Characters of an Accept header, and media ranges in it, that are looked at: a browser sends some 130 and 8.
MAX_ACCEPT, _MAX_RANGES = 1024, 20
#: Longer waits are told as a time of day (seconds).
_COUNTED_WAIT = 120


def status_code(decision: Decision) -> int:
    """429 for a quota or a block, 503 when policies deny only because the store is down."""
    return 503 if decision.denied_by and not decision.blocked_by else 429


def refusal_text(decision: Decision) -> str:
    """The refusal in a sentence or two, for people."""
    text = _reason(decision)
    wait = retry_after_seconds(decision)
    if wait is not None:
        text = f"{text} {_again(wait)}"
    if decision.refusal_id:
        # Not within an f-string: there gettext's own tools do not find what is to be translated.
        reference = _("Reference: %(id)s.") % {"id": decision.refusal_id}
        text = f"{text} {reference}"
    return text


def _reason(decision: Decision) -> str:
    if status_code(decision) == 503:
        return _("Requests cannot be counted right now.")
    return _("Requests are blocked.") if decision.blocked_by else _("Too many requests.")


def _again(wait: int) -> str:
    return ngettext("Try again in %(wait)d second.", "Try again in %(wait)d seconds.", wait) % {"wait": wait}


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
    return _response(request, decision, _media_type(request))


async def arefusal_response(request: Any, decision: Decision) -> HttpResponse:
    """``refusal_response``, awaited: a page of the project's own may read the database."""
    media_type = _media_type(request)
    if media_type == _HTML:
        return await sync_to_async(_response)(request, decision, media_type)
    return _response(request, decision, media_type)


def _response(request: Any, decision: Decision, media_type: str) -> HttpResponse:
    content: str
    if media_type == _HTML:
        content = _page(request, decision)
    elif media_type == "text/plain":
        content = refusal_text(decision) + "\n"
    else:
        media_type, content = _MEDIA_TYPES[0], json.dumps(problem(decision))
    if media_type.startswith("text/"):
        media_type += "; charset=utf-8"
    response = HttpResponse(content, status=status_code(decision), content_type=media_type)
    response["Vary"] = "Accept"
    add_headers(response, decision, request)
    return response


def _media_type(request: Any) -> str:
    return _preferred(_beginning(request.META.get("HTTP_ACCEPT", "*/*")))


def _beginning(accept: str) -> str:
    """The whole media ranges in the first ``MAX_ACCEPT`` characters; "" where there is none."""
    return accept if len(accept) <= MAX_ACCEPT else accept[: max(0, accept.rfind(",", 0, MAX_ACCEPT))]


@lru_cache(maxsize=256)
def _preferred(accept: str) -> str:
    """The offered media type that an Accept header prefers; the first where it prefers none, or cannot be read."""
    request = HttpRequest()
    request.META["HTTP_ACCEPT"] = ",".join(accept.split(",", _MAX_RANGES)[:_MAX_RANGES])
    try:
        return request.get_preferred_type(_MEDIA_TYPES) or _MEDIA_TYPES[0]
    except ValueError:  # Django's, for parameters in a character set that Python does not know
        return _MEDIA_TYPES[0]


def _page(request: Any, decision: Decision) -> str:
    """The template 429.html or 503.html: the project's, else the app's own."""
    status, wait = status_code(decision), retry_after_seconds(decision)
    title = problem(decision)["title"]
    context = {
        "title": title,
        "reason": _reason(decision),
        "wait": wait,
        "wait_text": "" if wait is None or wait >= _COUNTED_WAIT else _again(wait),
        "again_at": None if wait is None else _moment(wait),
        "refusal_id": decision.refusal_id,
        "status_code": status,
        "decision": decision,
    }
    try:
        return render_to_string(f"{status}.html", context, request)
    except TemplateDoesNotExist:  # an API without TEMPLATES, or without APP_DIRS
        text = refusal_text(decision)
        return format_html("<!doctype html>\n<title>{}</title>\n<h1>{}</h1>\n<p>{}</p>\n", title, title, text)


def _moment(wait: int) -> datetime:
    """When the wait is over, to the minute where people are told the time of day; never too early."""
    seconds = int(time.time()) + wait
    if wait >= _COUNTED_WAIT:
        seconds = -(-seconds // 60) * 60
    return timezone.localtime(datetime.fromtimestamp(seconds, UTC))
