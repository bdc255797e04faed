"""The history of policy changes: read-only; each change offers to restore its versions."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import QuerySet
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange, RecordedModel
from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .diff import RelatedNames, as_table, differences
from .filters import RelatedFilter
from .formatting import shown, time_column
from .names import object_name
from .restore import RestorePage

_AT = time_column("at", _("at"), seconds=True)
#: Fields on the page of a change.
_FIELDS = [_AT, "actor", "action", "kind", "object_id", "object_text", "user_touched", "reason_text", "difference"]


class KindFilter(admin.SimpleListFilter):
    """Filter by the kind of object that changed."""

    title = _("kind")
    parameter_name = "model"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the kinds."""
        return list(_kinds().items())

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the selected kind."""
        return queryset.filter(model=self.value()) if self.value() else queryset


class AffectedUserFilter(admin.SimpleListFilter):
    """Filter by whether a change affects one user only; the page of a change links here with that user's id."""

    title = _("affected user")
    parameter_name = "touched_user"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """Return whether one user is affected, and the selected user: a list of all would be too long."""
        choices: list[tuple[str, Any]] = [("one", _("one user only")), ("other", _("several or none"))]
        user = self._user()
        return [*choices, (user, shown(object_name(get_user_model(), user)))] if user else choices

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the choice."""
        if self._user():
            return queryset.filter(touched_user=self._user())
        if self.value():
            return queryset.filter(touched_user="") if self.value() == "other" else queryset.exclude(touched_user="")
        return queryset

    def _user(self) -> str:
        value = str(self.value() or "")
        return "" if value in ("one", "other") else value


@admin.register(PolicyChange)
class PolicyChangeAdmin(AutocompleteAdmin, RecordedAdmin):
    """Who changed what, when and why. Nobody can edit it."""

    pages = (RestorePage,)
    list_display = [_AT, "actor", "action", "kind", "object_text", "what_changed", "reason_text"]
    list_filter = ["action", KindFilter, "at", ("actor", RelatedFilter), AffectedUserFilter]
    list_select_related = ["actor"]
    list_per_page = 50
    fields = [*_FIELDS]
    readonly_fields = [*_FIELDS]

    class Media:
        css = {"all": ["django_ratequota/history.css"]}

    def get_search_fields(self, request: Any) -> list[str]:
        """Return the lookups that find an object, an actor or a reason."""
        return ["object_text", "reason", "=object_id", "=touched_user", *user_search_fields("actor")]

    def get_changelist_instance(self, request: Any) -> Any:
        """Return the list; the names of related objects are looked up once for all rows."""
        listed: Any = super().get_changelist_instance(request)
        names = RelatedNames(listed.result_list)
        for change in listed.result_list:
            change.names = names
        return listed

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False; so do the permissions to add and to delete."""
        return False

    has_add_permission = has_delete_permission = has_change_permission

    @admin.display(description=_("kind"), ordering="model")
    def kind(self, change: PolicyChange) -> Any:
        """Return the kind of object that changed."""
        return _kinds().get(change.model, change.model)

    @admin.display(description=_("what changed"))
    def what_changed(self, change: Any) -> str:
        """Return the fields that differ, in a few words."""
        summary: str = change.names.summary(change)
        return summary or str(self.get_empty_value_display())

    @admin.display(description=_("reason"), ordering="reason")
    def reason_text(self, change: PolicyChange) -> str:
        """Return the reason."""
        return shown(change.reason) or str(self.get_empty_value_display())

    @admin.display(description=_("affected user"))
    def user_touched(self, change: PolicyChange) -> str:
        """Return the name of the only user affected, linked to all changes that affect them."""
        if not change.touched_user:
            return self.get_empty_value_display()
        url = self.page_url("changelist", query={"touched_user": change.touched_user})
        return format_html('<a href="{}">{}</a>', url, shown(object_name(get_user_model(), change.touched_user)))

    @admin.display(description=_("difference"))
    def difference(self, change: PolicyChange) -> str:
        """Return a table of the fields whose values differ."""
        rows = differences(change)
        if not rows:
            return self.get_empty_value_display()
        head = _("counter") if change.model == "counter" else _("field")
        return as_table(rows, (head, _("before"), _("after")), self.get_empty_value_display())


def _kinds() -> dict[str, Any]:
    """Return the names of the values of ``PolicyChange.model``."""
    kinds: dict[str, Any] = {
        str(model._meta.model_name): model._meta.verbose_name
        for model in apps.get_app_config("django_ratequota").get_models()
        if issubclass(model, RecordedModel)
    }
    return {**kinds, "counter": _("counter"), "*": _("everything")}
