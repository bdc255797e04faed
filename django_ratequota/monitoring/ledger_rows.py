"""The ledger's rows: one statement adds any number of sums to them, each exactly once."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from django.apps import apps
from django.db import DatabaseError, DataError, connections, transaction
from django.utils import timezone

from ..changes.databases import policy_alias
from ..engine.calendar_windows import CalendarWindow
from ..engine.keys import short
from ..engine.rates import Rate
from ..engine.types import Bucket
from ..policies.facts import to_datetime


class Window(NamedTuple):
    """What names a row: its counter, and the first day of its calendar window."""

    counter: str
    first_day: date


class Totals(NamedTuple):
    """What a window has charged and refunded, both since it began."""

    charged: int
    refunded: int


NOTHING = Totals(0, 0)


class Part(NamedTuple):
    """What a policy has limited of a window on one day."""

    charged: int
    refunded: int
    #: As it limited last.
    rate: Rate


@dataclass(slots=True)
class Sum:
    """What is to be added to one window."""

    #: As it limited last, and the window around its last charge.
    bucket: Bucket
    bounds: CalendarWindow
    #: What was charged and refunded, by the day on which it was, and by its policy (0 = none).
    days: dict[tuple[date, int], Part] = field(default_factory=dict)

    def add(self, bucket: Bucket, day: date, charged: int, refunded: int) -> None:
        """Add what was charged to the bucket on the day, or refunded."""
        at = day, bucket.policy_id or 0
        before = self.days.get(at) or Part(0, 0, bucket.rate)
        rate = bucket.rate if charged else before.rate
        self.days[at] = Part(before.charged + charged, before.refunded + refunded, rate)
        if charged:  # a refund is of the policy that limited its charge
            self.bucket = bucket

    def refund(self, day: date, units: int, used: int, parts: Mapping[int, Part]) -> None:
        """Refund what the policy now in force has limited, and then what those before it have, the last one first."""
        others = {pk: part for pk, part in parts.items() if pk != (self.bucket.policy_id or 0)}
        rest = units - max(0, used - sum(part.charged - part.refunded for part in others.values()))
        for policy, part in reversed(others.items()):
            share = min(rest, part.charged - part.refunded)
            if share > 0:
                self.add(replace(self.bucket, policy_id=policy or None, rate=part.rate), day, 0, share)
                units, rest = units - share, rest - share
        self.add(self.bucket, day, 0, units)

    def totals(self) -> Totals:
        """Return the sums of all days."""
        parts = self.days.values()
        return Totals(sum(part.charged for part in parts), sum(part.refunded for part in parts))

    def is_mixed(self) -> bool:
        """Return whether several policies have limited it."""
        return len(self.days) > 1 and len({policy for _day, policy in self.days}) > 1


#: What a statement adds up, and what it takes from charges alone; of all else, the newest counts.
_ADDED, _OF_CHARGES = ("charged", "refunded"), ("policy_id", "rate", "limit")
_KEY = ("counter", "first_day")
_RETURNED = ", ".join((*_KEY, *_ADDED))
_WEEK_US = 8 * 86_400 * 10**6
#: MariaDB's error for a character that the table's encoding lacks; not each of its drivers raises ``DataError``.
_NO_CHARACTER = 1366
#: Column -> its type in MariaDB and in PostgreSQL, where it is no whole number.
_TEXT = ("varchar(200)", "text")
_INSTANT = ("datetime(6)", "timestamptz")
_TYPES = {
    **dict.fromkeys(("counter", "period", "subject", "rate"), _TEXT),
    **dict.fromkeys(("first_day", "day"), ("date", "date")),
    **dict.fromkeys(("starts_at", "ends_at", "written_at"), _INSTANT),
    "mixed": ("bigint", "boolean"),
}
_NEWEST = ("starts_at", "ends_at", "period", "subject", "policy_id", "endpoint_id", "rate", "limit", "written_at")
#: Model -> its columns in the order of the values, and those that name a row.
_TABLES = {
    "QuotaDay": ((*_KEY, "day", "policy_id", *_ADDED, "rate", "limit"), (*_KEY, "day", "policy_id")),
    # Mixed before the policy, which MariaDB would else have replaced by then.
    "QuotaWindow": ((*_KEY, *_ADDED, "mixed", *_NEWEST), _KEY),
}


def add(sums: Mapping[Window, Sum], writer: UUID, batch: int) -> dict[Window, Totals]:
    """Add the sums to the rows unless the writer's batch of this number is in them; returns the rows' totals.

    Raises ``django.db.Error``; then nothing is known, and the same batch is to be added again.
    """
    try:
        return _add(sums, writer, batch)
    except DatabaseError as error:
        if not isinstance(error, DataError) and error.args[:1] != (_NO_CHARACTER,):
            raise
        # A client's name must not keep what others have used out of the database for good.
        for each in sums.values():
            subject = each.bucket.subject.encode("ascii", "backslashreplace").decode()
            each.bucket = replace(each.bucket, subject=subject)
        return _add(sums, writer, batch)


def _add(sums: Mapping[Window, Sum], writer: UUID, batch: int) -> dict[Window, Totals]:
    alias = policy_alias(_model("QuotaWindow"))
    with transaction.atomic(using=alias):
        # First, as a transaction on SQLite has to begin with a write.
        totals = add_once(sums) if _claim(writer, batch) else totals_of(sums)
    if not connections[alias].in_atomic_block:
        connections[alias].commit()  # where AUTOCOMMIT is off
    return totals


def add_once(sums: Mapping[Window, Sum]) -> dict[Window, Totals]:
    """Add the sums to the rows, in the caller's transaction; returns the rows' totals."""
    alias = policy_alias(_model("QuotaWindow"))
    # In one order, so that processes wait for each other's rows instead of deadlocking.
    ordered = sorted(sums.items())
    now = _instant(alias, time.time_ns() // 1000)
    rows = [(*_row(alias, window, each), now) for window, each in ordered]
    days = [
        (window.counter, str(window.first_day), str(day), policy, charged, refunded, str(rate), rate.capacity)
        for window, each in ordered
        if each.bounds.ends_us - each.bounds.starts_us > _WEEK_US
        for (day, policy), (charged, refunded, rate) in sorted(each.days.items())
    ]
    with connections[alias].cursor() as cursor:
        # One parameter each: the ORM's own upsert, with F() and Case, takes a hundred times as long.
        # The windows first, as whoever locks rows begins with them.
        cursor.execute(f"{_statement(alias, 'QuotaWindow')} RETURNING {_RETURNED}", [json.dumps(rows)])
        found = cursor.fetchall()
        if days:
            cursor.execute(_statement(alias, "QuotaDay"), [json.dumps(days)])
    return {Window(counter, _date(first)): Totals(charged, refunded) for counter, first, charged, refunded in found}


def totals_of(windows: Collection[Window], *, lock: bool = False) -> dict[Window, Totals]:
    """Return the totals of those windows that have a row; raises ``django.db.Error``.

    ``lock`` keeps others from adding to the rows until the caller's transaction ends.
    """
    rows = _model("QuotaWindow").objects.filter(
        counter__in={window.counter for window in windows}, first_day__in={window.first_day for window in windows}
    )
    found = rows.values_list(*_KEY, *_ADDED).order_by(*_KEY if lock else ())
    if lock:
        found = found.select_for_update()
    return {
        window: Totals(charged, refunded)
        for counter, first_day, charged, refunded in found
        if (window := Window(counter, first_day)) in windows
    }


def used_by_policy(windows: Collection[Window]) -> dict[Window, dict[int, Part]]:
    """Return what each policy has limited of months, as far as their days tell; the last to charge is last."""
    rows = _model("QuotaDay").objects.filter(
        counter__in={window.counter for window in windows}, first_day__in={window.first_day for window in windows}
    )
    found: dict[Window, dict[int, Part]] = {}
    for counter, first_day, *added, policy, rate in rows.order_by("day", "pk").values_list(
        *_KEY, *_ADDED, "policy_id", "rate"
    ):
        parts = found.setdefault(Window(counter, first_day), {})
        before = parts.pop(policy, NOTHING) if added[0] else parts.get(policy, NOTHING)
        parts[policy] = Part(before[0] + added[0], before[1] + added[1], Rate.parse(rate))
    return found


def stored_subject(subject: str) -> str:
    """Return the subject as rows have it: without what databases refuse, lone surrogates and NUL."""
    if not subject.isascii() or "\0" in subject:
        subject = subject.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
    return short(subject)


def _claim(writer: UUID, batch: int) -> bool:
    """Note that the writer's batch is in the ledger; returns whether it was not."""
    writers = _model("LedgerWriter").objects
    if writers.filter(pk=writer, batches__lt=batch).update(batches=batch, written_at=timezone.now()):
        return True
    # It is, or the database has no such writer: it is new, or the rollup has forgotten it while it was idle.
    named = {"batches": batch, "written_at": timezone.now()}
    return bool(writers.get_or_create(pk=writer, defaults=named)[1])


def _row(alias: str, window: Window, of: Sum) -> tuple[object, ...]:
    """Return the values of the columns of ``QuotaWindow`` but the last."""
    bucket, (starts_us, ends_us, first_day) = of.bucket, of.bounds
    return (
        *(window.counter, str(first_day), *of.totals(), int(of.is_mixed())),
        *(_instant(alias, starts_us), _instant(alias, ends_us), bucket.rate.calendar, stored_subject(bucket.subject)),
        *(bucket.policy_id, bucket.endpoint_id, str(bucket.rate), bucket.rate.capacity),
    )


@lru_cache
def _statement(alias: str, name: str) -> str:
    """Return the statement that inserts rows of the model, or adds them to those of the same key."""
    connection = connections[alias]
    columns, key = _TABLES[name]
    quote, table = connection.ops.quote_name, connection.ops.quote_name(_model(name)._meta.db_table)
    quoted = {column: quote(column) for column in columns}
    conflict, new = f"ON CONFLICT ({', '.join(quoted[column] for column in key)}) DO UPDATE SET", "EXCLUDED.{}"
    if connection.vendor == "postgresql":
        kinds = [_TYPES.get(column, ("", "bigint"))[1] for column in columns]
        values = ", ".join(f"(value ->> {at})::{kind}" for at, kind in enumerate(kinds))
        source = f"SELECT {values} FROM json_array_elements(%s::json)"  # noqa: S608 - of our own columns
    elif connection.vendor == "sqlite":
        values = ", ".join(f"json_extract(value, '$[{at}]')" for at in range(len(columns)))
        source = f"SELECT {values} FROM json_each(%s) WHERE true"  # noqa: S608 - of our own columns
    else:
        kinds = [_TYPES.get(column, ("bigint", ""))[0] for column in columns]
        values = ", ".join(f"c{at} {kind} PATH '$[{at}]'" for at, kind in enumerate(kinds))
        source = f"SELECT sums.* FROM JSON_TABLE(%s, '$[*]' COLUMNS({values})) AS sums"  # noqa: S608 - of our own columns
        conflict, new = "ON DUPLICATE KEY UPDATE", "VALUES({})"
    added = {column: f"{table}.{quoted[column]} + {new.format(quoted[column])}" for column in _ADDED}
    kept = f"CASE WHEN {new.format('charged')} > 0 THEN %s ELSE %s END"
    changed = {
        column: kept % (new.format(own), f"{table}.{own}") if column in _OF_CHARGES else new.format(own)
        for column, own in quoted.items()
    }
    if "mixed" in quoted:
        policies = (f"COALESCE({one}, 0)" for one in (f"{table}.policy_id", new.format("policy_id")))
        changed["mixed"] = f"{table}.mixed OR {new.format('mixed')} OR {' <> '.join(policies)}"
    changed |= added
    changes = ", ".join(f"{quoted[column]} = {changed[column]}" for column in columns if column not in key)
    return f"INSERT INTO {table} ({', '.join(quoted.values())}) {source} {conflict} {changes}"


@lru_cache
def _instant(alias: str, at_us: int) -> str:
    return str(connections[alias].ops.adapt_datetimefield_value(to_datetime(at_us)))


def _date(value: Any) -> date:
    return date.fromisoformat(value) if isinstance(value, str) else value


def _model(name: str) -> Any:
    # Not imported above, because check_request can be imported before Django is set up.
    return apps.get_model("django_ratequota", name)
