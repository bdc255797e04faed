"""Blocks a caller, an address or its network until a time; and ends such blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpResponseRedirect
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import policy_alias
from ...exceptions import StoreError
from ...models import Endpoint, RatePolicy
from ...operations import blocks
from ...operations.explain_query import ExplainQuery
from ...operations.impact import estimate
from ...operations.impact_audience import NotEstimable
from ...policies.requests.caller import Caller
from ..base import ChangeReasonForm
from ..formatting import moment, number_text, shown
from ..names import audience_text, caller_names, described
from ..pages import AdminPage
from ..permissions import may_block
from .dated import dated_form
from .form import form_data

_LENGTHS = ("hour", "day", "week")


class BlockPage(AdminPage):
    """Asks whom to block, where and until when, and says who would be hit; shows the blocks in force, to end them."""

    path = "block/"
    name = "block"
    media = forms.Media(css={"all": ["django_ratequota/explain.css"]})

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may block callers."""
        return may_block(request.user)

    def view(self, request: Any) -> Any:
        """GET shows the form; POST blocks, or ends the block whose id is in ``end``."""
        caller, ip = request.GET.get("caller", ""), request.GET.get("ip", "")
        names = blocks.targets(caller, ip)
        users = caller_names(names)
        names = [name for name in names if not name.startswith("user:") or name in users]  # without deleted users
        endpoint = Endpoint.objects.filter(name=request.GET.get("endpoint", "").replace("\x00", "")).first()
        back = self._back(request, caller, endpoint)
        if not names:
            text = gettext("%(caller)s cannot be blocked: it names no user, subject or address.")
            self.admin.message_user(request, text % {"caller": shown(caller) or "—"}, messages.ERROR)
            return HttpResponseRedirect(back)
        in_force = list(blocks.blocks_in_force(names).values())
        if "end" in request.POST:
            self._end(request, in_force, users)
            return HttpResponseRedirect(back)
        proposed = {name: blocks.propose_block(name) for name in names}
        form = self._form(request, proposed, users, endpoint)(
            request.POST or None, instance=next(iter(proposed.values()))
        )
        if form.is_bound and form.is_valid():
            self._block(request, form, users, endpoint)
            return HttpResponseRedirect(back)
        operator = Caller(request)
        context = {
            "title": _("Block"),
            "form": form,
            "cautions": [text for block in proposed.values() for text in blocks.cautions(block, operator)],
            "in_force": [
                (block, audience_text(block, users), _until(block), ChangeReasonForm(auto_id=f"id_{block.pk}_%s"))
                for block in _longest(in_force)
            ],
            "back": back,
        }
        return self.render(request, "block.html", context, form)

    def _back(self, request: Any, caller: str, endpoint: Any) -> str:
        if request.GET.get("from") == "usage":
            return str(self.admin.page_url("usage"))
        params = form_data(ExplainQuery.for_caller(caller, endpoint=endpoint.name if endpoint else ""))
        return str(self.admin.page_url("explain", query=params))

    def _form(self, request: Any, proposed: dict[str, RatePolicy], users: Mapping[str, str], endpoint: Any) -> Any:
        targets = [(name, f"{described(name, users)}: {_recent(block)}") for name, block in proposed.items()]
        radio = forms.RadioSelect(attrs={"autofocus": True})
        fields: dict[str, Any] = {
            "target": forms.ChoiceField(label=_("Who"), choices=targets, initial=targets[0][0], widget=radio)
        }
        if endpoint is not None:
            places = [("", _("all endpoints")), (endpoint.name, _("only %(name)s") % {"name": shown(endpoint.name)})]
            fields["place"] = forms.ChoiceField(
                label=_("Where"), choices=places, initial="", required=False, widget=forms.RadioSelect
            )
        return dated_form(self.admin, request, fields, _LENGTHS, open_ended=True)

    def _block(self, request: Any, form: Any, users: Mapping[str, str], endpoint: Any) -> None:
        data = form.cleaned_data
        block = blocks.propose_block(data["target"], endpoint if data.get("place") else None)
        block.ends_at, block.reason = data["ends_at"], data["reason"]
        with transaction.atomic(using=policy_alias(RatePolicy)):
            block.save()
            words = {"audience": audience_text(block, users), "until": _until(block)}
            text = gettext("%(audience)s: %(until)s.") % words
            self.admin.log_addition(request, block, text)
        link = self.admin.page_url("change", block.pk)
        message = format_html('{} <a href="{}">{}</a>', text, link, gettext("See the override."))
        self.admin.message_user(request, message, messages.SUCCESS)

    def _end(self, request: Any, in_force: Iterable[list[RatePolicy]], users: Mapping[str, str]) -> None:
        """End the block, and all others of the same audience at the same place, such as one that was sent twice."""
        found = ((own, block) for own in in_force for block in own if str(block.pk) == request.POST["end"])
        own, chosen = next(found, ([], None))
        if chosen is None:
            self.admin.message_user(request, gettext("That block has ended already."), messages.WARNING)
            return
        words = {"audience": audience_text(chosen, users)}
        left = [
            shown(b.endpoint.name) if b.endpoint else gettext("all endpoints")
            for b in _longest([own])
            if b.endpoint_id != chosen.endpoint_id
        ]
        text = gettext("%(audience)s is not blocked any more.") % words
        if left:
            words["endpoints"] = ", ".join(left)
            text = gettext("That block of %(audience)s has ended. Another one is in force: %(endpoints)s.") % words
        with transaction.atomic(using=policy_alias(RatePolicy)):
            for block in own:
                if block.endpoint_id == chosen.endpoint_id:
                    blocks.end_block(block)
                    self.admin.log_change(request, block, text)
        self.admin.message_user(request, text, messages.WARNING if left else messages.SUCCESS)


class BlockLinks:
    """Makes links to the page for the callers of another page, with one query for those that are blocked."""

    def __init__(self, model_admin: Any, request: Any, callers: Iterable[tuple[str, str]], origin: str = "") -> None:
        """``callers`` are the (caller, address) pairs that links may be wanted for; ``origin`` is the page's name."""
        self._admin, self._origin = model_admin, origin
        self._offered = may_block(request.user)
        names = {name for pair in callers for name in blocks.targets(*pair)} if self._offered else set()
        self._in_force = blocks.blocks_in_force(names)

    def link(self, caller: str, ip: str = "", endpoint: str = "") -> dict[str, str] | None:
        """Return the link's address and text; None where there is nothing to block, or no permission."""
        names = blocks.targets(caller, ip) if self._offered else []
        if not names:
            return None
        query = {"caller": caller, "ip": ip, "endpoint": endpoint, "from": self._origin}
        url = self._admin.page_url("block", query={name: text for name, text in query.items() if text})
        block = next((self._in_force[name][0] for name in names if name in self._in_force), None)
        return {"url": url, "text": _("Block…") if block is None else _("%s: End it…") % _until(block)}


def _longest(in_force: Iterable[list[RatePolicy]]) -> list[RatePolicy]:
    """Return of each audience at each place the block that ends last."""
    found: dict[tuple[int, Any], RatePolicy] = {}
    for number, own in enumerate(in_force):
        for block in own:
            found.setdefault((number, block.endpoint_id), block)
    return list(found.values())


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
        text = gettext("%(requests)s requests of %(callers)s callers in the last hour")
    return (gettext("at least %s") % text if impact.share < 1 else text) % words
