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
from django.utils.translation import ngettext_lazy

from .engine.decision import Decision
from .headers import add_headers, retry_after_seconds

_TYPES = "https://iana.org/assignments/http-problem-types#"
#: The media types of refusals, the default first.
_HTML = "text/html"
_MEDIA_TYPES = ["application/problem+json", "application/json", _HTML, "text/plain"]
#: Maximum length of an Accept header, and maximum number of media ranges in it (browsers send about 130 and 8).
MAX_ACCEPT, _MAX_RANGES = 1024, 20
#: Status -> the templates of its page; the first that exists is rendered.
_TEMPLATES = {
    429: ["429.html", "django_ratequota/429.html"],
    503: ["503.html", "429.html", "django_ratequota/429.html"],
}
#: Seconds; from this wait on, pages show a time of day.
_CLOCK_TIME_FROM = 120
#: Seconds of each unit that waits are told in, the largest first.
_WAITS = (
    (86_400, ngettext_lazy("Try again in %(wait)d day.", "Try again in %(wait)d days.", "wait")),
    (3_600, ngettext_lazy("Try again in %(wait)d hour.", "Try again in %(wait)d hours.", "wait")),
    (60, ngettext_lazy("Try again in %(wait)d minute.", "Try again in %(wait)d minutes.", "wait")),
    (1, ngettext_lazy("Try again in %(wait)d second.", "Try again in %(wait)d seconds.", "wait")),
)


def status_code(decision: Decision) -> int:
    """Return 429 for a quota or a block, 503 when policies deny only because Redis is down."""
    return 503 if decision.denied_by and not decision.blocked_by else 429


def refusal_text(decision: Decision) -> str:
    """Return the refusal in one or two sentences, for people."""
    text = _reason(decision)
    wait = retry_after_seconds(decision)
    if wait is not None:
        text = f"{text} {_try_again(wait)}"
    if decision.refusal_id:
        # Not within an f-string, where gettext's tools find no messages.
        reference = _("Reference: %(id)s.") % {"id": decision.refusal_id}
        text = f"{text} {reference}"
    return text


def _reason(decision: Decision) -> str:
    if status_code(decision) == 503:
        return _("Requests cannot be counted right now.")
    return _("Requests are blocked.") if decision.blocked_by else _("Too many requests.")


def _try_again(wait: int) -> str:
    """Return the wait in words, rounded up; from two of a unit on in that unit, such as 119 seconds and 2 minutes."""
    size, text = next((each for each in _WAITS if wait >= 2 * each[0]), _WAITS[-1])
    return text % {"wait": -(-wait // size)}


def problem(decision: Decision) -> dict[str, Any]:
    """Return the refusal as a problem details object (RFC 9457).

    ``violated-policies`` is the name in the draft of the IETF. All members are also there as RFC 9457 asks for
    (section 3.2): letters, digits and ``_``.
    """
    unavailable = status_code(decision) == 503
    violated = list(decision.violated)
    return {
        "type": _TYPES + ("temporary-reduced-capacity" if unavailable else "quota-exceeded"),
        "title": _("Temporarily reduced capacity") if unavailable else _("Quota exceeded"),
        "status": status_code(decision),
        "detail": refusal_text(decision),
        "violated_policies": violated,
        "violated-policies": violated,
        "retry_after": retry_after_seconds(decision),
        **({"refusal_id": decision.refusal_id} if decision.refusal_id else {}),
    }


def refusal_response(request: Any, decision: Decision) -> HttpResponse:
    """Return the response to a refused request, in the media type that the client prefers."""
    return _response(request, decision, _media_type(request))


async def arefusal_response(request: Any, decision: Decision) -> HttpResponse:
    """``refusal_response``, awaited: the project's own template may read the database."""
    media_type = _media_type(request)
    if media_type == _HTML:
        return await sync_to_async(_response)(request, decision, media_type)
    return _response(request, decision, media_type)


def _response(request: Any, decision: Decision, media_type: str) -> HttpResponse:
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
    accept = request.META.get("HTTP_ACCEPT", "*/*")
    # A long header is cut to the complete media ranges in its first characters, if any.
    return _preferred(accept if len(accept) <= MAX_ACCEPT else accept[: max(0, accept.rfind(",", 0, MAX_ACCEPT))])


@lru_cache(maxsize=256)
def _preferred(accept: str) -> str:
    """Return the media type that an Accept header prefers; the default where it accepts none or is malformed."""
    request = HttpRequest()
    request.META["HTTP_ACCEPT"] = ",".join(accept.split(",", _MAX_RANGES)[:_MAX_RANGES])
    try:
        return request.get_preferred_type(_MEDIA_TYPES) or _MEDIA_TYPES[0]
    except ValueError:  # from Django, for parameters in a character set unknown to Python
        return _MEDIA_TYPES[0]


def _page(request: Any, decision: Decision) -> str:
    """Render the project's 429.html or 503.html, else the app's, whose name hides no template of another app."""
    status, wait = status_code(decision), retry_after_seconds(decision)
    title = problem(decision)["title"]
    context = {
        "title": title,
        "reason": _reason(decision),
        "wait": wait,
        "wait_text": "" if wait is None or wait >= _CLOCK_TIME_FROM else _try_again(wait),
        "again_at": None if wait is None else _moment(wait),
        "refusal_id": decision.refusal_id,
        "status_code": status,
        "decision": decision,
    }
    try:
        return render_to_string(_TEMPLATES[status], context, request)
    except TemplateDoesNotExist:  # an API without TEMPLATES, or without APP_DIRS
        text = refusal_text(decision)
        return format_html("<!doctype html>\n<title>{}</title>\n<h1>{}</h1>\n<p>{}</p>\n", title, title, text)


def _moment(wait: int) -> datetime:
    """Return when the wait is over, rounded up to the minute where pages show the time of day."""
    seconds = int(time.time()) + wait
    if wait >= _CLOCK_TIME_FROM:
        seconds = -(-seconds // 60) * 60
    return timezone.localtime(datetime.fromtimestamp(seconds, UTC))
