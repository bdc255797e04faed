"""The usage endpoints, for clients of an API built with Django REST framework: their limits and remaining units, and
what they have used in earlier days, weeks and months.

urlpatterns = [path("quota/", include("django_ratequota.urls"))]  # GET quota/usage/, quota/usage/history/
"""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError as InvalidValue
from django.db import Error as DatabaseError
from django.utils.translation import gettext as _
from rest_framework import serializers
from rest_framework.exceptions import NotFound, PermissionDenied, ValidationError
from rest_framework.generics import ListAPIView
from rest_framework.pagination import CursorPagination
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from .engine.decision import Decision
from .engine.types import Bucket, BucketStatus
from .models import QuotaWindow
from .operations.caller_limits import caller_limits
from .operations.past_windows import windows_of
from .operations.subjects import find_user
from .policies.requests.caller import Caller, DescribedCaller
from .policies.requests.view_declarations import USAGE_ATTRIBUTE
from .throttling import QuotaThrottle, StoreUnavailable

#: Staff with one of these permissions may query other users, as they may see policies in the admin.
LOOKING = ("view_ratepolicy", "change_ratepolicy", "grant_override", "reset_usage", "block_callers")
_SECOND = 10**6


class QuotaLimitSerializer(serializers.Serializer[Any]):
    """One limit, and the caller's remaining units."""

    policy = serializers.CharField(help_text="The limit's name, as in the RateLimit headers, such as search/min.")
    scope = serializers.CharField(allow_null=True, help_text="The endpoint's name; null = all endpoints together.")
    rate = serializers.CharField(help_text="Such as 100/min burst 20.")
    counts = serializers.CharField(help_text="What the numbers count: units, or requests whatever they cost.")
    counted_per = serializers.CharField(help_text="Counted per caller, ip, plan, everyone, or an identifier's name.")
    limit = serializers.IntegerField(help_text="The most units that can be free at a time.")
    window = serializers.IntegerField(help_text="Seconds that the rate is counted over.")
    # These are null while counts are unavailable.
    remaining = serializers.IntegerField(allow_null=True, help_text="Units free now; null = unknown.")
    reset = serializers.IntegerField(allow_null=True, help_text="Seconds until all units are free; null = unknown.")
    retry_after = serializers.IntegerField(
        allow_null=True, help_text="Seconds until one unit is free, 0 = now; null = unknown."
    )


class QuotaUsageSerializer(serializers.Serializer[Any]):
    """Each limit that applies to the caller."""

    limits = QuotaLimitSerializer(many=True)
    blocked_by = serializers.ListField(
        child=serializers.CharField(), help_text="Names of the policies that refuse every request of the caller."
    )
    available = serializers.BooleanField(help_text="False while counts are unavailable.")
    truncated = serializers.BooleanField(help_text="Whether there are more limits than shown; then query by scope.")


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
        """Return the response, which is nobody else's."""
        response["Cache-Control"] = "no-store"
        return super().finalize_response(request, response, *args, **kwargs)


setattr(CallersView, USAGE_ATTRIBUTE, True)


class UsageView(CallersView):
    """Each limit that applies to the caller; reading them consumes none of their units.

    ``?scope=`` selects one endpoint (else all that have limits), ``?user=``, a primary key or a name, another user.
    """

    serializer_class = QuotaUsageSerializer

    def get(self, request: Request) -> Response:
        """Return the caller's limits now."""
        scope, user = request.query_params.get("scope"), request.query_params.get("user")
        caller = Caller(request) if user is None else _other(request, user)
        try:
            # Redis has just failed to count this request: do not wait for it again.
            decision: Decision | None = getattr(request._request, "ratequota", None)
            found = caller_limits(caller, scope or None, ask=decision is None or not decision.degraded)
        except LookupError as error:
            text = _("There is no endpoint of that name.")
            raise ValidationError({"scope": [text]}) from error
        # Without the serializer, which is for documentation only: it is slower than everything else here.
        data = {
            "limits": [self.describe(bucket, status) for bucket, status in found.limits],
            "blocked_by": found.blocked_by,
            "available": found.available,
            "truncated": found.truncated,
        }
        return Response(data)

    def describe(self, bucket: Bucket, status: BucketStatus | None) -> dict[str, Any]:
        """Return one limit as the client sees it; ``status`` None = unknown."""
        return {
            "policy": bucket.title,
            "scope": bucket.scope or None,
            "rate": str(bucket.rate),
            "counts": bucket.rate.counts,
            "counted_per": bucket.counted_per,
            "limit": bucket.rate.capacity,
            "window": _seconds(status.window_us if status else bucket.rate.period_us),
            "remaining": status and status.remaining,
            "reset": status and _seconds(status.reset_after_us),
            "retry_after": status and _seconds(status.retry_after_us or 0),
        }


class QuotaWindowSerializer(serializers.Serializer[Any]):
    """What the caller has used of one limit in one day, week or month."""

    period = serializers.CharField(help_text="Length of the window: day, week or month.")
    scope = serializers.SerializerMethodField(help_text="The endpoint's name; null = all endpoints together.")
    rate = serializers.CharField(help_text="The rate at its last request, such as 10000/month.")
    counts = serializers.SerializerMethodField(help_text="What the numbers count: units, or requests.")
    counted_per = serializers.SerializerMethodField(help_text="Counted per user, or an identifier's name.")
    starts_at = serializers.DateTimeField(help_text="When the window began.")
    ends_at = serializers.DateTimeField(help_text="When the window ends; in the future = it runs now.")
    used = serializers.IntegerField(help_text="What was used; of a window that runs now, some seconds ago.")
    limit = serializers.IntegerField(help_text="The limit of that rate.")

    def get_scope(self, window: Any) -> str | None:
        """Return the endpoint's name; of a deleted one, its number."""
        return window.scope or (None if window.endpoint_id is None else f"#{window.endpoint_id}")

    def get_counts(self, window: Any) -> str:
        """Return what the rate counts."""
        return "requests" if " requests/" in window.rate else "units"

    def get_counted_per(self, window: Any) -> str:
        """Return the kind of its subject, not the subject: a key is a secret."""
        return str(window.subject.partition(":")[0])


class QuotaWindowPagination(CursorPagination):
    """The newest windows first, 100 at a time; ``?page_size=`` up to 1,000."""

    ordering = ("-starts_at", "-id")
    page_size, page_size_query_param, max_page_size = 100, "page_size", 1000

    def paginate_queryset(self, queryset: Any, request: Request, view: Any = None) -> Any:
        """Return a page; raises ``NotFound`` for a cursor that is no date, which REST framework passes on."""
        try:
            return super().paginate_queryset(queryset, request, view)
        except (InvalidValue, OverflowError, ValueError) as error:
            raise NotFound(self.invalid_cursor_message) from error


class UsageHistoryView(CallersView, ListAPIView[QuotaWindow]):
    """What the caller has used of each limit in earlier days, weeks and months, and so far in those that run now.

    The caller is its user and its identifiers, not its address. ``?period=`` selects day, week or month, ``?user=``,
    a primary key or a name, another user. Rolling limits, and policies that are not durable, have no such windows.
    """

    serializer_class = QuotaWindowSerializer
    pagination_class = QuotaWindowPagination
    filter_backends = ()

    def get_queryset(self) -> Any:
        """Return the windows of the caller, or of the user that staff queries."""
        if getattr(self, "swagger_fake_view", False):  # drf-spectacular has no request to name a caller
            return QuotaWindow.objects.none()
        period, user = self.request.query_params.get("period"), self.request.query_params.get("user")
        if period and period not in QuotaWindow.Period.values:
            raise ValidationError({"period": [_("Write day, week or month.")]})
        windows = windows_of(Caller(self.request) if user is None else _other(self.request, user))
        return windows.filter(period=period) if period else windows


def _seconds(us: int) -> int:
    return -(-us // _SECOND)


def _other(request: Request, name: str) -> DescribedCaller:
    """Return the user that staff queries; without PLAN_RESOLVER and IDENTIFIERS, which need the user's request."""
    staff: Any = request.user  # None where the project's UNAUTHENTICATED_USER is None
    is_staff = getattr(staff, "is_staff", False)
    if not (is_staff and any(staff.has_perm(f"django_ratequota.{codename}") for codename in LOOKING)):
        raise PermissionDenied
    user = find_user(name, by_key=True)
    if user is None:
        raise ValidationError({"user": [_("There is no such user.")]})
    return DescribedCaller(user_id=str(user.pk), address=None)
