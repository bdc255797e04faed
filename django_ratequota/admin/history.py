"""The history of policy changes: read-only, a row per save; what it leads to is in ``saves`` and ``revert``."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.db.models import Exists, Min, OuterRef, Q, QuerySet
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import Plan, PolicyChange
from ..operations.recorded import KINDS, object_name
from .base import AutocompleteAdmin, RecordedAdmin, user_search_fields
from .filters import ConditionFilter, RelatedFilter
from .formatting import reason_text, shown, time_column
from .saves import describe, kind_name, kinds
from .search import MOST_NAMED
from .tools import Unlisted

#: Rows in which words are searched, because no index finds a part of a text.
_SEARCHED = 100_000
#: Matching rows that are listed to find their saves; of more, each save is asked whether one is its own.
_FEW = 10_000

_AT = time_column("at", _("time"), seconds=True)


class KindFilter(ConditionFilter):
    """Filter by the kind of object that changed."""

    title = _("kind")
    parameter_name = "model"

    def conditions(self) -> dict[str, tuple[Any, Any]]:
        """Compare the kinds."""
        return {kind: (name, Q(model=kind)) for kind, name in kinds().items()}


class PlanFilter(admin.SimpleListFilter):
    """Filter by a plan: its own changes and those of its policies. The plan's button *History* links here.

    Assignments are left out unless the kind is chosen, because there may be thousands of them. There are no choices,
    because a list of all plans would be too long.
    """

    title = _("plan")
    parameter_name = "touched_plan"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the selected plan."""
        pk = str(self.value() or "")
        return [(pk, shown(object_name(Plan, pk)))] if pk else []

    def queryset(self, request: Any, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the rows of the plan, those of policies that were moved to another plan included."""
        plan = str(self.value() or "")
        of_plan = Q(touched_plan=plan)
        if plan.isascii() and plan.isdigit():
            rows = PolicyChange.objects.filter(of_plan, model="ratepolicy").order_by()
            of_plan |= Q(model="ratepolicy", object_id__in=rows.values("object_id"), before__plan=int(plan))
        return queryset.filter(of_plan if "model" in request.GET else of_plan & ~Q(model="planassignment"))


class SaveList(ChangeList):
    """The list of saves: of each save the first row that matches the filters and the search."""

    def get_queryset(self, request: Any, exclude_parameters: Any = None) -> QuerySet[Any]:
        """Return one row per save; the matching ones of the others are in ``matching``."""
        self.matching = super().get_queryset(request, exclude_parameters)
        rows: QuerySet[Any] = self.matching.filter(first=True)
        if self.query or self.get_filters_params():
            saves = self.matching.order_by().values("change_id")
            if self.query or self.matching.order_by()[: _FEW + 1].count() <= _FEW:
                found = Q(change_id__in=saves)
            else:  # because most saves are then found at the first look
                found = Q(Exists(saves.filter(change_id=OuterRef("change_id"))))
            rows = self.apply_select_related(self.root_queryset.filter(found, first=True))
        return rows.order_by(*self.get_ordering(request, rows))

    def get_results(self, request: Any) -> None:
        """Read the page: of each save the first row that matches, with a fixed number of queries."""
        super().get_results(request)
        saves = list(self.result_list)
        matching = self.matching.filter(change_id__in=[save.change_id for save in saves]).order_by()
        firsts = dict(matching.values_list("change_id").annotate(Min("pk")))
        found = PolicyChange.objects.select_related("actor").in_bulk(firsts.values())
        self.result_list = [found.get(firsts.get(save.change_id), save) for save in saves]
        describe(self.result_list)

    def url_for_result(self, result: Any) -> str:
        """Return the address of the save's page."""
        admin: Any = self.model_admin
        return str(admin.page_url("save", result.change_id))


@admin.register(PolicyChange)
class PolicyChangeAdmin(Unlisted, AutocompleteAdmin, RecordedAdmin):
    """The history of all changes. It is read-only for everybody."""

    pages = ("saves.SavePage", "saves.ChangePage", "revert.RevertPage")
    list_display = [_AT, "actor", "saved", "what_changed", reason_text]
    list_filter = ["action", KindFilter, PlanFilter, "at", ("actor", RelatedFilter)]
    list_select_related = ["actor"]
    #: An actor may be the affected user as well.
    search_fields = ["object_text", "reason", *user_search_fields("actor")]
    show_full_result_count = False
    # They would count rows, and the list shows saves.
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ["django_ratequota/history.css"]}

    def refers(self, relation: str, keys: Any) -> Q:
        """Return the condition of changes by these users, or that touch one of the first 500 of them."""
        touched = [str(pk) for pk in keys[:MOST_NAMED]]
        return super().refers(relation, keys) | Q(touched_user__in=touched)

    def contains(self, fields: list[str], word: str, queryset: QuerySet[Any]) -> Q:
        """Return the condition of rows with the word among the newest, and of rows with the key ``word`` in all."""
        newest = queryset.order_by("-pk").values_list("pk", flat=True).first() or 0
        keys = Q(model__in=[*KINDS, "counter"], object_id=word) | Q(touched_user=word.removeprefix("user:"))
        if word.startswith("user:"):  # of this user alone, where the text of others contains the key
            return keys
        return (Q(pk__gt=newest - _SEARCHED) & super().contains(fields, word, queryset)) | keys

    def get_changelist(self, request: Any, **kwargs: Any) -> Any:
        """Return the class of the list."""
        return SaveList

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """Show the list, or the changes of one object under its name."""
        context = {"title": capfirst(gettext("history")), **(extra_context or {})}
        plan, kind, pk = (request.GET.get(name, "") for name in ("touched_plan", "model", "object_id"))
        if plan or (pk and kind in KINDS):
            name = shown(object_name(Plan, plan) if plan else object_name(KINDS[kind], pk))
            context["title"] = gettext("History of %(object)s") % {"object": name}
        return super().changelist_view(request, context)

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        """Return False; so do the permissions to add and to delete."""
        return False

    has_add_permission = has_delete_permission = has_change_permission

    @admin.display(description=_("change"))
    def saved(self, change: Any) -> str:
        """Return the object that changed, and how many others the save has."""
        more = ngettext("and %(count)d more", "and %(count)d more", change.more) % {"count": change.more}
        return format_html(
            "{} {}<div><bdi>{}</bdi> {}</div>",
            *(kind_name(change.model), change.get_action_display()),
            *(shown(change.object_text), more if change.more else ""),
        )

    @admin.display(description=_("changed fields"))
    def what_changed(self, change: Any) -> str:
        """Return the fields that differ in a few words."""
        return str(change.what)
