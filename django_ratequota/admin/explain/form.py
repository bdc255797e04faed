"""The form that asks about one caller and one request: what Explain shows, and what its actions act upon."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib.admin.widgets import AdminIntegerFieldWidget, AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from ...conf import settings
from ...engine.rates import MAX_UNITS
from ...models import METHODS, Endpoint, Plan
from ...operations.explain_query import ExplainQuery
from ...policies.identity import FAILED

#: What PLAN_RESOLVER may answer besides a slug; no slug has brackets.
_NO_PLAN = "(none)"


class ExplainForm(forms.Form):
    """Who, where and how much; once valid, ``question`` asks it.

    Bound to a query string, so that links can be shared.
    """

    ip = forms.CharField(
        label=_("IP address"), required=False, widget=AdminTextInputWidget, help_text=_("Such as 203.0.113.7.")
    )
    kind = forms.ChoiceField(
        label=_("Identifier"), required=False, help_text=_("A name from RATEQUOTA['IDENTIFIERS'] …")
    )
    # Blanks belong to the value: it is compared as it is.
    value = forms.CharField(
        label=_("Its value"),
        required=False,
        strip=False,
        widget=AdminTextInputWidget,
        help_text=_("… and what it is for this caller, such as acme."),
    )
    plan = forms.ChoiceField(
        label=_("Plan"),
        required=False,
        help_text=_("PLAN_RESOLVER says the plan, and it needs a request: say its answer here."),
    )
    endpoint = forms.ChoiceField(label=_("Endpoint"), required=False, help_text=_("What the code names …"))
    path = forms.CharField(
        label=_("Path"),
        required=False,
        widget=AdminTextInputWidget,
        help_text=_("… or what is requested: /api/reports/7/, or a route as endpoints list it."),
    )
    method = forms.ChoiceField(
        label=_("Method"), required=False, choices=[(name, name) for name in (*METHODS, "HEAD")]
    )
    cost = forms.IntegerField(
        label=_("Cost"),
        required=False,
        min_value=0,
        max_value=MAX_UNITS,
        widget=AdminIntegerFieldWidget,
        help_text=_("Units; empty = what the endpoint says."),
    )

    def __init__(self, data: Any, *, user: forms.ModelChoiceField[Any]) -> None:
        """``user`` is the field that finds users, as the operator may."""
        super().__init__(data)
        user.required, user.label, user.help_text = False, _("User"), _("Empty = an anonymous caller.")
        user.error_messages["invalid_choice"] = _("There is no such user; choose one, or write the id of one.")
        self.fields = {"user": user, **self.fields}
        names = Endpoint.objects.values_list("name", flat=True)
        self._choose("endpoint", names, _("none named"))
        if settings.identifiers:
            self._choose("kind", settings.identifiers, "—")
        else:
            del self.fields["kind"], self.fields["value"]
        if settings.plan_resolver:
            slugs = Plan.objects.values_list("slug", flat=True)
            self._choose("plan", [_NO_PLAN, *slugs], _("choose"))
        else:
            del self.fields["plan"]

    def _choose(self, name: str, values: Any, empty: Any) -> None:
        field: Any = self.fields[name]
        field.choices = [("", empty), *((value, value) for value in values)]
        field.error_messages["invalid_choice"] = _("%(value)s is not one of the choices.")

    def clean(self) -> dict[str, Any]:
        """Reads caller and place; what cannot be read is told beside its field."""
        given = self.cleaned_data
        kind, value = given.get("kind"), given.get("value")
        if bool(kind) != bool(value) and not {"kind", "value"} & self.errors.keys():
            self.add_error("value" if kind else "kind", _("An identifier is a name and a value: give both."))
        if not self.errors and not (given["user"] or given["ip"] or value):
            raise ValidationError(_("Say who asks: a user, an IP address or another identifier."))
        if "plan" in self.fields and not given.get("plan") and "plan" not in self.errors:
            self.add_error("plan", _("Say what PLAN_RESOLVER would answer for this caller."))
        user, slug = given.get("user"), given.get("plan")
        self.question = ExplainQuery(
            user_id=None if user is None else str(user.pk),
            ip=given.get("ip", ""),
            identifiers={kind: value} if kind and value else {},
            plan_slug=None if slug in (None, "", _NO_PLAN) else slug,
            endpoint=given.get("endpoint", ""),
            path=given.get("path", ""),
            method=given.get("method") or "GET",
            cost=given.get("cost"),
        )
        for read in (self.question.caller, self.question.request_arguments):
            try:
                read()
            except ValidationError as error:
                self.add_error(None, error)
        return given

    def given(self) -> dict[str, str]:
        """What was asked, field by field: the query string of links back here."""
        return {name: str(self.data[name]) for name in self.fields if self.data.get(name)}


def answers(question: ExplainQuery) -> dict[str, str]:
    """What the form would be filled in with to ask this."""
    kind, value = next(iter(question.identifiers.items()), ("", ""))
    if value == FAILED and kind in settings.identifiers:
        kind = ""  # the form wants a value: what is known of them is their address
    given = {
        "user": question.user_id or "",
        "ip": question.ip,
        "kind": kind,
        "value": value,
        "plan": (question.plan_slug or _NO_PLAN) if settings.plan_resolver else "",
        "endpoint": question.endpoint,
        "path": question.path,
        "method": question.method,
        "cost": "" if question.cost is None else str(question.cost),
    }
    return {name: text for name, text in given.items() if text}
