"""The verb ``undo`` of ``manage.py ratequota``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError

from ..changes.databases import saving
from ..models import PolicyChange, RatePolicy
from ..operations.differences import who_changed
from ..operations.revert import apply, of_save, plan

#: Maximum number of unchanged objects that are listed.
_LISTED = 20


def add_verbs(verbs: Any) -> None:
    """Add the verb with its options."""
    verb = verbs.add_parser(
        "undo", help="Undo a change that was made in the admin, by an import or by a bulk action."
    )
    verb.set_defaults(run=undo_save)
    text = "Change id from the output of import or boost, or from the URL of the change's page in the admin."
    verb.add_argument("change_id", type=_change_id, help=text)
    verb.add_argument("--dry-run", action="store_true", help="Show the changes without making them.")
    verb.add_argument("--reason", default="", help="Reason for the history.")


def _change_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"write a change id, such as import and boost print, not {text[:100]!r}") from None


def undo_save(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Undo the save in one transaction."""
    change_id, dry = options["change_id"], options["dry_run"]
    if not PolicyChange.objects.filter(change_id=change_id).exists():
        raise CommandError(f"No change has the id {change_id}. Copy it from the URL of the change's page.")
    with saving(RatePolicy):
        undo = plan(of_save(change_id), lock=not dry)
        for step in undo.left[:_LISTED]:
            later = " ".join(who_changed(step.later, step.last)) if step.later else ""
            yield f"stays unchanged: {step.kind} {step.object_text}: {step.obstacle or later}"
        if len(undo.left) > _LISTED:
            yield f"and {len(undo.left) - _LISTED} more"
        counts = Counter(step.verb for step in undo.done)
        summary = f"{counts['create']} created, {counts['change']} changed, {counts['delete']} deleted"
        if dry:
            yield f"Dry run: would be {summary}. No changes were made."
            return
        apply(undo, actor=None, reason=options["reason"] or f"undo {change_id}", undoes=change_id)
    yield summary if counts else "Nothing to undo"
