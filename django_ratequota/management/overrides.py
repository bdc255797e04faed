"""The verbs ``block`` and ``boost`` of ``manage.py ratequota``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from ..changes.databases import saving
from ..changes.validators import canonical_subject
from ..changes.writer import changed_by
from ..engine.rates import BLOCKED
from ..models import RatePolicy
from ..operations import overrides
from ..operations.texts import moment
from .callers import USER_HELP, add_caller, query_of, user_of
from .maintenance import whole_number

#: Ten years.
_MOST_HOURS = 87_600


def add_verbs(verbs: Any) -> None:
    """Add both verbs with their options."""
    blocking = verbs.add_parser("block", run=block, help="Block a user, a subject or a network, or end the block.")
    one = blocking.add_mutually_exclusive_group(required=True)
    one.add_argument("--user", help=USER_HELP)
    one.add_argument("--subject", help="Subject such as tenant:acme, ip:203.0.113.7 or 203.0.113.0/24.")
    blocking.add_argument("--end", action="store_true", help="End the block instead.")
    text = "Raise a customer's limits for a while, to twice the rates by default."
    boosting = verbs.add_parser("boost", run=boost, help=text)
    add_caller(boosting)
    text = "Number of a policy as explain shows it. May be repeated. Default: all policies that a boost can raise."
    boosting.add_argument("--policy", action="append", default=[], help=text)
    boosting.add_argument("--rates", default="", help="Rates of the boost of one policy, such as 200/min.")
    text = "Duration in hours (default: {})."
    blocking.add_argument("--hours", type=whole_number(_MOST_HOURS), help=text.format("until --end"))
    boosting.add_argument("--hours", type=whole_number(_MOST_HOURS), default=1, help=text.format("1"))
    for verb in (blocking, boosting):
        verb.add_argument("--reason", default="", help="Reason for the history.")


def block(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Block, or end all blocks of that name, and yield who is blocked and how to end it."""
    option = "--subject" if options["user"] is None else "--user"
    who = options[option[2:]]
    name, user = user_of(who) if option == "--user" else (canonical_subject(who), "")
    shown = f"{name} ({user})" if user else name
    with saving(RatePolicy), changed_by(None, options["reason"]):
        found = overrides.blocks_in_force([name]).get(name, ())
        if not options["end"]:
            if found:
                text = f"{shown} is already blocked until {_until(found[0])}. End that block first with --end."
                raise CommandError(text)
            added = overrides.propose_block(name)
            _save(added, options)
        elif not found:
            raise CommandError(f"{shown} is not blocked. To end the block of a network, enter the network.")
        for one in found:
            overrides.end(one)
    if options["end"]:
        yield f"No longer blocked: {shown}"
        return
    yield f"Blocked until {_until(added)}: {shown}"
    yield f"To end it: manage.py ratequota block {option} {shlex.quote(who)} --end"


def boost(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Grant boosts, and yield each and how to undo them."""
    query, chosen = query_of(options), options["policy"]
    if query.everywhere and not chosen:
        text = "Choose the request with --endpoint or --path, or choose policies from explain with --policy"
        raise CommandError(text)
    explanation = query.explain()
    winners = explanation.resolution.winners
    if not winners:
        raise CommandError("No policy applies to this request, so there is nothing to boost")
    possible = [one for one in winners if not overrides.no_boost_reason(explanation, one)]
    found = overrides.propose_boosts(explanation, chosen or [str(one.id) for one in possible or winners])
    if options["rates"] and len(found) > 1:
        numbers = ", ".join(str(winner.pk) for winner, _added in found)
        raise CommandError(f"--rates is for one policy. Choose it with --policy, one of {numbers}.")
    if options["rates"].strip() == BLOCKED:
        raise CommandError("To refuse the customer's requests, run manage.py ratequota block")
    with saving(RatePolicy), changed_by(None, options["reason"]) as save:
        for winner, added in found:
            added.rates = options["rates"] or added.rates
            _save(added, options)
            overrides.refuse_lower(added, winner)
    for winner, added in found:
        yield f"Boosted until {moment(added.ends_at)}: {added} instead of {winner.rates}"
    yield f"To undo it: manage.py ratequota undo {save.change_id}"


def _save(added: RatePolicy, options: dict[str, Any]) -> None:
    """Save the override with its end and reason."""
    hours, now = options["hours"], timezone.now().replace(microsecond=0)
    added.ends_at = None if hours is None else now + timedelta(hours=hours)
    added.reason = options["reason"]
    added.clean_fields(exclude={field.name for field in RatePolicy._meta.fields} - {"rates", "reason"})
    added.save()


def _until(block: RatePolicy) -> str:
    return moment(block.ends_at) if block.ends_at else "somebody ends it"
