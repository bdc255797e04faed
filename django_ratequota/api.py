"""The usage endpoints, for clients of an API built with Django REST framework: their limits and remaining units, and
what they have used in earlier days, weeks and months.

urlpatterns = [path("quota/", include("django_ratequota.urls"))]  # GET quota/usage/, quota/usage/history/
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError as InvalidValue
from django.db import Error as DatabaseError
from django.utils.translation import gettext as _
from rest_framework.exceptions import NotFound, ValidationError
from rest_framework.fields import BooleanField, CharField, DateField, DateTimeField, IntegerField, ListField
from rest_framework.generics import GenericAPIView, ListAPIView
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer

from .engine.decision import Decision
from .engine.keys import is_per_caller
from .engine.rates import Rate
from .engine.types import Bucket, BucketStatus
from .models import QuotaWindow
from .operations.caller_limits import caller_limits, describe_limit, describe_window
from .operations.invoice_lines import days_of, lines_of, sources_of
from .operations.past_windows import windows_of
from .policies.facts import to_us
from .policies.requests.caller import Caller
from .policies.requests.view_declarations import USAGE_ATTRIBUTE
from .runtime import process
from .throttling import QuotaThrottle, StoreUnavailable


class LimitSerializer(Serializer[Any]):
    """The fields of ``describe_window``, which both endpoints have."""

    title = CharField(help_text="Title of the limit for people, such as search: 10/min.")
    name = CharField(help_text="Name of the limit in the RateLimit headers, such as search/min.")
    scope = CharField(
        allow_null=True, help_text="Name of the endpoint, or its number if deleted. null = all endpoints together."
    )
    period = CharField(help_text="Length of the window: day, week or month.")
    rate = CharField(help_text="Rate such as 100/min burst 20. For past windows, the rate of the last request.")
    unit = CharField(
        help_text="Unit of the numbers: units, requests regardless of their cost, or concurrent requests."
    )
    counted_per = CharField(
        help_text="Owner of the counter: user, plan, everyone or the name of an identifier. ip = an anonymous client."
    )
    limit = IntegerField(help_text="Maximum number of units that can be available at a time.")
    used = IntegerField(help_text="Units used, as of some seconds ago for the current window.")
    starts_at = DateTimeField(help_text="Start of the window.")
    ends_at = DateTimeField(help_text="End of the window, in the future for the current window.")
    resets_in = IntegerField(help_text="Seconds until the window ends. 0 = it has ended.")


class QuotaLimitSerializer(LimitSerializer):
    """One limit with the units that the caller has used and has left."""

    # The first three are null where the limit has no calendar window, the others while counts are unavailable.
    period = CharField(allow_null=True, help_text="Calendar window of the limit: day, week or month. null = none.")
    used = IntegerField(
        allow_null=True, help_text="Units used. May exceed the limit if more were charged afterwards. null = unknown."
    )
    starts_at = DateTimeField(allow_null=True, help_text="Start of the window.")
    ends_at = DateTimeField(allow_null=True, help_text="End of the window.")
    resets_in = IntegerField(
        allow_null=True,
        help_text="Seconds until the window ends or else until all units are available. null = unknown.",
    )
    remaining = IntegerField(allow_null=True, help_text="Units available now. null = unknown.")
    retry_after = IntegerField(
        allow_null=True, help_text="Seconds until one unit is available. 0 = now, null = unknown."
    )
    window = IntegerField(help_text="Period of the rate in seconds. 0 for concurrent requests.")

    def to_representation(self, limit: Any) -> dict[str, Any]:
        """Return one of the ``CallerLimits`` as the view describes it."""
        found: Any = self.root.instance
        return super().to_representation(self.context["view"].describe(*limit, found.at_us))


class QuotaUsageSerializer(Serializer[Any]):
    """Each limit that applies to the caller."""

    limits = QuotaLimitSerializer(many=True)
    blocked_by = ListField(
        child=CharField(), help_text="Names of the policies that refuse every request of the client."
    )
    available = BooleanField(help_text="False while counts are unavailable.")
    truncated = BooleanField(help_text="True if there are more limits than shown. Query them by scope.")


class CallersView(GenericAPIView[Any]):
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
        return Response(self.get_serializer(found).data)

    def describe(self, bucket: Bucket, status: BucketStatus | None, at_us: int) -> dict[str, Any]:
        """Return one limit at that time as its serializer reads it; ``status`` None = unknown."""
        return describe_limit(bucket, status, at_us)


class QuotaLineSerializer(Serializer[Any]):
    """The usage of a window under one plan and rate, as on the invoice."""

    plan = CharField(source="source.plan", help_text="Name of the plan. Empty = none.")
    rate = CharField(help_text="Rate at that time.")
    first_day = DateField(allow_null=True, help_text="Day of the first charge. null = no longer kept.")
    last_day = DateField(allow_null=True, help_text="Day of the last charge. null = no longer kept.")
    used = IntegerField(help_text="Units used.")
    over = IntegerField(help_text="The part of them above the limit that was in force on their day.")


class QuotaDaySerializer(Serializer[Any]):
    """The usage of a month on one day under one plan and rate, as operators see it."""

    day = DateField(allow_null=True, help_text="null = the days before, which are no longer kept.")
    plan = CharField(help_text="Name of the plan. Empty = none.")
    rate = CharField(help_text="Rate on that day.")
    used = IntegerField(help_text="Units used. Negative if more were refunded than used.")


class QuotaWindowSerializer(LimitSerializer):
    """The caller's usage of one limit in one day, week or month."""

    lines = QuotaLineSerializer(many=True, help_text="The usage under each plan and rate.")
    days = QuotaDaySerializer(many=True, required=False, help_text="The usage on each day of a month, with ?days=1.")

    def to_representation(self, window: Any) -> dict[str, Any]:
        """Return one window as the client sees it."""
        subject = window.counter[1:].partition("}")[0]  # which has the kind of a long one, too
        bucket = Bucket(
            subject,
            Rate.parse(window.rate),
            scope=window.scope or ("" if window.endpoint_id is None else f"#{window.endpoint_id}"),
            counted_per="" if is_per_caller(window.counter) else subject.partition(":")[0],
        )
        bounds, at_us = (to_us(window.starts_at), to_us(window.ends_at)), process.limiter().now_us
        limit = describe_window(bucket, at_us, used=window.used, window=bounds)
        return super().to_representation(limit | window.parts)


class QuotaWindowPagination(CursorPagination):
    """The latest windows first, 100 at a time; ``?page_size=`` up to 1,000."""

    ordering = ("-starts_at", "-id")
    page_size, page_size_query_param, max_page_size = 100, "page_size", 1000


class UsageHistoryView(CallersView, ListAPIView[QuotaWindow]):
    """The caller's usage of each limit in earlier days, weeks and months and in the current ones.

    The caller is its user and its identifiers, not its address. ``?period=`` selects day, week or month. Rolling
    limits, and policies that are not durable, have no such windows. ``?days=1`` adds the days of months.
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

    def paginate_queryset(self, queryset: Any) -> Any:
        """Return the windows of a page, each with its ``parts``: the lines and, with ``?days=1``, a month's days.

        Raises ``NotFound`` for a cursor that is no date, which REST framework does not expect.
        """
        try:
            windows: Any = super().paginate_queryset(queryset)
        except (InvalidValue, OverflowError, ValueError) as error:
            raise NotFound(QuotaWindowPagination.invalid_cursor_message) from error
        for window, lines in zip(windows, lines_of([window] for window in windows), strict=True):
            window.parts = {"lines": [line for line in lines if line.source.mode != "log"]}
        if self.request.query_params.get("days") == "1":
            months = [window for window in windows if window.period == QuotaWindow.Period.MONTH]
            found = days_of(months)
            sources = sources_of({day.policy for days in found.values() for day in days})
            for window in months:
                window.parts["days"] = [
                    {**day._asdict(), "plan": sources[day.policy].plan, "used": day.used}
                    for day in found[window.pk]
                    if sources[day.policy].mode != "log"
                ]
        return windows
