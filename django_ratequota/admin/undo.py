"""The page of a save: what it changed, what undoing it would change, and the button that undoes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.contrib.admin.utils import quote
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Count
from django.http import Http404, HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import policy_alias
from ..changes.publication import current_save
from ..changes.validators import visible
from ..changes.writer import field_values
from ..models import PolicyChange, RatePolicy
from ..operations.cascades import KINDS
from ..operations.differences import Difference, differences
from ..operations.undo import Undo, plan_undo, undo
from ..operations.undo_plan import Step
from .diff import RelatedNames, as_table, kind_name
from .formatting import moment, shown
from .pages import AdminPage
from .restore import ComparedForm, missing_permission

#: Most objects of a save that the page compares; larger saves are undone by the command. Most that it lists.
MOST, _LISTED = 2_000, 50
_FLAGS = {"create": ADDITION, "change": CHANGE, "delete": DELETION}


class SavePage(AdminPage):
    """Shows all changes of a save, and undoes it: each object gets back the values that it had before."""

    path = "save/<uuid:change_id>/"
    name = "save"

    def view(self, request: Any, change_id: UUID) -> Any:
        """GET compares and asks, POST undoes. Each edit needs the permissions of the object's own page."""
        rows = PolicyChange.objects.filter(change_id=change_id).select_related("actor").order_by("pk")
        first = rows.first()
        if first is None:
            raise Http404
        if rows.count() > MOST:
            return self._page(request, first, None, None, [])
        form = ComparedForm(request.POST) if request.method == "POST" else None
        errors: list[str] = []
        using = policy_alias(RatePolicy)

        def forbidden(now: Any, then: Any) -> str:
            return missing_permission(self.site, request, now, then)

        # The locks make concurrent edits wait: nothing is overwritten that the operator has not seen.
        with transaction.atomic(using=using):
            plan = plan_undo(change_id, lock=form is not None, forbidden=forbidden)
            if form is not None and form.is_valid():
                overwrite = form.cleaned_data["also"]
                if form.cleaned_data["seen"] != plan.seen:
                    errors.append(gettext("An object was edited in the meantime. Compare again, then undo."))
                elif any(step.applies(overwrite) for step in plan.steps):
                    try:
                        with transaction.atomic(using=using):
                            return self._undo(request, first, plan, form.cleaned_data)
                    except ValidationError as error:
                        errors += error.messages
        return self._page(request, first, plan, ComparedForm.asking(plan.seen, form), errors)

    def _undo(self, request: Any, first: PolicyChange, plan: Undo, data: dict[str, Any]) -> HttpResponseRedirect:
        message = gettext("undid the save of %(date)s") % {"date": moment(first.at)}
        done = 0

        def log(verb: Any, rows: Sequence[Any]) -> None:
            nonlocal done
            done += len(rows)
            LogEntry.objects.log_actions(request.user.pk, rows, _FLAGS[verb], message)

        reason, overwrite = data["reason"] or message, data["also"]
        undo(plan, actor=request.user, reason=reason, overwrite=overwrite, written=log)
        text = ngettext("%(count)d object was restored.", "%(count)d objects were restored.", done) % {"count": done}
        left = sum(not step.done and not step.applies(overwrite) for step in plan.steps)
        if left:
            stay = ngettext("%(count)d stays as it is.", "%(count)d stay as they are.", left) % {"count": left}
            text = f"{text} {stay}"
        self.admin.message_user(request, text, messages.WARNING if left else messages.SUCCESS)
        own = current_save(policy_alias(RatePolicy)).change_id
        return HttpResponseRedirect(self.admin.page_url("save", own))

    def _page(
        self, request: Any, first: PolicyChange, plan: Undo | None, form: ComparedForm | None, errors: list[str]
    ) -> Any:
        steps = [step for step in plan.steps if not step.done] if plan else []
        # Those that need a decision come first.
        steps.sort(key=lambda step: (not step.edited, not step.obstacle))
        context = {
            "title": _("Save of %(date)s") % {"date": moment(first.at)},
            "original": gettext("Save"),
            "first": first,
            "actor": shown(first.actor) if first.actor else "",
            "reason": shown(first.reason),
            "counts": _counts(first.change_id),
            "others": [self._recorded(change) for change in _others(first.change_id, plan)],
            "too_large": plan is None,
            "most": MOST,
            "steps": self._described(request, steps[:_LISTED]),
            "more": max(0, len(steps) - _LISTED),
            "undone": bool(plan and plan.steps and not steps),
            "edited": sum(step.edited and not step.obstacle for step in steps),
            "blocked": sum(bool(step.obstacle) for step in steps),
            "form": form if any(step.applies(True) for step in steps) else None,
            "errors": [visible(error) for error in errors],
            "back": self.admin.page_url("changelist"),
        }
        return self.render(request, "save.html", context)

    def _described(self, request: Any, steps: list[Step]) -> list[dict[str, Any]]:
        """Return what the page shows of each step, with a fixed number of queries."""
        rows = PolicyChange.objects.in_bulk([pk for step in steps for pk in (step.first, step.last)])
        current = _current(steps)
        tables = [
            _differences(step, rows[step.first], rows[step.last], current.get((step.kind, step.object_id)))
            for step in steps
        ]
        names = RelatedNames(row for table in tables for row in table)
        head = (_("field"), _("now"), _("restored"))
        described = []
        for step, table in zip(steps, tables, strict=True):
            described.append(
                {
                    "text": shown(rows[step.last].object_text),
                    "kind": kind_name(step.kind),
                    "verb": step.verb,
                    "edited": step.edited and not step.obstacle,
                    "obstacle": visible(step.obstacle),
                    "table": as_table(table, head, self.admin.get_empty_value_display(), names) if table else "",
                    "url": self.admin.page_url("change", quote(step.last)),
                }
            )
        return described

    def _recorded(self, change: PolicyChange) -> tuple[str, str]:
        words = f"{kind_name(change.model)} {change.get_action_display()}"
        return words, shown(change.object_text)


def _current(steps: list[Step]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the fields of the stored objects by kind and id."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for kind, model in KINDS.items():
        own = [step.object_id for step in steps if step.kind == kind]
        for row in model._base_manager.filter(pk__in=own):
            found[kind, str(row.pk)] = field_values(row)
    return found


def _differences(step: Step, first: PolicyChange, last: PolicyChange, now: dict[str, Any] | None) -> list[Difference]:
    """Return the fields that undoing sets, or else those that the save has set: now, and before the save."""
    if step.verb == "delete":
        return []
    then, after = first.before or {}, last.after or {}
    names = step.fields or [name for name in then if after.get(name) != then[name]]
    known = after if now is None else now
    states = ({name: state.get(name) for name in names} for state in (known, then))
    return differences(PolicyChange(model=step.kind, before=next(states), after=next(states)))


def _counts(change_id: UUID) -> list[tuple[int, str, str]]:
    """Return (number, kind, action) of the save's rows."""
    actions = dict(PolicyChange.Action.choices)
    rows = PolicyChange.objects.filter(change_id=change_id).order_by()
    found = rows.values_list("model", "action").annotate(Count("pk"))
    return [(count, kind_name(kind), str(actions.get(action, action))) for kind, action, count in found]


def _others(change_id: UUID, plan: Undo | None) -> Any:
    """Return the first rows that are not compared: of counters, and of saves that are too large."""
    rows = PolicyChange.objects.filter(change_id=change_id).order_by("pk")
    return rows[:_LISTED] if plan is None else rows.exclude(model__in=KINDS)[:_LISTED]
