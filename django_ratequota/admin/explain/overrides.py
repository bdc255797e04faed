"""The pages that ask about temporary overrides, boosts and blocks, add them, and end those in force."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import time, timedelta
from typing import Any, ClassVar

from django import forms
from django.contrib import messages
from django.contrib.admin.widgets import AdminSplitDateTime, AdminTextInputWidget
from django.core.exceptions import ValidationError
from django.http import HttpResponseRedirect
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import saving
from ...exceptions import StoreError
from ...models import RatePolicy
from ...operations import overrides as operations
from ...operations.explain import Explanation, caller_params
from ...operations.impact import NotEstimable, estimate
from ...policies.requests.caller import Caller
from ..base import ChangeReasonForm
from ..formatting import moment, number_text, shown
from ..names import audience_text, caller_names, caller_text, endpoint_text
from ..pages import AdminPage
from ..permissions import check_subject, lacking, may, may_block
from ..widgets import name_date_parts
from .form import CallerPage

#: How long overrides last -> the text of the choice.
_LENGTHS = {
    "hour": (timedelta(hours=1), _("for 1 hour")),
    "hours": (timedelta(hours=2), _("for 2 hours")),
    "day": (timedelta(days=1), _("for 1 day")),
    "week": (timedelta(weeks=1), _("for 1 week")),
}
_NEVER = "never"


class EndField(forms.SplitDateTimeField):
    """A date and a time; without a time, the end of that day."""

    def compress(self, data_list: Any) -> Any:
        """Return the moment."""
        if data_list and not data_list[1]:
            data_list = [data_list[0], time(23, 59, 59)]
        return super().compress(data_list)


class OverrideForm(forms.Form):
    """Until when, and why; the pages add fields about whom and what. Once valid, ``ends_at`` may be None = never."""

    until = forms.ChoiceField(
        label=_("Until"),
        choices=[(name, text) for name, (_length, text) in _LENGTHS.items()],
        initial="hour",
        required=False,
        widget=forms.RadioSelect,
    )
    ends_at = EndField(
        label=_("Or until"),
        required=False,
        widget=AdminSplitDateTime,
        help_text=_("A date replaces the choice above. Without a time, the override ends with that day."),
    )
    reason = forms.CharField(
        label=_("Reason"),
        max_length=RatePolicy._meta.get_field("reason").max_length,
        widget=AdminTextInputWidget,
        help_text=RatePolicy._meta.get_field("reason").help_text,
    )

    def __init__(self, request: Any, fields: Mapping[str, forms.Field], *, endless: bool = False) -> None:
        """``endless`` offers an override that somebody has to end."""
        super().__init__(request.POST if request.method == "POST" else None)
        if endless:
            until: Any = self.fields["until"]
            until.choices = [*until.choices, (_NEVER, _("until somebody ends it"))]
        name_date_parts(self.fields["ends_at"])  # type: ignore[arg-type]
        self.fields = {**fields, **self.fields}

    def clean(self) -> None:
        """Work the end out: the date if one was entered, else the choice."""
        values = self.cleaned_data
        if not self.errors and not values["ends_at"]:
            if not (chosen := values["until"]):
                self.add_error("until", _("Choose a duration or enter a date."))
            elif chosen != _NEVER:
                values["ends_at"] = timezone.now().replace(microsecond=0) + _LENGTHS[chosen][0]


class OverridePage(AdminPage):
    """Asks with an ``OverrideForm``; adds the overrides once the operator has confirmed, and ends those in force."""

    css = ("django_ratequota/explain.css",)
    title: ClassVar[Any]
    lead: ClassVar[Any]
    button: ClassVar[Any]
    #: What it says of an override that it has ended, and of one that had ended already.
    ended: ClassVar[Any]
    gone: ClassVar[Any]

    def text(self, override: RatePolicy) -> str:
        """Return in a sentence that the override was added."""
        raise NotImplementedError

    def until(self, override: RatePolicy) -> str:
        """Return until when an override in force lasts."""
        raise NotImplementedError

    def asking(self, request: Any, form: Any, in_force: Mapping[str, tuple[RatePolicy, str]], **context: Any) -> Any:
        """Return the page; ``in_force`` has what the button to end an override sends, and for whom that is."""
        listed = [
            (name, override, who, self.until(override), ChangeReasonForm(auto_id=f"id_{name}_%s"))
            for name, (override, who) in in_force.items()
        ]
        common = {"title": self.title, "lead": self.lead, "button": self.button, "in_force": listed, "fields": form}
        return self.render(request, "override.html", {**common, **context}, form)

    def end(self, request: Any, own: Iterable[RatePolicy], users: Mapping[str, str]) -> None:
        """End the overrides, which are for one audience: there may be another one that was sent twice."""
        done = ""
        with saving(RatePolicy):
            for override in own:
                done = str(self.ended) % {"audience": audience_text(override, users)}
                operations.end(override)
                self.admin.log_change(request, override, done)
        self.admin.message_user(request, done or self.gone, messages.SUCCESS if done else messages.WARNING)

    def add(self, request: Any, form: OverrideForm, overrides: Mapping[str, RatePolicy]) -> bool:
        """Save the overrides, by the form's field that chose each, all or none; False = the form has errors now."""
        for field, override in overrides.items():
            override.ends_at, override.reason = form.cleaned_data["ends_at"], form.cleaned_data["reason"]
            _validate(override, form, field)
            try:
                check_subject(request.user, override.subject)
            except ValidationError as error:
                form.add_error(field, error)
        if form.errors:
            return False
        with saving(RatePolicy):
            texts = [self._add(request, override) for override in overrides.values()]
        for text in texts:
            self.admin.message_user(request, text, messages.SUCCESS)
        return True

    def _add(self, request: Any, override: RatePolicy) -> str:
        text = self.text(override)
        override.save()
        self.admin.log_addition(request, override, text)
        link = self.admin.page_url("change", override.pk)
        return format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))


def _validate(override: RatePolicy, form: OverrideForm, field: str) -> None:
    """Add the errors of the override to the form: those of the rates to ``field``, others once."""
    try:
        override.full_clean(exclude={one.name for one in RatePolicy._meta.fields} - {"rates", "ends_at"})
    except ValidationError as error:
        for name, errors in error.error_dict.items():
            place = field if name == "rates" else name
            if place not in form.errors:
                form.add_error(place if place in form.fields else None, errors)


class BoostPage(CallerPage, OverridePage):
    """Proposes twice the rates of each ``policy`` in the query; one whose rates are emptied is left out."""

    name = "boost"
    title, button = _("Boost"), _("Yes, boost")
    lead = _("Temporary overrides. They end by themselves. Units already used stay used.")
    ended = _("The override has ended: %(audience)s.")
    gone = _("That override has already ended.")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may grant overrides."""
        return may(request.user, "add", override=True) and super().has_permission(request, obj)

    def ask(self, request: Any, explanation: Explanation, back: str) -> Any:
        """Return the page; None once the boosts are granted, or with a message why there are none."""
        ids = request.GET.getlist("policy")
        granted = {
            pk: boost
            for pk, boost in operations.boosts_in_force(explanation, ids).items()
            if not lacking(request.user, "change", boost)
        }
        names = caller_names(boost.subject for boost in granted.values())
        if "end" in request.POST:
            own = [granted[pk] for pk in request.POST.getlist("end") if pk in granted]
            self.end(request, own, names)
            return None
        try:
            found = operations.propose_boosts(explanation, ids)
        except ValidationError as error:
            if not granted or request.method == "POST":
                self.admin.message_user(request, " ".join(error.messages), messages.ERROR)
                return None
            found = []  # such as an unlimited one, which can be ended
        proposals = {f"{winner.pk}-rates": (winner, boost) for winner, boost in found}
        form = OverrideForm(request, {name: self._rates(request, *pair) for name, pair in proposals.items()})
        if form.is_valid():
            boosts = {name: boost for name, (_winner, boost) in proposals.items() if form.cleaned_data[name]}
            for name, boost in boosts.items():
                boost.rates = form.cleaned_data[name]
                try:
                    operations.refuse_lower(boost, proposals[name][0])
                except ValidationError as error:
                    form.add_error(name, error.messages)
            if not boosts:
                form.add_error(None, _("Enter rates for at least one policy."))
            elif form.is_valid() and self.add(request, form, boosts):
                return None
        names |= caller_names(boost.subject for _winner, boost in found)
        in_force = {
            pk: (boost, f"{endpoint_text(boost.endpoint)}: {audience_text(boost, names)}")
            for pk, boost in granted.items()
        }
        rows = [
            (winner, endpoint_text(winner.endpoint), audience_text(boost, names), form[name])
            for name, (winner, boost) in proposals.items()
        ]
        fields = [field for field in form if field.name not in proposals]
        button = self.button if found else ""
        return self.asking(request, form, in_force, rows=rows, fields=fields, button=button, back=back)

    def text(self, override: RatePolicy) -> str:
        """Return what the boost grants."""
        endpoint, end = endpoint_text(override.endpoint), moment(override.ends_at)
        words = {"endpoint": endpoint, "rates": override.rates, "end": end}
        return gettext("Boost granted for %(endpoint)s: %(rates)s until %(end)s.") % words

    def until(self, override: RatePolicy) -> str:
        """Return until when the boost lasts."""
        return gettext("In force until %(end)s") % {"end": moment(override.ends_at)}

    def _rates(self, request: Any, winner: RatePolicy, boost: RatePolicy) -> Any:
        """Return the field of the boost's rates."""
        field = self.admin.formfield_for_dbfield(
            RatePolicy._meta.get_field("rates"), request=request, required=False, initial=boost.rates
        )
        words = {"rates": shown(winner.rates), "id": winner.pk}
        label = gettext("Rates instead of %(rates)s (policy %(id)s)") % words
        attrs = {"aria-label": label, "class": "vTextField ratequota-rates", "dir": "ltr", "spellcheck": "false"}
        field.widget.attrs |= attrs
        return field


class BlockPage(OverridePage):
    """Asks whom to block, and until when, and says who would be hit; shows the blocks in force, to end them."""

    name = "block"
    title, button = _("Block"), _("Yes, block")
    lead = _("A block refuses every request at once. It takes precedence over all other policies.")
    ended = _("No longer blocked: %(audience)s.")
    gone = _("That block has already ended.")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may block callers."""
        return may_block(request.user)

    def view(self, request: Any) -> Any:
        """GET shows the form; POST blocks, or ends the block whose id is in ``end``."""
        caller, ip = request.GET.get("caller", ""), request.GET.get("ip", "")
        names = operations.block_targets(caller, ip)
        users = caller_names(names)
        names = [name for name in names if not name.startswith("user:") or name in users]  # without deleted users
        back = self.admin.page_url("explain", query=caller_params(caller))
        if request.GET.get("from") == "traffic":  # which shows the block of a network, too
            back = self.admin.page_url("traffic")
        if not names:
            text = gettext("Only users, subjects and addresses can be blocked, not %(caller)s.")
            self.admin.message_user(request, text % {"caller": shown(caller) or "—"}, messages.ERROR)
            return HttpResponseRedirect(back)
        blocked = operations.blocks_in_force([name for name in names if may_block(request.user, name)])
        if "end" in request.POST:
            self.end(request, blocked.get(request.POST["end"], []), users)
            return HttpResponseRedirect(back)
        proposed = {name: operations.propose_block(name) for name in names}
        choices = [(name, f"{caller_text(name, users)}: {_recent(block)}") for name, block in proposed.items()]
        radio = forms.RadioSelect(attrs={"autofocus": True})
        target = forms.ChoiceField(label=_("Who"), choices=choices, initial=choices[0][0], widget=radio)
        form = OverrideForm(request, {"target": target}, endless=True)
        if form.is_valid() and self.add(request, form, {"target": proposed[form.cleaned_data["target"]]}):
            # Where it began in Explain, the same page shows the block and how to end it.
            return HttpResponseRedirect(back if "from" in request.GET else request.get_full_path())
        operator = Caller(request)
        cautions = (operations.block_caution(block, operator) for block in proposed.values())
        in_force = {name: (own[0], caller_text(name, users)) for name, own in blocked.items()}
        return self.asking(request, form, in_force, cautions=[*filter(None, cautions)], back=back)

    def text(self, override: RatePolicy) -> str:
        """Return who is blocked, and until when."""
        # Not the audience first, because the admin begins messages with a capital letter.
        return f"{self.until(override)}: {audience_text(override, caller_names([override.subject]))}."

    def until(self, override: RatePolicy) -> str:
        """Return until when the audience is blocked."""
        return _until(override)


def block_links(
    model_admin: Any, request: Any, pairs: Iterable[tuple[str, str]], origin: str = ""
) -> dict[tuple[str, str], dict[str, str]]:
    """Return the link to the page for each (caller, address), with one query for those that are blocked.

    Pairs without anybody to block have none, and so has an operator without the permission. ``origin`` is the name of
    the page with the links.
    """
    names = {pair: [one for one in operations.block_targets(*pair) if may_block(request.user, one)] for pair in pairs}
    blocked = operations.blocks_in_force({name for own in names.values() for name in own})
    links = {}
    for (caller, ip), own in names.items():
        if own:
            query = {name: text for name, text in (("caller", caller), ("ip", ip), ("from", origin)) if text}
            block = next((blocked[name][0] for name in own if name in blocked), None)
            links[caller, ip] = {
                "url": model_admin.page_url("block", query=query),
                "text": _("Block…") if block is None else _("%s: End it…") % _until(block),
            }
    return links


def _until(block: RatePolicy) -> str:
    if block.ends_at is None:
        return gettext("Blocked until somebody ends it")
    return gettext("Blocked until %(end)s") % {"end": moment(block.ends_at)}


def _recent(block: RatePolicy) -> str:
    """Return what the block would have refused in the last hour."""
    try:
        impact = estimate(block, 1)
    except (NotEstimable, StoreError):
        return gettext("recent requests unknown")
    words = {"requests": number_text(impact.refused_requests), "callers": number_text(impact.refused_clients)}
    text = ngettext(
        "%(requests)s request in the last hour", "%(requests)s requests in the last hour", impact.refused_requests
    )
    if impact.refused_clients > 1:
        text = gettext("%(requests)s requests from %(callers)s customers in the last hour")
    return (gettext("at least %s") % text if impact.share < 1 else text) % words
