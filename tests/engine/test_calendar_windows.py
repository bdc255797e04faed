"""Calendar windows across time zones; they follow Redis' clock, never the application's."""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import dateutil.tz
import pytest
import pytz
import redis
import time_machine
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.engine.calendar_windows import calendar_window
from django_ratequota.engine.decision import LimitRequest, Mode
from django_ratequota.engine.keys import counter_name
from django_ratequota.engine.protocol import CheckCommand
from django_ratequota.exceptions import InvalidBucket, StoreError
from django_ratequota.utils.sansio import drive
from tests.support.properties import examples, thorough_after
from tests.support.reference_models import begins_month

HOUR = 3600 * 10**6
UNITS = ("day", "week", "month")


def us(text: str, zone: str = "UTC") -> int:
    """The instant, in µs, of a wall clock reading: ``2025-03-30 02:00`` in a zone, or with an offset of its own."""
    moment = datetime.fromisoformat(text)
    return round((moment if moment.tzinfo else moment.replace(tzinfo=ZoneInfo(zone))).timestamp()) * 10**6


@pytest.mark.parametrize(
    ("zone", "unit", "now", "begins", "ends"),
    [
        ("UTC", "day", "2025-11-21T05:20Z", "2025-11-21T00:00Z", "2025-11-22T00:00Z"),
        ("UTC", "day", "2025-11-21T00:00Z", "2025-11-21T00:00Z", "2025-11-22T00:00Z"),
        ("UTC", "week", "2025-11-21T05:20Z", "2025-11-17T00:00Z", "2025-11-24T00:00Z"),  # a Monday
        ("UTC", "week", "2024-12-31T23:59Z", "2024-12-30T00:00Z", "2025-01-06T00:00Z"),
        ("UTC", "month", "2025-11-21T05:20Z", "2025-11-01T00:00Z", "2025-12-01T00:00Z"),
        ("UTC", "month", "2025-12-31T23:59Z", "2025-12-01T00:00Z", "2026-01-01T00:00Z"),
        ("UTC", "month", "2024-02-29T12:00Z", "2024-02-01T00:00Z", "2024-03-01T00:00Z"),
        ("Asia/Kathmandu", "day", "2025-11-20T18:15Z", "2025-11-20T18:15Z", "2025-11-21T18:15Z"),
        # 23 and 25 hours
        ("Europe/Berlin", "day", "2025-03-30T12:00Z", "2025-03-30T00:00+01", "2025-03-31T00:00+02"),
        ("Europe/Berlin", "day", "2025-10-26T12:00Z", "2025-10-26T00:00+02", "2025-10-27T00:00+01"),
        ("Europe/Berlin", "week", "2025-10-26T12:00Z", "2025-10-20T00:00+02", "2025-10-27T00:00+01"),
        ("Europe/Berlin", "month", "2025-10-01T00:00Z", "2025-10-01T00:00+02", "2025-11-01T00:00+01"),
        # midnight does not exist: the day begins at one
        ("America/Sao_Paulo", "day", "2018-11-04T12:00Z", "2018-11-04T01:00-02", "2018-11-05T00:00-02"),
        ("America/Sao_Paulo", "day", "2018-11-04T02:59Z", "2018-11-03T00:00-03", "2018-11-04T01:00-02"),
        ("America/Havana", "day", "2025-03-09T12:00Z", "2025-03-09T01:00-04", "2025-03-10T00:00-04"),
        # midnight occurs twice: the day begins at the first
        ("America/Havana", "day", "2025-11-02T04:30Z", "2025-11-02T00:00-04", "2025-11-03T00:00-05"),
        ("America/Havana", "day", "2025-11-02T05:30Z", "2025-11-02T00:00-04", "2025-11-03T00:00-05"),
        # Saturday's last hour occurs twice, and is Saturday both times
        ("America/Sao_Paulo", "day", "2018-02-18T01:30Z", "2018-02-17T00:00-02", "2018-02-18T00:00-03"),
        ("America/Sao_Paulo", "day", "2018-02-18T02:30Z", "2018-02-17T00:00-02", "2018-02-18T00:00-03"),
        # a day that was skipped
        ("Pacific/Apia", "day", "2011-12-30T09:59Z", "2011-12-29T00:00-10", "2011-12-31T00:00+14"),
        ("Pacific/Apia", "day", "2011-12-30T10:00Z", "2011-12-31T00:00+14", "2012-01-01T00:00+14"),
        ("Pacific/Apia", "month", "2011-12-30T10:00Z", "2011-12-01T00:00-10", "2012-01-01T00:00+14"),
    ],
)
def test_bounds(zone: str, unit: Any, now: str, begins: str, ends: str) -> None:
    assert calendar_window(unit, us(now), ZoneInfo(zone))[:2] == (us(begins), us(ends))


#: Each changes its clocks at another time of the day: 2:00, 0:00, 24:00, 0:01 (once), by half an hour, by a day.
ZONES = (
    "Europe/Berlin America/New_York America/Sao_Paulo America/Havana Asia/Beirut Asia/Gaza America/Nuuk "
    "America/Asuncion Australia/Lord_Howe Pacific/Apia Pacific/Kwajalein America/St_Johns America/Toronto "
    "Africa/Casablanca Antarctica/Troll Atlantic/Azores Asia/Tehran Europe/Dublin"
).split()


@pytest.mark.parametrize(
    ("zone", "anchor", "now", "begins", "ends"),
    [
        ("UTC", 15, "2025-11-21T05:20Z", "2025-11-15T00:00Z", "2025-12-15T00:00Z"),
        ("UTC", 15, "2025-11-14T23:59Z", "2025-10-15T00:00Z", "2025-11-15T00:00Z"),
        ("UTC", 15, "2026-01-03T00:00Z", "2025-12-15T00:00Z", "2026-01-15T00:00Z"),
        # cut at short months
        ("UTC", 31, "2025-04-29T00:00Z", "2025-03-31T00:00Z", "2025-04-30T00:00Z"),
        ("UTC", 31, "2025-04-30T00:00Z", "2025-04-30T00:00Z", "2025-05-31T00:00Z"),
        ("UTC", 31, "2025-02-27T23:59Z", "2025-01-31T00:00Z", "2025-02-28T00:00Z"),
        ("UTC", 31, "2025-02-28T00:00Z", "2025-02-28T00:00Z", "2025-03-31T00:00Z"),
        ("UTC", 30, "2024-02-28T23:59Z", "2024-01-30T00:00Z", "2024-02-29T00:00Z"),
        ("UTC", 29, "2024-02-29T00:00Z", "2024-02-29T00:00Z", "2024-03-29T00:00Z"),
        ("UTC", 29, "2025-03-01T00:00Z", "2025-02-28T00:00Z", "2025-03-29T00:00Z"),
        ("Europe/Berlin", 30, "2025-03-30T12:00Z", "2025-03-30T00:00+01", "2025-04-30T00:00+02"),
        # midnight does not exist, occurs twice; Saturday's last hour occurs twice; a day that was skipped
        ("America/Sao_Paulo", 4, "2018-11-04T03:00Z", "2018-11-04T01:00-02", "2018-12-04T00:00-02"),
        ("America/Sao_Paulo", 4, "2018-11-04T02:59Z", "2018-10-04T00:00-03", "2018-11-04T01:00-02"),
        ("America/Havana", 2, "2025-11-02T04:00Z", "2025-11-02T00:00-04", "2025-12-02T00:00-05"),
        ("America/Sao_Paulo", 18, "2018-02-18T02:59Z", "2018-01-18T00:00-02", "2018-02-18T00:00-03"),
        ("America/St_Johns", 7, "2010-11-07T02:40Z", "2010-11-07T00:00-02:30", "2010-12-07T00:00-03:30"),
        ("Pacific/Apia", 30, "2011-12-30T09:59Z", "2011-11-30T00:00-10", "2011-12-31T00:00+14"),
        ("Pacific/Apia", 30, "2011-12-30T10:00Z", "2011-12-31T00:00+14", "2012-01-30T00:00+14"),
    ],
)
def test_bounds_of_months_that_begin_on_the_customer_s_day(
    zone: str, anchor: int, now: str, begins: str, ends: str
) -> None:
    assert calendar_window("month", us(now), ZoneInfo(zone), anchor)[:2] == (us(begins), us(ends))


@pytest.mark.parametrize("unit", UNITS)
@given(zone=st.sampled_from(ZONES), second=st.integers(0, 2_300_000_000))
@examples(300)
def test_every_instant_since_1970_lies_in_its_window(unit: Any, zone: str, second: int) -> None:
    now = second * 10**6 + 999_999
    start, finish, _ = calendar_window(unit, now, ZoneInfo(zone))
    assert start <= now < finish


@given(zone=st.sampled_from(ZONES), anchor=st.integers(1, 31), second=st.integers(0, 2_300_000_000))
@examples(300)
def test_months_follow_one_another_and_begin_on_their_day(zone: str, anchor: int, second: int) -> None:
    now, where = second * 10**6 + 999_999, ZoneInfo(zone)
    start, finish, _ = calendar_window("month", now, where, anchor)
    assert start <= now < finish
    assert calendar_window("month", finish, where, anchor)[0] == finish
    assert calendar_window("month", start - 1, where, anchor)[1] == start
    first, after = (datetime.fromtimestamp(at // 10**6, where).date() for at in (start, finish))
    days = [first + timedelta(days=day) for day in range((after - first).days + 1)]
    assert [day for day in days if begins(day, anchor, where)] == [first, after]


def begins(day: date, anchor: int, zone: ZoneInfo) -> bool:
    """Whether months begin on the day, or should have begun on the day before, which the zone skipped."""
    before = day - timedelta(days=1)
    late = skipped(before, zone) and begins_month(before, anchor)
    return late or (begins_month(day, anchor) and not skipped(day, zone))


def skipped(day: date, zone: ZoneInfo) -> bool:
    """Whether the zone had no such day."""
    noon = datetime(day.year, day.month, day.day, 12, tzinfo=zone)
    return noon.astimezone(UTC).astimezone(zone).date() != day


@pytest.mark.parametrize("zone", thorough_after(6, ZONES))
def test_around_every_change_of_the_clocks_windows_follow_one_another(zone: str) -> None:
    """In St. John's clocks went back at 00:01 until 2011: for an hour no window contained the present."""
    for now in changes(ZoneInfo(zone)):
        for offset in (-HOUR, -HOUR // 2, -1, 0, 1, HOUR // 2, HOUR, 2 * HOUR):
            start, finish, _ = calendar_window("day", now + offset, ZoneInfo(zone))
            assert start <= now + offset < finish, datetime.fromtimestamp((now + offset) // 10**6, UTC)
            assert calendar_window("day", finish, ZoneInfo(zone))[0] == finish
            assert calendar_window("day", start - 1, ZoneInfo(zone))[1] == start


def changes(zone: ZoneInfo) -> Generator[int]:
    """The instants, in µs, at which a zone's offset changed from 1980 to 2037."""
    day = datetime(1980, 1, 1, tzinfo=UTC)
    while day.year < 2038:
        after = day + timedelta(days=1)
        if day.astimezone(zone).utcoffset() != after.astimezone(zone).utcoffset():
            low, high = int(day.timestamp()), int(after.timestamp())
            before = day.astimezone(zone).utcoffset()
            while high - low > 1:
                middle = (low + high) // 2
                same = datetime.fromtimestamp(middle, UTC).astimezone(zone).utcoffset() == before
                low, high = (middle, high) if same else (low, middle)
            yield high * 10**6
        day = after


# --- In the engine. ---


def anchored(anchor: int) -> list[Bucket]:
    return [Bucket("user:1", Rate.parse("10/month"), anchor=anchor)]


@pytest.mark.parametrize("anchor", [0, 32, -1, 1.5, "15", None])
def test_a_day_that_no_month_has_is_refused(limiter: Limiter, anchor: Any) -> None:
    with pytest.raises(InvalidBucket, match="anchor is a day of the month, 1 to 31, not"):
        limiter.check(anchored(anchor))


# --- Redis' clock counts, not the application's. ---


def noon_zone(client: redis.Redis) -> timezone:
    """A zone in which it is about noon by the server's clock, so that no window ends while a test runs."""
    return timezone(timedelta(hours=12 - datetime.fromtimestamp(client.time()[0], UTC).hour))


def counted(limiter: Limiter, buckets: list[Bucket], verb: Mode = "check") -> tuple[Decision, int]:
    """The decision, and how many commands it took."""
    commands = []

    def execute(command: tuple[Any, ...]) -> Any:
        commands.append(command[0])
        return limiter.store.execute(command)

    decision = drive(limiter.ask(LimitRequest(mode=verb, buckets=tuple(buckets))), execute)
    assert set(commands) == {"EVALSHA"}
    return decision, len(commands)


@pytest.mark.parametrize("off", [timedelta(days=-400), timedelta(days=-40), timedelta(days=40)], ids=str)
def test_a_wrong_application_clock_still_counts_in_the_right_window(
    redis_client: redis.Redis, off: timedelta
) -> None:
    """Two hosts with different clocks minted capacity; one more command corrects each of them for good."""
    zone = noon_zone(redis_client)
    asked = [Bucket("user:1", Rate.parse(f"10/{unit} fixed_window")) for unit in UNITS]
    asked.append(Bucket("user:1", Rate.parse("10/3650day")))
    right = Limiter(client=redis_client, prefix="rqtest", time_zone=zone, timeout=5)
    right.check(asked)
    with time_machine.travel(datetime.now(UTC) + off):
        wrong = Limiter(client=redis_client, prefix="rqtest", time_zone=zone, timeout=5)
        first, first_commands = counted(wrong, asked)
        second, second_commands = counted(wrong, asked)
    for limiter in (right, wrong):
        limiter.store.close()
    assert [status.remaining for status in first.statuses] == [8] * 4
    assert [status.remaining for status in second.statuses] == [7] * 4
    assert (first_commands, second_commands) == (2, 1)


def test_the_command_has_the_bounds_of_the_current_window() -> None:
    """The store's clock may be set back too: the last command would be for a future month."""
    prepared = CheckCommand("rqtest", UTC, (Bucket("user:1", Rate.parse("10/month")),))
    for month, days in ((2, 28), (1, 31), (2, 28), (3, 31)):
        begins = us(f"2025-{month:02}-01 00:00")
        for now_us in (begins, begins + days * 24 * HOUR - 1):
            command, windows_us = prepared.command((("check", 0, -1, 0), (1,), None, False, None), now_us)
            assert command[-4:-2] == (begins, begins + days * 24 * HOUR)
            assert windows_us == (days * 24 * HOUR,)


@pytest.mark.parametrize(
    ("verb", "remaining"), [("check", [9, 9]), ("peek", [10, 10]), ("charge", [9, 9]), ("refund", [10, 10])]
)
def test_midnight_between_window_and_question_costs_a_second_one_and_counts_once(
    redis_client: redis.Redis, verb: str, remaining: list[int]
) -> None:
    midnight = us("2025-12-01")
    ticks = iter([midnight - 1, midnight, midnight + 1])
    limiter = Limiter(client=redis_client, clock=lambda: next(ticks), prefix="rqtest", timeout=5)
    asked = [Bucket("user:1", Rate.parse("10/hour")), Bucket("user:1", Rate.parse("10/day fixed_window"))]
    decision, commands = counted(limiter, asked, verb)
    limiter.store.close()
    assert commands == 2
    assert [status.remaining for status in decision.statuses] == remaining
    assert decision.at_us == midnight + 1


def test_raising_lowers_no_total_and_mints_no_room(limiter: Limiter) -> None:
    bucket = Bucket("user:1", Rate.parse("100/month"), durable=True)
    limiter.charge([bucket], 7)
    window = calendar_window("month", limiter.now_us, limiter.time_zone)
    for totals, raised, left in (
        ((5, 9), (7, 7, 7), 100),  # what others have charged is not in the database yet
        ((10, 3), (10, 7, 3), 97),
        ((0, 0), (10, 7, 0), 97),
        ((10, 8), (10, 8, 1), 98),
    ):
        steps = limiter.backend.raise_counters({(counter_name(bucket), window.first_day): (*totals, window.ends_us)})
        assert drive(steps, limiter.store.execute) == [raised]
        assert limiter.peek([bucket]).remaining == left


def test_a_clock_that_leaves_every_window_ends_as_an_error(redis_client: redis.Redis) -> None:
    days = iter(range(10**6))
    limiter = Limiter(
        client=redis_client, clock=lambda: us("2025-12-01") + next(days) * 24 * HOUR, prefix="rqtest", timeout=5
    )
    with pytest.raises(StoreError, match="three calendar windows") as caught:
        limiter.check([Bucket("user:1", Rate.parse("10/day fixed_window"))])
    limiter.store.close()
    assert caught.value.reason == "clock"
    assert redis_client.keys("rqtest:*") == []


# --- Zones of other libraries. ---


@pytest.mark.parametrize(
    "zone",
    [dateutil.tz.gettz("Europe/Berlin"), dateutil.tz.UTC, pytz.timezone("Europe/Berlin"), 3600],
    ids=lambda zone: type(zone).__name__,
)
def test_zones_that_do_not_are_refused_at_once(redis_client: redis.Redis, zone: Any) -> None:
    with pytest.raises(InvalidBucket, match=r"write zoneinfo\.ZoneInfo\('Europe/Berlin'\)"):
        Limiter(client=redis_client, time_zone=zone)


def test_a_name_is_no_zone(redis_client: redis.Redis) -> None:
    with pytest.raises(InvalidBucket, match=r"cannot be 'Asia/Tokyo'; write zoneinfo\.ZoneInfo\('Asia/Tokyo'\)"):
        Limiter(client=redis_client, time_zone="Asia/Tokyo")  # type: ignore[arg-type]
