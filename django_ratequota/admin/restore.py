"""Restores a version that the history holds: a page of each change, which compares it with what is there now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import Http404, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..models import PolicyChange, RatePolicy
from ..operations.cascades import Deletion
from ..operations.restore import KINDS, Restoration, plan_restoration, problems, restore, versions
from ..recording.databases import policy_alias
from ..recording.recorder import field_values
from ..recording.validators import visible
from .base import RecordedAdmin
from .diff import as_table, fields_of
from .formatting import moment, shown
from .permissions import is_override, may
from .reset import ReasonForm

#: More of what was deleted along is counted, not listed; all of it is restored.
_SHOWN_ALONG = 50


class RestoreForm(ReasonForm):
    """Why, and with what; and which state of the object the operator has looked at."""

    along = forms.BooleanField(required=False, label=_("Restore these as well"), label_suffix="")
    seen = forms.CharField(widget=forms.HiddenInput)


class RestorePage(RecordedAdmin):
    """Lets those who may edit an object bring it back to a version of its history."""

    def get_urls(self) -> list[Any]:
        """With the page that restores the version after a change, or the one before it."""
        view = self.admin_site.admin_view(self.restore_view)
        own = path("<path:object_id>/restore/<str:version>/", view, name="django_ratequota_policychange_restore")
        return [own, *super().get_urls()]

    def render_change_form(
        self, request: Any, context: Any, add: bool = False, change: bool = False, form_url: str = "", obj: Any = None
    ) -> Any:
        """With the ways to the versions that the operator may restore."""
        if obj is not None:
            texts = {"after": _("Restore this version"), "before": _("Restore the previous version")}
            context["restore_links"] = [
                (self.page_url("restore", quote(obj.pk), version), texts[version])
                for version in versions(obj)
                if self._offered(request, obj, version)
            ]
        return super().render_change_form(request, context, add, change, form_url, obj)

    def restore_view(self, request: Any, object_id: str, version: Any) -> Any:
        """GET compares and asks, POST restores."""
        change = self.get_object(request, unquote(object_id))
        if not self.has_view_permission(request, change):
            raise PermissionDenied
        if change is None or version not in versions(change):
            raise Http404
        return self.recorded(self._ask_or_restore, request, change, version)

    def _ask_or_restore(self, request: Any, change: PolicyChange, version: Any) -> Any:
        confirmed = request.method == "POST"
        form = RestoreForm(request.POST) if confirmed else None
        errors: list[str] = []
        # Whoever edits the object in the meantime waits until it is restored, and is not overwritten unseen.
        with transaction.atomic(using=policy_alias(KINDS[change.model])):
            try:
                restoration = plan_restoration(change, version, lock=confirmed)
            except ValidationError as error:
                if not self._may_write(request, KINDS[change.model]):
                    raise PermissionDenied from error
                return self._page_of(request, change, version, None, None, error.messages)
            if not self._may(request, restoration):
                raise PermissionDenied
            if form is not None and form.is_valid():
                if form.cleaned_data["seen"] != restoration.seen:
                    errors.append(gettext("The object was edited in the meantime. Compare again, then restore."))
                elif restoration.differing:
                    try:
                        with transaction.atomic(using=policy_alias(KINDS[change.model])):
                            return self._restore(request, restoration, form.cleaned_data)
                    except ValidationError as error:
                        errors += error.messages
        # As things stand, another try would fail the same way.
        stuck = problems(restoration) if restoration.differing else []
        given = {"reason": form.data.get("reason", ""), "along": form.data.get("along")} if form else {}
        asked = None if stuck else RestoreForm(initial={**given, "seen": restoration.seen})
        errors += [one for one in stuck if one not in errors]
        return self._page_of(request, change, version, restoration, asked, errors)

    def _restore(self, request: Any, restoration: Restoration, given: dict[str, Any]) -> HttpResponseRedirect:
        along = given["along"] and self._may_along(request, restoration)
        said = _said(restoration.change, restoration.version)
        target = restoration.target

        def log(rows: Sequence[Any]) -> None:
            flag = CHANGE if target in rows and restoration.current is not None else ADDITION
            LogEntry.objects.log_actions(request.user.pk, rows, flag, said)

        restore(restoration, actor=request.user, reason=given["reason"] or said, along=along, written=log)
        text = gettext("%(object)s was restored.") % {"object": shown(target)}
        self.message_user(request, text, messages.SUCCESS)
        opts = target._meta
        if self.admin_site.get_model_admin(type(target)).has_view_permission(request, target):
            name = f"{self.admin_site.name}:{opts.app_label}_{opts.model_name}_change"
            return HttpResponseRedirect(reverse(name, args=[quote(target.pk)]))
        return HttpResponseRedirect(self.page_url("change", quote(restoration.change.pk)))

    def _page_of(
        self,
        request: Any,
        change: PolicyChange,
        version: Any,
        restoration: Restoration | None,
        form: RestoreForm | None,
        errors: list[str],
    ) -> Any:
        request.current_app = self.admin_site.name
        along = restoration.along if restoration else ()
        titles = {"before": _("Restore the version before %(date)s"), "after": _("Restore the version of %(date)s")}
        context = {
            **self.admin_site.each_context(request),
            "title": titles[version] % {"date": moment(change.at)},
            "original": gettext("Restore"),  # the end of the breadcrumbs
            "opts": self.opts,
            "media": self.media,
            "has_view_permission": True,
            "object_text": shown(change.object_text),
            "kind": KINDS[change.model]._meta.verbose_name,
            "object_id": change.object_id,
            "errors": [visible(error) for error in errors],
            "form": form,
            "readable": restoration is not None,
            "deleted": restoration is not None and restoration.current is None,
            "differs": bool(restoration and restoration.differing),
            "difference": _difference(restoration, self.get_empty_value_display()) if restoration else "",
            "along": [shown(text) for text in _texts(along[:_SHOWN_ALONG])],
            "along_more": max(0, len(along) - _SHOWN_ALONG),
            "may_along": restoration is not None and self._may_along(request, restoration),
            "back": self.page_url("change", quote(change.pk)),
        }
        return TemplateResponse(request, "admin/django_ratequota/policychange/restore.html", context)

    def _offered(self, request: Any, change: PolicyChange, version: Any) -> bool:
        try:
            return self._may(request, plan_restoration(change, version, along=False))
        except ValidationError:  # its page says why
            return self._may_write(request, KINDS[change.model])

    def _may(self, request: Any, restoration: Restoration) -> bool:
        """Whether the operator may make this edit on the object's own page."""
        model = type(restoration.target)
        if not self._may_write(request, model, restoration.current):
            return False
        if not isinstance(restoration.target, RatePolicy):
            return True
        verb = "add" if restoration.current is None else "change"
        return may(request.user, verb, override=is_override(restoration.target))

    def _may_along(self, request: Any, restoration: Restoration) -> bool:
        for kind, override in {(one.model, one.override) for one in restoration.along}:
            if not self._may_write(request, KINDS[kind]):
                return False
            if KINDS[kind] is RatePolicy and not may(request.user, "add", override=override):
                return False
        return True

    def _may_write(self, request: Any, model: Any, current: Any = None) -> bool:
        """By the model's own admin: to change the object, or without one to add it."""
        if not self.admin_site.is_registered(model):
            return False
        admin = self.admin_site.get_model_admin(model)
        if current is None:
            return bool(admin.has_add_permission(request))
        return bool(admin.has_change_permission(request, current))


def _said(change: PolicyChange, version: str) -> str:
    """What the history says of the restoration."""
    before, after = gettext("restored version before %(date)s"), gettext("restored version of %(date)s")
    return (before if version == "before" else after) % {"date": moment(change.at)}


def _texts(deletions: Sequence[Deletion]) -> list[str]:
    """The deleted objects in words."""
    found = PolicyChange.objects.in_bulk([one.pk for one in deletions])
    return [found[one.pk].object_text for one in deletions if one.pk in found]


def _difference(restoration: Restoration, empty: Any) -> str:
    now = field_values(restoration.current) if restoration.current else {}
    then = field_values(restoration.target)
    known = fields_of(restoration.change.model)
    rows = [(name, known[name], now.get(name), then.get(name)) for name in restoration.differing]
    if restoration.current is None:
        rows = [row for row in rows if row[3] not in (None, "")]
    return as_table(rows, (_("field"), _("now"), _("restored")), empty)
