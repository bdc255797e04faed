"""Copies a plan with its policies, under a new name. A page of its own: the plan's form shows a part of them only."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.utils import quote, unquote
from django.contrib.admin.widgets import AdminTextareaWidget, AdminTextInputWidget
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..models import Plan, RatePolicy
from ..recording.databases import policy_alias
from ..recording.recorder import acting
from .base import ReasonField, RecordedAdmin
from .formatting import dates, shown
from .permissions import may

#: More policies than this are counted, not listed, on the page that asks; all are copied.
_SHOWN_POLICIES = 100


class CopyForm(forms.ModelForm):  # type: ignore[type-arg]
    """What the copy does not take over from its plan, and why it is made."""

    reason = ReasonField()

    class Meta:
        model = Plan
        fields = ["name", "slug", "description"]
        widgets = {
            "name": AdminTextInputWidget,
            "slug": AdminTextInputWidget,
            "description": AdminTextareaWidget(attrs={"rows": 2}),
        }


class CopyPlan(RecordedAdmin):
    """Lets those who may add plans, and policies where the plan has any, copy one."""

    def get_urls(self) -> list[Any]:
        """With the page of a copy."""
        view = self.admin_site.admin_view(self.copy_view)
        own = path("<path:object_id>/copy/", view, name="django_ratequota_plan_copy")
        return [own, *super().get_urls()]

    def render_change_form(
        self, request: Any, context: Any, add: bool = False, change: bool = False, form_url: str = "", obj: Any = None
    ) -> Any:
        """With the way to the copy, where the operator may."""
        if obj is not None and self._may_copy(request, obj):
            context["copy_url"] = self.page_url("copy", quote(obj.pk))
        return super().render_change_form(request, context, add, change, form_url, obj)

    def copy_view(self, request: Any, object_id: str) -> Any:
        """GET asks for the name, POST copies."""
        plan = self.get_object(request, unquote(object_id))
        if not self._may_copy(request, plan):
            raise PermissionDenied
        if plan is None:
            raise Http404
        return self._recorded(self._ask_or_copy, request, plan)

    def _ask_or_copy(self, request: Any, plan: Plan) -> Any:
        form = CopyForm(request.POST or None, initial=_suggestion(plan))
        policies = list(plan.policies.select_related("endpoint").order_by("endpoint__name", "counted_per", "pk"))
        if request.method == "POST" and form.is_valid():
            reason = form.cleaned_data["reason"] or gettext("copy of %(plan)s") % {"plan": shown(plan.name)}
            try:
                with acting(request.user, reason), transaction.atomic(using=policy_alias(Plan)):
                    count = copy_policies(policies, form.save())
                    self.log_addition(request, form.instance, _logged(plan, count))
            except ValidationError as error:
                form.instance.pk = None
                form.add_error(None, error)
            else:
                return self._done(request, form.instance, count)
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Copy plan %(plan)s") % {"plan": shown(plan.name)},
            "original": gettext("Copy"),  # the end of the breadcrumbs
            "opts": self.opts,
            "media": self.media + form.media,
            "has_view_permission": self.has_view_permission(request, plan),
            "errors": form.errors,
            "form": form,
            "policies": [(policy, dates(policy)) for policy in policies[:_SHOWN_POLICIES]],
            "more": max(0, len(policies) - _SHOWN_POLICIES),
            "default_for": plan.get_default_for_display() if plan.default_for else "",
            "back": self.page_url("change", quote(plan.pk)),
        }
        return TemplateResponse(request, "admin/django_ratequota/plan/copy.html", context)

    def _done(self, request: Any, copy: Plan, count: int) -> HttpResponseRedirect:
        text = ngettext(
            "Plan %(plan)s was made, with %(count)d policy.",
            "Plan %(plan)s was made, with %(count)d policies.",
            count,
        )
        self.message_user(request, text % {"plan": shown(copy.name), "count": count}, messages.SUCCESS)
        if self.has_view_permission(request, copy):
            return HttpResponseRedirect(self.page_url("change", quote(copy.pk)))
        return HttpResponseRedirect(reverse(f"{self.admin_site.name}:index"))

    def _may_copy(self, request: Any, plan: Plan | None) -> bool:
        """Whoever sees the plan, and may add all that the copy adds."""
        if not self.has_add_permission(request) or not self.has_view_permission(request, plan):
            return False
        return may(request.user, "add", override=False) or plan is None or not plan.policies.exists()


def copy_policies(policies: list[RatePolicy], plan: Plan) -> int:
    """Give the plan the same policies, every field of them, and return how many.

    Raises ``ValidationError`` naming the policy that could not be saved as it is (written by raw SQL, or counted per
    an identifier that has left the settings).
    """
    names = [field.attname for field in RatePolicy._meta.concrete_fields if not field.primary_key]
    relations = [field.name for field in RatePolicy._meta.concrete_fields if field.is_relation]
    copies = []
    for policy in policies:
        copy = RatePolicy(**{**{name: getattr(policy, name) for name in names}, "plan_id": plan.pk})
        try:
            # Related objects and constraints hold as they did: only the plan is another, and it had no policy.
            copy.clean_fields(exclude=relations)
            copy.clean()
        except ValidationError as error:
            text = _("Nothing was copied: %(policy)s cannot be saved as it is. %(errors)s")
            given = {"policy": shown(policy), "errors": " ".join(error.messages)}
            raise ValidationError(text % given) from error
        copies.append(copy)
    return len(RatePolicy.objects.bulk_create(copies))


def _suggestion(plan: Plan) -> dict[str, str]:
    name = Plan._meta.get_field("name").max_length
    slug = Plan._meta.get_field("slug").max_length or 0
    copy = gettext("Copy of %(plan)s") % {"plan": plan.name}
    return {"name": copy[:name], "slug": f"{plan.slug[: slug - 5]}-copy", "description": plan.description}


def _logged(plan: Plan, count: int) -> str:
    """What the copy's own history says."""
    text = ngettext(
        "Copied from %(plan)s, with %(count)d policy.", "Copied from %(plan)s, with %(count)d policies.", count
    )
    return text % {"plan": shown(plan.name), "count": count}
