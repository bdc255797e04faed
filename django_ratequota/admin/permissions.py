"""The permissions to see, change and reset policies, for all pages.

Overrides (policies for a user or a subject) are edited with the permission ``grant_override``, other policies with
Django's own permission to add, change or delete rate policies. ``block_callers`` adds and ends blocks, by their page.
A row for a wide network, a policy or a list member, also needs the permission to change rate policies.
"""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_lazy as _

from ..models import RatePolicy
from ..utils.addresses import is_wide

_APP = "django_ratequota"
OVERRIDES = Q(user__isnull=False) | ~Q(subject="")
#: Policies for chosen callers: overrides, and those for lists, which need Django's own permissions.
FOR_CHOSEN = OVERRIDES | Q(subject_list__isnull=False)


def is_override(row: Any) -> bool:
    """Return whether the row is a policy for a user or a subject."""
    return isinstance(row, RatePolicy) and (row.user_id is not None or bool(row.subject))


def may(user: Any, verb: str, *, override: bool) -> bool:
    """Return whether the user may add, change or delete overrides, or (``override=False``) other policies."""
    return bool(user.has_perm(f"{_APP}.{_codename(verb, override)}"))


def lacking(user: Any, verb: str, row: Any) -> str:
    """Return the codename of a permission that the user lacks to add, change or delete the row; "" = none.

    ``row`` may be in a state that is not stored.
    """
    own = "grant_override" if is_override(row) else f"{verb}_{row._meta.model_name}"
    if not user.has_perm(f"{_APP}.{own}"):
        return own
    return "" if may_name(user, getattr(row, "subject", "")) else "change_ratepolicy"


def may_block(user: Any, name: str = "") -> bool:
    """Return whether the user may block callers, or the caller or network of this name, and end such blocks."""
    return bool(user.has_perm(f"{_APP}.block_callers")) and may_name(user, name)


def may_edit_members(user: Any, verb: str) -> bool:
    """Return whether the user may add, change or delete members of lists."""
    return bool(user.has_perm(f"{_APP}.{verb}_listmember"))


def may_see_members(user: Any) -> bool:
    """Return whether the user has any permission for members of lists."""
    return any(may_edit_members(user, verb) for verb in ("view", "add", "change", "delete"))


def check_audience(user: Any, verb: str, *, override: bool) -> None:
    """Raise ``ValidationError`` with the missing permission where ``may`` is False."""
    if may(user, verb, override=override):
        return
    text = _("You may only change overrides. Choose a user or a subject. Other policies need the permission “%s”.")
    if override:
        text = _("You may not change overrides. Leave user and subject empty. Overrides need the permission “%s”.")
    raise ValidationError(text % permission_name(_codename(verb, override)))


def may_name(user: Any, subject: str | None) -> bool:
    """Return whether the user may write policies and list members for the subject, which may be a wide network."""
    return not is_wide(subject or "") or may(user, "change", override=False)


def check_subject(user: Any, subject: str | None) -> None:
    """Raise ``ValidationError`` with the missing permission where ``may_name`` is False."""
    if not may_name(user, subject):
        text = _(
            "Enter a network of /16 (IPv6 /32) or smaller, because %(subject)s is a large part of the Internet. "
            "Larger networks need the permission “%(permission)s”."
        )
        params = {"subject": subject, "permission": permission_name("change_ratepolicy")}
        raise ValidationError(text % params)


def permission_name(codename: str) -> str:
    """Return the permission's name in Django's lists of permissions."""
    verb, _underscore, model = codename.partition("_")
    names = dict(RatePolicy._meta.permissions)
    return str(names.get(codename) or f"Can {verb} {apps.get_model(_APP, model)._meta.verbose_name_raw}")


def _codename(verb: str, override: bool) -> str:
    return "grant_override" if override else f"{verb}_ratepolicy"


class RowPermissions(admin.ModelAdmin):  # type: ignore[type-arg]
    """The permissions to change and delete each row, which may be for a wide network."""

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may change this row; without ``obj``, any."""
        return self._may(request, "change", obj)

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may delete this row; without ``obj``, any."""
        return self._may(request, "delete", obj)

    def _may(self, request: Any, verb: str, row: Any) -> bool:
        return not lacking(request.user, verb, row or self.model())


class PolicyPermissions(RowPermissions):
    """The permissions of a policy's own pages.

    The tables on the pages of plans and endpoints hold no overrides, so Django's own permissions apply there.
    """

    def has_add_permission(self, request: Any) -> bool:
        """Return whether the operator may add overrides or other policies; the form refuses the wrong kind."""
        return self._may(request, "add", None)

    def has_view_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may see this policy; the permissions about overrides show these."""
        if super().has_view_permission(request, obj):
            return True
        acts = request.user.has_perm(f"{_APP}.reset_usage") or may_block(request.user)
        return bool((self._may(request, "view", None) or acts) and (obj is None or is_override(obj)))

    def has_reset_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may reset counters, and see this policy."""
        return request.user.has_perm(f"{_APP}.reset_usage") and self.has_view_permission(request, obj)

    def sees_all_policies(self, request: Any) -> bool:
        """Return whether the operator may see policies other than overrides, too."""
        return super().has_view_permission(request)

    def get_queryset(self, request: Any) -> QuerySet[Any]:
        """Return the policies that the operator may see."""
        policies: QuerySet[Any] = super().get_queryset(request)
        if self.sees_all_policies(request):
            return policies
        return policies.filter(OVERRIDES) if self.has_view_permission(request) else policies.none()

    def _may(self, request: Any, verb: str, row: Any) -> bool:
        return super()._may(request, verb, row) or (row is None and may(request.user, verb, override=True))
