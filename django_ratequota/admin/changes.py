"""The history of policy changes, to look at."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db import models
from django.db.models import QuerySet
from django.utils.dateparse import parse_datetime
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange, RecordedModel
from ..validation import visible
from .base import moment, named, user_search_fields

#: What the page of a change shows.
_SHOWN = [
    "at",
    "actor",
    "action",
    "kind",
    "object_id",
    "object_text",
    "user_touched",
    "reason",
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


@admin.register(PolicyChange)
class PolicyChangeAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Who changed what, and when; nobody edits history."""

    list_display = ["at", "actor", "action", "kind", "object_text", "reason"]
    list_filter = ["action", KindFilter, "at", ("actor", admin.RelatedOnlyFieldListFilter)]
    list_select_related = ["actor"]
    list_per_page = 50
    fields = [*_SHOWN]
    readonly_fields = [*_SHOWN]

    class Media:
        css = {"all": ["django_ratequota/admin.css"]}

    def get_search_fields(self, request: Any) -> list[str]:
        """What was changed, by whom, and why."""
        return ["object_text", "reason", "=object_id", "=touched_user", *user_search_fields("actor")]

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

    @admin.display(description=_("user touched"))
    def user_touched(self, change: PolicyChange) -> str:
        """The only user whom the change concerns, by name."""
        return named(get_user_model(), change.touched_user) if change.touched_user else self.get_empty_value_display()

    @admin.display(description=_("difference"))
    def difference(self, change: PolicyChange) -> str:
        """The fields whose values differ, before and after."""
        before, after = change.before or {}, change.after or {}
        known = _fields(change.model)
        counted = change.model == "counter"
        rows = []
        # In the model's order: PostgreSQL keeps none for the keys of what was recorded.
        for name in dict.fromkeys([*known, *before, *after]):
            field = known.get(name)
            states = [state.get(name) for state in (before, after)]
            changed = (states[0] or "") != (states[1] or "") and not (field and field.primary_key)
            if changed or counted:
                rows.append((field.verbose_name if field else name, *(self._shown(field, state) for state in states)))
        if not rows:
            return self.get_empty_value_display()
        return format_html(
            '<table class="ratequota-difference"><thead><tr><th scope="col">{}</th><th scope="col">{}</th>'
            '<th scope="col">{}</th></tr></thead><tbody>{}</tbody></table>',
            _("counter") if counted else _("field"),
            _("before"),
            _("after"),
            format_html_join("", '<tr><th scope="row">{}</th><td>{}</td><td>{}</td></tr>', rows),
        )

    def _shown(self, field: Any, value: Any) -> str:
        """A recorded value in words."""
        if value is None or value == "":
            return str(self.get_empty_value_display())
        if isinstance(value, dict) and value.keys() == {"used", "remaining"}:
            return gettext("%(used)s used, %(remaining)s left") % value
        if field is None:  # a field of an earlier version
            return visible(value)
        if field.is_relation:
            return named(field.related_model, value)
        if isinstance(field, models.DateTimeField):
            return moment(parse_datetime(value)) or str(value)
        return visible(dict(field.flatchoices).get(value, value))


def _kinds() -> dict[str, Any]:
    """What a change's ``model`` may say, in words."""
    kinds: dict[str, Any] = {
        str(model._meta.model_name): model._meta.verbose_name
        for model in apps.get_app_config("django_ratequota").get_models()
        if issubclass(model, RecordedModel)
    }
    return {**kinds, "counter": _("what was counted"), "*": _("everything")}


def _fields(kind: str) -> dict[str, Any]:
    """The fields of the model, by name; none for ``*``."""
    try:
        model = apps.get_model("django_ratequota", kind)
    except (LookupError, ValueError):
        return {}
    return {field.name: field for field in model._meta.concrete_fields}
