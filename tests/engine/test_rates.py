"""Rate text: valid and invalid text, the character that errors name, and the way from text to rate and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Rate
from django_ratequota.engine.rates import (
    ALGORITHMS,
    BURST_ALGORITHMS,
    MAX_TEXT,
    MAX_UNITS,
    format_period,
    normalize_rates,
    parse_rates,
)
from django_ratequota.exceptions import InvalidRate, RateQuotaError
from tests.support.properties import examples

EXAMPLES = examples(300)
TEN_YEARS = 3653 * 86_400


def _short(value: object) -> str:
    return "+".join(value) if isinstance(value, dict) else ascii(value)[:30]


@pytest.mark.parametrize(
    ("text", "limit", "period", "burst", "algorithm"),
    [
        ("100/min", 100, 60, None, "token_bucket"),
        ("100/min burst 20", 100, 60, 20, "token_bucket"),
        ("100/min burst 20 gcra", 100, 60, 20, "gcra"),
        ("100/min gcra", 100, 60, None, "gcra"),
        ("  100 / 15 Minutes  BURST 20  GCRA ", 100, 900, 20, "gcra"),
        ("1_000_000/month", 10**6, "month", None, "fixed_window"),
        ("5/month fixed_window", 5, "month", None, "fixed_window"),
        ("007/s", 7, 1, None, "token_bucket"),
        ("1000000000000/3653day", 10**12, TEN_YEARS, None, "token_bucket"),
        ("10/s", 10, 1, None, "token_bucket"),
        ("10/7days sliding_window_log", 10, 604_800, None, "sliding_window_log"),
    ],
)
def test_parse(text: str, limit: int, period: Any, burst: int | None, algorithm: str) -> None:
    assert Rate.parse(text) == Rate(limit=limit, period=period, burst=burst, algorithm=algorithm)


@pytest.mark.parametrize(
    ("names", "seconds"),
    [
        ("s sec secs second seconds", 1),
        ("m min mins minute minutes", 60),
        ("h hour hours", 3600),
        ("d day days", 86_400),
        ("w week weeks", 604_800),
        ("month months", "month"),
    ],
)
def test_units(names: str, seconds: Any) -> None:
    for name in names.split():
        assert Rate.parse(f"1/{name}").period == seconds
        assert Rate.parse(f"1/{name.upper()}").period == seconds


def test_the_policy_s_algorithm_is_the_default_of_rates_that_name_none() -> None:
    rates = parse_rates("10/s, 100/min gcra, 1000/month", algorithm="leaky_bucket")
    assert [rate.algorithm for rate in rates] == ["leaky_bucket", "gcra", "fixed_window"]  # type: ignore[union-attr]


@pytest.mark.parametrize("word", ["unlimited", "blocked"])
def test_words(word: str) -> None:
    assert parse_rates(f" {word.upper()} ") == normalize_rates(f" {word.upper()} ") == word


REST = f"the end, 'burst' and a number, or an algorithm ({', '.join(ALGORITHMS)})"
UNITS = "s, min, hour, day, week or month"


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "expected a limit (a number) at character 1, but the text ends"),
        ("min", "expected a limit (a number) at character 1, not 'min'"),
        ("-5/min", "expected a limit (a number) at character 1, not '-5/min'"),
        ("60", "expected '/' at character 3, but the text ends (example: 60/min)"),
        ("0", "expected '/' at character 2, but the text ends (example: 100/min)"),
        ("100 per min", "expected '/' at character 5, not 'per min'"),
        ("1.5/min", "expected '/' at character 2, not '.5/min'"),
        ("60 tokens/min", "expected '/' at character 4"),
        ("60 requestsfoo/min", "expected '/' at character 4"),
        ("60 requests", "expected '/' at character 12"),
        ("100/", f"expected a unit ({UNITS}) at character 5, but the text ends"),
        ("100/fortnight", f"expected a unit ({UNITS}) at character 5, not 'fortnight'"),
        ("100/minburst 5", f"expected a unit ({UNITS}) at character 5, not 'minburst 5'"),
        ("100/min burst", f"expected {REST} at character 9, not 'burst'"),
        ("100/min burst gcra", f"expected {REST} at character 9, not 'burst gcra'"),
        ("100/min burst 5 burst 6", f"expected {REST} at character 17, not 'burst 6'"),
        ("100/min burts 5", f"expected {REST} at character 9, not 'burts 5'"),
        ("100/min gcra burst 5", f"expected {REST} at character 14, not 'burst 5'"),
        ("100/min gcras", f"expected {REST} at character 9, not 'gcras'"),
        ("100/min, 5/s", f"expected {REST} at character 8, not ', 5/s'"),
        ("100/min\0", rf"expected {REST} at character 8, not '\x00'"),
        ("١٠٠/min", "expected a limit (a number) at character 1"),
        ("1００/min", "expected '/' at character 2"),
        ("100/ſ", "expected a unit"),
        ("100/wee\u212a", "expected a unit"),  # the Kelvin sign, which lower-cases to k
        ("\ud800/min", r"expected a limit (a number) at character 1, not '\ud800/min'"),
        ("0/min", "limit must be a whole number from 1 to 1000000000000, not 0"),
        ("5/0 min", "period must be 0.001 to 315619200 seconds, or 'month', not 0"),
        ("5/min burst 0 gcra", "burst must be a whole number from 1 to 1000000000000, not 0"),
        ("5/3654days", "period must be 0.001 to 315619200 seconds"),
        ("5/2months", "months are counted one by one, so write 5/month or 5/60day"),
        ("5/month gcra", "drop the algorithm or write 5/30day gcra"),
        (
            "5/month burst 2",
            "'burst 2' needs one of the algorithms gcra, leaky_bucket, token_bucket, not fixed_window",
        ),
        ("5/min " + " " * 255, "rates may have at most 255 characters, not 261"),
        ("1" * 10**6, "rates may have at most 255 characters, not 1000000"),
        (None, "a rate is text such as 100/min, not None"),
        (b"5/min", "a rate is text such as 100/min, not b'5/min'"),
    ],
    ids=_short,
)
def test_bad_text(text: Any, fragment: str) -> None:
    with pytest.raises(InvalidRate) as caught:
        Rate.parse(text)
    assert fragment in str(caught.value)
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, RateQuotaError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("10/s,", "expected a limit (a number) at character 6, but the text ends"),
        (",10/s", "expected a limit (a number) at character 1, not ',10/s'"),
        ("10/s,,5/min", "expected a limit (a number) at character 6, not ',5/min'"),
        ("10/s; 5/min", f"expected {REST} at character 5, not '; 5/min'"),
        ("10/s, Unlimited", "unlimited cannot be combined with other rates"),
        ("blocked, 10/s", "blocked cannot be combined with other rates"),
        ("10/min, 20/60s", "'10/min' and '20/min' have the same algorithm and period, so keep only the stricter one"),
        ("60 requests/min, 90 requests/60s", "'60 requests/min' and '90 requests/min' have the same"),
        ("10/min burst 5, 20/min", "'10/min burst 5' and '20/min' have the same algorithm and period"),
    ],
)
def test_bad_lists(text: Any, fragment: str) -> None:
    with pytest.raises(InvalidRate) as caught:
        parse_rates(text)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"limit": 0}, "limit must be a whole number from 1"),
        ({"limit": MAX_UNITS + 1}, "limit must be a whole number from 1"),
        ({"limit": 10**5000}, "not a number that large"),
        ({"limit": True}, "limit must be a whole number from 1"),
        ({"limit": 1.0}, "limit must be a whole number from 1"),
        ({"limit": None}, "limit must be a whole number from 1"),
        ({"burst": 0}, "burst must be a whole number from 1"),
        ({"period": 0}, "period must be 0.001 to 315619200 seconds"),
        ({"period": 0.0009}, "period must be 0.001 to 315619200 seconds"),
        ({"period": float("nan")}, "period must be 0.001 to 315619200 seconds"),
        ({"period": 10**400}, "period must be 0.001 to 315619200 seconds"),
        ({"period": TEN_YEARS + 1}, "period must be 0.001 to 315619200 seconds"),
        ({"period": "month", "algorithm": "gcra"}, "a month is counted in calendar windows, not by gcra"),
        ({"algorithm": "leaky"}, "unknown algorithm 'leaky'"),
        ({"counts": "tokens"}, "counts units or requests, not 'tokens'"),
        ({"burst": 5, "algorithm": "sliding_window_log"}, "needs one of the algorithms"),
    ],
    ids=_short,
)
def test_numbers_that_make_no_rate(fields: dict[str, Any], fragment: str) -> None:
    with pytest.raises(InvalidRate) as caught:
        Rate(**({"limit": 10, "period": 60} | fields))
    assert fragment in str(caught.value)


# --- From text to rate and back. ---


@st.composite
def rates(draw: st.DrawFn) -> Rate:
    algorithm = draw(st.sampled_from(ALGORITHMS))
    units = st.integers(1, 1000) | st.integers(1, MAX_UNITS)
    return Rate(
        limit=draw(units),
        period=draw(
            st.sampled_from([1, 60, 900, 3600, 86_400, 604_800])
            | st.integers(1, TEN_YEARS)
            | (st.just("month") if algorithm == "fixed_window" else st.nothing())
        ),
        burst=draw(st.none() | units) if algorithm in BURST_ALGORITHMS else None,
        algorithm=algorithm,
    )


@given(rate=rates())
@EXAMPLES
def test_a_rate_s_text_reads_back_as_the_rate(rate: Rate) -> None:
    assert Rate.parse(str(rate)) == rate
    assert hash(Rate.parse(str(rate))) == hash(rate)
    assert normalize_rates(str(rate)) == str(rate)


@given(period=st.integers(1_000, 10**9))
@EXAMPLES
def test_periods_of_microseconds_are_written_in_full(period: int) -> None:
    """``:g`` rounded to six digits: two periods had one name in the headers."""
    text = format_period(period / 10**6)
    amount, unit = text.rstrip("abcdefghijklmnopqrstuvwxyz"), text.lstrip("0123456789.")
    assert round(float(amount or 1) * {"s": 1, "min": 60}[unit] * 10**6) == period


BLANKS = st.sampled_from(["", " ", "  ", "\t", "\n"])


@given(
    chosen=st.lists(rates(), min_size=1, max_size=4), blanks=st.lists(BLANKS, min_size=8, max_size=8), data=st.data()
)
@EXAMPLES
def test_normalizing_keeps_the_meaning_and_is_idempotent(
    chosen: list[Rate], blanks: list[str], data: st.DataObject
) -> None:
    texts = []
    for rate in chosen:
        text = str(rate) if data.draw(st.booleans()) else str(rate).upper()
        texts.append(blanks[0] + text.replace("/", f"{blanks[1]}/{blanks[2]}").replace(" ", " " + blanks[3]))
    text = (blanks[4] + "," + blanks[5]).join(texts)
    once = normalize_rates(text)
    assert normalize_rates(once) == once == ", ".join(str(rate) for rate in chosen)
    assert [Rate.parse(part) for part in once.split(",")] == chosen


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("1000 / 60sec", "1000/min"),
        ("1_000/3600s", "1000/hour"),
        ("5/90min", "5/90min"),
        ("5/min token_bucket", "5/min token_bucket"),  # named on purpose: stays when the policy's default changes
        ("5/month fixed_window", "5/month"),
        ("10/s,5/m burst 7,  1/d gcra", "10/s, 5/min burst 7, 1/day gcra"),
        ("60requests/min burst 5 gcra", "60 requests/min burst 5 gcra"),
        ("1 request / min, 1000 Requests/month", "1 requests/min, 1000 requests/month"),
        ("60 units/min, 1 unit/s", "60/min, 1/s"),
        ("BLOCKED", "blocked"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert normalize_rates(text) == normalize_rates(canonical) == canonical


def test_canonical_text_fits_where_rate_text_fits() -> None:
    """64 times ``1/s`` is 255 characters, its canonical text 318: stored, it could not be read again."""
    text = ",".join(["1/m"] * 64)
    assert len(text) == MAX_TEXT
    try:
        canonical = normalize_rates(text)
    except InvalidRate as error:
        assert str(MAX_TEXT) in str(error)  # noqa: PT017 - either way is right, unreadable text is not
    else:
        assert normalize_rates(canonical) == canonical


@given(text=st.text(max_size=40) | st.text(alphabet="0123456789/ ,_smhdwbursgcat\0٣", max_size=40))
@EXAMPLES
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    for read in (Rate.parse, parse_rates, normalize_rates):
        try:
            read(text)
        except InvalidRate as error:
            assert len(str(error)) < 400  # noqa: PT017


# --- Derived values. ---


@pytest.mark.parametrize(
    ("text", "capacity", "period_us", "calendar"),
    [
        ("100/min burst 20", 20, 60_000_000, ""),
        ("100/min", 100, 60_000_000, ""),
        ("100/day fixed_window", 100, 86_400_000_000, "day"),
        ("100/2day fixed_window", 100, 172_800_000_000, ""),
        ("100/hour fixed_window", 100, 3_600_000_000, ""),
        ("100/month", 100, 2_678_400_000_000, "month"),
    ],
)
def test_derived(text: str, capacity: int, period_us: int, calendar: str) -> None:
    rate = Rate.parse(text)
    assert (rate.capacity, rate.period_us, rate.calendar) == (capacity, period_us, calendar)


def test_seconds_are_one_number_however_they_are_written() -> None:
    assert Rate(limit=5, period=60.0) == Rate(limit=5, period=60) == Rate.parse("5/min")
    assert repr(Rate(limit=5, period=60.0).period) == "60"
    assert Rate(limit=5, period=0.0015).period_us == 1500


def test_a_rate_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Rate.parse("5/min").limit = 6  # type: ignore[misc]
