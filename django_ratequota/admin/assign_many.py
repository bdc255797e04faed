"""Assigns a plan to many customers: pasted lines, or a file of them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote
from django.contrib.admin.widgets import AdminSplitDateTime
from django.http import HttpResponseRedirect
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import saving
from ..conf import settings
from ..models import Plan, PlanAssignment
from ..operations.assign_many import Assigning, assigning
from .base import REASON_FIELD
from .formatting import shown
from .list_members import LinesForm
from .pages import AdminPage
from .widgets import name_date_parts

#: Most bad lines that the page lists; more are counted.
_SHOWN_PROBLEMS = 100


class AssignForm(LinesForm):
    """Customers as lines of text, or a file of them, the dates of their assignments, and the reason."""

    starts_at = forms.SplitDateTimeField(
        label=_("Starts at"), required=False, widget=AdminSplitDateTime, help_text=_("Empty = at once.")
    )
    ends_at = forms.SplitDateTimeField(
        label=_("Ends at"),
        required=False,
        widget=AdminSplitDateTime,
        help_text=_("Empty = open-ended. The end of a line takes precedence."),
    )
    field_order = ["text", "file", "starts_at", "ends_at", REASON_FIELD]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("starts_at", "ends_at"):
            name_date_parts(self.fields[name])  # type: ignore[arg-type]
        self.fields["text"].label = _("Customers, one a line")
        self.fields["text"].help_text = _(
            "A login name, or a subject such as tenant:acme, then optionally until 2026-12-31 and # reason. More "
            "than 2 MB: choose a file."
        )
        self.fields["file"].help_text = _("The same lines (.txt), or columns: customer, end, reason (.csv).")

    def hidden(self) -> AssignForm:
        """Return the form with the lines of the file as text, for hidden fields: files are sent only once."""
        text = "\n".join(
            f"{line.who}{line.until and f' until {line.until}'}{line.reason and f' # {line.reason}'}"
            for line in self.cleaned_data["lines"]
        )
        return type(self)({**self.data.dict(), "text": text})  # type: ignore[attr-defined]


class AssignPage(AdminPage):
    """Asks for the customers, shows what would happen, then assigns the plan to them in one save."""

    path = "<path:object_id>/assign/"
    name = "assign"

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether assignments decide who is on a plan, and the operator may add some, and see the plan."""
        may_add = request.user.has_perm("django_ratequota.add_planassignment")
        return may_add and not settings.plan_resolver and self.admin.has_view_permission(request, obj)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link, where the operator may assign plans."""
        return [(self.url(obj), _("Assign to many"))] if self.has_permission(request, obj) else []

    def view(self, request: Any, plan: Plan) -> Any:
        """GET asks for the lines, POST shows what they would do, and does it once that is confirmed."""
        form = AssignForm(*((request.POST, request.FILES) if request.method == "POST" else ()))
        found = None
        if form.is_valid():
            data = form.cleaned_data
            fields = {"ends_at": data["ends_at"], "reason": data[REASON_FIELD], "created_by": request.user}
            with saving(PlanAssignment) if "confirmed" in request.POST else nullcontext():
                found = assigning(plan, data["lines"], starts_at=data["starts_at"] or timezone.now(), **fields)
                if "confirmed" in request.POST:
                    PlanAssignment.objects.bulk_create(found.new)
                    return self._done(request, plan, found)
        context = {
            "title": gettext("Assign plan %(plan)s to many") % {"plan": shown(plan.name)},
            "original": gettext("Assign to many"),
            "form": form.hidden() if found else form,
            "errors": form.errors,
            "found": found,
            "effects": found and _effects(found),
            "problems": found and found.problems[:_SHOWN_PROBLEMS],
            "more": found and max(0, len(found.problems) - _SHOWN_PROBLEMS),
            "back": self.admin.page_url("change", quote(plan.pk)),
        }
        return self.render(request, "assign.html", context, form)

    def _done(self, request: Any, plan: Plan, found: Assigning) -> HttpResponseRedirect:
        """Log and report what was assigned."""
        text = gettext("Assigned: %(new)d. On it already: %(present)d. Lines skipped: %(skipped)d.")
        text %= {"new": len(found.new), "present": found.present, "skipped": len(found.problems)}
        self.admin.log_change(request, plan, text)
        self.admin.message_user(request, f"{shown(plan)}: {text}", messages.SUCCESS)
        return HttpResponseRedirect(self.admin.page_url("change", quote(plan.pk)))


def _effects(found: Assigning) -> list[tuple[Any, int]]:
    """Return what would happen to how many customers, or lines."""
    names = dict(Plan.objects.filter(pk__in=[pk for pk in found.moved if pk]).values_list("pk", "name"))
    rows = [
        *(
            (shown(names[pk]) if pk in names else _("no assignment"), count)
            for pk, count in found.moved.most_common()
        ),
        (_("of these, only when the present assignment ends, because one with an end takes precedence"), found.later),
        (_("this plan already, so nothing changes"), found.present),
        (_("lines skipped"), len(found.problems)),
    ]
    return [(text, count) for text, count in rows if count]
