"""What the admin pages share: who is acting, how users are looked up, and what counts as active."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.widgets import ForeignKeyRawIdWidget
from django.contrib.auth import get_user_model
from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..recording import acting


class RecordedAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A model admin whose changes are recorded as the logged-in operator's."""

    def changeform_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The add and change pages."""
        with acting(request.user):
            return super().changeform_view(request, *args, **kwargs)

    def delete_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The delete page."""
        with acting(request.user):
            return super().delete_view(request, *args, **kwargs)

    def changelist_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The list, with its actions and edits in place."""
        with acting(request.user):
            return super().changelist_view(request, *args, **kwargs)


class UserLookup(admin.options.BaseModelAdmin):  # type: ignore[type-arg]
    """Looks users up by autocomplete where the admin knows how to search them, else by their id.

    The user model is the project's: it may be absent from the admin, or have other fields.
    """

    def get_autocomplete_fields(self, request: Any) -> list[str]:
        """The declared fields, and ``user`` where its admin can search."""
        fields = list(super().get_autocomplete_fields(request))
        user_admin = self.admin_site._registry.get(get_user_model())
        if user_admin is not None and user_admin.get_search_fields(request):
            fields.append("user")
        return fields

    def formfield_for_foreignkey(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """A text field for the user's id where autocomplete cannot be had: a select would list every user."""
        if db_field.name == "user" and "user" not in self.get_autocomplete_fields(request):
            kwargs["widget"] = ForeignKeyRawIdWidget(db_field.remote_field, self.admin_site)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)


def user_search_fields() -> list[str]:
    """Lookups that find what belongs to a user by the user's name or mail address."""
    model: Any = get_user_model()
    names = [model.USERNAME_FIELD, getattr(model, "EMAIL_FIELD", "")]
    return [f"user__{name}" for name in dict.fromkeys(names) if name]


class ActiveFilter(admin.SimpleListFilter):
    """Whether a dated row counts now, will count, or has ended."""

    title = _("time")
    parameter_name = "time"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """The choices."""
        choices = {"active": _("active now"), "future": _("not started"), "ended": _("ended"), "dated": _("ends")}
        return list(choices.items())

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the choice."""
        now = timezone.now()
        started = Q(starts_at__isnull=True) | Q(starts_at__lte=now)
        open_ended = Q(ends_at__isnull=True) | Q(ends_at__gt=now)
        condition = {
            "active": started & open_ended,
            "future": Q(starts_at__gt=now),
            "ended": Q(ends_at__lte=now),
            "dated": Q(ends_at__isnull=False),
        }.get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


def when(row: Any) -> str:
    """The row's dates in a few words; "always" without any."""
    dates = {"start": _short(row.starts_at), "end": _short(row.ends_at)}
    if row.starts_at and row.ends_at:
        return gettext("%(start)s to %(end)s") % dates
    if row.starts_at:
        return gettext("from %(start)s") % dates
    return gettext("until %(end)s") % dates if row.ends_at else gettext("always")


def _short(moment: Any) -> str:
    return date_format(timezone.localtime(moment), "SHORT_DATETIME_FORMAT") if moment else ""


def is_active(row: Any) -> bool:
    """Whether the row's dates include this moment."""
    now = timezone.now()
    return (row.starts_at is None or row.starts_at <= now) and (row.ends_at is None or row.ends_at > now)
