"""Copies a plan with all of its policies, under a new name."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import AdminForm
from django.contrib.admin.utils import quote
from django.contrib.admin.widgets import AdminTextareaWidget, AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import saving
from ..changes.writer import changed_by
from ..models import Plan
from ..operations.copy_plan import copy_policies
from .base import ReasonField
from .formatting import number_text, shown
from .pages import AdminPage
from .permissions import may


class CopyForm(forms.ModelForm):  # type: ignore[type-arg]
    """The fields in which the copy differs from its plan, and the reason."""

    factor = forms.DecimalField(
        label=_("Multiply all limits by"),
        initial=1,
        min_value=Decimal("0.001"),
        max_value=1000,
        max_digits=7,
        localize=True,
        widget=AdminTextInputWidget(attrs={"inputmode": "decimal", "size": 8}),
        help_text=_("1.5 raises them by half. Results are rounded to three digits."),
    )
    reason = ReasonField()

    class Meta:
        model = Plan
        fields = ["name", "slug", "description"]
        widgets = {
            "name": AdminTextInputWidget(attrs={"autofocus": True}),
            "slug": AdminTextInputWidget,
            "description": AdminTextareaWidget(attrs={"rows": 2}),
        }


class CopyPlanPage(AdminPage):
    """Asks for the name of the copy, then copies the plan with its policies."""

    path = "<path:object_id>/copy/"
    name = "copy"
    link = _("Copy plan")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator sees the plan, and may add plans, and policies where the plan has any."""
        if not self.admin.has_add_permission(request) or not self.admin.has_view_permission(request, obj):
            return False
        return may(request.user, "add", override=False) or obj is None or not obj.policies.exists()

    def view(self, request: Any, plan: Plan) -> Any:
        """GET asks, POST copies."""
        name = gettext("Copy of %(plan)s") % {"plan": plan.name}
        initial = {"name": name[: Plan._meta.get_field("name").max_length], "description": plan.description}
        form = CopyForm(request.POST or None, initial=initial)
        if form.is_valid():
            try:
                return self._copy(request, plan, form)
            except ValidationError as error:
                form.add_error(None, error)
        context = {
            "title": _("Copy plan %(plan)s") % {"plan": shown(plan.name)},
            "original": gettext("Copy"),
            "button": _("Copy"),
            "prepopulated": AdminForm(form, [], {"slug": ["name"]}),
            "policies": plan.policies.count(),
            "default_for": plan.get_default_for_display() if plan.default_for else "",
            "back": self.admin.page_url("change", quote(plan.pk)),
        }
        return self.render(request, "copy.html", context, form)

    def _copy(self, request: Any, plan: Plan, form: CopyForm) -> HttpResponseRedirect:
        """Save the copy, and lead to it; raises ``ValidationError``."""
        reason = form.cleaned_data["reason"] or gettext("copy of %(plan)s") % {"plan": shown(plan.name)}
        factor = form.cleaned_data["factor"]
        with changed_by(request.user, reason), saving(Plan):
            copy = form.save(commit=False)
            copy.position = plan.position + 1
            copy.save()
            text = _message(plan, copy_policies(plan.policies.all(), copy, factor), factor)
            self.admin.log_addition(request, copy, text)
        self.admin.message_user(request, f"{shown(copy.name)}: {text}", messages.SUCCESS)
        link = self.object_url(request, Plan, copy.pk, copy)
        return HttpResponseRedirect(link or reverse(f"{self.site.name}:index"))


def _message(plan: Plan, count: int, factor: Decimal) -> str:
    text = ngettext(
        "Copied from %(plan)s with %(count)d policy.", "Copied from %(plan)s with %(count)d policies.", count
    )
    text %= {"plan": shown(plan.name), "count": count}
    if factor != 1:
        text += " " + gettext("All limits were multiplied by %(factor)s.") % {"factor": number_text(float(factor))}
    return text
