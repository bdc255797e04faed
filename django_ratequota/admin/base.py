"""Base classes of the model admins: recorded changes with a reason, their own pages, warnings, and autocomplete."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR
from django.contrib.admin.widgets import AdminTextInputWidget
from django.contrib.auth import get_user_model
from django.db import IntegrityError, transaction
from django.http import HttpResponseRedirect
from django.utils.functional import cached_property
from django.utils.module_loading import import_string
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..changes.databases import commits, policy_alias, saving
from ..changes.validators import primary_key
from ..changes.writer import changed_by
from ..conf import settings
from ..models import Endpoint, Plan, PolicyChange, RatePolicy, TrackedModel
from ..models.fields import SubjectField
from ..utils.log import logger
from .deletion import CountsDeleted
from .formatting import shown
from .fresh_fields import FreshForm
from .names import set_display_names
from .pages import AdminPage, may_view, model_url, show_mode
from .permissions import check_subject
from .search import MOST_WORDS, SearchesRelated, words_of
from .widgets import SafeAutocomplete, complete_subjects, name_date_parts

#: The form field for the reason of a change. The models' own field ``reason`` is the reason why an object exists.
REASON_FIELD = "change_reason"
_ROW_KEY = re.compile(r"form-\d+-id")
#: Maximum number of rows of a list with counts next to filter choices, because each filter's query reads all rows.
_MOST_COUNTED = 10_000
#: Maximum number of warnings after one save.
_MAX_WARNINGS = 10
#: Policies that a warning names; more are counted.
_MAX_NAMES = 3


class ReasonField(forms.CharField):
    """The reason of a change, for the history; it is not stored in the object."""

    def __init__(self, label: Any = None) -> None:
        super().__init__(
            label=label or _("Reason"),
            required=False,
            max_length=PolicyChange._meta.get_field("reason").max_length,
            widget=AdminTextInputWidget,
            help_text=_("A ticket number, for example. Shown in the history."),
        )

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Return False: the admin's own log lists the fields of the object that were edited."""
        return False


class ChangeReasonForm(forms.Form):
    """The reason of a change, for pages that have no form of one object."""

    change_reason = ReasonField(_("Reason for this change"))


class RecordedAdmin(CountsDeleted, SearchesRelated):
    """A model admin with pages of its own, whose changes are recorded with the operator and their reason."""

    #: The pages beside Django's own, as paths of their classes below this package; each adds its URL, and its
    #: links on the change form. They are imported with the first URL, for only the admin's visitors need them.
    pages: tuple[str, ...] = ()
    form = FreshForm
    list_per_page = 50
    #: django-unfold asks its own model admins whether their lists and forms link to the page that adds a row.
    show_add_link = True

    class Media:
        css = {"all": ["django_ratequota/admin.css"]}

    def get_urls(self) -> list[Any]:
        """Put the addresses of ``pages`` before Django's, whose last one matches every address."""
        return [*(page.url_pattern() for page in self.own_pages), *super().get_urls()]

    @cached_property
    def own_pages(self) -> list[AdminPage]:
        """The pages of ``pages``."""
        return [import_string(f"{__package__}.{path}")(self) for path in self.pages]

    def page(self, name: str) -> Any:
        """Return the page of this name."""
        return next(page for page in self.own_pages if page.name == name)

    def get_fields(self, request: Any, obj: Any = None) -> Any:
        """Return the fields of the object; the reason is rendered below them."""
        return [name for name in super().get_fields(request, obj) if name != REASON_FIELD]

    def get_form(self, request: Any, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form, with a field for the reason where the operator may save."""
        form: Any = super().get_form(request, obj, change, **kwargs)
        if self._has_reason_field(request, obj):
            # The class was made for this request.
            form.base_fields[REASON_FIELD] = ReasonField(_("Reason for this change"))
        return form

    def _has_reason_field(self, request: Any, obj: Any) -> bool:
        if obj is not None:
            return self.has_change_permission(request, obj)
        # A new policy or assignment is recorded with its own reason.
        return self.has_add_permission(request) and not any(f.name == "reason" for f in self.opts.concrete_fields)

    def render_change_form(self, request: Any, context: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the field for the reason, and the links of ``pages``."""
        form, obj = context["adminform"].form, kwargs.get("obj")
        context["change_reason_form"] = [form[REASON_FIELD]] if REASON_FIELD in form.fields else []
        context["page_links"] = [] if obj is None else self.links(request, obj)
        return super().render_change_form(request, context, *args, **kwargs)

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the links, (address, text), that the form of ``obj`` has: those to ``pages``."""
        return [link for page in self.own_pages for link in page.links(request, obj)]

    def get_changelist_instance(self, request: Any) -> Any:
        """Return the list, its subjects with names, without counts in the filters of a long one.

        A filter value with a NUL is refused, because PostgreSQL raises an error for it.
        """
        if any("\x00" in value for name, values in request.GET.lists() for value in values if name != SEARCH_VAR):
            raise IncorrectLookupParameters
        changelist = super().get_changelist_instance(request)
        if len(words_of(changelist.query)) > MOST_WORDS:
            text = gettext("Search for at most %(most)d words.") % {"most": MOST_WORDS}
            self.message_user(request, text, messages.ERROR)
        if (changelist.full_result_count or 0) > _MOST_COUNTED:
            changelist.add_facets = False
        if "_save" in request.POST:
            self._show_sent_rows(request, changelist)
        if settings.subject_names and hasattr(self.model, "subject"):
            set_display_names(changelist.result_list)
        return changelist

    def _show_sent_rows(self, request: Any, changelist: Any) -> None:
        """Give the list the rows that were sent, because its filters may leave out by now what it must show again."""
        sent = [primary_key(self.model, pk) for name, pk in request.POST.items() if _ROW_KEY.fullmatch(name)]
        rows = changelist.apply_select_related(changelist.root_queryset.filter(pk__in={*sent} - {None}))
        found = {row.pk: row for row in rows}
        if found.keys() == {*sent}:
            changelist.result_list = [found[pk] for pk in sent]

    def changeform_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Show the add or change page, and record what it saves."""
        show_mode(self, request)
        return self.run_recorded(super().changeform_view, request, *args, saves=True, **kwargs)

    def delete_view(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Show the delete page, and record the deletion."""
        return self.run_recorded(super().delete_view, request, *args, saves=True, **kwargs)

    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        """Show the list, and record its actions and edits."""
        show_mode(self, request)
        context = {"change_reason_form": ChangeReasonForm(request.POST or None), **(extra_context or {})}
        return self.run_recorded(super().changelist_view, request, context, saves=True)

    def history_view(self, request: Any, object_id: str, extra_context: Any = None) -> Any:
        """Show the object's saves, with reasons and differences; Django's log to those who may not view them."""
        obj = self.get_object(request, unquote(object_id)) if issubclass(self.model, TrackedModel) else None
        viewable = obj is not None and self.has_view_permission(request, obj)
        if obj is None or not viewable or not may_view(self.admin_site, PolicyChange, request):
            return super().history_view(request, object_id, extra_context)
        of_object = {"model": self.opts.model_name, "object_id": obj.pk}
        query = {"touched_plan": obj.pk} if self.model is Plan else of_object
        return HttpResponseRedirect(model_url(self.admin_site, PolicyChange, "changelist", query=query))

    def page_url(self, page: str, *args: Any, **query: Any) -> str:
        """Return the address of a page of this model, as ``model_url``."""
        return model_url(self.admin_site, self.model, page, *args, **query)

    def run_recorded(self, view: Any, request: Any, *args: Any, saves: bool = False, **kwargs: Any) -> Any:
        """Run the view, and record its changes with the operator and the reason in the form.

        With ``saves``, a POST is one save from its first query on: so it reads what it will write. When the database
        refuses the write, show a message instead.
        """

        def warn() -> None:
            text = _(
                "The change is saved, but Redis did not answer. Every worker applies it within "
                "%(seconds)s seconds (POLL_SECONDS)."
            )
            params = {"seconds": f"{settings.poll_seconds:g}"}
            self.message_user(request, text % params, messages.WARNING, fail_silently=True)

        try:
            reason = request.POST.get(REASON_FIELD, "").replace("\x00", "").strip()
            in_turn = saving(self.model) if saves and request.method == "POST" else nullcontext()
            with changed_by(request.user, reason, unpublished=warn), in_turn:
                return view(request, *args, **kwargs)
        except IntegrityError:
            # The forms were valid, but another request wrote first.
            logger.warning("an edit in the admin was refused by the database", exc_info=True)
            text = _(
                "Your change was not saved, because somebody else saved a conflicting change at the same time. Check "
                "the current values and try again."
            )
            self.message_user(request, text, messages.ERROR)
            return HttpResponseRedirect(request.get_full_path())


class WarnsOnSave(RecordedAdmin):
    """The admin of policies, or of objects with a table of them. Every save is accepted.

    It warns of policies and endpoints without the effect that one would expect.
    """

    def save_related(self, request: Any, form: Any, formsets: Any, change: bool) -> None:
        """Save the tables, and advise after the commit, because other saves wait for this one until then.

        With AUTOCOMMIT off, the project commits and Django calls no hook, so the advice is given at once.
        """
        super().save_related(request, form, formsets, change)
        advise, alias = partial(self._advise, request, form.instance, formsets), policy_alias(self.model)
        if commits(alias):
            transaction.on_commit(advise, using=alias, robust=True)
        else:
            advise()

    def _advise(self, request: Any, saved: Any, formsets: Any) -> None:
        """Show the advice on the saved policies, and on the endpoint: each sentence once."""
        from ..operations.advice import about_endpoint, about_saved  # which setting up Django does not need

        rows = [saved] if isinstance(saved, RatePolicy) else []
        for formset in formsets:
            if formset.model is RatePolicy:
                rows += [*formset.new_objects, *(policy for policy, _fields in formset.changed_objects)]
        endpoint = saved if isinstance(saved, Endpoint) else getattr(saved, "endpoint", None)
        advice: list[tuple[Any, list[str]]] = [] if endpoint is None else [(endpoint, about_endpoint(endpoint))]
        advice += zip(rows, about_saved(rows), strict=True)
        named: dict[str, list[str]] = {}
        for row, texts in advice:
            for text in texts:
                named.setdefault(text, []).append(shown(row))
        for text, names in islice(named.items(), _MAX_WARNINGS):
            listed, more = ", ".join(names[:_MAX_NAMES]), len(names) - _MAX_NAMES
            if more > 0:
                listed += f" {ngettext('and %(count)d more', 'and %(count)d more', more)}" % {"count": more}
            self.message_user(request, f"{listed}: {text}", messages.WARNING)


class AutocompleteAdmin(admin.options.BaseModelAdmin):  # type: ignore[type-arg]
    """A model admin or inline with autocomplete fields for the related objects that the operator may search.

    Which these are depends on the project (its user model may not be in the admin) and on the operator's permissions,
    so it is decided per request: ``autocomplete_fields`` would fail the system checks (admin.E039, E040).
    """

    @property
    def media(self) -> forms.Media:
        """Add the files of the autocompletes among the filters of a list, and of fields for subjects."""
        own = forms.Media(js=["django_ratequota/subjects.js"])
        return super().media + SafeAutocomplete(None, self.admin_site).media + own

    def get_autocomplete_fields(self, request: Any) -> list[str]:
        """Return the foreign keys to models that the operator may view, with an admin that has a search."""
        return [
            field.name
            for field in self.model._meta.fields
            if field.many_to_one and self.may_search(field.related_model, request)
        ]

    def formfield_for_dbfield(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """Return the field; one for a subject completes those that are known, and refuses wide networks to some."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if isinstance(db_field, SubjectField) and field is not None:
            complete_subjects(field, model_url(self.admin_site, RatePolicy, "subjects"))
            field.validators.append(partial(check_subject, request.user))
        if isinstance(field, forms.SplitDateTimeField):
            name_date_parts(field)
        return field

    def formfield_for_foreignkey(self, db_field: Any, request: Any, **kwargs: Any) -> Any:
        """Return the field; a text field for the user's id without autocomplete, as a select would list all users."""
        if db_field.name in self.get_autocomplete_fields(request):
            kwargs["widget"] = SafeAutocomplete(db_field, self.admin_site, using=kwargs.get("using"))
        elif db_field.name == "user":
            unknown = _("There is no user with the id %(value)s. Enter the id of an existing user.")
            kwargs |= {"widget": AdminTextInputWidget, "error_messages": {"invalid_choice": unknown}}
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def may_search(self, model: Any, request: Any) -> bool:
        """Return whether autocomplete works for the model and this operator."""
        allowed = may_view(self.admin_site, model, request)
        return allowed and bool(self.admin_site.get_model_admin(model).get_search_fields(request))


def user_search_fields(relation: str = "user") -> list[str]:
    """Return the lookups that search by a related user's name or email address."""
    model: Any = get_user_model()
    names = [model.USERNAME_FIELD, getattr(model, "EMAIL_FIELD", "email")]
    return [f"{relation}__{f.name}" for f in model._meta.concrete_fields if f.name in names and not f.is_relation]
