"""What the admin pages share: who is acting, how related objects are looked up, and what counts as active."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import SEARCH_VAR
from django.contrib.admin.widgets import AdminTextInputWidget, ForeignKeyRawIdWidget
from django.contrib.auth import get_user_model
from django.db import IntegrityError
from django.http import HttpResponseRedirect
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..models import PolicyChange
from ..recording.publication import when_unpublished
from ..recording.recorder import acting
from .deletion import deleted_objects
from .pages import AdminPage
from .widgets import SafeAutocomplete, UserField

logger = logging.getLogger("django_ratequota")

#: The field of a form that says why it is saved. Models have a field ``reason``, which says why the object exists.
WHY = "change_reason"


class ReasonField(forms.CharField):
    """Why a change is made, for the history. It is no field of the object, so filling it in changes nothing there."""

    def __init__(self, label: Any = None) -> None:
        super().__init__(
            label=label or _("Reason"),
            required=False,
            max_length=PolicyChange._meta.get_field("reason").max_length,
            widget=AdminTextInputWidget,
            help_text=_("Recorded in the history, such as a ticket number or who asked for the change."),
        )

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return False: the admin's own log lists the fields of the object that were edited."""
        return False


class WhyForm(forms.Form):
    """The reason of a save, for pages without a form for one object."""

    change_reason = ReasonField(_("Reason for this change"))


class RecordedAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A model admin with pages of its own. Changes are recorded as the operator's, with the reason they wrote."""

    #: The pages beside Django's own; each adds its URL, and what it shows on the change form.
    pages: tuple[type[AdminPage], ...] = ()

    def get_urls(self) -> list[Any]:
        """Put the addresses of ``pages`` before Django's, whose last one matches every address."""
        return [*(page(self).url_pattern() for page in self.pages), *super().get_urls()]

    def get_fields(self, request: Any, obj: Any = None) -> Any:
        """The fields of the object; the reason has its own place, below them."""
        return [name for name in super().get_fields(request, obj) if name != WHY]

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """The form, with the reason of the change where the operator may save."""
        form: Any = super().get_form(request, obj, change, **kwargs)
        if self._asks_why(request, obj):
            form.base_fields[WHY] = ReasonField(_("Reason for this change"))  # the class was made for this request
        return form

    def _asks_why(self, request: Any, obj: Any) -> bool:
        if obj is not None:
            return self.has_change_permission(request, obj)
        # The reason of a new policy or assignment is its own.
        return self.has_add_permission(request) and not any(f.name == "reason" for f in self.opts.concrete_fields)

    def render_change_form(
        self, request: Any, context: Any, add: bool = False, change: bool = False, form_url: str = "", obj: Any = None
    ) -> Any:
        """With the reason's field below all others, and what ``pages`` show here."""
        form = context["adminform"].form
        context["why"] = [form[WHY]] if WHY in form.fields else []
        for page in self.pages:
            context |= page(self).change_form_context(request, obj)
        return super().render_change_form(request, context, add, change, form_url, obj)

    def get_changelist_instance(self, request: Any) -> Any:
        """The list. A filter's value with a NUL is no value, and PostgreSQL takes none."""
        values = [value for name, given in request.GET.lists() for value in given if name != SEARCH_VAR]
        if any("\x00" in value for value in values):
            raise IncorrectLookupParameters
        return super().get_changelist_instance(request)

    def changeform_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The add and change pages."""
        return self.recorded(super().changeform_view, request, *args, **kwargs)

    def delete_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The delete page."""
        return self.recorded(super().delete_view, request, *args, **kwargs)

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """The list, with its actions and edits in place."""
        context = {"why": WhyForm(request.POST or None), **(extra_context or {})}
        return self.recorded(super().changelist_view, request, context)

    def get_deleted_objects(self, objs: Any, request: Any) -> Any:
        """What the delete pages show; of the rows that go along, the first."""
        return deleted_objects(objs, request, self.admin_site)

    def page_url(self, page: str, *args: Any, query: Mapping[str, str] | None = None) -> str:
        """The address of one of the model's pages: changelist, add, change, or one of ours."""
        url = reverse(f"{self.admin_site.name}:{self.opts.app_label}_{self.opts.model_name}_{page}", args=args)
        return f"{url}?{urlencode(query)}" if query else url

    def recorded(self, view: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the view; its changes are recorded as the operator's, with the reason they wrote."""

        def warn() -> None:
            text = _(
                "The change is saved, but Redis did not answer. Every worker applies it within "
                "%(seconds)s seconds (POLL_SECONDS)."
            )
            params = {"seconds": f"{settings.poll_seconds:g}"}
            self.message_user(request, text % params, messages.WARNING, fail_silently=True)

        try:
            reason = request.POST.get(WHY, "").replace("\x00", "").strip()
            with acting(request.user, reason), when_unpublished(warn):
                return view(request, *args, **kwargs)
        except IntegrityError:
            # Valid when it was looked at, refused when it was written.
            logger.warning("an edit in the admin was refused by the database", exc_info=True)
            text = _(
                "Nothing was saved, because somebody else saved a conflicting change at that "
                "moment. Check the current values, then edit again."
            )
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())


class Lookups(admin.options.BaseModelAdmin):  # type: ignore[type-arg]
    """Looks related objects up by autocomplete where the operator may search them.

    That depends on the project (its user model may be absent from the admin) and on the operator's permissions,
    so it is decided request by request: ``autocomplete_fields`` would fail the system checks (admin.E039, E040).
    """

    @property
    def media(self) -> forms.Media:
        """With what the autocompletes among the filters of a list need."""
        return super().media + SafeAutocomplete(None, self.admin_site).media

    def get_autocomplete_fields(self, request: Any) -> list[str]:
        """The relations whose other side has an admin that can search, and that the operator may look at."""
        return [
            field.name
            for field in self.model._meta.fields
            if field.many_to_one and self.may_search(field.related_model, request)
        ]

    def formfield_for_foreignkey(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """A text field for the user's id where autocomplete cannot be had: a select would list every user."""
        if db_field.name == "user":
            kwargs["form_class"] = UserField
        if db_field.name == "user" and "user" not in self.get_autocomplete_fields(request):
            kwargs["widget"] = ForeignKeyRawIdWidget(db_field.remote_field, self.admin_site)
            kwargs["error_messages"] = {
                "invalid_choice": _("There is no user with the id %(value)s. Enter the id of an existing user.")
            }
        elif db_field.name in self.get_autocomplete_fields(request):
            kwargs["widget"] = SafeAutocomplete(db_field, self.admin_site, using=kwargs.get("using"))
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def may_search(self, model: Any, request: Any) -> bool:
        """Whether an autocomplete finds the model's objects for the operator."""
        if not self.admin_site.is_registered(model):
            return False
        other = self.admin_site.get_model_admin(model)
        return bool(other.get_search_fields(request)) and other.has_view_permission(request)


def user_search_fields(relation: str = "user") -> list[str]:
    """Lookups that find what belongs to a user by the user's name or mail address."""
    model: Any = get_user_model()
    wanted = [model.USERNAME_FIELD, getattr(model, "EMAIL_FIELD", "email")]
    return [f"{relation}__{f.name}" for f in model._meta.concrete_fields if f.name in wanted and not f.is_relation]
