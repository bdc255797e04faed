"""Blocks a caller, an address or its network until a time; and ends such blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.db import transaction
from django.http import HttpResponseRedirect
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
from ..names import audience_text, caller_names, described, endpoint_text
from ..permissions import may_block
from .form import form_data
from .override import Ending, OverrideForm, OverridePage


class BlockForm(OverrideForm):
    """Which of the names is blocked, and whether everywhere; each choice says what it would have refused."""

    lengths = ("hour", "day", "week")

    def __init__(
        self, request: Any, model_admin: Any, *, names: Iterable[str], users: Mapping[str, str], endpoint: Any
    ) -> None:
        self._users, self._endpoint = users, endpoint
        self.proposed = {name: blocks.propose_block(name) for name in names}
        targets = [(name, f"{described(name, users)}: {_recent(block)}") for name, block in self.proposed.items()]
        radio = forms.RadioSelect(attrs={"autofocus": True})
        fields: dict[str, forms.Field] = {
            "target": forms.ChoiceField(label=_("Who"), choices=targets, initial=targets[0][0], widget=radio)
        }
        if endpoint is not None:
            places = [("", _("all endpoints")), (endpoint.name, _("only %(name)s") % {"name": shown(endpoint.name)})]
            fields["place"] = forms.ChoiceField(
                label=_("Where"), choices=places, initial="", required=False, widget=forms.RadioSelect
            )
        endings = {"never": Ending(None, _("until somebody ends it"))}
        super().__init__(request, model_admin, fields=fields, endings=endings)

    def chosen(self, values: dict[str, Any]) -> Iterator[tuple[str, RatePolicy]]:
        """Yield the block."""
        block = self.proposed[values["target"]]
        block.endpoint = self._endpoint if values.get("place") else None
        yield "target", block

    def text(self, field: str, override: RatePolicy) -> str:
        """Return who is blocked, and until when."""
        words = {"audience": audience_text(override, self._users), "until": _until(override)}
        return gettext("%(audience)s: %(until)s.") % words


class BlockPage(OverridePage):
    """Asks whom to block, where and until when, and says who would be hit; shows the blocks in force, to end them."""

    path = "block/"
    name = "block"

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
        form = BlockForm(request, self.admin, names=names, users=users, endpoint=endpoint)
        operator = Caller(request)
        context = {
            "title": _("Block"),
            "lead": _("A blocked caller is refused at once, and no other policy outranks that."),
            "cautions": [text for block in form.proposed.values() for text in blocks.cautions(block, operator)],
            "in_force": [
                (block, audience_text(block, users), _until(block), ChangeReasonForm(auto_id=f"id_{block.pk}_%s"))
                for places in in_force
                for block, *_others in places
            ],
            "yes": _("Yes, block"),
            "back": back,
        }
        return self.confirm(request, form, context) or HttpResponseRedirect(back)

    def _back(self, request: Any, caller: str, endpoint: Any) -> str:
        if request.GET.get("from") == "traffic":
            return str(self.admin.page_url("traffic"))
        params = form_data(ExplainQuery.for_caller(caller, endpoint=endpoint.name if endpoint else ""))
        return str(self.admin.page_url("explain", query=params))

    def _end(self, request: Any, in_force: Iterable[list[list[RatePolicy]]], users: Mapping[str, str]) -> None:
        """End the block, and all others of the same audience at the same place, such as one that was sent twice."""
        found = [(own, places) for places in in_force for own in places]
        found = [one for one in found if request.POST["end"] in {str(block.pk) for block in one[0]}]
        if not found:
            self.admin.message_user(request, gettext("That block has ended already."), messages.WARNING)
            return
        own, places = found[0]
        words = {"audience": audience_text(own[0], users)}
        left = [endpoint_text(block.endpoint) for block, *_others in places if block != own[0]]
        text = gettext("%(audience)s is not blocked any more.") % words
        if left:
            words["endpoints"] = ", ".join(left)
            text = gettext("That block of %(audience)s has ended. Another one is in force: %(endpoints)s.") % words
        with transaction.atomic(using=policy_alias(RatePolicy)):
            for block in own:
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
        block = next((self._in_force[name][0][0] for name in names if name in self._in_force), None)
        return {"url": url, "text": _("Block…") if block is None else _("%s: End it…") % _until(block)}


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
