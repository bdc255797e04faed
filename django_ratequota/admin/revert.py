"""The pages that take changes back: of a save, which is undone, and of a version, which is restored.

Both show the plan first, then apply it. Each edit needs the permissions of the object's own page.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from uuid import UUID

from django import forms
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
from ..changes.validators import visible
from ..changes.writer import field_values
from ..models import PolicyChange, RatePolicy
from ..operations.differences import Difference, differences, name_users
from ..operations.revert import Revert, Step, apply, plan_restore, plan_undo, versions
from ..operations.states import KINDS
from .diff import RelatedNames, as_table, kind_name
from .formatting import moment, shown
from .pages import AdminPage
from .permissions import is_override, may, permission_name
from .reset import ReasonForm

#: Most changes of a save that a page compares; larger saves are undone by the command. Most objects that it lists.
MOST, _LISTED = 2_000, 50
_FLAGS = {"create": ADDITION, "change": CHANGE, "delete": DELETION}


class RevertForm(ReasonForm):
    """The reason, whether to do the steps left out by default, and a hash of the state that the operator compared."""

    also = forms.BooleanField(required=False, label_suffix="")
    seen = forms.CharField(widget=forms.HiddenInput)


class _RevertPage(AdminPage):
    """Shows what taking changes back would do, and does it once the operator has confirmed."""

    #: The button, the label of what it leaves out by default, and the sentences where nothing is or was done.
    words: ClassVar[dict[str, Any]]

    def answer(
        self,
        request: Any,
        make: Callable[..., Revert],
        *,
        message: str,
        done_url: Callable[[Any], str],
        context: dict[str, Any],
    ) -> Any:
        """GET compares and asks, POST applies the plan that ``make`` returns.

        ``message`` is recorded, as the reason too where none is given. ``done_url`` returns where the operator goes
        next; its argument is the first object.
        """
        form = RevertForm(request.POST) if request.method == "POST" else None
        errors = [text for texts in form.errors.values() for text in texts] if form else []
        using = policy_alias(RatePolicy)

        def forbidden(now: Any, then: Any) -> str:
            return missing_permission(self.site, request, now, then)

        # The locks make concurrent edits wait: nothing is overwritten that the operator has not seen.
        with transaction.atomic(using=using):
            plan = make(lock=form is not None, most=MOST, forbidden=forbidden)
            if form is not None and form.is_valid():
                if form.cleaned_data["seen"] != plan.seen:
                    errors.append(gettext("An object was edited in the meantime. Compare again, then undo."))
                elif any(step.applies(form.cleaned_data["also"]) for step in plan.steps):
                    try:
                        with transaction.atomic(using=using):
                            done = self._apply(request, plan, form.cleaned_data, message)
                        return HttpResponseRedirect(done_url(done[0].then))
                    except ValidationError as error:
                        errors += error.messages
        entered = {name: form.data.get(name) for name in ("reason", "also")} if form else {}
        form = RevertForm(initial={**entered, "seen": plan.seen})
        context |= {**self.words, **self._planned(plan, form), "errors": [visible(error) for error in errors]}
        return self.render(request, "revert.html", context)

    def _apply(self, request: Any, plan: Revert, data: dict[str, Any], message: str) -> list[Step]:
        done = apply(plan, actor=request.user, reason=data["reason"] or message, chosen=data["also"])
        for verb, flag in _FLAGS.items():
            rows: Any = [step.then or step.now for step in done if step.verb == verb]
            LogEntry.objects.log_actions(request.user.pk, rows, flag, message)
        count = len(done)
        text = ngettext("%(count)d object was restored.", "%(count)d objects were restored.", count)
        text = text % {"count": count}
        wanted = [step for step in plan.steps if data["also"] or not step.along]
        left = sum(not step.done and not step.applies(data["also"]) for step in wanted)
        if left:
            stay = ngettext("%(count)d stays as it is.", "%(count)d stay as they are.", left) % {"count": left}
            text = f"{text} {stay}"
        self.admin.message_user(request, text, messages.WARNING if left else messages.SUCCESS)
        return done

    def _planned(self, plan: Revert, form: RevertForm) -> dict[str, Any]:
        """Return what the page shows of the plan."""
        steps = [step for step in plan.steps if not step.done and not step.along]
        # Those that need a decision come first.
        steps.sort(key=lambda step: (not step.edited, not step.obstacle))
        along = [step for step in plan.steps if step.along and not step.done]
        return {
            "steps": self._described(steps[:_LISTED]),
            "more": max(0, len(steps) - _LISTED),
            "nothing": self.words["nothing"] if plan.steps and not steps else "",
            "edited": sum(step.edited and not step.obstacle for step in steps),
            "blocked": sum(bool(step.obstacle) for step in steps),
            "along": [(shown(step.object_text), visible(step.obstacle)) for step in along[:_LISTED]],
            "along_more": max(0, len(along) - _LISTED),
            "optional": any(step.applies(True) and not step.applies(False) for step in plan.steps),
            "too_large": plan.too_large,
            "most": MOST,
            "form": form if any(step.applies(True) for step in plan.steps) else None,
        }

    def _described(self, steps: list[Step]) -> list[dict[str, Any]]:
        """Return what the page shows of each step, with a fixed number of queries."""
        tables = [_differences(step) for step in steps]
        names = RelatedNames(row for table in tables for row in table)
        head = (_("field"), _("now"), _("restored"))
        return [
            {
                "text": shown(step.object_text),
                "kind": kind_name(step.kind),
                "id": step.object_id,
                "verb": step.verb,
                "edited": step.edited and not step.obstacle,
                "obstacle": visible(step.obstacle),
                "table": as_table(table, head, self.admin.get_empty_value_display(), names) if table else "",
                "url": self.admin.page_url("change", quote(step.last or step.change)),
            }
            for step, table in zip(steps, tables, strict=True)
        ]


class SavePage(_RevertPage):
    """Shows all changes of a save, and undoes it: each object gets back the values that it had before."""

    path = "save/<uuid:change_id>/"
    name = "save"
    words = {
        "yes": _("Undo this save"),
        "also": _("Undo these as well"),
        "nothing": _("There is nothing to undo: all objects are as they were before this save."),
        "failed": _("Nothing was undone."),
    }

    def view(self, request: Any, change_id: UUID) -> Any:
        """Show the save, and what undoing it would change."""
        rows = PolicyChange.objects.filter(change_id=change_id).select_related("actor").order_by("pk")
        first = rows.first()
        if first is None:
            raise Http404
        undone = first.undoes and PolicyChange.objects.filter(change_id=first.undoes).first()
        large = rows[MOST : MOST + 1].exists()
        others = list((rows if large else rows.exclude(model__in=KINDS))[:_LISTED])
        name_users(others)
        context = {
            "title": _("Save of %(date)s") % {"date": moment(first.at)},
            "original": gettext("Save"),
            "first": first,
            "actor": shown(first.actor) if first.actor else "",
            "reason": shown(first.reason),
            "counts": _counts(change_id),
            "others": [(kind_name(row.model), row.get_action_display(), shown(row.object_text)) for row in others],
            "undone": undone and moment(undone.at),
            "undone_url": undone and self.admin.page_url("save", undone.change_id),
            "back": self.admin.page_url("changelist"),
        }
        return self.answer(
            request,
            partial(plan_undo, change_id),
            message=gettext("undid the save of %(date)s") % {"date": moment(first.at)},
            # This page, which has nothing left to undo: the same button never makes the changes again.
            done_url=lambda row: str(self.admin.page_url("save", change_id)),
            context=context,
        )


class RestorePage(_RevertPage):
    """Compares an object with the version before or after a recorded change, and restores that version."""

    path = "<path:object_id>/restore/<str:version>/"
    name = "restore"
    words = {
        "yes": _("Yes, restore it"),
        "also": _("Restore these as well"),
        "nothing": _("There is nothing to restore: the object already matches this version."),
        "failed": _("Nothing was restored."),
    }

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links to the versions, and to the object's other changes."""
        texts = {"after": _("Restore this version"), "before": _("Restore the previous version")}
        links = [(self.url(obj, version), texts[version]) for version in versions(obj)]
        links.append((self.admin.page_url("save", obj.change_id), _("All changes of this save")))
        if obj.object_id:
            query = {"model": obj.model, "object_id": obj.object_id}
            links.append((self.admin.page_url("changelist", query=query), _("All changes of this object")))
        return links

    def view(self, request: Any, change: PolicyChange, version: Any) -> Any:
        """Show what restoring the version would change."""
        if version not in versions(change):
            raise Http404
        titles = {"before": _("Restore the version before %(date)s"), "after": _("Restore the version of %(date)s")}
        recorded = {
            "before": gettext("restored version before %(date)s"),
            "after": gettext("restored version of %(date)s"),
        }
        date = {"date": moment(change.at)}
        context = {
            "title": titles[version] % date,
            "original": gettext("Restore"),
            "back": self.admin.page_url("change", quote(change.pk)),
        }

        def done_url(row: Any) -> str:
            return self.object_url(request, type(row), row.pk, row) or context["back"]

        return self.answer(
            request,
            partial(plan_restore, change, version),
            message=recorded[version] % date,
            done_url=done_url,
            context=context,
        )


def missing_permission(site: Any, request: Any, now: Any, then: Any) -> str:
    """Return which permission an edit from ``now`` to ``then`` lacks, as a sentence; None = no object; "" = none."""
    model = type(now or then)
    verb = "add" if now is None else "delete" if then is None else "change"
    names: list[str] = []
    if not site.is_registered(model) or not getattr(site.get_model_admin(model), f"has_{verb}_permission")(
        request, *([] if now is None else [now])
    ):
        override = model is RatePolicy and is_override(now or then)
        names.append(permission_name(verb, override=override, model=model))
    if model is RatePolicy:
        kinds = dict.fromkeys(is_override(one) for one in (now, then) if one is not None)
        names += [
            permission_name(verb, override=kind) for kind in kinds if not may(request.user, verb, override=kind)
        ]
    return gettext("You need the permission “%s”.") % names[0] if names else ""


def _differences(step: Step) -> list[Difference]:
    """Return the fields that the step sets: now, and afterwards."""
    if step.then is None:
        return []
    before, after = (None if row is None else field_values(row) for row in (step.now, step.then))
    return differences(PolicyChange(model=step.kind, before=before, after=after))


def _counts(change_id: UUID) -> list[tuple[int, str, str]]:
    """Return (number, kind, action) of the save's rows."""
    actions = dict(PolicyChange.Action.choices)
    rows = PolicyChange.objects.filter(change_id=change_id).order_by()
    found = rows.values_list("model", "action").annotate(Count("pk"))
    return [(count, kind_name(kind), str(actions.get(action, action))) for kind, action, count in found]
