"""The ledger's rows: one statement adds any number of sums to them, each exactly once."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import lru_cache
from typing import Any, NamedTuple
from uuid import UUID

from django.apps import apps
from django.db import DatabaseError, DataError, IntegrityError, connections, transaction
from django.utils import timezone

from ..changes.databases import committing, policy_alias
from ..engine.calendar_windows import CalendarWindow
from ..engine.keys import short
from ..engine.protocol import Raised
from ..engine.rates import Rate
from ..engine.types import Bucket
from ..policies.facts import to_datetime
from ..utils.escaping import one_line
from ..utils.log import logger
from ..utils.problems import remember

#: What names a row: its counter, and the first day of its calendar window.
Window = tuple[str, date]


class Totals(NamedTuple):
    """What a window has charged and refunded, both since it began."""

    charged: int
    refunded: int


NOTHING = Totals(0, 0)


@dataclass(slots=True)
class Part:
    """What is to be added to a window: what one policy charged and refunded on one day."""

    #: As it limited last.
    bucket: Bucket
    bounds: CalendarWindow
    day: date
    charged: int = 0
    refunded: int = 0


#: The parts of each window; most have one.
Sums = dict[Window, list[Part]]
#: The windows whose rows the database refuses, and why.
Refused = dict[Window, DatabaseError]


def total_of(parts: Iterable[Part]) -> Totals:
    """Return the sums of all parts."""
    return Totals(sum(part.charged for part in parts), sum(part.refunded for part in parts))


def give_back(parts: list[Part], units: int, used: int, limited: Mapping[int, tuple[int, Rate]]) -> None:
    """Add a refund to the one part: first of what its policy has limited, then of the others', the last one first."""
    own = parts[0]
    others = {pk: each for pk, each in limited.items() if pk != (own.bucket.policy_id or 0)}
    rest = units - max(0, used - sum(by_policy for by_policy, _rate in others.values()))
    for policy, (by_policy, rate) in reversed(others.items()):
        share = min(rest, by_policy)
        if share > 0:
            bucket = replace(own.bucket, policy_id=policy or None, rate=rate)
            parts.append(Part(bucket, own.bounds, own.day, refunded=share))
            units, rest = units - share, rest - share
    own.refunded = units


#: What a statement adds up, and what it takes from charges alone; of all else, the newest counts.
_ADDED, _OF_CHARGES = ("charged", "refunded"), ("policy_id", "rate", "limit")
_KEY = ("counter", "first_day")
_RETURNED = ", ".join((*_KEY, *_ADDED))
#: Most units that a total counts. Redis' numbers are exact up to here, and a hundred times as many fit ``percent``.
_MOST_UNITS = 2**53 - 1
#: What a database raises for values that it refuses: out of range, too long, or against a constraint.
_REFUSALS = (DataError, IntegrityError)
#: Those that MariaDB's drivers raise as ``OperationalError``: a malformed value, a division by 0, and a character
#: that the table's encoding lacks.
_REFUSAL_NUMBERS = {1292, 1365, 1366}
#: The values of a part, in the order in which they are sent.
_VALUES = (
    *(*_KEY, *_ADDED, "mixed", "starts_at", "ends_at", "period", "subject", "policy_id", "endpoint_id"),
    *("rate", "limit", "written_at", "day"),
)
#: Value -> its type in MariaDB and in PostgreSQL, where it is no whole number.
_TEXT = ("varchar(200)", "text")
_INSTANT = ("datetime(6)", "timestamptz")
_TYPES = {
    **dict.fromkeys(("counter", "period", "subject", "rate"), _TEXT),
    **dict.fromkeys(("first_day", "day"), ("date", "date")),
    **dict.fromkeys(("starts_at", "ends_at", "written_at"), _INSTANT),
    "mixed": ("bigint", "boolean"),
}
#: Model -> its columns, and those that name a row. Mixed comes before the policy, which MariaDB would else have
#: replaced by then.
_TABLES = {
    "QuotaDay": ((*_KEY, "day", "policy_id", *_ADDED, "rate"), (*_KEY, "day", "policy_id")),
    "QuotaWindow": (_VALUES[:-1], _KEY),
}


def add(sums: Sums, writer: UUID, batch: int) -> tuple[Raised, int]:
    """Add the sums to the rows unless the writer's batch of this number is in them; returns the rows' totals.

    Rows that the database refuses must not keep the others waiting: they are logged, and their units are returned,
    too. Raises ``django.db.Error``; then nothing is known, and the same batch is to be added again.
    """
    refused: Refused = {}
    with committing(_model("QuotaWindow")):
        # First, as a transaction on SQLite has to begin with a write.
        if _claim(writer, batch):
            totals = _add_each(dict(sorted(sums.items())), refused)
            errors = list(refused.values())
            if len(errors) == len(sums) > 1 and all(isinstance(error, IntegrityError) for error in errors):
                raise errors[0]  # all of them: another version of this app has migrated the table
        else:
            totals = {window: (*found, _ends_us(sums[window])) for window, found in totals_of(sums).items()}
    return totals, _log(sums, refused) if refused else 0


def _add_each(sums: Sums, refused: Refused) -> Raised:
    """Add the sums but for those that the database refuses, which it finds by halving."""
    try:
        with transaction.atomic(using=policy_alias(_model("QuotaWindow"))):
            return add_once(sums)
    except DatabaseError as error:
        if not isinstance(error, _REFUSALS) and _REFUSAL_NUMBERS.isdisjoint(error.args[:1]):
            raise
        refusal = error
    items = list(sums.items())
    if half := len(items) // 2:
        return _add_each(dict(items[:half]), refused) | _add_each(dict(items[half:]), refused)
    [(window, parts)] = items
    subject = parts[0].bucket.subject
    if subject.isascii():
        refused[window] = refusal
        return {}
    # Perhaps it has a character that the table's encoding lacks, as all lack NUL: then its digest is written.
    parts = [replace(part, bucket=replace(part.bucket, subject=short(f"{subject}\0"))) for part in parts]
    return _add_each({window: parts}, refused)


def _log(sums: Sums, refused: Refused) -> int:
    """Log which units are in no row and are not tried again; returns how many they are."""
    lost = [(*window, *total_of(sums[window])) for window in refused]
    why = str(next(iter(refused.values()))).partition("\n")[0]  # further lines have the values
    rows = "; ".join("{} of {}: {} charged, {} refunded".format(*one) for one in lost)
    text = one_line(f"the database refuses rows of the ledger ({why}), these units are not recorded: {rows}")
    remember("ledger", text)
    logger.error("%s", text)  # not once a minute, as nothing else has these units
    return sum(charged + refunded for _counter, _first_day, charged, refunded in lost)


def add_once(sums: Sums) -> Raised:
    """Add the sums to the rows, in the caller's transaction; returns the rows' totals."""
    alias = policy_alias(_model("QuotaWindow"))
    now, totals = _instant(alias, time.time_ns() // 1000), Raised()
    # In one order, so that processes wait for each other's rows instead of deadlocking.
    ordered = sorted(sums.items())
    with connections[alias].cursor() as cursor:
        while ordered:  # a statement adds one part to each row; few have another
            months = any(parts[0].bucket.rate.calendar == "month" for _, parts in ordered)
            # One parameter: the ORM's own upsert, with F() and Case, takes a hundred times as long.
            values = [_values(alias, counter, parts[0], now) for (counter, _), parts in ordered]
            rows = [json.dumps(values, separators=(",", ":"))]
            # The windows first: all code that locks rows begins with them.
            cursor.execute(f"{_statement(alias, 'QuotaWindow')} RETURNING {_RETURNED}", rows)
            for counter, first_day, charged, refunded in cursor.fetchall():
                window = counter, _date(first_day)
                totals[window] = charged, refunded, _ends_us(sums[window])
            if months:
                cursor.execute(_statement(alias, "QuotaDay"), rows)
            ordered = [(window, parts[1:]) for window, parts in ordered if len(parts) > 1]
    return totals


def totals_of(windows: Collection[Window], *, lock: bool = False) -> dict[Window, Totals]:
    """Return the totals of those windows that have a row; raises ``django.db.Error``.

    ``lock`` keeps others from adding to the rows until the caller's transaction ends.
    """
    found = _of(windows, "QuotaWindow").values_list(*_KEY, *_ADDED).order_by(*_KEY if lock else ())
    if lock:
        found = found.select_for_update()
    rows = {(counter, first_day): Totals(charged, refunded) for counter, first_day, charged, refunded in found}
    return {window: totals for window, totals in rows.items() if window in windows}


def limited_by(windows: Collection[Window]) -> dict[Window, dict[int, tuple[int, Rate]]]:
    """Return the units that each policy has limited of months, by their days, and its rate; the last one is last."""
    found: dict[Window, dict[int, tuple[int, Rate]]] = {}
    days = _of(windows, "QuotaDay").order_by("day", "pk").values_list(*_KEY, *_ADDED, "policy_id", "rate")
    for counter, first_day, charged, refunded, policy, rate in days:
        policies = found.setdefault((counter, first_day), {})
        before = policies.pop(policy, (0, rate)) if charged else policies.get(policy, (0, rate))
        policies[policy] = before[0] + charged - refunded, Rate.parse(rate)
    return found


def _of(windows: Collection[Window], name: str) -> Any:
    """Return a query of the windows' rows of the model, and perhaps of the same counters at other times."""
    counters, first_days = (set(of) for of in zip(*windows, strict=True)) if windows else ((), ())
    return _model(name).objects.filter(counter__in=counters, first_day__in=first_days)


def _claim(writer: UUID, batch: int) -> bool:
    """Note that the writer's batch is in the ledger; returns whether it was not."""
    writers = _model("LedgerWriter").objects
    if writers.filter(pk=writer, batches__lt=batch).update(batches=batch, written_at=timezone.now()):
        return True
    # It is, or the database has no such writer: it is new, or the rollup has forgotten it while it was idle.
    named = {"batches": batch, "written_at": timezone.now()}
    return bool(writers.get_or_create(pk=writer, defaults=named)[1])


def _values(alias: str, counter: str, part: Part, now: str) -> tuple[object, ...]:
    """Return what ``_VALUES`` names."""
    bucket, rate = part.bucket, part.bucket.rate
    first_day, starts_at, ends_at = _texts(alias, part.bounds)
    return (
        *(counter, first_day, min(part.charged, _MOST_UNITS), min(part.refunded, _MOST_UNITS), 0),
        *(starts_at, ends_at, rate.calendar),
        *(short(bucket.subject), bucket.policy_id, bucket.endpoint_id, str(rate), rate.capacity),
        *(now, str(part.day)),
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
        read = {name: f"(value ->> {at})::{_TYPES.get(name, ('', 'bigint'))[1]}" for at, name in enumerate(_VALUES)}
        source = "jsonb_array_elements(%s::jsonb)"
    elif connection.vendor == "sqlite":
        read = {name: f"json_extract(value, '$[{at}]')" for at, name in enumerate(_VALUES)}
        source = "json_each(%s)"
    else:
        kinds = [f"c{at} {_TYPES.get(name, ('bigint',))[0]} PATH '$[{at}]'" for at, name in enumerate(_VALUES)]
        read = {name: f"c{at}" for at, name in enumerate(_VALUES)}
        source = f"JSON_TABLE(%s, '$[*]' COLUMNS({', '.join(kinds)})) AS sums"
        conflict, new = "ON DUPLICATE KEY UPDATE", "VALUES({})"
    chosen = "true"
    if "day" in columns:  # months alone have days, and there 0 stands for no policy
        chosen, read["policy_id"] = f"{read['period']} = 'month'", f"COALESCE({read['policy_id']}, 0)"
    kept = f"CASE WHEN {new.format('charged')} > 0 THEN %s ELSE %s END"
    changed = {
        column: kept % (new.format(own), f"{table}.{own}") if column in _OF_CHARGES else new.format(own)
        for column, own in quoted.items()
    }
    if "mixed" in quoted:
        policies = (f"COALESCE({one}, 0)" for one in (f"{table}.policy_id", new.format("policy_id")))
        changed["mixed"] = f"{table}.mixed OR {' <> '.join(policies)}"
    least = "MIN" if connection.vendor == "sqlite" else "LEAST"
    for column in _ADDED:
        changed[column] = f"{least}({table}.{quoted[column]} + {new.format(quoted[column])}, {_MOST_UNITS})"
    changes = ", ".join(f"{quoted[column]} = {changed[column]}" for column in columns if column not in key)
    values = ", ".join(read[column] for column in columns)
    return (
        f"INSERT INTO {table} ({', '.join(quoted.values())}) SELECT {values} FROM {source}"  # noqa: S608 - our own columns
        f" WHERE {chosen} {conflict} {changes}"
    )


@lru_cache
def _texts(alias: str, bounds: CalendarWindow) -> tuple[str, str, str]:
    return str(bounds.first_day), _instant(alias, bounds.starts_us), _instant(alias, bounds.ends_us)


def _instant(alias: str, at_us: int) -> str:
    return str(connections[alias].ops.adapt_datetimefield_value(to_datetime(at_us)))


def _ends_us(parts: list[Part]) -> int:
    return parts[0].bounds.ends_us


def _date(value: Any) -> date:
    return date.fromisoformat(value) if isinstance(value, str) else value


def _model(name: str) -> Any:
    # Not imported above, because check_request can be imported before Django is set up.
    return apps.get_model("django_ratequota", name)
