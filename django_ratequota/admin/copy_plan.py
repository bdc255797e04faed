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
from django.utils.text import slugify
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import saving
from ..changes.writer import changed_by
from ..models import Plan
from ..operations.copy_plan import copy_policies, scaled
from .base import ReasonField
from .formatting import number_text, shown, when
from .pages import AdminPage
from .permissions import may

#: Most policies that the page lists; more are counted, and all are copied.
_SHOWN_POLICIES = 100


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
        help_text=_("1.5 raises them by half. The new rates are shown before anything is saved."),
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["slug"].required = False

    def clean(self) -> Any:
        """Make the slug of the name where it is empty, as the page's script does while the name is typed."""
        values: Any = super().clean()
        if not values.get("slug") and "slug" not in self.errors:
            length = Plan._meta.get_field("slug").max_length
            values["slug"] = slugify(values.get("name", ""))[:length]
            if values.get("name") and not values["slug"]:
                self.add_error("slug", _("Enter a slug: the name has no letter from a to z and no digit."))
        return values


class CopyPlanPage(AdminPage):
    """Asks for the name of the copy, then copies the plan with its policies."""

    path = "<path:object_id>/copy/"
    name = "copy"

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator sees the plan, and may add plans, and policies where the plan has any."""
        if not self.admin.has_add_permission(request) or not self.admin.has_view_permission(request, obj):
            return False
        return may(request.user, "add", override=False) or obj is None or not obj.policies.exists()

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link, where the operator may copy the plan."""
        return [(self.url(obj), _("Copy plan"))] if self.has_permission(request, obj) else []

    def view(self, request: Any, plan: Plan) -> Any:
        """GET asks, POST copies; where limits change, it first shows the new ones, and copies once confirmed."""
        form = CopyForm(request.POST or None, initial=_initial(plan))
        policies = list(plan.policies.select_related("endpoint").order_by("endpoint__name", "counted_per", "pk"))
        factor = form.cleaned_data["factor"] if form.is_valid() else Decimal(1)
        confirming = form.is_valid() and factor != 1 and "confirmed" not in request.POST
        if form.is_valid() and not confirming:
            reason = form.cleaned_data["reason"] or gettext("copy of %(plan)s") % {"plan": shown(plan.name)}
            try:
                with changed_by(request.user, reason), saving(Plan):
                    copy = form.save(commit=False)
                    copy.position = plan.position + 1
                    copy.save()
                    count = copy_policies(policies, copy, factor)
                    text = _message(plan, count, factor)
                    self.admin.log_addition(request, copy, text)
            except ValidationError as error:
                form.instance.pk = None
                form.add_error(None, error)
            else:
                self.admin.message_user(request, f"{shown(copy.name)}: {text}", messages.SUCCESS)
                link = self.object_url(request, Plan, copy.pk, copy)
                return HttpResponseRedirect(link or reverse(f"{self.site.name}:index"))
        context = {
            "title": _("Copy plan %(plan)s") % {"plan": shown(plan.name)},
            "original": gettext("Copy"),
            "errors": form.errors,
            "factor": number_text(float(factor)),
            "form": form,
            "prepopulated": AdminForm(form, [], {"slug": ["name"]}),
            "policies": [
                (policy, scaled(policy.rates, factor) if confirming else "", when(policy))
                for policy in policies[:_SHOWN_POLICIES]
            ],
            "confirming": confirming,
            "more": max(0, len(policies) - _SHOWN_POLICIES),
            "default_for": plan.get_default_for_display() if plan.default_for else "",
            "back": self.admin.page_url("change", quote(plan.pk)),
        }
        return self.render(request, "copy.html", context, form)


def _initial(plan: Plan) -> dict[str, str]:
    name = Plan._meta.get_field("name").max_length
    copy = gettext("Copy of %(plan)s") % {"plan": plan.name}
    return {"name": copy[:name], "description": plan.description}


def _message(plan: Plan, count: int, factor: Decimal) -> str:
    text = ngettext(
        "Copied from %(plan)s, with %(count)d policy.", "Copied from %(plan)s, with %(count)d policies.", count
    )
    text %= {"plan": shown(plan.name), "count": count}
    if factor != 1:
        text += " " + gettext("All limits were multiplied by %(factor)s.") % {"factor": number_text(float(factor))}
    return text
