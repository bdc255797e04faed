"""The verbs ``export``, ``import`` and ``undo`` of ``manage.py ratequota``."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.core.management.base import BaseCommand, CommandError
from django.db import IntegrityError

from ..changes.databases import saving
from ..changes.writer import changed_by
from ..exceptions import SHOWN, InvalidFile
from ..models import PolicyChange, RatePolicy
from ..operations.recorded import who_changed
from ..operations.revert import apply, of_save, plan
from ..policyfile import FORMATS, MAX_BYTES, apply_file, decode, export_chunks
from ..utils.escaping import one_line

#: Maximum number of unchanged objects that are listed.
_LISTED = 20


def add_verbs(verbs: Any) -> None:
    """Add the verbs with their options."""
    out = verbs.add_parser("export", run=export_file, help="Export plans, endpoints and policies to a file.")
    out.add_argument("--format", choices=sorted(FORMATS), default="yaml", help="yaml (default) or json.")
    out.add_argument("--output", metavar="FILE", help="File to write (default: standard output).")
    out.add_argument("--assignments", action="store_true", help="Include the plan assignments.")
    into = verbs.add_parser("import", run=import_file, help="Import plans, endpoints and policies from a file.")
    into.add_argument("file", metavar="FILE", help="YAML or JSON file as written by export. - = standard input.")
    into.add_argument("--dry-run", action="store_true", help="Show the changes without making them.")
    into.add_argument("--prune", action="store_true", help="Delete objects that the sections of the file leave out.")
    into.add_argument("--only-new", action="store_true", help="Create objects that are missing and change no others.")
    into.add_argument("--reason", default="", help="Reason for the history.")
    text = "Undo a change that was made in the admin, by an import or by a bulk action."
    back = verbs.add_parser("undo", run=undo, help=text)
    text = "Change id from the output of import or boost, or from the URL of the change's page in the admin."
    back.add_argument("change_id", type=_change_id, help=text)
    back.add_argument("--dry-run", action="store_true", help="Show the changes without making them.")
    back.add_argument("--reason", default="", help="Reason for the history.")


def export_file(command: BaseCommand, options: dict[str, Any]) -> None:
    """Write the file, or print it."""
    text = export_chunks(options["format"], assignments=options["assignments"])
    if not options["output"]:
        for piece in text:
            command.stdout.write(piece, ending="")
        return
    try:
        with open(options["output"], "w", encoding="utf-8", newline="\n") as file:
            file.writelines(text)
    except OSError as error:
        raise CommandError(f"{options['output']} cannot be written: {error.strerror}") from error


def import_file(command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Import a file, or print its problems; raises ``CommandError``."""
    name = "<stdin>" if options["file"] == "-" else one_line(options["file"])
    only_new = options["only_new"]
    if only_new and options["prune"]:
        raise CommandError("--only-new deletes no objects. Write it without --prune, or --prune alone.")
    try:
        text = decode(_bytes(options["file"]))
        with changed_by(None, options["reason"]) as save:
            diff = apply_file(text, prune=options["prune"], only_new=only_new, dry_run=options["dry_run"])
    except InvalidFile as error:
        count = len(error.problems)
        for number, path, message in error.problems[:SHOWN]:
            command.stderr.write(f"{name}:{number}: {path}: {message}" if path else f"{name}:{number}: {message}")
        if count > SHOWN:
            command.stderr.write(f"and {count - SHOWN} more")
        raise CommandError(f"{count} problem{'s' if count != 1 else ''} in {name}. No changes were made.") from error
    except IntegrityError as error:
        raise CommandError(f"Another change conflicts with this file. Try again. {error}") from error
    yield from diff.lines()
    created, changed, deleted = (len(diff.of(verb)) for verb in ("create", "change", "delete"))
    if not diff.changes:
        reason = f"has all objects of {name}" if only_new else f"equals {name}"
        yield f"No changes, because the database {reason}"
    elif options["dry_run"]:
        yield f"Dry run: {created} to create, {changed} to change, {deleted} to delete. No changes were made."
    else:
        yield f"{created} created, {changed} changed, {deleted} deleted"
    counts = Counter(change.section for change in diff.of("keep"))
    kept = [f"{count} {kind.singular if count == 1 else kind.name}" for kind, count in counts.items()]
    if kept and not only_new:
        yield f"Kept although the file does not contain them: {', '.join(kept)}. Delete them with --prune."
    if diff.changes and not options["dry_run"]:
        yield f"To undo it: manage.py ratequota undo {save.change_id}"


def _bytes(name: str) -> bytes:
    try:
        if name == "-":
            return sys.stdin.buffer.read(MAX_BYTES + 1)
        with open(name, "rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from error


def _change_id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ArgumentTypeError(f"write a change id, such as import and boost print, not {text[:100]!r}") from None


def undo(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Undo the save in one transaction."""
    change_id, dry = options["change_id"], options["dry_run"]
    if not PolicyChange.objects.filter(change_id=change_id).exists():
        raise CommandError(f"No change has the id {change_id}. Copy it from the URL of the change's page.")
    with saving(RatePolicy):
        revert = plan(of_save(change_id), lock=not dry)
        for step in revert.left[:_LISTED]:
            later = " ".join(who_changed(step.later, step.last)) if step.later else ""
            yield f"stays unchanged: {step.kind} {step.object_text}: {step.obstacle or later}"
        if len(revert.left) > _LISTED:
            yield f"and {len(revert.left) - _LISTED} more"
        counts = Counter(step.verb for step in revert.done)
        summary = f"{counts['create']} created, {counts['change']} changed, {counts['delete']} deleted"
        if dry:
            yield f"Dry run: would be {summary}. No changes were made."
            return
        apply(revert, actor=None, reason=options["reason"] or f"undo {change_id}", undoes=change_id)
    yield summary if counts else "Nothing to undo"
