"""Resets what was counted for overrides: a page of each override, and an action of the list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import quote
from django.db import transaction
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import policy_alias
from ..engine.types import Bucket, BucketStatus
from ..exceptions import StoreError
from ..models import PolicyChange, RatePolicy
from ..operations import counters
from .base import ReasonField
from .formatting import shown
from .names import audience_text, caller_names
from .pages import AdminPage, reply, unanswered
from .permissions import is_override

#: The page names each counter, and one call to Redis reads them all.
_MAX_COUNTERS = 200
#: More policies than this are counted, not listed, where the page says which have no counter of their own.
_SHOWN_WITHOUT = 20
_NOT_SHOWN = _("The counters cannot be shown, and changing them will probably fail. Try again later.")


class ReasonForm(forms.Form):
    """The reason of a change, for the history."""

    reason = ReasonField()


class CountersPage(AdminPage):
    """Shows counters live and asks; changes them once the operator has confirmed."""

    media = forms.Media(css={"all": ["django_ratequota/explain.css"]})
    title: ClassVar[Any] = _("Reset counters")
    lead: ClassVar[Any] = _(
        "These counters are reset to zero. The limits and the counters of other callers stay unchanged."
    )
    yes: ClassVar[Any] = _("Yes, reset them")
    #: Heads of the two columns before the numbers.
    heads: ClassVar[tuple[Any, Any]]

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may reset what was counted for the policy."""
        return bool(self.admin.has_reset_permission(request, obj))

    def form(self, buckets: Iterable[Bucket], data: Any) -> forms.Form:
        """Return the form that asks about these counters."""
        return ReasonForm(data)

    def confirm(
        self,
        request: Any,
        rows: Mapping[Bucket, tuple[str, str]],
        change: Callable[[Any], None],
        context: dict[str, Any],
    ) -> Any:
        """Return the page that asks about the counters of ``rows`` (with the texts of their first two columns).

        Once confirmed, call ``change`` with the form. Return None then, unless it has added an error to the form.
        """
        confirmed = request.method == "POST" and "post" in request.POST
        form = self.form(rows, request.POST if confirmed else None)
        if confirmed and rows and form.is_valid():
            change(form)
            if not form.errors:
                return None
        statuses, store_error = reply(lambda: counters.peek(rows))
        context = {
            "title": self.title,
            "lead": self.lead,
            "yes": self.yes,
            "heads": self.heads,
            "rows": [(*texts, bucket.rate, (statuses or {}).get(bucket)) for bucket, texts in rows.items()],
            "store_error": store_error and unanswered(store_error, _NOT_SHOWN),
            "form": form,
            **context,
        }
        return self.render(request, "confirm_counters.html", context, form)


class ResetPage(CountersPage):
    """Resets the counters of one override; the action of the list uses it for many."""

    path = "<path:object_id>/reset/"
    name = "reset"
    heads = (_("Who"), _("Endpoint"))

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link of an override that the operator may reset."""
        offered = is_override(obj) and self.has_permission(request, obj)
        return [(self.url(obj), _("Reset usage"))] if offered else []

    def view(self, request: Any, policy: RatePolicy) -> Any:
        """GET asks, POST resets."""
        back = self.admin.page_url("change", quote(policy.pk))
        return self.ask_or_reset(request, [policy], back) or HttpResponseRedirect(back)

    def ask_or_reset(self, request: Any, policies: Any, back: str, action: str = "") -> Any:
        """Return the page that asks; None once the counters are reset, or with a message why they cannot be.

        ``action`` is the name of the list's action that the page repeats when the operator confirms.
        """
        owners, without = counters.own_counters(policies)
        if len(owners) > _MAX_COUNTERS:
            text = _(
                "The selected overrides have %(count)d counters, and at most %(most)d can be "
                "reset at once. Select fewer."
            )
            words = {"count": len(owners), "most": _MAX_COUNTERS}
            self.admin.message_user(request, text % words, messages.ERROR)
            return None
        names = caller_names(policy.subject for policy in owners.values())
        rows = {
            bucket: (audience_text(policy, names), shown(bucket.scope) if bucket.scope else gettext("all endpoints"))
            for bucket, policy in owners.items()
        }
        context = {
            "without": [(shown(policy), why) for policy, why in list(without.items())[:_SHOWN_WITHOUT]],
            "without_more": max(0, len(without) - _SHOWN_WITHOUT),
            "back": back,
            "action": action,
            "checkbox": ACTION_CHECKBOX_NAME,
            "policies": list(dict.fromkeys(owners.values())),
        }
        return self.confirm(request, rows, lambda form: self._reset(request, owners, form), context)

    def _reset(self, request: Any, owners: Mapping[Bucket, RatePolicy], form: Any) -> None:
        done = 0
        try:
            for policy in dict.fromkeys(owners.values()):
                with transaction.atomic(using=policy_alias(PolicyChange)):
                    own = (bucket for bucket, owner in owners.items() if owner == policy)
                    before = counters.reset(own, form.cleaned_data["reason"])
                    self.admin.log_change(request, policy, f"{reset_message(len(before))} {counters_text(before)}")
                done += len(before)
        except StoreError as error:
            then = _("%(done)d of %(all)d counters were reset. Try again later.") % {"done": done, "all": len(owners)}
            self.admin.message_user(request, unanswered(error.reason, then), messages.ERROR)
        else:
            self.admin.message_user(request, reset_message(done), messages.SUCCESS)


def reset_message(count: int) -> str:
    """Return how many counters were reset, in words."""
    return ngettext("%(count)d counter was reset.", "%(count)d counters were reset.", count) % {"count": count}


def counters_text(before: Iterable[BucketStatus]) -> str:
    """Return the counters in words, and how they stood before they were changed."""
    return "; ".join(f"{shown(s.bucket.title)}, {shown(s.bucket.subject)} ({s.used} / {s.limit})" for s in before)
