"""The pages that show what happened: all changes of a save, and one change; who made them, when and why."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import Http404
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange
from ..operations.differences import Words, name_users
from ..operations.revert import of_save
from ..operations.states import KINDS
from .diff import kind_and_action
from .formatting import moment, shown
from .names import caller_names, caller_text
from .pages import AdminPage, page_numbers

#: Objects of a page.
_PAGE = 50


class SavePage(AdminPage):
    """Shows what a save changed, and links to the page that undoes it."""

    path = "save/<uuid:change_id>/"
    name = "save"

    def view(self, request: Any, change_id: UUID) -> Any:
        """Show all changes of the save."""
        return self.show(request, PolicyChange.objects.filter(change_id=change_id), {"title": _("Save of %(date)s")})

    def show(self, request: Any, rows: QuerySet[PolicyChange], context: dict[str, Any]) -> Any:
        """Return the page about these rows, all of one save; the ``title`` takes the date."""
        page = Paginator(rows.select_related("actor").order_by("pk"), _PAGE).get_page(request.GET.get("p"))
        changes = list(page)
        if not changes:
            raise Http404
        first = changes[0]
        undid = first.undoes and PolicyChange.objects.filter(change_id=first.undoes).first()
        # By object, which has an index.
        own = PolicyChange.objects.filter(model__in=KINDS, object_id__in=[change.object_id for change in changes])
        undone = own.filter(undoes=first.change_id).select_related("actor").first()
        undo = of_save(first.change_id).exists()
        context |= {
            "title": context["title"] % {"date": moment(first.at)},
            "facts": self._facts(first),
            "reason": shown(first.reason),
            "undid": undid and self._facts(undid),
            "undone": undone and self._facts(undone),
            "changes": self._described(request, changes),
            "numbers": page_numbers(page, lambda number: f"?p={number}"),
            "undo": self.admin.page_url("revert", first.pk, "save") if undo else "",
            "back": self.admin.page_url("changelist"),
        }
        return self.render(request, "save.html", context)

    def _facts(self, change: PolicyChange) -> dict[str, str]:
        """Return when the change was made and by whom, and the address of its save."""
        actor = shown(change.actor or gettext("code or a command"))
        url = self.admin.page_url("save", change.change_id)
        return {"at": moment(change.at, seconds=True), "actor": actor, "url": url}

    def _described(self, request: Any, changes: list[PolicyChange]) -> list[dict[str, Any]]:
        """Return what the page shows of each change, with a fixed number of queries."""
        name_users(changes)
        subjects = [_subject(change) for change in changes]
        names = caller_names(filter(None, subjects))
        words = Words(changes)
        described = []
        for change, subject in zip(changes, subjects, strict=True):
            links = self._links(change)
            if subject:
                text = gettext("All changes for %s") % caller_text(subject, names)
                links.append((self.admin.page_url("changelist", query={"q": _quoted(subject)}), text))
            exists = change.model in KINDS and change.action != PolicyChange.Action.DELETE
            described.append(
                {
                    **kind_and_action(change.model, change.action),
                    "text": shown(change.object_text),
                    "url": self.object_url(request, KINDS[change.model], change.object_id) if exists else "",
                    "counted": change.model == "counter",
                    "table": words.table(change),
                    "links": links,
                }
            )
        return described

    def _links(self, change: PolicyChange) -> list[tuple[str, str]]:
        """Return the addresses and texts of what to do about the change's object."""
        links = []
        if change.model in KINDS and change.before:
            url = self.admin.page_url("revert", change.pk, "object")
            links.append((url, gettext("Restore the version before this change")))
        if change.object_id:
            query = {"model": change.model, "object_id": change.object_id}
            links.append((self.admin.page_url("changelist", query=query), gettext("All changes of this object")))
        return links


class ChangePage(SavePage):
    """Shows one change; takes the place of Django's own page."""

    path = "<path:object_id>/change/"
    name = "change"

    def view(self, request: Any, change: PolicyChange) -> Any:  # type: ignore[override]
        """Show the change."""
        others = PolicyChange.objects.filter(change_id=change.change_id).exclude(pk=change.pk)
        whole = self.admin.page_url("save", change.change_id) if others.exists() else ""
        context = {"title": _("Change of %(date)s"), "whole": whole}
        return self.show(request, PolicyChange.objects.filter(pk=change.pk), context)


def _subject(change: PolicyChange) -> str:
    """Return the only user or subject whom the change affects, as counters name them; "" = none."""
    subjects = {state.get("subject") for state in (change.before, change.after) if state} - {None, ""}
    if change.touched_user:
        return f"user:{change.touched_user}"
    return str(subjects.pop()) if len(subjects) == 1 and change.model in KINDS else ""


def _quoted(word: str) -> str:
    """Return the word for a search, which splits at spaces."""
    escaped = word.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'
