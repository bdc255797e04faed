"""Who may see, write and reset which policies: the one place that decides, asked by every page.

An override, a policy for a user or a subject, is written by those who hold ``grant_override`` and by nobody else.
Every other policy is written by those who hold Django's own permission to add, change or delete rate policies.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from ..models import RatePolicy

_APP = "django_ratequota"
OVERRIDES = Q(user__isnull=False) | ~Q(subject="")


def is_override(policy: RatePolicy) -> bool:
    """Whether the policy's audience is a user or a subject."""
    return policy.user_id is not None or bool(policy.subject)


def may(user: Any, verb: str, *, override: bool) -> bool:
    """Whether the user may add, change or delete overrides, or the policies that are none."""
    return bool(user.has_perm(f"{_APP}.{_codename(verb, override)}"))


def check_audience(user: Any, verb: str, *, override: bool) -> None:
    """Raises ``ValidationError`` naming the missing permission, unless the user may."""
    if may(user, verb, override=override):
        return
    text = _("You may only edit overrides. Choose a user or a subject, or ask for the permission “%s”.")
    if override:
        text = _("You may not edit overrides. Leave user and subject empty, or ask for the permission “%s”.")
    raise ValidationError(text % permission_name(verb, override=override), code="permission")


def permission_name(verb: str, *, override: bool) -> str:
    """The permission as the page of a user or group lists it."""
    named = dict(RatePolicy._meta.permissions)
    codename = _codename(verb, override)
    return str(named.get(codename) or f"Can {verb} {RatePolicy._meta.verbose_name_raw}")


def _codename(verb: str, override: bool) -> str:
    return "grant_override" if override else f"{verb}_ratepolicy"


class PolicyRights(admin.ModelAdmin):  # type: ignore[type-arg]
    """The rights to policies on their own pages.

    The tables on the pages of plans and endpoints hold no overrides, so Django's own permissions decide there.
    """

    def has_add_permission(self, request: Any) -> bool:
        """Whoever may add some policy; the form refuses those that are not theirs."""
        return self._may(request, "add", None)

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Whoever may change this policy; without one, some policy."""
        return self._may(request, "change", obj)

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Whoever may delete this policy; without one, some policy."""
        return self._may(request, "delete", obj)

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        """Whoever may look at policies; overrides are seen by those who grant or reset them, too."""
        if super().has_view_permission(request, obj):
            return True
        theirs = self._may(request, "view", None) or request.user.has_perm(f"{_APP}.reset_usage")
        return bool(theirs and (obj is None or is_override(obj)))

    def has_reset_permission(self, request: Any, obj: Any = None) -> bool:
        """Whoever may reset what was counted, and see the policy."""
        return request.user.has_perm(f"{_APP}.reset_usage") and self.has_view_permission(request, obj)

    def sees_all_policies(self, request: Any) -> bool:
        """Whether overrides are not all that the operator may see."""
        return super().has_view_permission(request)

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """The policies that the operator may see."""
        policies: QuerySet[Any] = super().get_queryset(request)
        if self.sees_all_policies(request):
            return policies
        return policies.filter(OVERRIDES) if self.has_view_permission(request) else policies.none()

    def _may(self, request: Any, verb: str, policy: Any) -> bool:
        kinds = (True, False) if policy is None else (is_override(policy),)
        return any(may(request.user, verb, override=override) for override in kinds)
