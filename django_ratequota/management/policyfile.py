"""The verbs ``export`` and ``import`` of ``manage.py ratequota``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import IntegrityError

from ..changes.writer import changed_by
from ..exceptions import SHOWN, InvalidFile
from ..policyfile import FORMATS, MAX_BYTES, apply_file, decode, export_chunks


def add_verbs(verbs: Any) -> None:
    """Add both verbs with their options."""
    out = verbs.add_parser("export", help="Export plans, endpoints and policies to a file.")
    out.set_defaults(run=export_file)
    out.add_argument("--format", choices=sorted(FORMATS), default="yaml", help="yaml (default) or json.")
    out.add_argument("--output", metavar="FILE", help="File to write (default: standard output).")
    out.add_argument("--assignments", action="store_true", help="Include the plan assignments.")
    into = verbs.add_parser("import", help="Import plans, endpoints and policies from a file.")
    into.set_defaults(run=import_file)
    into.add_argument("file", metavar="FILE", help="YAML or JSON file as written by export. - = standard input.")
    into.add_argument("--dry-run", action="store_true", help="Show the changes without making them.")
    into.add_argument("--prune", action="store_true", help="Delete objects that the sections of the file leave out.")
    into.add_argument("--reason", default="", help="Reason for the history.")


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
    name = "<stdin>" if options["file"] == "-" else options["file"]
    try:
        text = decode(_bytes(options["file"]))
        with changed_by(None, options["reason"]) as save:
            diff = apply_file(text, prune=options["prune"], dry_run=options["dry_run"])
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
    created, changed, deleted = map(len, (diff.created, diff.changed, diff.deleted))
    if not diff.changes:
        yield f"No changes, because the database equals {name}"
    elif options["dry_run"]:
        yield f"Dry run: {created} to create, {changed} to change, {deleted} to delete. No changes were made."
    else:
        yield f"{created} created, {changed} changed, {deleted} deleted"
    kept = [f"{count} {kind.singular if count == 1 else kind.name}" for kind, count in diff.unnamed.items() if count]
    if kept:
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
