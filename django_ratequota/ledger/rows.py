"""The ledger's rows: one statement adds any number of sums to them, each exactly once."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from typing import Any, NamedTuple

from django.apps import apps
from django.db import connections

from ..changes.databases import policy_alias
from ..engine.calendar_windows import CalendarWindow
from ..engine.keys import short
from ..engine.protocol import Raised
from ..engine.rates import Rate
from ..engine.types import Bucket
from ..policies.facts import to_datetime

#: What names a row: its counter, and the first day of its calendar window.
Window = tuple[str, date]


class Totals(NamedTuple):
    """What a window has charged and refunded, both since it began."""

    charged: int
    refunded: int


class Row(NamedTuple):
    """The figures of a window in the database."""

    #: By checks that have ended.
    charged: int = 0
    refunded: int = 0
    #: The units of checks that are open, of all workers.
    held: int = 0
    #: The levels (%) of which somebody has been told, by limit, as JSON; "" = none.
    notified: str = ""
    #: When the limit was in force that the row has (µs).
    limited_us: int = 0

    def due(self, ends_us: int) -> tuple[int, int, int]:
        """Return what Redis is raised to: units charged and refunded, and the window's end (µs)."""
        return self.charged + self.held, self.refunded, ends_us


#: What limits: a policy, 0 = none, and its rate.
Under = tuple[int, Rate]


@dataclass(slots=True)
class Part:
    """What is to be added to a window: what one policy and rate charged and refunded on one day, in ended checks."""

    bucket: Bucket
    bounds: CalendarWindow
    day: date
    charged: int = 0
    refunded: int = 0
    #: By how much the units of open checks have changed; of the first part alone.
    held: int = 0
    #: The highest cost for which the window had no room; 0 = it had.
    refused: int = 0
    #: When the bucket was last checked (µs); 0 = these units say nothing about the limit in force.
    limited_us: int = 0


#: The parts of each window; most have one.
Sums = dict[Window, list[Part]]


def due(rows: Mapping[Window, Row], sums: Sums) -> Raised:
    """Return what Redis is raised to by the rows of these sums."""
    return {window: row.due(sums[window][0].bounds.ends_us) for window, row in rows.items()}


def total_of(parts: Iterable[Part]) -> Totals:
    """Return the sums of all parts."""
    return Totals(sum(part.charged for part in parts), sum(part.refunded for part in parts))


#: What a statement adds up, and what it takes from the latest check; of all else, what is written last counts.
_ADDED, _OF_CHECKS = ("charged", "refunded", "held"), ("policy_id", "rate", "limit")
_KEY = ("counter", "first_day")
_READ = (*_KEY, *_ADDED, "notified", "limited_us")
#: Most units that a total counts. Redis' numbers are exact up to here, and a hundred times as many fit ``percent``.
_MOST_UNITS = 2**53 - 1
#: The values of a part, in the order in which they are sent.
_VALUES = (
    *(*_KEY, *_ADDED, "mixed", "starts_at", "ends_at", "period", "subject", "policy_id", "endpoint_id"),
    *("rate", "limit", "limited_us", "written_at", "day"),
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
#: Model -> its columns, and those that name a row. Mixed comes before the policy and the rate, which MariaDB would
#: else have replaced by then.
_TABLES = {
    "QuotaDay": ((*_KEY, "day", "policy_id", "rate", "charged", "refunded"), (*_KEY, "day", "policy_id", "rate")),
    "QuotaWindow": ((*_VALUES[:-1], "notified"), _KEY),
}


def add_once(sums: Sums) -> dict[Window, Row]:
    """Add the sums to the rows, in the caller's transaction; returns the rows."""
    alias = policy_alias(model_of("QuotaWindow"))
    now, found = _instant(alias, time.time_ns() // 1000), dict[Window, Row]()
    # In one order, so that processes wait for each other's rows instead of deadlocking.
    ordered = sorted(sums.items())
    with connections[alias].cursor() as cursor:
        while ordered:  # a statement adds one part to each row; few have another
            months = any(parts[0].bucket.rate.calendar == "month" for _, parts in ordered)
            # One parameter: the ORM's own upsert, with F() and Case, takes a hundred times as long.
            values = [_values(alias, counter, parts[0], now) for (counter, _), parts in ordered]
            rows = [json.dumps(values, separators=(",", ":"))]
            # The windows first: all code that locks rows begins with them.
            cursor.execute(f"{_statement(alias, 'QuotaWindow')} RETURNING {', '.join(_READ)}", rows)
            found |= {(counter, _date(first_day)): Row(*row) for counter, first_day, *row in cursor.fetchall()}
            if months:
                cursor.execute(_statement(alias, "QuotaDay"), rows)
            ordered = [(window, parts[1:]) for window, parts in ordered if len(parts) > 1]
    return found


def rows_of(windows: Collection[Window], *, lock: bool = False) -> dict[Window, Row]:
    """Return the figures of those windows that have a row; raises ``django.db.Error``.

    ``lock`` keeps others from adding to the rows until the caller's transaction ends.
    """
    found = _of(windows, "QuotaWindow").values_list(*_READ).order_by(*_KEY if lock else ())
    if lock:
        found = found.select_for_update()
    rows = {(counter, first_day): Row(*row) for counter, first_day, *row in found}
    return {window: row for window, row in rows.items() if window in windows}


def limited_by(windows: Collection[Window]) -> dict[Window, dict[Under, int]]:
    """Return the units that each policy and rate has limited of months, by their days; the last one is last."""
    found: dict[Window, dict[Under, int]] = {}
    columns = (*_KEY, "charged", "refunded", "policy_id", "rate")
    days = _of(windows, "QuotaDay").order_by("day", "pk").values_list(*columns)
    for counter, first_day, charged, refunded, policy, rate in days:
        own, under = found.setdefault((counter, first_day), {}), (policy, Rate.parse(rate))
        before = own.pop(under, 0) if charged else own.get(under, 0)
        own[under] = before + charged - refunded
    return found


def _of(windows: Collection[Window], name: str) -> Any:
    """Return a query of the windows' rows of the model, and perhaps of the same counters at other times."""
    counters, first_days = (set(of) for of in zip(*windows, strict=True)) if windows else ((), ())
    return model_of(name).objects.filter(counter__in=counters, first_day__in=first_days)


def _values(alias: str, counter: str, part: Part, now: str) -> tuple[object, ...]:
    """Return what ``_VALUES`` names."""
    bucket, rate = part.bucket, part.bucket.rate
    first_day, starts_at, ends_at = _texts(alias, part.bounds)
    return (
        *(counter, first_day, min(part.charged, _MOST_UNITS), min(part.refunded, _MOST_UNITS), part.held, 0),
        *(starts_at, ends_at, rate.calendar),
        *(short(bucket.subject), bucket.policy_id, bucket.endpoint_id, str(rate), rate.capacity),
        *(part.limited_us, now, str(part.day)),
    )


@lru_cache
def _statement(alias: str, name: str) -> str:
    """Return the statement that inserts rows of the model, or adds them to those of the same key."""
    connection = connections[alias]
    columns, key = _TABLES[name]
    quote, table = connection.ops.quote_name, connection.ops.quote_name(model_of(name)._meta.db_table)
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
        chosen = f"{read['period']} = 'month' AND {read['charged']} + {read['refunded']} > 0"
        read["policy_id"] = f"COALESCE({read['policy_id']}, 0)"
    changed = {column: new.format(own) for column, own in quoted.items()}
    least, greatest = ("MIN", "MAX") if connection.vendor == "sqlite" else ("LEAST", "GREATEST")
    if "limited_us" in quoted:
        latest = f"{new.format('limited_us')} > {table}.limited_us"
        billed = f"{new.format('charged')} + {new.format('refunded')} > 0"
        for column, condition in (*dict.fromkeys(_OF_CHECKS, latest).items(), ("written_at", billed)):
            changed[column] = f"CASE WHEN {condition} THEN {changed[column]} ELSE {table}.{quoted[column]} END"
        # After those, as MariaDB would compare with the new value.
        changed["limited_us"] = f"{greatest}({table}.limited_us, {new.format('limited_us')})"
    if "mixed" in quoted:
        read["notified"], changed["notified"] = "''", f"{table}.{quoted['notified']}"
        policies = (f"COALESCE({one}, 0)" for one in (f"{table}.policy_id", new.format("policy_id")))
        rates = f"{table}.rate <> {new.format('rate')}"
        changed["mixed"] = f"{table}.mixed OR {' <> '.join(policies)} OR {rates}"
    for column in quoted.keys() & set(_ADDED):
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


def _date(value: Any) -> date:
    return date.fromisoformat(value) if isinstance(value, str) else value


def model_of(name: str) -> Any:
    # Not imported above, because check_request can be imported before Django is set up.
    return apps.get_model("django_ratequota", name)
