"""Resets what was counted for overrides: an action of the list, and a page of each override, behind one question."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..models import PolicyChange, RatePolicy
from ..operations import counters as usage
from ..recording.databases import policy_alias
from .base import ReasonField, RecordedAdmin
from .formatting import shown
from .permissions import PolicyRights, is_override

#: One question names each counter, and one call to Redis takes them all.
_MAX_COUNTERS = 200
#: More policies than this are counted, not listed, where the page says which have no counter of their own.
_SHOWN_WITHOUT = 20


class ReasonForm(forms.Form):
    """Why, for whoever reads the history."""

    reason = ReasonField()


class ResetUsage(PolicyRights, RecordedAdmin):
    """Lets those who hold ``reset_usage`` forget what the counters of overrides hold."""

    actions = ["reset_usage"]

    def get_urls(self) -> list[Any]:
        """With the page of one override's reset."""
        view = self.admin_site.admin_view(self.reset_view)
        own = path("<path:object_id>/reset/", view, name="django_ratequota_ratepolicy_reset")
        return [own, *super().get_urls()]

    def render_change_form(
        self, request: Any, context: Any, add: bool = False, change: bool = False, form_url: str = "", obj: Any = None
    ) -> Any:
        """With the way to the reset of an override, where the operator may."""
        if obj is not None and is_override(obj) and self.has_reset_permission(request, obj):
            context["reset_url"] = self.page_url("reset", quote(obj.pk))
        return super().render_change_form(request, context, add, change, form_url, obj)

    @admin.action(permissions=["reset"], description=_("Reset the counters of the selected overrides"))
    def reset_usage(self, request: Any, queryset: Any) -> Any:
        """Ask, then reset; the list is shown again when done."""
        return self._ask_or_reset(request, queryset, back=self.page_url("changelist"), action="reset_usage")

    def reset_view(self, request: Any, object_id: str) -> Any:
        """The same for one override: GET asks, POST resets."""
        policy = self.get_object(request, unquote(object_id))
        if not self.has_reset_permission(request, policy):
            raise PermissionDenied
        if policy is None:
            raise Http404
        back = self.page_url("change", quote(policy.pk))
        answer = self.recorded(self._ask_or_reset, request, [policy], back=back)
        return answer or HttpResponseRedirect(back)

    def _ask_or_reset(self, request: Any, policies: Any, *, back: str, action: str = "") -> Any:
        if action:
            policies = policies.select_related("user", "plan", "endpoint")
        counters, without = usage.own_counters(policies)
        if len(counters) > _MAX_COUNTERS:
            text = _(
                "The selected overrides have %(count)d counters, and at most %(most)d can be "
                "reset at once. Select fewer."
            )
            self.message_user(request, text % {"count": len(counters), "most": _MAX_COUNTERS}, messages.ERROR)
            return None
        confirmed = request.method == "POST" and "post" in request.POST
        form = ReasonForm(request.POST if confirmed else None)
        if confirmed and counters and form.is_valid():
            self._reset(request, counters, form.cleaned_data["reason"])
            return None
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            **_standing(counters),
            "title": _("Reset counters"),
            "original": gettext("Reset counters"),  # the end of the breadcrumbs
            "opts": self.opts,
            "media": self.media + form.media,
            "has_view_permission": True,
            "without": [(shown(policy), why) for policy, why in list(without.items())[:_SHOWN_WITHOUT]],
            "without_more": max(0, len(without) - _SHOWN_WITHOUT),
            "form": form,
            "back": back,
            "action": action,
            "checkbox": ACTION_CHECKBOX_NAME,
            "policies": list(dict.fromkeys(counters.values())),
        }
        return TemplateResponse(request, "admin/django_ratequota/ratepolicy/reset_usage.html", context)

    def _reset(self, request: Any, counters: dict[Bucket, RatePolicy], reason: str) -> None:
        done = 0
        try:
            for policy in dict.fromkeys(counters.values()):
                with transaction.atomic(using=policy_alias(PolicyChange)):
                    before = usage.reset((b for b, owner in counters.items() if owner == policy), reason)
                    self.log_change(request, policy, _logged(before))
                done += len(before)
        except StoreError as error:
            failed = _("Redis did not answer (%(reason)s). %(done)d of %(all)d counters were reset. Try again later.")
            counts = {"reason": error.reason, "done": done, "all": len(counters)}
            self.message_user(request, failed % counts, messages.ERROR)
            return
        text = ngettext("%(count)d counter was reset.", "%(count)d counters were reset.", done)
        self.message_user(request, text % {"count": done}, messages.SUCCESS)


def _standing(counters: dict[Bucket, RatePolicy]) -> dict[str, Any]:
    """The rows of the page, live; without numbers, and with the reason, while Redis gives no answer."""
    statuses: dict[Bucket, BucketStatus] = {}
    error = ""
    try:
        statuses = usage.peek(counters)
    except StoreError as failure:
        error = failure.reason
    rows = [
        {
            "who": shown(policy.audience),
            "endpoint": shown(bucket.scope) if bucket.scope else _("all endpoints"),
            "rate": bucket.rate,
            "status": statuses.get(bucket),
        }
        for bucket, policy in counters.items()
    ]
    return {"counters": rows, "store_error": error}


def _logged(before: tuple[BucketStatus, ...]) -> str:
    """What the policy's own history says."""
    counters = ", ".join(f"{shown(s.bucket.title)} ({s.used} / {s.limit})" for s in before)
    return gettext("Reset counters: %(counters)s.") % {"counters": counters}
