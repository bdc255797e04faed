"""Blocks a caller, an address or its network until a time; and ends such overrides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpResponseRedirect
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ...exceptions import StoreError
from ...models import RatePolicy
from ...operations import overrides
from ...operations.explain import caller_params
from ...operations.impact import NotEstimable, estimate
from ...policies.requests.caller import Caller
from ..formatting import moment, number_text, shown
from ..names import audience_text, caller_names, caller_text
from ..permissions import may_block
from .override import OverrideForm, OverridePage, in_force


class BlockPage(OverridePage):
    """Asks whom to block, and until when, and says who would be hit; shows the blocks in force, to end them."""

    name = "block"
    ended = _("No longer blocked: %(audience)s.")
    gone = _("That block has already ended.")

    def has_permission(self, request: Any, obj: Any = None) -> bool:
        """Return whether the operator may block callers."""
        return may_block(request.user)

    def view(self, request: Any) -> Any:
        """GET shows the form; POST blocks, or ends the block whose id is in ``end``."""
        caller, ip = request.GET.get("caller", ""), request.GET.get("ip", "")
        names = overrides.block_targets(caller, ip)
        users = caller_names(names)
        names = [name for name in names if not name.startswith("user:") or name in users]  # without deleted users
        back = self.admin.page_url("explain", query=caller_params(caller))
        if request.GET.get("from") == "traffic":  # which shows the block of a network, too
            back = self.admin.page_url("traffic")
        if not names:
            text = gettext("Only users, subjects and addresses can be blocked, not %(caller)s.")
            self.admin.message_user(request, text % {"caller": shown(caller) or "—"}, messages.ERROR)
            return HttpResponseRedirect(back)
        blocked = overrides.blocks_in_force([name for name in names if may_block(request.user, name)])
        if "end" in request.POST:
            self.end(request, blocked.get(request.POST["end"], []), users)
            return HttpResponseRedirect(back)
        proposed = {name: overrides.propose_block(name) for name in names}
        choices = [(name, f"{caller_text(name, users)}: {_recent(block)}") for name, block in proposed.items()]
        radio = forms.RadioSelect(attrs={"autofocus": True})
        target = forms.ChoiceField(label=_("Who"), choices=choices, initial=choices[0][0], widget=radio)
        form = OverrideForm(request, {"target": target}, endless=True)
        if form.is_valid() and self.add(request, form, {"target": proposed[form.cleaned_data["target"]]}):
            # Where it began in Explain, the same page shows the block and how to end it.
            return HttpResponseRedirect(back if "from" in request.GET else request.get_full_path())
        operator = Caller(request)
        context = {
            "title": _("Block"),
            "lead": _("A block refuses every request at once. It takes precedence over all other policies."),
            "cautions": [text for block in proposed.values() if (text := overrides.block_caution(block, operator))],
            "in_force": [
                in_force(name, own[0], caller_text(name, users), _until(own[0])) for name, own in blocked.items()
            ],
            "fields": form,
            "button": _("Yes, block"),
            "back": back,
        }
        return self.render(request, "override.html", context, form)

    def text(self, override: RatePolicy) -> str:
        """Return who is blocked, and until when."""
        # Not the audience first, because the admin begins messages with a capital letter.
        return f"{_until(override)}: {audience_text(override, caller_names([override.subject]))}."


def block_links(
    model_admin: Any, request: Any, pairs: Iterable[tuple[str, str]], origin: str = ""
) -> dict[tuple[str, str], dict[str, str]]:
    """Return the link to the page for each (caller, address), with one query for those that are blocked.

    Pairs without anybody to block have none, and so has an operator without the permission. ``origin`` is the name of
    the page with the links.
    """
    names = {pair: [one for one in overrides.block_targets(*pair) if may_block(request.user, one)] for pair in pairs}
    blocked = overrides.blocks_in_force({name for own in names.values() for name in own})
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
