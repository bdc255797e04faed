"""The endpoints that policies limit."""

from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ..engine.rates import MAX_UNITS
from .base import TrackedModel
from .fields import description

_STATUS = re.compile(r"[1-5](?:xx|[0-9]{2})", re.ASCII)
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


class Endpoint(TrackedModel):
    """A named set of requests that policies limit: code names it as a scope, or routes and methods match it."""

    class Limits(models.TextChoices):
        """Which policies limit the endpoint's requests."""

        BESIDES = "besides", _("its own policies and those for all endpoints")
        OWN = "own", _("only its own policies")
        NONE = "none", _("exempt (never limited)")

    name = models.SlugField(
        _("name"),
        max_length=100,
        unique=True,
        help_text=_("The scope in the code (throttle_scope, ratequota(scope=...)). Clients see it in headers."),
    )
    description = description()
    routes = models.TextField(
        _("routes"),
        blank=True,
        help_text=_(
            "One pattern per line, either a URL name such as reports:* or a route that starts with / such as "
            "/api/v1/reports/*. An asterisk matches any text. Patterns are compared with the route that Django "
            "resolved, never with the path that a client sent."
        ),
    )
    methods = models.CharField(
        _("methods"),
        max_length=100,
        blank=True,
        help_text=_(
            "HTTP methods separated by spaces, such as GET POST. Empty = all. HEAD is treated as GET. If a method "
            "other than GET is listed, methods without their own handler in the view are included too. OPTIONS with "
            "its own handler is only included if it is listed."
        ),
    )
    cost = models.PositiveBigIntegerField(
        _("cost"),
        default=1,
        validators=[MinValueValidator(1), MaxValueValidator(MAX_UNITS)],
        help_text=_("Units per request. A cost in the code takes precedence."),
    )
    charged_statuses = models.CharField(
        _("charged statuses"),
        max_length=100,
        blank=True,
        default="",
        help_text=_(
            "Response statuses that are charged, such as 401, 403 or 4xx for failed logins. Empty = every request. "
            "Requests are charged before they run and refunded if the response has another status."
        ),
    )
    limits = models.CharField(
        _("limits"),
        max_length=20,
        choices=Limits.choices,
        default=Limits.BESIDES,
        help_text=_(
            "The policies that limit requests to this endpoint. “only its own policies” leaves out those for all "
            "endpoints, except “blocked”. “exempt” never limits or counts requests, such as health checks, so that "
            "policies for other endpoints that match and even blocks do not apply. If methods are listed, only these "
            "are exempt."
        ),
    )

    class Meta(TrackedModel.Meta):
        verbose_name = _("endpoint")
        verbose_name_plural = _("endpoints")
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        """Normalize routes, methods and statuses; raise ``ValidationError`` that names the bad line or word."""
        errors: dict[str, Any] = {}
        if self.name == "all":
            errors["name"] = _("Choose another name. In headers, 'all' means all endpoints together.")
        lines = [line.strip() for line in self.routes.splitlines() if line.strip()]
        self.routes = "\n".join(lines)
        for line in lines:
            text: Any = ""
            if len(line) > 500 or "\x00" in line or re.search(r"\s", line):
                text = _("%(line)r is not a valid pattern. Enter a URL name or a route without spaces.")
            elif "://" in line or re.search(r"(?<!\()\?[\w.-]+=", line):
                text = _("%(line)r has a host or a query. Enter only the route, such as /api/reports/*.")
            elif re.search(r"(^|/)\^|\$$", line):
                text = _("%(line)r has ^ or $. Enter the route without them, such as /api/reports/*.")
            elif "/" in line and line[0] not in "/*":
                text = _("%(line)r has a / but does not begin with one. Begin routes with /, such as /api/reports/*.")
            if text:
                errors["routes"] = text % {"line": line[:60]}
        words = re.findall(r"[^\s,]+", self.methods.upper())
        words = list(dict.fromkeys("GET" if word == "HEAD" else word for word in words))
        self.methods = " ".join(words)
        unknown = [word for word in words if word not in METHODS]
        if unknown:
            text = _("%(word)r is not an HTTP method. Choose from %(known)s.")
            errors["methods"] = text % {"word": unknown[0][:30], "known": ", ".join(METHODS)}
        words = re.findall(r"[^\s,]+", self.charged_statuses.lower())
        self.charged_statuses = ", ".join(sorted(set(words)))
        unknown = [word for word in words if not _STATUS.fullmatch(word)]
        if unknown:
            text = _("%(word)r is not an HTTP status. Enter statuses such as 401, 403 or 4xx.")
            errors["charged_statuses"] = text % {"word": unknown[0][:30]}
        if errors:
            raise ValidationError(errors)
