"""Blocks a caller, an address or its network until a time; and ends such blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...changes.databases import saving
from ...exceptions import StoreError
from ...models import RatePolicy
from ...operations import blocks
from ...operations.explain_query import ExplainQuery
from ...operations.impact import estimate
from ...operations.impact_audience import NotEstimable
from ...policies.requests.caller import Caller
from ..base import ChangeReasonForm
from ..formatting import moment, number_text, shown
from ..names import audience_text, caller_names, caller_text
from ..permissions import may_block
from .form import form_data
from .override import OverrideForm, OverridePage


class BlockForm(OverrideForm):
    """Which of the names is blocked; each choice says what it would have refused."""

    lengths = {**OverrideForm.lengths, "never": (None, _("until somebody ends it"))}

    def __init__(self, request: Any, model_admin: Any, names: Iterable[str], users: Mapping[str, str]) -> None:
        self._users = users
        self.proposed = {name: blocks.propose_block(name) for name in names}
        targets = [(name, f"{caller_text(name, users)}: {_recent(block)}") for name, block in self.proposed.items()]
        radio = forms.RadioSelect(attrs={"autofocus": True})
        who = forms.ChoiceField(label=_("Who"), choices=targets, initial=targets[0][0], widget=radio)
        super().__init__(request, model_admin, {"target": who})

    def chosen(self, values: dict[str, Any]) -> Iterator[tuple[str, RatePolicy]]:
        """Yield the block."""
        yield "target", self.proposed[values["target"]]

    def text(self, field: str, override: RatePolicy) -> str:
        """Return who is blocked, and until when."""
        # Not the audience first, because the admin begins messages with a capital letter.
        return f"{_until(override)}: {audience_text(override, self._users)}."


class BlockPage(OverridePage):
    """Asks whom to block, and until when, and says who would be hit; shows the blocks in force, to end them."""

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
        back = self.admin.page_url("explain", query=form_data(ExplainQuery.for_caller(caller)))
        if request.GET.get("from") == "traffic":
            back = self.admin.page_url("traffic")
        if not names:
            text = gettext("Only a user, a subject or an address can be blocked, not this caller: %(caller)s")
            self.admin.message_user(request, text % {"caller": shown(caller) or "—"}, messages.ERROR)
            return HttpResponseRedirect(back)
        in_force = blocks.blocks_in_force(names)
        if "end" in request.POST:
            self._end(request, in_force.get(request.POST["end"], []), users)
            return HttpResponseRedirect(back)
        form = BlockForm(request, self.admin, names, users)
        operator = Caller(request)
        context = {
            "title": _("Block"),
            "lead": _("A blocked caller is refused at once, and no other policy outranks that."),
            "cautions": [text for block in form.proposed.values() for text in blocks.cautions(block, operator)],
            "in_force": [
                (name, own[0], caller_text(name, users), _until(own[0]), ChangeReasonForm(auto_id=f"id_{name}_%s"))
                for name, own in in_force.items()
            ],
            "yes": _("Yes, block"),
            "back": back,
        }
        # Where it began in Explain, the same page shows the block and how to end it.
        done = back if "from" in request.GET else request.get_full_path()
        return self.confirm(request, form, context) or HttpResponseRedirect(done)

    def _end(self, request: Any, own: list[RatePolicy], users: Mapping[str, str]) -> None:
        """End all blocks of one name: there may be another one that was sent twice."""
        text = gettext("That block has ended already.")
        with saving(RatePolicy):
            for block in own:
                text = gettext("No longer blocked: %(audience)s.") % {"audience": audience_text(block, users)}
                blocks.end_block(block)
                self.admin.log_change(request, block, text)
        self.admin.message_user(request, text, messages.SUCCESS if own else messages.WARNING)


class BlockLinks:
    """Makes links to the page for the callers of another page, with one query for those that are blocked."""

    def __init__(self, model_admin: Any, request: Any, callers: Iterable[tuple[str, str]], origin: str = "") -> None:
        """``callers`` are the (caller, address) pairs that links may be wanted for; ``origin`` is the page's name."""
        self._admin, self._origin = model_admin, origin
        self._offered = may_block(request.user)
        names = {name for pair in callers for name in blocks.targets(*pair)} if self._offered else set()
        self._in_force = blocks.blocks_in_force(names)

    def link(self, caller: str, ip: str = "") -> dict[str, str] | None:
        """Return the link's address and text; None where there is nothing to block, or no permission."""
        names = blocks.targets(caller, ip) if self._offered else []
        if not names:
            return None
        query = {"caller": caller, "ip": ip, "from": self._origin}
        url = self._admin.page_url("block", query={name: text for name, text in query.items() if text})
        block = next((self._in_force[name][0] for name in names if name in self._in_force), None)
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
