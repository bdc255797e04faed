"""Restores a version from the history: a page of each change, which compares that version with today's object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION, CHANGE, LogEntry
from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.http import Http404, HttpResponseRedirect
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import policy_alias
from ..changes.validators import visible
from ..changes.writer import field_values
from ..models import PolicyChange, RatePolicy
from ..operations.cascades import Deletion
from ..operations.differences import fields_of
from ..operations.restore import KINDS, Restoration, plan_restoration, problems, restore, versions
from .diff import as_table
from .formatting import moment, shown
from .pages import AdminPage
from .permissions import is_override, may, permission_name
from .reset import ReasonForm

#: Most objects deleted along that are listed; more are counted, and all are restored.
_SHOWN_ALONG = 50


class ComparedForm(ReasonForm):
    """The reason, whether to change what stays otherwise, and a hash of the state that the operator compared."""

    also = forms.BooleanField(required=False, label_suffix="")
    seen = forms.CharField(widget=forms.HiddenInput)

    @classmethod
    def asking(cls, seen: str, sent: ComparedForm | None) -> ComparedForm:
        """Return the form that asks about the state with the hash ``seen``, with what was entered in ``sent``."""
        entered = {name: sent.data.get(name) for name in ("reason", "also")} if sent else {}
        return cls(initial={**entered, "seen": seen})


class RestorePage(AdminPage):
    """Compares an object with the version before or after a recorded change, and restores that version."""

    path = "<path:object_id>/restore/<str:version>/"
    name = "restore"

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links to the versions that the operator may restore, and to the object's other changes."""
        texts = {"after": _("Restore this version"), "before": _("Restore the previous version")}
        offered = [version for version in versions(obj) if self._offered(request, obj, version)]
        links = [(self.url(obj, version), texts[version]) for version in offered]
        links.append((self.admin.page_url("save", obj.change_id), _("All changes of this save")))
        if obj.object_id:
            query = {"model": obj.model, "object_id": obj.object_id}
            links.append((self.admin.page_url("changelist", query=query), _("All changes of this object")))
        return links

    def view(self, request: Any, change: PolicyChange, version: Any) -> Any:
        """GET compares and asks, POST restores. The edit needs the permissions of the object's own page."""
        if version not in versions(change):
            raise Http404
        confirmed = request.method == "POST"
        form = ComparedForm(request.POST) if confirmed else None
        errors: list[str] = []
        # The lock makes a concurrent edit wait: nothing is overwritten that the operator has not seen.
        with transaction.atomic(using=policy_alias(KINDS[change.model])):
            try:
                restoration = plan_restoration(change, version, lock=confirmed)
            except ValidationError as error:
                if not self._may_add(request, KINDS[change.model]):
                    raise PermissionDenied from error
                return self._page(request, change, version, None, None, error.messages)
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
        # These problems would fail another try, too.
        remaining = problems(restoration) if restoration.differing else []
        new_form = None if remaining else ComparedForm.asking(restoration.seen, form)
        errors += [problem for problem in remaining if problem not in errors]
        return self._page(request, change, version, restoration, new_form, errors)

    def _restore(self, request: Any, restoration: Restoration, data: dict[str, Any]) -> HttpResponseRedirect:
        along = data["also"] and self._may_along(request, restoration)
        before, after = gettext("restored version before %(date)s"), gettext("restored version of %(date)s")
        message = (before if restoration.version == "before" else after) % {"date": moment(restoration.change.at)}
        target = restoration.target

        def log(rows: Sequence[Any]) -> None:
            flag = CHANGE if target in rows and restoration.current is not None else ADDITION
            LogEntry.objects.log_actions(request.user.pk, rows, flag, message)

        restore(restoration, actor=request.user, reason=data["reason"] or message, along=along, written=log)
        text = gettext("%(object)s was restored.") % {"object": shown(target)}
        self.admin.message_user(request, text, messages.SUCCESS)
        link = self.object_url(request, type(target), target.pk, target)
        return HttpResponseRedirect(link or self.admin.page_url("change", quote(restoration.change.pk)))

    def _page(
        self,
        request: Any,
        change: PolicyChange,
        version: Any,
        restoration: Restoration | None,
        form: ComparedForm | None,
        errors: list[str],
    ) -> Any:
        along = restoration.along if restoration else ()
        titles = {"before": _("Restore the version before %(date)s"), "after": _("Restore the version of %(date)s")}
        context = {
            "title": titles[version] % {"date": moment(change.at)},
            "original": gettext("Restore"),
            "object_text": shown(change.object_text),
            "kind": KINDS[change.model]._meta.verbose_name,
            "object_id": change.object_id,
            "errors": [visible(error) for error in errors],
            "form": form,
            "restoration": restoration,
            "difference": _difference(restoration, self.admin.get_empty_value_display()) if restoration else "",
            "along": [shown(text) for text in _texts(along[:_SHOWN_ALONG])],
            "along_more": max(0, len(along) - _SHOWN_ALONG),
            "may_along": restoration is not None and self._may_along(request, restoration),
            "back": self.admin.page_url("change", quote(change.pk)),
        }
        return self.render(request, "restore.html", context)

    def _offered(self, request: Any, change: PolicyChange, version: Any) -> bool:
        try:
            return self._may(request, plan_restoration(change, version, along=False))
        except ValidationError:  # the page shows why
            return self._may_add(request, KINDS[change.model])

    def _may(self, request: Any, restoration: Restoration) -> bool:
        """Return whether the operator may make this edit on the object's own page."""
        return not missing_permission(self.site, request, restoration.current, restoration.target)

    def _may_along(self, request: Any, restoration: Restoration) -> bool:
        found = {(KINDS[deletion.model], deletion.override) for deletion in restoration.along}
        return all(
            self._may_add(request, model) and (model is not RatePolicy or may(request.user, "add", override=override))
            for model, override in found
        )

    def _may_add(self, request: Any, model: Any) -> bool:
        """Return whether the model's own admin lets the operator add an object."""
        registered = self.site.is_registered(model)
        return registered and bool(self.site.get_model_admin(model).has_add_permission(request))


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


def _texts(deletions: Sequence[Deletion]) -> list[str]:
    """Return the names of the deleted objects."""
    found = PolicyChange.objects.in_bulk([deletion.pk for deletion in deletions])
    return [found[deletion.pk].object_text for deletion in deletions if deletion.pk in found]


def _difference(restoration: Restoration, empty: Any) -> str:
    now = field_values(restoration.current) if restoration.current else {}
    then = field_values(restoration.target)
    known = fields_of(restoration.change.model)
    rows = [(name, known[name], now.get(name), then.get(name)) for name in restoration.differing]
    if restoration.current is None:
        rows = [row for row in rows if row[3] not in (None, "")]
    return as_table(rows, (_("field"), _("now"), _("restored")), empty)
