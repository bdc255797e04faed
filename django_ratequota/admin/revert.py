"""The page that takes changes back: it undoes a save, or restores a version of an object.

It shows the plan first, then applies it. Each edit needs the permissions of the object's own page.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, DELETION, LogEntry
from django.core.exceptions import ValidationError
from django.http import Http404, HttpResponseRedirect
from django.utils.translation import gettext, ngettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..changes.databases import saving
from ..changes.validators import visible
from ..changes.writer import field_values
from ..models import PolicyChange, RatePolicy
from ..operations.recorded import KINDS, Words, who_changed
from ..operations.revert import Revert, Step, apply, of_object, of_save, plan
from .base import ReasonField
from .formatting import moment
from .pages import AdminPage
from .permissions import lacking, permission_name
from .saves import kind_name

#: Maximum number of objects that the page compares (the command undoes larger saves), and that it lists.
MOST, _LISTED = 2_000, 50
_FLAGS = {"create": ADDITION, "change": CHANGE, "delete": DELETION}
#: Kind of revert -> the page's title, the text for the history, and the message afterwards.
_TEXTS = {
    "save": (
        _("Undo the change of %(date)s"),
        _("undid the change of %(date)s"),
        ngettext_lazy("The change of %d object was undone.", "The changes of %d objects were undone."),
    ),
    "object": (
        _("Restore the version before %(date)s"),
        _("restored version before %(date)s"),
        ngettext_lazy("%d object was restored.", "%d objects were restored."),
    ),
}


class RevertForm(forms.Form):
    """The reason, and a hash of the state that the operator compared."""

    reason = ReasonField()
    seen = forms.CharField()


class RevertPage(AdminPage):
    """Shows what undoing a change's save, or restoring its object, would do, and does it once that is confirmed."""

    path = "<path:object_id>/revert/<str:what>/"
    name = "revert"

    def view(self, request: Any, change: PolicyChange, what: str) -> Any:
        """GET compares and asks, POST takes back."""
        if what not in _TEXTS or (what == "object" and not (change.model in KINDS and change.before)):
            raise Http404
        rows = of_save(change.change_id) if what == "save" else of_object(change)
        title, message = (text % {"date": moment(change.at)} for text in _TEXTS[what][:2])
        # Not the page of the undo, where a button of the same name would make the changes again.
        back = self.admin.page_url("save", change.change_id)
        context = {"title": title, "what": what, "back": back}
        if rows.values("model", "object_id").distinct().count() > MOST:
            save = rows.order_by("-pk").values_list("change_id", flat=True)[0]
            return self.render(request, "revert.html", {**context, "most": MOST, "save": str(save)})
        form = RevertForm(request.POST if request.method == "POST" else None)
        errors: list[Any] = [text for texts in form.errors.values() for text in texts]
        # The locks make concurrent edits wait: nothing is overwritten that the operator has not seen.
        with saving(RatePolicy) if form.is_bound else nullcontext():
            forbidden = partial(missing_permission, self.site, request)
            revert = plan(rows, lock=form.is_bound, forbidden=forbidden)
            if form.is_valid() and revert.done:
                if form.cleaned_data["seen"] != revert.seen:
                    errors = [gettext("An object was changed in the meantime. Compare again.")]
                else:
                    undoes = change.change_id if what == "save" else None
                    reason = form.cleaned_data["reason"] or message
                    try:
                        apply(revert, actor=request.user, reason=reason, undoes=undoes)
                        self._report(request, revert, message, _TEXTS[what][2])
                        return HttpResponseRedirect(back)
                    except ValidationError as error:
                        errors = error.messages
        context |= {
            **self._described(revert),
            "revert": revert,
            "form": form,
            "errors": [visible(error) for error in errors],
        }
        return self.render(request, "revert.html", context)

    def _report(self, request: Any, revert: Revert, message: str, text: Any) -> None:
        """Write the log of each object, and tell the operator."""
        for verb, flag in _FLAGS.items():
            rows: Any = [step.then or step.now for step in revert.done if step.verb == verb]
            LogEntry.objects.log_actions(request.user.pk, rows, flag, message)
        done, left = len(revert.done), len(revert.left)
        text %= done
        if left:
            stay = ngettext("%(count)d object stays unchanged.", "%(count)d objects stay unchanged.", left)
            text = f"{text} {stay % {'count': left}}"
        self.admin.message_user(request, text, messages.WARNING if left else messages.SUCCESS)

    def _described(self, revert: Revert) -> dict[str, Any]:
        """Return what the page shows of the plan's objects."""
        steps = [step for step in revert.steps if step.verb or step.obstacle or step.later]
        # Those that need a decision come first.
        steps.sort(key=lambda step: (not step.later, not step.obstacle))
        listed = steps[:_LISTED]
        planned = [_change(step) for step in listed]
        words = Words(planned)
        described = [
            (step, kind_name(step.kind), words.table(change), step.later and who_changed(step.later, step.last))
            for step, change in zip(listed, planned, strict=True)
        ]
        return {"steps": described, "more": len(steps) - len(listed)}


def missing_permission(site: Any, request: Any, now: Any, then: Any) -> str:
    """Return which permission an edit from ``now`` to ``then`` lacks, as a sentence; None = no object; "" = none."""
    model = type(now or then)
    verb = "add" if now is None else "delete" if then is None else "change"
    name = next(filter(None, (lacking(request.user, verb, row) for row in (now, then) if row is not None)), "")
    own = site.is_registered(model) and getattr(site.get_model_admin(model), f"has_{verb}_permission")
    if not own or not own(request, *([] if now is None else [now])):  # a project's own may refuse more
        name = name or f"{verb}_{model._meta.model_name}"
    return gettext("You need the permission “%s”.") % permission_name(name) if name else ""


def _change(step: Step) -> PolicyChange:
    """Return what the step changes, as it would be recorded; only deletions and steps that do nothing are empty."""
    before, after = (None if row is None or not step.then else field_values(row) for row in (step.now, step.then))
    return PolicyChange(model=step.kind, before=before, after=after)
