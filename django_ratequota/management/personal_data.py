"""The verbs ``export-subject`` and ``forget`` of ``manage.py ratequota``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from ..changes.validators import canonical_subject
from ..conf import settings
from ..engine.keys import short
from ..operations import held_data
from ..runtime import default_limiter
from .callers import USER_HELP, user_of
from .maintenance import add_timeout, wait_for_counts, why_unreported


def add_verbs(verbs: Any) -> None:
    """Add the verbs with their options."""
    text = "Print all stored data about a user or subject as JSON lines."
    exporting = verbs.add_parser("export-subject", run=export_subject, help=text)
    text = "Delete the stored data about a user or subject except for usage figures."
    forgetting = verbs.add_parser("forget", run=forget, help=text)
    text = "Subject such as tenant:acme, api_key:k_7, ip:203.0.113.7, or user:7 for a deleted user."
    for verb in (exporting, forgetting):
        one = verb.add_mutually_exclusive_group(required=True)
        one.add_argument("--user", help=USER_HELP)
        one.add_argument("--subject", help=text)
    text = "Delete the data. Without it, the command only shows the changes."
    forgetting.add_argument("--yes", action="store_true", help=text)
    add_timeout(forgetting)
    text = "Do not wait for workers, because they have been stopped."
    forgetting.add_argument("--no-wait", action="store_true", help=text)


def export_subject(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Yield a JSON object for each thing that is held."""
    for kind, values in held_data.held(_chosen(options)):
        yield json.dumps({"kind": kind, **values}, default=str)


def forget(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Forget the subject, and yield how much was held of it."""
    subject = _chosen(options)
    if options["yes"]:
        yield _written(options)
    found = Counter(kind for kind, _values in held_data.held(subject))
    counts = ", ".join(f"{kind} {count}" for kind, count in found.items())
    yield f"{subject}: {counts or 'no data'}"
    if found and options["yes"]:
        held_data.forget(subject)
        yield "Deleted. Its usage figures stay in the ledger without the name."
    elif found:
        yield "No changes were made yet. Add --yes to delete the data."


def _written(options: dict[str, Any]) -> str:
    """Wait until all counts are in the database, if any are kept there; raises ``CommandError``."""
    if options["no_wait"]:
        return "Did not wait for workers"
    unreported = why_unreported()
    if unreported and settings.checkpoint_seconds and not default_limiter().store.absent:
        raise CommandError(f"{unreported} Then add --no-wait.")
    return unreported or wait_for_counts(options["timeout"])


def _chosen(options: dict[str, Any]) -> str:
    """Return the subject as counters have it; raises ``CommandError``."""
    if options["user"]:
        return user_of(options["user"], ". For a deleted user, enter --subject user:KEY.")[0]
    text: str = options["subject"]
    with suppress(ValidationError):  # a user, or a kind that is no longer in IDENTIFIERS
        text = canonical_subject(text)
    kind, _colon, value = text.partition(":")
    if not kind or not value:
        raise CommandError(f"Enter kind:value, such as tenant:acme or user:7, not {text!r}")
    return f"{kind}:{short(value)}"
