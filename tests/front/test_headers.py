"""Decisions as response headers, read back with the structured fields parser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import http_sf
import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, BucketStatus, Decision, Limiter, Rate
from django_ratequota.conf import HEADER_FORMS
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS
from django_ratequota.headers import FORMS, add_headers, decision_headers
from tests.conftest import NOON_US, Clock
from tests.project.views import request_from
from tests.support.properties import examples, thorough_after

SECOND = 10**6
DOCS = Path(__file__).parents[2] / "docs"
RATES = ("100/min", "10/s burst 3", "5/hour gcra", "7/month", "9/day fixed_window")


def standing(
    rate: str = "10/min",
    *,
    passed: bool = True,
    remaining: int = 5,
    retry_us: int | None = 0,
    reset_us: int = 30 * SECOND,
    next_us: int | None = 2 * SECOND,
    **bucket: Any,
) -> BucketStatus:
    parsed = Rate.parse(rate)
    return BucketStatus(
        bucket=Bucket("user:1", parsed, **bucket),
        allowed=passed,
        remaining=remaining,
        retry_after_us=retry_us,
        reset_after_us=reset_us,
        window_us=parsed.period_us,
        next_after_us=next_us,
    )


def refusal(*statuses: BucketStatus) -> dict[str, str]:
    return decision_headers(Decision(allowed=False, statuses=statuses, at_us=NOON_US))


def parsed(value: str) -> list[tuple[str, dict[str, int]]]:
    """A List of Strings with parameters, as (string, parameters)."""
    return [(str(item), dict(parameters)) for item, parameters in http_sf.parse(value.encode(), tltype="list")]


def test_a_refused_request(limiter: Limiter, clock: Clock) -> None:
    buckets = [Bucket("user:1", Rate.parse("2/min"), scope="search"), Bucket("user:1", Rate.parse("1000/day"))]
    limiter.check(buckets, cost=2)
    clock.advance(0.5)
    assert decision_headers(limiter.check(buckets)) == {
        # 29.5 s until one unit is back: rounded up, and no earlier than any t.
        "Retry-After": "30",
        "RateLimit-Policy": '"search/min";q=2;w=60, "all/day";q=1000;w=86400',
        "RateLimit": '"search/min";r=0;t=30, "all/day";r=998',
        "X-RateLimit-Limit": "2",
        "X-RateLimit-Remaining": "0",
        "X-RateLimit-Reset": str(NOON_US // SECOND + 60),
    }


def test_retry_after_is_the_longest_wait_rounded_up_and_left_out_where_waiting_cannot_help() -> None:
    rounded = {1: "1", SECOND: "1", SECOND + 1: "2", 5 * SECOND: "5", 3600 * SECOND - 1: "3600", None: None}
    for retry_us, expected in rounded.items():
        assert refusal(standing(passed=False, retry_us=retry_us)).get("Retry-After") == expected
    waits = [standing(passed=False, retry_us=seconds * SECOND) for seconds in (3, 90, 7)]
    assert refusal(*waits, standing(retry_us=0))["Retry-After"] == "90"
    assert "Retry-After" not in refusal(*waits, standing(passed=False, retry_us=None))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(RATES),
            st.booleans(),
            st.one_of(st.none(), st.integers(1, 2**53)),
            st.integers(0, 10**12),
            st.integers(0, 2**53),
            st.one_of(st.none(), st.integers(1, 2**53)),
            st.sampled_from(["enforce", "log"]),
        ),
        max_size=6,
    )
)
@examples(200)
def test_every_header_can_be_read_back_and_no_t_is_later_than_retry_after(drawn: list[Any]) -> None:
    statuses = tuple(
        standing(
            rate, passed=ok, remaining=units, retry_us=0 if ok else wait, reset_us=reset, next_us=more, mode=mode
        )
        for rate, ok, wait, units, reset, more, mode in drawn
    )
    allowed = not any(status.refused for status in statuses)
    headers = decision_headers(Decision(allowed=allowed, statuses=statuses, at_us=NOON_US))
    enforced = [status for status in statuses if status.bucket.mode == "enforce"]
    assert ("RateLimit" in headers) == ("RateLimit-Policy" in headers) == bool(enforced)
    assert ("Retry-After" in headers) == (
        not allowed and None not in [s.retry_after_us for s in statuses if s.refused]
    )
    if enforced:
        rows = parsed(headers["RateLimit"])
        assert [name for name, _ in rows] == [name for name, _ in parsed(headers["RateLimit-Policy"])]
        assert [parameters["r"] for _, parameters in rows] == [status.remaining for status in enforced]
        bound = int(headers.get("Retry-After", 2**53))
        told = [-(-s.next_after_us // SECOND) if s.next_after_us else None for s in enforced]
        assert [parameters.get("t") for _, parameters in rows] == [t if t and t <= bound else None for t in told]
        assert "qu" not in headers["RateLimit-Policy"]


def test_x_ratelimit_describes_the_binding_bucket() -> None:
    for statuses, limit in (
        # Of an admitted request the smallest remaining share, not the smallest number.
        ([("10/min", 9), ("100/min", 50), ("1000/min", 999)], "100"),
        ([("10/min", 0), ("100/min", 0)], "10"),
        ([("10/min burst 50", 10), ("100/min", 30)], "50"),
    ):
        decision = Decision(allowed=True, statuses=tuple(standing(rate, remaining=left) for rate, left in statuses))
        assert decision_headers(decision)["X-RateLimit-Limit"] == limit
    # Of a refused one the longest wait.
    for waits, limit in (([5, 9, 7], "2"), ([5, None, 7], "2"), ([8, 3, 8], "1")):
        statuses = [
            standing(f"{n}/min", passed=False, remaining=n, retry_us=None if wait is None else wait * SECOND)
            for n, wait in enumerate(waits, 1)
        ]
        assert refusal(*statuses, standing("4/min", remaining=0))["X-RateLimit-Limit"] == limit


def test_a_policy_may_lead_x_ratelimit_and_a_refusal_shows_who_refused(limiter: Limiter) -> None:
    tight, leading = standing("10/min", remaining=1), standing("1000/month", remaining=900, leads=True)
    later, logged = standing("5/day", leads=True), standing("7/hour", leads=True, mode="log")
    for statuses in ((tight, leading, later), (logged, leading, tight)):
        assert decision_headers(Decision(allowed=True, statuses=statuses))["X-RateLimit-Limit"] == "1000"
    refused = standing("10/min", passed=False, remaining=0, retry_us=SECOND)
    assert refusal(leading, refused)["X-RateLimit-Limit"] == "10"


def test_windows(limiter: Limiter) -> None:
    for rate, policy in {
        Rate(limit=5, period=0.5): '"all/0.5s";q=5',
        Rate(limit=5, period=1.5): '"all/1.5s";q=5;w=1',
        Rate(limit=5, period=1): '"all/s";q=5;w=1',
        Rate.parse("5/15min gcra"): '"all/15min gcra";q=5;w=900',
        Rate.parse("5/month"): '"all/month";q=5;w=2592000',  # the injected clock stands in November
        Rate.parse("5/day fixed_window"): '"all/day fixed_window";q=5;w=86400',
    }.items():
        assert decision_headers(limiter.check([Bucket("user:1", rate)]))["RateLimit-Policy"] == policy


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rate", thorough_after(2, ["12/min", "10/10s", "60/min", "30/hour"]))
def test_a_client_that_obeys_r_and_t_is_never_refused_and_reaches_the_full_rate(
    limiter: Limiter, clock: Clock, algorithm: str, rate: str
) -> None:
    """It sends the r units it has left at once, then waits for t; another one asks as often as it can."""
    patient, greedy = (Bucket(user, Rate.parse(f"{rate} {algorithm}")) for user in ("user:1", "user:2"))
    period_us = patient.rate.period_us
    step_us = period_us // patient.rate.limit // 4
    # Not at the edge of a window, where a second's rounding up would be the same for all.
    clock.advance(us=period_us // 3)
    begun, sent, taken = clock.now_us, 0, 0
    end = begun + 4 * period_us
    while clock.now_us < end:
        rows = parsed(decision_headers(limiter.peek([patient]))["RateLimit"])
        units = rows[0][1]["r"]
        for _ in range(units):
            decision = limiter.check([patient])
            assert decision.allowed
            rows = parsed(decision_headers(decision)["RateLimit"])
        sent += units
        [(_, parameters)] = rows
        assert parameters["r"] == 0
        assert parameters["t"] <= 2 * period_us // SECOND
        until = clock.now_us + parameters["t"] * SECOND
        while clock.now_us < min(until, end):
            while limiter.check([greedy]).allowed:
                taken += 1
            clock.now_us = min(until, end, clock.now_us + step_us)
    # What came back within the last t, which is rounded up, is not sent yet.
    waiting = patient.rate.limit * SECOND // period_us + 1
    assert taken - waiting <= sent <= taken + waiting
    if algorithm in BURST_ALGORITHMS:
        assert sent >= 5 * patient.rate.limit - waiting


def test_a_debt_that_a_free_request_waits_for_says_no_t_beyond_retry_after(limiter: Limiter) -> None:
    asked = [Bucket("user:1", Rate.parse("6/min"))]
    assert decision_headers(limiter.peek(asked))["RateLimit"] == '"all/min";r=6'
    limiter.charge(asked, 9)
    headers = decision_headers(limiter.check(asked, cost=0))
    assert (headers["Retry-After"], headers["RateLimit"]) == ("30", '"all/min";r=0')
    assert decision_headers(limiter.check(asked))["RateLimit"] == '"all/min";r=0;t=40'


def test_the_page_exposes_to_scripts_what_is_sent(settings: Any) -> None:
    settings.RATEQUOTA = {"HEADERS": ["ietf-11", "x-ratelimit"]}
    page = (DOCS / "reference/headers.md").read_text()
    exposed = re.search(r"CORS_EXPOSE_HEADERS = \[(.*?)\]", page, re.DOTALL)
    assert exposed
    decision = Decision(
        allowed=False, statuses=(standing(passed=False, retry_us=SECOND),), at_us=NOON_US, refusal_id="x"
    )
    sent = set(decision_headers(decision))
    assert set(re.findall(r'"(.+?)"', exposed[1])) == sent
    assert {
        name for line in re.findall(r"^\| `[^|]+", page, re.MULTILINE) for name in re.findall(r"`(.+?)`", line)
    } >= sent


def test_log_mode_is_invisible(limiter: Limiter) -> None:
    logged = Bucket("user:1", Rate.parse("1/min"), scope="trial", mode="log")
    enforced = Bucket("user:1", Rate.parse("9/min"), scope="search")
    for remaining in ("8", "7"):
        headers = decision_headers(limiter.check([logged, enforced]))
        assert "trial" not in "".join(headers.values())
        assert (headers["X-RateLimit-Limit"], headers["X-RateLimit-Remaining"]) == ("9", remaining)
    assert decision_headers(limiter.check([logged])) == {}


def test_the_setting_chooses_headers(settings: Any) -> None:
    assert tuple(FORMS) == HEADER_FORMS
    ietf, old = {"RateLimit", "RateLimit-Policy"}, {"X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"}
    for chosen, expected in (
        (["ietf"], ietf),
        (["ietf-11"], ietf),
        (["ietf", "ietf-11"], ietf),
        (["x-ratelimit"], old),
        ([], set[str]()),
    ):
        settings.RATEQUOTA = {"HEADERS": chosen}
        assert set(decision_headers(Decision(allowed=True, statuses=(standing(),)))) == expected
        # A refusal has Retry-After in any case.
        assert set(refusal(standing(passed=False, retry_us=SECOND))) == expected | {"Retry-After"}


def test_scopes_of_the_engine_may_be_any_text(limiter: Limiter) -> None:
    for scope, title in {
        "suche-größe": "suche-gr??e/min",
        'say "hi" \\ bye~': 'say "hi" \\ bye~/min',
        "a\r\nSet-Cookie: x=1": "a??Set-Cookie: x=1/min",
        "\x00\ud800\x7f": "???/min",
    }.items():
        headers = decision_headers(limiter.check([Bucket("user:1", Rate.parse("5/min"), scope=scope)]))
        for name in ("RateLimit", "RateLimit-Policy"):
            assert [found for found, _ in parsed(headers[name])] == [title]


def test_where_there_are_no_numbers() -> None:
    for decision, expected in (
        (Decision(allowed=True), {}),
        (Decision(allowed=True, error="timeout"), {}),
        (Decision(allowed=False, blocked_by=("all/blocked",)), {}),
        (Decision(allowed=False, denied_by=("all/min",), error="timeout"), {"Retry-After": "1"}),
        (Decision(allowed=False, denied_by=("all/min",), blocked_by=("x/blocked",), error="timeout"), {}),
        # Charged before the store went down: the numbers are out of date.
        (Decision(allowed=True, statuses=(standing(),), error="timeout"), {}),
    ):
        assert decision_headers(decision) == expected


def test_headers_that_are_there_are_left_alone() -> None:
    response = {"RateLimit": "mine", "Retry-After": "7", "Cache-Control": "private, max-age=5"}
    decision = Decision(allowed=False, statuses=(standing(passed=False, retry_us=90 * SECOND),), at_us=NOON_US)
    add_headers(response, decision, request_from())
    assert (response["RateLimit"], response["Retry-After"]) == ("mine", "7")
    assert response["Cache-Control"] == "private, max-age=5"
    assert response["RateLimit-Policy"] == '"all/min";q=10;w=60'
