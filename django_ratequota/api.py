"""The usage endpoints, for clients of an API built with Django REST framework: their limits and remaining units, and
what they have used in earlier days, weeks and months.

urlpatterns = [path("quota/", include("django_ratequota.urls"))]  # GET quota/usage/, quota/usage/history/
"""

from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import ValidationError as InvalidValue
from django.db import Error as DatabaseError
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.generics import ListAPIView
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from .engine.decision import Decision
from .engine.keys import is_per_caller
from .engine.rates import Rate
from .engine.types import Bucket, BucketStatus
from .models import QuotaWindow
from .operations.caller_limits import caller_limits, describe_limit, describe_window
from .operations.invoice_lines import lines_of
from .operations.past_windows import windows_of
from .policies.facts import to_datetime, to_us
from .policies.requests.caller import Caller
from .policies.requests.view_declarations import USAGE_ATTRIBUTE
from .runtime import process
from .throttling import QuotaThrottle, StoreUnavailable

_SECOND = 10**6
_INSTANT = serializers.DateTimeField()


class LimitSerializer(serializers.Serializer[Any]):
    """The fields of a limit that both endpoints have."""

    title = serializers.CharField(help_text="Title of the limit for people, such as search: 10/min.")
    name = serializers.CharField(help_text="Name of the limit in the RateLimit headers, such as search/min.")
    scope = serializers.CharField(
        allow_null=True, help_text="Name of the endpoint, or its number if deleted. null = all endpoints together."
    )
    rate = serializers.CharField(
        help_text="Rate such as 100/min burst 20. For past windows, the rate of the last request."
    )
    unit = serializers.CharField(
        help_text="Unit of the numbers: units, requests regardless of their cost, or concurrent requests."
    )
    counted_per = serializers.CharField(
        help_text="Owner of the counter: user, plan, everyone or the name of an identifier. ip = an anonymous client."
    )
    limit = serializers.IntegerField(help_text="Maximum number of units that can be available at a time.")


class QuotaLimitSerializer(LimitSerializer):
    """One limit with the units that the caller has used and has left."""

    # The first three are null where the limit has no calendar window, the others while counts are unavailable.
    period = serializers.CharField(
        allow_null=True, help_text="Calendar window of the limit: day, week or month. null = none."
    )
    starts_at = serializers.DateTimeField(allow_null=True, help_text="Start of the window.")
    ends_at = serializers.DateTimeField(allow_null=True, help_text="End of the window.")
    used = serializers.IntegerField(
        allow_null=True, help_text="Units used. May exceed the limit if more were charged afterwards. null = unknown."
    )
    resets_in = serializers.IntegerField(
        allow_null=True,
        help_text="Seconds until the window ends or else until all units are available. null = unknown.",
    )
    remaining = serializers.IntegerField(allow_null=True, help_text="Units available now. null = unknown.")
    retry_after = serializers.IntegerField(
        allow_null=True, help_text="Seconds until one unit is available. 0 = now, null = unknown."
    )
    window = serializers.IntegerField(help_text="Period of the rate in seconds. 0 for concurrent requests.")


class QuotaUsageSerializer(serializers.Serializer[Any]):
    """Each limit that applies to the caller."""

    limits = QuotaLimitSerializer(many=True)
    blocked_by = serializers.ListField(
        child=serializers.CharField(), help_text="Names of the policies that refuse every request of the client."
    )
    available = serializers.BooleanField(help_text="False while counts are unavailable.")
    truncated = serializers.BooleanField(help_text="True if there are more limits than shown. Query them by scope.")


class CallersView(APIView):
    """A view of the caller's own limits: no cache keeps it, and without the database it is unavailable."""

    # Policies of the endpoint ``usage`` apply. Policies for all endpoints do not (see ``policies.exemptions``):
    # clients without quota left must be able to see that.
    throttle_classes = (QuotaThrottle,)
    throttle_scope: str | None = "usage"

    def handle_exception(self, exc: Exception) -> Response:
        """Answer 503 where the database does not."""
        if isinstance(exc, DatabaseError):
            exc = StoreUnavailable(Decision(allowed=False, denied_by=("all",), error="database"))
        return super().handle_exception(exc)

    def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the response, which no cache may keep for other callers."""
        response["Cache-Control"] = "no-store"
        return super().finalize_response(request, response, *args, **kwargs)


setattr(CallersView, USAGE_ATTRIBUTE, True)


class UsageView(CallersView):
    """Each limit that applies to the caller; reading them consumes none of their units.

    ``?scope=`` selects one endpoint (else all that have limits).
    """

    serializer_class = QuotaUsageSerializer

    def get(self, request: Request) -> Response:
        """Return the caller's limits now."""
        scope = request.query_params.get("scope")
        try:
            # Redis has just failed to count this request: do not wait for it again.
            decision: Decision | None = getattr(request._request, "ratequota", None)
            found = caller_limits(Caller(request), scope or None, ask=decision is None or not decision.degraded)
        except LookupError as error:
            text = _("There is no endpoint with this name.")
            raise ValidationError({"scope": [text]}) from error
        # Without the serializer, which is for documentation only: it is slower than everything else here.
        data = {
            "limits": [self.describe(bucket, status, found.at_us) for bucket, status in found.limits],
            "blocked_by": found.blocked_by,
            "available": found.available,
            "truncated": found.truncated,
        }
        return Response(data)

    def describe(self, bucket: Bucket, status: BucketStatus | None, at_us: int) -> dict[str, Any]:
        """Return one limit at that time as the client sees it; ``status`` None = unknown."""
        limit = describe_limit(bucket, status, at_us)
        starts_us, ends_us = limit["starts_at"], limit["ends_at"]
        remaining, retry_us = limit.pop("remaining"), limit.pop("retry_at")
        period_us = 0 if bucket.rate.concurrent else bucket.rate.period_us
        return {
            **_told(limit, at_us),
            "remaining": remaining,
            "retry_after": None if retry_us is None else _seconds(retry_us - at_us),
            "window": _seconds(period_us if ends_us is None else ends_us - starts_us),
        }


class QuotaLineSerializer(serializers.Serializer[Any]):
    """The usage of a window under one plan and rate, as on the invoice."""

    plan = serializers.CharField(source="source.plan", help_text="Name of the plan. Empty = none.")
    rate = serializers.CharField(help_text="Rate at that time.")
    first_day = serializers.DateField(allow_null=True, help_text="Day of the first charge. null = no longer kept.")
    last_day = serializers.DateField(allow_null=True, help_text="Day of the last charge. null = no longer kept.")
    used = serializers.IntegerField(help_text="Units used.")
    over = serializers.IntegerField(help_text="The part of them above the limit that was in force on their day.")


class QuotaWindowListSerializer(serializers.ListSerializer[Any]):
    """Windows with their lines, which are read together."""

    def to_representation(self, data: Any) -> Any:
        """Return the windows as the client sees them."""
        windows = list(data)
        for window, lines in zip(windows, lines_of([window] for window in windows), strict=True):
            window.lines = [line for line in lines if line.source.mode != "log"]
        return super().to_representation(windows)


class QuotaWindowSerializer(LimitSerializer):
    """The caller's usage of one limit in one day, week or month."""

    period = serializers.CharField(help_text="Length of the window: day, week or month.")
    starts_at = serializers.DateTimeField(help_text="Start of the window.")
    ends_at = serializers.DateTimeField(help_text="End of the window, in the future for the current window.")
    used = serializers.IntegerField(help_text="Units used, as of some seconds ago for the current window.")
    resets_in = serializers.IntegerField(help_text="Seconds until the window ends. 0 = it has ended.")
    lines = QuotaLineSerializer(many=True, help_text="The usage under each plan and rate.")

    class Meta:
        list_serializer_class = QuotaWindowListSerializer

    def to_representation(self, window: Any) -> dict[str, Any]:
        """Return one window as the client sees it."""
        subject = window.counter[1:].partition("}")[0]  # which has the kind of a long one, too
        bucket = Bucket(
            subject,
            Rate.parse(window.rate),
            scope=window.scope or ("" if window.endpoint_id is None else f"#{window.endpoint_id}"),
            counted_per="" if is_per_caller(window.counter) else subject.partition(":")[0],
        )
        bounds = to_us(window.starts_at), to_us(window.ends_at)
        limit = describe_window(bucket, used=window.used, window=bounds)
        return {
            **_told(limit, process.limiter().now_us),
            "lines": self.fields["lines"].to_representation(window.lines),
        }


class QuotaWindowPagination(CursorPagination):
    """The latest windows first, 100 at a time; ``?page_size=`` up to 1,000."""

    ordering = ("-starts_at", "-id")
    page_size, page_size_query_param, max_page_size = 100, "page_size", 1000

    def get_page_size(self, request: Request) -> int:
        """Return how many windows the client asks for; raises ``ValidationError`` for what is no such number."""
        text, most = request.query_params.get("page_size", str(self.page_size)), self.max_page_size
        # Python refuses to read thousands of digits.
        size = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
        if not 1 <= size <= most:
            raise ValidationError({"page_size": [_("Enter a number from 1 to %(most)d.") % {"most": most}]})
        return size

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> Any:
        """Return a page; raises ``NotFound`` for a cursor that is no date, which REST framework passes on."""
        try:
            return super().paginate_queryset(queryset, request, view)
        except (InvalidValue, OverflowError, ValueError) as error:
            raise NotFound(self.invalid_cursor_message) from error


class UsageHistoryView(CallersView, ListAPIView[QuotaWindow]):
    """The caller's usage of each limit in earlier days, weeks and months and in the current ones.

    The caller is its user and its identifiers, not its address. ``?period=`` selects day, week or month. Rolling
    limits, and policies that are not durable, have no such windows.
    """

    serializer_class = QuotaWindowSerializer
    pagination_class = QuotaWindowPagination
    filter_backends = ()

    def get_queryset(self) -> Any:
        """Return the windows of the caller."""
        if getattr(self, "swagger_fake_view", False):  # drf-spectacular has no request to name a caller
            return QuotaWindow.objects.none()
        period = self.request.query_params.get("period")
        if period and period not in QuotaWindow.Period.values:
            raise ValidationError({"period": [_("Enter day, week or month.")]})
        windows = windows_of(Caller(self.request))
        return windows.filter(period=period) if period else windows


def _told(limit: dict[str, Any], at_us: int) -> dict[str, Any]:
    """Return a described limit as clients get it: the bounds of its window as text, the seconds until its reset."""
    reset_us = limit.pop("reset")
    for name in ("starts_at", "ends_at"):
        if limit[name] is not None:
            limit[name] = _INSTANT.to_representation(to_datetime(limit[name]))
    return {**limit, "resets_in": None if reset_us is None else _seconds(max(0, reset_us - at_us))}


def _seconds(us: int) -> int:
    return -(-us // _SECOND)
