"""The form that asks about one caller and one request, for the Explain page and the pages that it leads to."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.admin.widgets import AdminIntegerFieldWidget, AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from ...conf import settings
from ...engine.rates import MAX_UNITS
from ...models import METHODS, Endpoint, Plan, RatePolicy
from ...operations.explain import IDENTIFIER, NO_PLAN, ExplainQuery, Explanation, caller_params
from ...operations.subjects import find_accounts, only_account
from ...policies.matching import NO_METHOD
from ...utils.addresses import named_network
from ..pages import AdminPage
from ..subjects import SubjectsPage
from ..widgets import complete_subjects


class ExplainForm(forms.Form):
    """A caller and a request; once valid, ``query`` holds them.

    It is bound to the query string, so that links can be shared.
    """

    ip = forms.CharField(
        label=_("IP address"), required=False, widget=AdminTextInputWidget, help_text=_("For example 203.0.113.7.")
    )
    plan = forms.ChoiceField(
        label=_("Plan"),
        help_text=_(
            "PLAN_RESOLVER cannot run without a request. Choose the plan that it would return. With (none), the "
            "assigned plan or the default plan applies."
        ),
        error_messages={"required": _("Choose the plan that PLAN_RESOLVER would return for this customer.")},
    )
    endpoint = forms.ModelChoiceField(
        Endpoint.objects.all(),
        label=_("Endpoint"),
        required=False,
        to_field_name="name",
        empty_label=_("none"),
        help_text=_("The scope that the code specifies."),
    )
    path = forms.CharField(
        label=_("Path"),
        required=False,
        widget=AdminTextInputWidget,
        help_text=_("The requested path, such as /api/reports/7/, or a route from the list of an endpoint."),
    )
    method = forms.ChoiceField(
        label=_("Method"),
        required=False,
        choices=[*((name, name) for name in (*METHODS, "HEAD")), (NO_METHOD, _("none (check_caller)"))],
    )
    cost = forms.IntegerField(
        label=_("Cost"),
        required=False,
        min_value=0,
        max_value=MAX_UNITS,
        widget=AdminIntegerFieldWidget,
        help_text=_("Units. Empty = the cost declared by the view or the endpoint."),
    )

    def __init__(self, data: Any, *, user: forms.ModelChoiceField[Any], subjects: str) -> None:
        """Take ``user``, the field that finds users, and the address of ``SubjectsPage``."""
        super().__init__(data)
        user.required, user.label, user.help_text = False, _("User"), _("Empty = an anonymous client.")
        user.error_messages["invalid_choice"] = _("There is no such user. Choose a user or enter the id of one.")
        identifiers = {f"{IDENTIFIER}{name}": _identifier_field(name, subjects) for name in settings.identifiers}
        self.fields = {"user": user, "ip": self.fields["ip"], **identifiers, **self.fields}
        plan: Any = self.fields["plan"]
        if settings.plan_resolver:
            slugs = [NO_PLAN, *Plan.objects.values_list("slug", flat=True)]
            plan.choices = [("", _("choose")), *((slug, slug) for slug in slugs)]
        else:
            del self.fields["plan"]

    def clean(self) -> dict[str, Any]:
        """Build ``query``; what of it cannot be read becomes an error of the form."""
        data = self.cleaned_data
        values = {kind: data.get(f"{IDENTIFIER}{kind}") for kind in settings.identifiers}
        identifiers = {kind: value for kind, value in values.items() if value}
        if not self.errors and not (data["user"] or data["ip"] or identifiers):
            raise ValidationError(_("Enter a user, an IP address or another identifier."))
        user, endpoint, slug = data.get("user"), data.get("endpoint"), data.get("plan")
        self.query = ExplainQuery(
            user_id=None if user is None else str(user.pk),
            ip=data.get("ip", ""),
            identifiers=identifiers,
            plan_slug=None if slug in (None, "", NO_PLAN) else slug,
            endpoint="" if endpoint is None else endpoint.name,
            path=data.get("path", ""),
            method=data.get("method") or "GET",
            cost=data.get("cost"),
        )
        for read in (self.query.caller, self.query.request_arguments):
            try:
                read()
            except ValidationError as error:
                self.add_error(None, error)
        return data

    def explain(self) -> Explanation | None:
        """Return the answer; None where the form is empty or has errors."""
        return self.query.explain() if self.is_bound and self.is_valid() else None

    def params(self) -> dict[str, str]:
        """Return the filled-in fields, as the query string of a link back here."""
        if not self.is_bound:
            return {}
        return {name: str(self.data[name]) for name in self.fields if self.data.get(name)}


def explain_form(model_admin: Any, request: Any, data: Any) -> ExplainForm:
    """Return the form for ``data``, unbound where that is empty; it finds the users that the operator may see."""
    user = model_admin.formfield_for_foreignkey(RatePolicy._meta.get_field("user"), request)
    return ExplainForm(data or None, user=user, subjects=model_admin.page_url("subjects"))


def _identifier_field(name: str, subjects: str) -> forms.CharField:
    """Return the field for the caller's value of an identifier."""
    field = forms.CharField(
        label=capfirst(name.replace("_", " ")),
        required=False,
        strip=False,  # blanks belong to the value: it is compared as it is
        widget=AdminTextInputWidget,
        help_text=_("The value of %(name)s in RATEQUOTA['IDENTIFIERS'], for example acme.") % {"name": name},
    )
    complete_subjects(field, subjects, name)
    return field


def data_of(params: Any) -> Any:
    """Return the query string as the form's data; None where it names none of its fields."""
    own = (name == "user" or name in ExplainForm.base_fields or name.startswith(IDENTIFIER) for name in params)
    return params if any(own) else None


def find_caller(model_admin: Any, request: Any, text: str) -> dict[str, str]:
    """Return the query string about a caller: an address, a network, ``kind:value``, or a user; {} = nobody.

    ``acme`` is also the known subject with that value, such as ``tenant:acme``. Raises ``ValidationError`` that lists
    several of them.
    """
    kind, _colon, value = text.partition(":")
    if value and kind in ("user", "ip", *settings.identifiers):
        return caller_params(text)
    if (network := named_network(text)) is not None:
        return {"ip": str(network if "/" in text else network[0])}
    # One kind after another, because there may be hundreds of longer ones of another kind.
    subjects = (f"{kind}:{text}" for kind in settings.identifiers)
    others = {one: "" for one in subjects if one in SubjectsPage(model_admin).beginning(request, one)}
    matches = find_accounts([text]).get(text, {}) | others
    return caller_params(only_account(matches)[0]) if matches else {}


class CallerPage(AdminPage):
    """A page that Explain leads to, about the same caller and request; it returns to Explain."""

    def view(self, request: Any) -> Any:
        """Return the page; redirect to Explain where its form has errors, and once all is done."""
        form = explain_form(self.admin, request, data_of(request.GET))
        explanation = form.explain()
        refusal_id = request.GET.get("id")
        params = {**form.params(), **({"id": refusal_id} if refusal_id else {})}
        back = self.admin.page_url("explain", query=params)
        page = None if explanation is None else self.ask(request, explanation, back)
        return page or HttpResponseRedirect(back)

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page; None once all is done, or with a message why it cannot be."""
        raise NotImplementedError
