"""The history of policy changes, to look at."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange


@admin.register(PolicyChange)
class PolicyChangeAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Who changed what, and when; nobody edits history."""

    list_display = ["at", "actor", "action", "model", "object_text", "reason"]
    list_filter = ["action", "model", "at", ("actor", admin.RelatedOnlyFieldListFilter)]
    list_select_related = ["actor"]
    list_per_page = 50
    search_fields = ["object_text", "reason", "object_id", "touched_user"]
    readonly_fields = [
        "at",
        "actor",
        "action",
        "model",
        "object_id",
        "object_text",
        "touched_user",
        "reason",
        "difference",
    ]
    exclude = ["before", "after"]

    def has_add_permission(self, request: Any) -> bool:
        """Nobody."""
        return False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Nobody."""
        return False

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """Nobody."""
        return False

    @admin.display(description=_("difference"))
    def difference(self, change: PolicyChange) -> str:
        """The fields whose values differ, before and after."""
        before, after = change.before or {}, change.after or {}
        rows = [
            (name, before.get(name, ""), after.get(name, ""))
            for name in {**before, **after}
            if before.get(name) != after.get(name)
        ]
        if not rows:
            return "-"
        return format_html(
            "<table><thead><tr><th>{}</th><th>{}</th><th>{}</th></tr></thead><tbody>{}</tbody></table>",
            _("field"),
            _("before"),
            _("after"),
            format_html_join("", "<tr><th>{}</th><td>{}</td><td>{}</td></tr>", rows),
        )
