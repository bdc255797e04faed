"""The verbs ``publish``, ``rollup``, ``checkpoint``, ``status`` and ``purge`` of ``manage.py ratequota``."""

from __future__ import annotations

import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError

from ..changes.writer import write_publication
from ..conf import settings
from ..exceptions import StoreError
from ..models import PolicyChange, QuotaWindow
from ..monitoring.health import has_late_checkpoint, is_of_another_site, reports, state_of, wait_until_written
from ..monitoring.rollup import KEEP_DAYS, MANY_ROWS, roll_up
from ..operations.held_data import purge as delete_keys
from ..operations.recorded import KINDS
from ..policies.loading import find_unreadable, find_unverified
from ..runtime import default_limiter
from ..store.base import NEARLY_FULL, memory_ratio, server_version
from ..utils.escaping import one_line
from ..utils.histogram import merged, quantile


def add_verbs(verbs: Any) -> None:
    """Add the verbs with their options."""
    text = "Make every worker reload all policies after raw SQL, fixtures or data migrations."
    verb = verbs.add_parser("publish", run=publish, help=text)
    verb.add_argument("--reason", default="ratequota publish", help="Reason for the history.")
    text = "Copy hourly counts from Redis to the database and delete old rows. Run it hourly."
    verb = verbs.add_parser("rollup", run=rollup, help=text)
    text = f"Delete hourly rows that are older than this many days (default {KEEP_DAYS})."
    verb.add_argument("--keep-days", type=int, default=KEEP_DAYS, metavar="DAYS", help=text)
    text = "Wait until every worker has written its counters to the database, for example before you replace Redis."
    add_timeout(verbs.add_parser("checkpoint", run=checkpoint, help=text))
    verbs.add_parser("status", run=status, help="Show Redis, the policy version and every worker.")
    text = "Delete every key of this app in Redis before you remove the app."
    verb = verbs.add_parser("purge", run=purge, help=text)
    verb.add_argument("--no-input", action="store_true", help="Delete them without asking.")


def publish(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Publish a new revision and record it in the history."""
    limiter = default_limiter()
    before = limiter.stored_revision()
    write_publication(options["reason"])
    if limiter.store.absent:
        yield f"Recorded but not published: {limiter.store.absent}"
        yield "Other workers that enforce policies reload all of them within POLL_SECONDS"
        return
    revision = limiter.stored_revision()
    if revision <= before:
        raise CommandError("The publication is recorded, but Redis has no new version. See the log.")
    yield f"Published version {revision}. Every worker reloads all policies."


def rollup(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Write usage counts to the database and delete old ones."""
    done = roll_up(options["keep_days"])
    yield f"{done.written} hourly rows written, {done.deleted} old rows deleted"


def checkpoint(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Wait until every reporting process has written what it had counted when the command began."""
    if unreported := why_unreported():
        raise CommandError(unreported)
    yield wait_for_counts(options["timeout"])


def add_timeout(verb: Any) -> None:
    """Add the option for the seconds of ``wait_for_counts``."""
    text = "Fail if a worker has not written its counters after this many seconds (default 60)."
    verb.add_argument("--timeout", type=whole_number(3600), default=60, metavar="SECONDS", help=text)


def why_unreported() -> str:
    """Return why no process reports what it has written to the database; "" if they do."""
    if not (why := why_not_kept()) and not settings.statistics_seconds:
        return "STATISTICS_SECONDS is 0, so workers do not report. Stop them. Each writes its counters when it stops."
    return why


def why_not_kept() -> str:
    """Return why no counts are kept in the database; "" if they are."""
    if absent := default_limiter().store.absent:
        return f"Redis has no counters: {absent}"
    return "" if settings.checkpoint_seconds else "CHECKPOINT_SECONDS is 0, so no counters are kept in the database"


def wait_for_counts(seconds: float) -> str:
    """Wait until all processes have written their counts, and return how many have; raises ``CommandError``."""
    workers, waiting = wait_until_written(seconds)
    if waiting:
        last = ", ".join(f"{worker.process} reported {time.time() - worker.at:.0f} s ago" for worker in waiting)
        raise CommandError(
            f"{len(waiting)} of {len(workers)} workers have not written their counters within {seconds} s ({last}). "
            "Check their logs. A killed worker is no longer waited for one minute after its last report."
        )
    if not workers:
        return "No worker has reported in the last minute, so there are no counters to write"
    return f"All counters are in the database, from {len(workers)} worker{'s' if len(workers) > 1 else ''}"


def whole_number(most: int) -> Callable[[str], int]:
    """Return the type of an option for a number from 1 to ``most``."""

    def read(text: str) -> int:
        # Python reads no number of more than 4300 digits.
        if not text.isdecimal() or len(text) > len(str(most)) or not 1 <= int(text) <= most:
            raise ArgumentTypeError(f"write a whole number from 1 to {most}")
        return int(text)

    return read


def purge(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Delete every key of this app in Redis, once the operator has said yes."""
    limiter = default_limiter()
    if limiter.store.absent:
        raise CommandError(f"Nothing is counted in Redis: {limiter.store.absent}")
    keys = f"{settings.prefix} at {', '.join(limiter.store.info())}"
    if options["no_input"] or _agreed(f"This deletes every key of {keys}. Limits that are in use start again."):
        yield f"Deleted {delete_keys(limiter)} keys of {keys}"
    else:
        yield "Nothing was deleted"


def _agreed(what: str) -> bool:
    try:
        return input(f"{one_line(what)}\nType 'yes' to go on, or anything else to stop: ") == "yes"
    except EOFError:
        raise CommandError("There is no terminal to ask: add --no-input to delete the keys without asking") from None


def status(_command: BaseCommand, _options: dict[str, Any]) -> Iterator[str]:
    """Yield what can be read, line by line; then raise the first error of what cannot."""
    if absent := default_limiter().store.absent:
        yield f"store        none: {absent}"
        yield from _policies()
        return
    errors: list[Exception] = []
    parts = {"store": _store, "version": _version, "last change": _policies, "ledger": _ledger, "workers": _workers}
    for name, read in parts.items():
        try:
            yield from read()
        except (StoreError, DatabaseError) as error:
            errors.append(error)
            yield f"{name:<13}could not be read: {error}"
    if errors:
        raise errors[0]


def _store() -> Iterator[str]:
    for server, info in default_limiter().store.info().items():
        name, version = server_version(info)
        # Some servers leave fields out.
        names = ("uptime_in_seconds", "maxmemory_policy", "evicted_keys")
        up, policy, evicted = (info.get(name, "unknown") for name in names)
        yield f"store        {name} {version} at {server}, up {up} s"
        yield f"eviction     {policy}, {evicted} keys evicted"
        if (ratio := memory_ratio(info) or 0) >= NEARLY_FULL:
            yield f"memory       {ratio:.0%} of maxmemory, each policy's on_error applies when it is full"


def _version() -> Iterator[str]:
    yield f"keys         {settings.prefix}:*"
    yield f"version      {default_limiter().stored_revision() or 'none published yet'}"


def _policies() -> Iterator[str]:
    """Yield what the database tells of the policies; a publication is no change, because it cannot be undone."""
    newest = PolicyChange.objects.filter(model__in=KINDS).order_by("-pk").first()
    yield f"last change  {f'{newest.at:%Y-%m-%d %H:%M:%S %Z} {newest}' if newest else 'none'}"
    if newest:
        yield f"to undo it   manage.py ratequota undo {newest.change_id}"
    for text in find_unreadable():
        yield f"unreadable   {text}"
    if unverified := ", ".join(map(str, find_unverified())):
        yield f"unverified   policies {unverified} keep in the database what any address or made-up name uses"


def _ledger() -> Iterator[str]:
    rows = QuotaWindow.objects.count()
    yield f"ledger       {rows} rows{': many, lower KEEP_QUOTA_MONTHS' if rows > MANY_ROWS else ''}"


#: Words for the values of ``state_of``. A process without a decision since the revision used no older one.
_STATES = {
    "live": "at this version",
    "idle": "without a decision since",
    "behind": "behind",
    "fresh": "without policies yet",
    "silent": "not reporting",
}


def _workers() -> Iterator[str]:
    """Yield what the workers reported in the last minute."""
    revision, workers = default_limiter().stored_revision(), reports()
    if not workers:
        yield "workers      none has reported in the last minute"
        return
    found = Counter(state_of(worker, revision) for worker in workers)
    states = ", ".join(f"{found[state]} {text}" for state, text in _STATES.items() if found[state] or state == "live")
    closed = sum(not worker.down for worker in workers)
    latency = merged(worker.latency for worker in workers)
    failing = sum(bool(worker.errors) for worker in workers)
    errors = f", errors in {failing}" if failing else ""
    yield f"workers      {len(workers)}: {states}, breaker closed in {closed}{errors}"
    yield f"latency      {_latency(latency)} in the last minute"
    if others := sum(map(is_of_another_site, workers)):
        which = f"{others} of {len(workers)} workers have another SECRET_KEY"
        yield f"site         {which}, so give each site its own PREFIX"
    if late := sum(map(has_late_checkpoint, workers)):
        yield f"ledger       late in {late} of {len(workers)} workers, see their logs"
    if aside := [worker for worker in workers if worker.set_aside]:
        units, names = sum(worker.set_aside for worker in aside), ", ".join(worker.process for worker in aside)
        yield f"ledger       the database refused rows with {units} units, see the logs of {names}"
    for worker in workers:
        yield f"  {worker.process}"
        yield f"             version {worker.revision or 'none yet'}, {_latency(worker.latency)}"
        down = ", ".join(f"open to {server} ({reason})" for server, reason in worker.down.items())
        yield f"             breaker {down or 'closed'}"
        if has_late_checkpoint(worker):
            yield f"             counters not written for {worker.checkpoint_age:.0f} s"
        for reason, message in sorted(worker.errors.items()):
            known = "" if message.startswith(reason) else f"{reason}: "
            yield f"             error in the last minute: {known}{message}"
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(worker.degraded.items()))
        yield f"             decided without Redis: {reasons or 'none'}"


def _latency(counts: list[int]) -> str:
    p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
    if p50 is None or p99 is None:
        return "no decisions"
    return f"{sum(counts)} decisions, p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms"
