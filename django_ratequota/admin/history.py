"""The history of policy changes: read-only, with a way back to each version that it holds."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import QuerySet
from django.urls import reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange, RecordedModel
from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .diff import Names, as_table, differences
from .filters import RelatedFilter
from .formatting import shown
from .names import object_name
from .restore import RestorePage

#: What the page of a change shows.
_SHOWN = [
    "at",
    "actor",
    "action",
    "kind",
    "object_id",
    "object_text",
    "user_touched",
    "why",
    "difference",
]


class KindFilter(admin.SimpleListFilter):
    """What kind of object changed."""

    title = _("kind")
    parameter_name = "model"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """The choices."""
        return list(_kinds().items())

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the choice."""
        return queryset.filter(model=self.value()) if self.value() else queryset


class TouchedFilter(admin.SimpleListFilter):
    """Whether a change touches one user only, or this one: the page of a change links here with a user's id."""

    title = _("affected user")
    parameter_name = "touched_user"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """The choices: all users would be too many."""
        choices: list[tuple[str, Any]] = [("one", _("one user only")), ("other", _("several or none"))]
        chosen = self._user()
        return [*choices, (chosen, shown(object_name(get_user_model(), chosen)))] if chosen else choices

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """The rows of the choice."""
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
    """Who changed what, and when; nobody edits history."""

    pages = (RestorePage,)
    list_display = ["at", "actor", "action", "kind", "object_text", "what_changed", "why"]
    list_filter = ["action", KindFilter, "at", ("actor", RelatedFilter), TouchedFilter]
    list_select_related = ["actor"]
    list_per_page = 50
    fields = [*_SHOWN]
    readonly_fields = [*_SHOWN]

    class Media:
        css = {"all": ["django_ratequota/admin.css", "django_ratequota/history.css"]}

    def get_search_fields(self, request: Any) -> list[str]:
        """What was changed, by whom, and why."""
        return ["object_text", "reason", "=object_id", "=touched_user", *user_search_fields("actor")]

    def get_changelist_instance(self, request: Any) -> Any:
        """The list; what its rows point at is looked up once for all of them."""
        listed: Any = super().get_changelist_instance(request)
        names = Names(listed.result_list)
        for change in listed.result_list:
            change.names = names
        return listed

    def has_add_permission(self, request: Any) -> bool:
        """Nobody."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Nobody."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Nobody."""
        return False

    @admin.display(description=_("kind"), ordering="model")
    def kind(self, change: PolicyChange) -> Any:
        """What kind of object changed."""
        return _kinds().get(change.model, change.model)

    @admin.display(description=_("what changed"))
    def what_changed(self, change: Any) -> str:
        """The fields that differ, in a few words."""
        summary: str = change.names.summary(change)
        return summary or str(self.get_empty_value_display())

    @admin.display(description=_("reason"), ordering="reason")
    def why(self, change: PolicyChange) -> str:
        """Why, where it was given."""
        return shown(change.reason) or str(self.get_empty_value_display())

    @admin.display(description=_("affected user"))
    def user_touched(self, change: PolicyChange) -> str:
        """The only user whom the change concerns, by name; all changes of theirs are a click away."""
        if not change.touched_user:
            return self.get_empty_value_display()
        url = reverse(f"{self.admin_site.name}:django_ratequota_policychange_changelist")
        query = urlencode({"touched_user": change.touched_user})
        return format_html(
            '<a href="{}?{}">{}</a>', url, query, shown(object_name(get_user_model(), change.touched_user))
        )

    @admin.display(description=_("difference"))
    def difference(self, change: PolicyChange) -> str:
        """The fields whose values differ, before and after."""
        rows = differences(change)
        if not rows:
            return self.get_empty_value_display()
        head = _("counter") if change.model == "counter" else _("field")
        return as_table(rows, (head, _("before"), _("after")), self.get_empty_value_display())


def _kinds() -> dict[str, Any]:
    """What a change's ``model`` may say, in words."""
    kinds: dict[str, Any] = {
        str(model._meta.model_name): model._meta.verbose_name
        for model in apps.get_app_config("django_ratequota").get_models()
        if issubclass(model, RecordedModel)
    }
    return {**kinds, "counter": _("counter"), "*": _("everything")}
