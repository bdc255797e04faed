"""OpenAPI by drf-spectacular (``pip install 'django-ratequota[spectacular]'``): refusals and rate headers documented.

REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "django_ratequota.openapi.AutoSchema"}

A project with its own schema class lists ``QuotaSchema`` as a base before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rest_framework import serializers, views

from .api import UsageHistoryView, UsageView
from .conf import settings
from .policies.requests.view_facts import exemption_of_instance
from .throttling import QuotaThrottle
from .utils.optional import require

if TYPE_CHECKING:
    from drf_spectacular import drainage, openapi, plumbing, utils
else:
    drainage, openapi, plumbing, utils = (
        require(f"drf_spectacular.{name}", "spectacular") for name in ("drainage", "openapi", "plumbing", "utils")
    )

_Component: Any = plumbing.ResolvedComponent
_DESCRIPTIONS = {
    "429": "The request exceeds a quota or is blocked.",
    "503": "Requests cannot be counted right now and a policy refuses uncounted requests.",
}
_RETRY = {"Retry-After": ("integer", "Whole seconds until the same request would be admitted. Absent = never.")}
_REFUSED = {"X-RateLimit-Refusal": ("string", "Id of the refusal, for the operators of the API.")}
_IETF_11 = {
    "RateLimit-Policy": ("string", 'Each limit: name, quota (q), window in seconds (w): "search/min";q=10;w=60.'),
    "RateLimit": ("string", 'Each limit: name, units left (r), seconds until more (t): "search/min";r=3;t=6.'),
}
_RATES = {
    "ietf": _IETF_11,
    "ietf-11": _IETF_11,
    "x-ratelimit": {
        "X-RateLimit-Limit": (
            "integer",
            "Maximum units of the limit with the least room or of the limit that is first in headers.",
        ),
        "X-RateLimit-Remaining": ("integer", "Units left of that limit."),
        "X-RateLimit-Reset": ("integer", "Unix time in seconds at which all units are available again."),
    },
}

#: The body that ``responses.problem`` returns.
_PROBLEM = utils.inline_serializer(
    "QuotaProblem",
    {
        "type": serializers.URLField(help_text="Kind of problem, such as ...#quota-exceeded."),
        "title": serializers.CharField(),
        "status": serializers.IntegerField(),
        "detail": serializers.CharField(),
        "violated_policies": serializers.ListField(child=serializers.CharField()),
        "violated-policies": serializers.ListField(
            child=serializers.CharField(), help_text="The same under its name in the IETF draft."
        ),
        "retry_after": serializers.IntegerField(
            allow_null=True, help_text="Seconds until the request would be admitted. null = never."
        ),
        "refusal_id": serializers.CharField(
            required=False, help_text="Id of the refusal, for the operators of the API."
        ),
    },
)


class QuotaErrorSerializer(serializers.Serializer[Any]):
    """The body of DRF's own exception handler."""

    detail = serializers.CharField()


class QuotaSchema:
    """Mixin before a schema class: documents 429, 503 and rate headers of operations under ``QuotaThrottle``."""

    view: Any
    method: str
    registry: Any
    _get_response_for_code: Any

    def get_override_parameters(self) -> list[Any]:
        """Add the query parameters of the usage endpoints."""
        parameters: list[Any] = super().get_override_parameters()  # type: ignore[misc]
        if isinstance(self.view, UsageView):
            text = "Name of an endpoint. Default: all endpoints with limits."
            return [*parameters, utils.OpenApiParameter("scope", str, description=text)]
        if isinstance(self.view, UsageHistoryView):
            periods, text = ["day", "week", "month"], "Length of the windows. Default: all."
            period = utils.OpenApiParameter("period", str, enum=periods, description=text)
            text = "1 = with the usage on each day of a month."
            return [*parameters, period, utils.OpenApiParameter("days", str, enum=["1"], description=text)]
        return parameters

    def _get_response_bodies(self, direction: str = "response") -> dict[str, Any]:
        responses: dict[str, Any] = super()._get_response_bodies(direction=direction)  # type: ignore[misc]
        if direction != "response" or not self._limited():
            return responses
        rates = {name: header for kind in settings.headers for name, header in _RATES[kind].items()}
        for code, response in responses.items():
            if code.startswith("2"):
                self._add_headers(response, rates)
        refused = _REFUSED if settings.statistics_seconds else {}
        for code, headers in {"429": _RETRY | rates | refused, "503": _RETRY | refused}.items():
            response = self._refusal(code)
            # The project's own response stays; a body is added where it has none.
            own = responses.get(code, {})
            content = {**response.get("content", {}), **own.get("content", {})}
            responses[code] = {**response, **own, **({"content": content} if content else {})}
            self._add_headers(responses[code], headers)
        return responses

    def _limited(self) -> bool:
        exemption = exemption_of_instance(self.view)
        if exemption is not None and exemption.covers(self.method):
            return False
        try:
            return any(isinstance(throttle, QuotaThrottle) for throttle in self.view.get_throttles())
        except Exception as error:  # a project's own get_throttles may need a real request
            drainage.warn(f"get_throttles() failed, so its refusals are not documented: {error!r}")
            return False

    def _refusal(self, code: str) -> dict[str, Any]:
        """Return the response of the view's exception handler; without a body for a project's own handler."""
        handler = self.view.get_exception_handler()
        response: dict[str, Any] = {}
        if getattr(handler, "returns_problems", False):
            media_types = ["application/problem+json"]
            response = self._get_response_for_code(_PROBLEM, code, media_types=media_types)
        elif handler is views.exception_handler:
            response = self._get_response_for_code(QuotaErrorSerializer, code)
        return {**response, "description": _DESCRIPTIONS[code]}

    def _add_headers(self, response: dict[str, Any], headers: dict[str, tuple[str, str]]) -> None:
        refs = {}
        for name, (kind, description) in headers.items():
            component = _Component(
                name=name,
                type=_Component.HEADER,
                schema={"schema": {"type": kind}, "description": description},
                object=QuotaSchema,
            )
            self.registry.register_on_missing(component)
            refs[name] = component.ref
        response["headers"] = {**refs, **response.get("headers", {})}


class AutoSchema(QuotaSchema, openapi.AutoSchema):
    """drf-spectacular's schema, with refusals and rate headers."""
