"""The impact estimate equals a brute-force count: the same records, checked by the real limiter."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from cProfile import Profile
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone
from hypothesis import example, given
from hypothesis import strategies as st

from django_ratequota import Bucket, Limiter, Rate
from django_ratequota.engine.rates import ALGORITHMS, BURST_ALGORITHMS, parse_rates
from django_ratequota.models import Endpoint, ListMember, Plan, RatePolicy, SubjectList
from django_ratequota.monitoring import attempts
from django_ratequota.monitoring.attempts import Attempts, RecordedAttempts
from django_ratequota.monitoring.records import UNKNOWN_PLAN
from django_ratequota.operations import impact
from django_ratequota.operations.impact import (
    Impact,
    NotEstimable,
    RecordedAudience,
    estimate,
    has_room,
    peak,
    sentences,
    spread,
)
from django_ratequota.operations.replay import replay
from tests.conftest import Clock
from tests.policies.test_cache import queries
from tests.support.properties import examples

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("fresh_policies")]

#: 2026-11-20 23:50:00 UTC: a day ends among the records.
START = 1_795_218_600
_subjects = itertools.count(1)


def record(second: int = START, caller: str = "user:1", **fields: Any) -> Attempts:
    plain: dict[str, Any] = {"ip": "ip:203.0.113.7", "plan_id": None, "endpoint_ids": (), "cost": 1}
    plain |= {"admitted": 1, "refused": 0}
    return Attempts(second=second, caller=caller, **{**plain, **fields})


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def records(*rows: Attempts, share: float = 1.0) -> None:
        def usage(hours: int, endpoint_id: int | None) -> RecordedAttempts:
            here = tuple(row for row in rows if endpoint_id is None or endpoint_id in row.endpoint_ids)
            since = datetime.fromtimestamp(START, UTC) if rows else None
            return RecordedAttempts(attempts=here, share=share, since=since)

        monkeypatch.setattr(attempts, "recorded_attempts", usage)

    records()
    return records


@pytest.fixture
def counted(redis_client: redis.Redis) -> Iterator[Any]:
    """Check every attempt with a real limiter; returns how many requests and callers it refused."""
    clock = Clock()
    limiter = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5)

    def count(rates: tuple[Rate, ...], attempts: list[tuple[str, Attempts]]) -> tuple[int, int]:
        walk = []
        for order, (subject, one) in enumerate(attempts):
            for i in range(one.admitted + one.refused):
                at = one.second * 10**6 + i * 10**6 // (one.admitted + one.refused)
                walk.append((at, order, subject, one))
        run, refused, callers = next(_subjects), 0, set()
        buckets: dict[str, list[Bucket]] = {}
        for clock.now_us, _order, subject, one in sorted(walk, key=lambda step: step[:2]):
            own = buckets.setdefault(subject, [Bucket(f"run:{run}:{subject}", rate) for rate in rates])
            if not limiter.check(own, one.cost).allowed:
                refused += 1
                callers.add(one.caller)
        for own in buckets.values():
            limiter.reset(own)
        return refused, len(callers)

    yield count
    limiter.store.close()


def refusals(found: Impact) -> tuple[int, int]:
    return found.refused_requests, found.refused_clients


RATES = st.lists(
    st.builds(
        lambda limit, period, algorithm, burst: Rate(
            limit=limit,
            period=period,
            algorithm="fixed_window" if period == "month" else algorithm,
            burst=burst if algorithm in BURST_ALGORITHMS and period != "month" else None,
        ),
        st.integers(1, 12),
        st.sampled_from([1, 7, 10, 60, 3600, 86_400, "month"]),
        st.sampled_from(ALGORITHMS),
        st.none() | st.integers(1, 20),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda rate: (rate.algorithm, rate.period),
)
RECORDS = st.lists(
    st.builds(
        record,
        second=st.integers(START, START + 5) | st.integers(START, START + 1200),
        caller=st.sampled_from(["user:1", "user:2", "ip:203.0.113.7", "ip:::/64"]),
        ip=st.sampled_from(["ip:203.0.113.7", "ip:203.0.113.8", "ip:::/64", ""]),
        plan_id=st.sampled_from([None, 1, 2]),
        endpoint_ids=st.sampled_from([(), (1,), (1, 2)]),
        cost=st.sampled_from([1, 1, 2, 13]),
        admitted=st.integers(0, 4),
        refused=st.integers(0, 4),
    ),
    max_size=25,
).map(lambda records: sorted(records, key=lambda one: one.second))
SUBJECTS: dict[str, Callable[[Attempts], str | None]] = {
    "caller": lambda one: one.caller,
    "ip": lambda one: one.ip or "ip:unknown",
    "plan": lambda one: one.plan_id and f"plan:{one.plan_id}",
    "everyone": lambda one: "everyone",
}


@examples(120)
@given(
    rates=RATES, records=RECORDS, counted_per=st.sampled_from(list(SUBJECTS)), endpoint=st.sampled_from([None, 1, 2])
)
def test_the_estimate_equals_a_brute_force_count(
    recorded: Any, counted: Any, rates: list[Rate], records: list[Attempts], counted_per: str, endpoint: int | None
) -> None:
    recorded(*records)
    for pk in (1, 2):
        Endpoint.objects.get_or_create(pk=pk, defaults={"name": f"e{pk}"})
        Plan.objects.get_or_create(pk=pk, defaults={"name": f"p{pk}", "slug": f"p{pk}"})
    text = ", ".join(_named(rate) for rate in rates)
    policy = RatePolicy(rates=text, counted_per=counted_per, endpoint_id=endpoint)
    matching = [
        (subject, one)
        for one in records
        if (endpoint is None or endpoint in one.endpoint_ids) and (subject := SUBJECTS[counted_per](one))
    ]
    found = estimate(policy, seconds=60)
    assert refusals(found) == counted(tuple(rates), matching)
    assert found.requests == sum(one.admitted + one.refused for _, one in matching)
    assert found.clients == len({one.caller for _, one in matching})
    assert found.share == 1


def _named(rate: Rate) -> str:
    plain = str(rate)
    return plain if rate.period == "month" or rate.algorithm in plain else f"{plain} {rate.algorithm}"


@examples(300)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    period=st.sampled_from([1, 2, 3]),
    burst=st.none() | st.integers(1, 12),
    counts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=12),
)
@example(algorithm="sliding_window_counter", period=2, burst=None, counts=[(3, 4), (3, 4)])
def test_skipped_callers_would_not_have_been_refused(
    redis_client: redis.Redis, algorithm: str, period: int, burst: int | None, counts: list[tuple[int, int]]
) -> None:
    """Each is replayed at the lowest limit at which it is skipped."""
    seconds = itertools.accumulate((pause for pause, _ in counts), initial=START)
    records = [record(second, admitted=count) for second, (_, count) in zip(seconds, counts, strict=False)]
    burst = burst if algorithm in BURST_ALGORITHMS else None
    for limit in range(1, 50):
        rates = [Rate(limit=limit, period=period, algorithm=algorithm, burst=burst)]
        if has_room(rates[0], peak(rates[0], records)):
            assert all(replay(rates, [(at, cost) for at, cost, _ in spread(records)]))
            break


@pytest.mark.parametrize(
    "text", ["5/s", "5/s gcra", "5/min fixed_window", "5/min sliding_window_log", "5/day burst 9"]
)
def test_callers_within_the_limit_are_skipped(text: str) -> None:
    rate = Rate.parse(text)
    assert has_room(rate, peak(rate, [record(admitted=5)]))
    assert not has_room(rate, peak(rate, [record(admitted=6)]))
    assert has_room(rate, peak(rate, [record(START + day * 90_000, admitted=5) for day in range(3)]))


@examples(150)
@given(
    algorithm=st.sampled_from(ALGORITHMS),
    period=st.sampled_from([1, 2, 60]),
    rows=st.lists(
        st.builds(
            record,
            second=st.integers(START, START + 5) | st.integers(START, START + 300),
            caller=st.sampled_from([f"user:{number}" for number in range(150)]),
            cost=st.sampled_from([1, 3]),
            admitted=st.integers(0, 4),
        ),
        min_size=1,
        max_size=300,
    ),
)
def test_limits_that_fit_keep_their_promise(recorded: Any, algorithm: str, period: int, rows: list[Attempts]) -> None:
    recorded(*sorted(rows, key=lambda one: one.second))
    rates = str(Rate(limit=7, period=period, algorithm=algorithm))
    for fit in estimate(RatePolicy(rates=rates), seconds=60).fits:
        nobody, most = (
            estimate(RatePolicy(rates=text, algorithm=algorithm), seconds=60)
            for text in (fit.nobody, fit.one_percent)
        )
        assert nobody.refused_requests == 0
        assert most.refused_clients * 100 <= most.clients


def test_limits_that_fit_are_said_by_rate(recorded: Any) -> None:
    recorded(*(record(caller=f"user:{number}", cost=2, admitted=1 + number) for number in range(200)))
    found = estimate(RatePolicy(rates="5/min, 4 requests/hour, 9/day gcra"))
    texts = [text for text in sentences(found) if text.startswith("A limit")]
    few = "would have refused requests on at most 1 % of the counters."
    assert texts == [
        f"A limit of 400/min would have admitted all requests. A limit of 396/min {few}",
        f"A limit of 200 requests/hour would have admitted all requests. A limit of 198 requests/hour {few}",
        f"A limit of 400/day gcra would have admitted all requests. A limit of 396/day gcra {few}",
    ]
    recorded(record(admitted=3))
    assert "A limit of 3/min would have admitted all requests." in sentences(estimate(RatePolicy(rates="5/min")))
    assert estimate(RatePolicy(rates="blocked")).fits == ()


def test_attempts_are_spread_over_their_second() -> None:
    walk = spread(
        [record(7, admitted=2, refused=1), record(7, caller="b", cost=5, admitted=2), record(8, admitted=0)]
    )
    assert walk == [
        (7_000_000, 1, "user:1"),
        (7_000_000, 5, "b"),
        (7_333_333, 1, "user:1"),
        (7_500_000, 5, "b"),
        (7_666_666, 1, "user:1"),
    ]


@pytest.mark.parametrize(
    ("fields", "caller", "share", "why"),
    [
        ({"counted_per": "tenant"}, ["user", "ip"], 1.0, "do not include the tenant of every customer"),
        ({"subject": "tenant:acme"}, ["user", "tenant", "ip"], 1.0, "do not include the tenant of every customer"),
        ({"user_id": 1}, ["tenant", "user", "ip"], 1.0, "do not include the user of every customer"),
        ({"subject": "ip:2001:db8::1"}, ["user", "ip"], 1.0, "only the first 64 bits"),
        ({"counted_per": "everyone"}, ["user", "ip"], 0.5, "has shared counters"),
        ({"counted_per": "plan"}, ["user", "ip"], 0.5, "has shared counters"),
        ({"counted_per": "ip"}, ["user", "ip"], 0.5, "has shared counters"),
    ],
)
def test_a_policy_is_not_estimated_if_the_records_lack_its_callers(
    recorded: Any, settings: Any, fields: dict[str, Any], caller: list[str], share: float, why: str
) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "tests.project.views.api_key"},
        "CALLER": caller,
    }
    recorded(record(), share=share)
    with pytest.raises(NotEstimable, match=why):
        estimate(RatePolicy(rates="1/s", **fields))


@pytest.mark.parametrize("needed_by", ["plan", "counted per plan", "rival"])
def test_callers_recorded_without_their_plan_are_not_estimated(recorded: Any, needed_by: str) -> None:
    """They used to be recorded, and estimated, with the plan of anonymous clients."""
    recorded(record(plan_id=UNKNOWN_PLAN))
    plan = Plan.objects.create(name="Pro", slug="pro")
    policy = RatePolicy(rates="1/s", plan=plan if needed_by == "plan" else None)
    assert estimate(RatePolicy(rates="1/s")).clients == 1
    if needed_by == "counted per plan":
        policy.counted_per = "plan"
    if needed_by == "rival":
        RatePolicy.objects.create(plan=plan, rates="5/s")
    with pytest.raises(NotEstimable, match="do not include the plan of every customer"):
        estimate(policy)


def test_policies_for_an_identifier_are_estimated_if_it_names_callers(recorded: Any, settings: Any) -> None:
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": {"tenant": "tests.project.views.api_key"},
        "CALLER": ["tenant", "ip"],
    }
    recorded(record(caller="tenant:acme", admitted=3), record(caller="tenant:b"), record(caller="ip:203.0.113.7"))
    found = estimate(RatePolicy(rates="1/min", counted_per="tenant"))
    assert (found.clients, *refusals(found)) == (2, 2, 1)
    found = estimate(RatePolicy(rates="1/min", subject="tenant:acme"))
    assert (found.clients, *refusals(found)) == (1, 2, 1)


def test_callers_with_a_more_specific_policy_are_left_out(recorded: Any) -> None:
    users = [User.objects.create(username=f"u{number}") for number in range(3)]
    free = Plan.objects.create(name="Free", slug="free")
    RatePolicy.objects.create(user=users[0], rates="1/s")
    RatePolicy.objects.create(user=users[1], rates="1/s", mode="off")
    RatePolicy.objects.create(user=users[1], rates="1/s", ends_at=timezone.now() - timedelta(days=1))
    RatePolicy.objects.create(user=users[1], rates="1/s", counted_per="ip")
    RatePolicy.objects.create(plan=free, rates="unlimited")
    bots = SubjectList.objects.create(name="Bad bots")
    ListMember.objects.create(subject_list=bots, subject="ip:198.51.100.0/24")
    RatePolicy.objects.create(subject_list=bots, rates="1/s")
    RatePolicy.objects.create(subject="ip:2001:db8::1", rates="1/s")
    recorded(
        record(caller=f"user:{users[0].pk}"),
        record(caller=f"user:{users[1].pk}"),
        record(caller=f"user:{users[2].pk}", plan_id=free.pk),
        record(caller="ip:198.51.100.7", ip="ip:198.51.100.7"),
    )
    everyone, plan, user = (
        estimate(RatePolicy(rates="1/s", **fields)) for fields in ({}, {"plan": free}, {"user": users[0]})
    )
    assert (everyone.clients, everyone.unknown_policies) == (1, 1)
    # Of equals the newest wins, which is the one that is estimated.
    assert plan.clients == 1
    assert (user.clients, user.unknown_policies) == (1, 0)


def test_only_enforced_policies_take_precedence(recorded: Any) -> None:
    """Log-only ones were counted as unknown rivals, and those for plans made an estimate impossible."""
    rivals: list[dict[str, Any]] = [
        {"plan": Plan.objects.create(name="Free", slug="free")},
        {"subject": "ip:2001:db8::1"},
    ]
    for rival in rivals:
        RatePolicy.objects.create(rates="1/s", mode="log", **rival)
    recorded(record(plan_id=UNKNOWN_PLAN))
    found = estimate(RatePolicy(rates="1/s"))
    assert (found.clients, found.unknown_policies) == (1, 0)


def test_log_only_policies_of_users_are_no_unknown_rivals(recorded: Any, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "user", "ip"]} | {
        "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}
    }
    recorded(record(caller="tenant:acme"))
    for name, mode in (("u1", "log"), ("u2", "off"), ("u3", "enforce")):
        RatePolicy.objects.create(rates="1/s", mode=mode, user=User.objects.create(username=name))
    assert estimate(RatePolicy(rates="1/s")).unknown_policies == 1


def calls_of(work: Callable[[], Any]) -> int:
    """Return how many Python functions ``work`` calls."""
    profile = Profile(builtins=False)
    profile.runcall(work)
    return sum(function.callcount for function in profile.getstats())


@pytest.mark.slow
def test_policies_for_other_callers_add_no_work_per_caller(recorded: Any) -> None:
    """2,500 policies for other addresses took 40 s: each was compared with every caller."""
    rates = {"rates": "1/s"}
    RatePolicy.objects.bulk_create(
        [RatePolicy(subject=f"ip:198.51.{number >> 8}.{number & 255}", **rates) for number in range(2500)]
        + [RatePolicy(subject="ip:203.0.113.9", **rates), RatePolicy(subject="ip:203.0.113.128/25", **rates)]
    )
    recorded(record())
    network = RatePolicy(subject="ip:203.0.113.0/24", rates="1/day")
    alone = calls_of(lambda: estimate(network, seconds=60))
    recorded(
        *(record(caller=f"ip:203.0.113.{last}", ip=f"ip:203.0.113.{last}") for last in range(256)),
        record(caller="ip:198.51.100.7", ip="ip:198.51.100.7"),
    )
    found = estimate(network, seconds=60)
    # Left out: .9, and the upper half.
    assert (found.clients, found.unknown_policies) == (127, 0)
    assert calls_of(lambda: estimate(network, seconds=60)) - alone < 200 * 256
    network.rates = "blocked"
    found = estimate(network, seconds=60)
    assert (found.clients, found.unknown_policies) == (256, 0), "a block comes first"


def test_the_search_for_callers_stops_when_its_time_is_up(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate uses the callers found by then. Selecting a caller advances the injected clock."""
    now = 0.0
    monkeypatch.setattr(impact, "time", SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns))
    select = RecordedAudience.select

    def slow(self: Any, records: Any) -> Any:
        nonlocal now
        now += 0.125
        return select(self, records)

    monkeypatch.setattr(RecordedAudience, "select", slow)
    recorded(*(record(caller=f"user:{number}", admitted=3) for number in range(100)))
    found = estimate(RatePolicy(rates="1/min"), seconds=2.0)
    assert (found.clients, found.refused_requests, found.share) == (17, 34, 0.17)
    # If it applies to nobody, the share of callers that was searched is still reported.
    found = estimate(RatePolicy(subject="ip:198.51.100.0/24", rates="1/min"), seconds=2.0)
    assert (found.clients, found.share) == (0, 0.17)
    assert sentences(found)[1] == "This is an estimate from 17 % of the customers."


def test_requests_that_an_exempt_endpoint_matches_are_not_estimated(recorded: Any) -> None:
    """They were: the estimate told the rules of precedence itself, without exemptions."""
    status = Endpoint.objects.create(name="status", limits="none")
    recorded(record(endpoint_ids=(status.pk,)), record(caller="user:2"))
    assert estimate(RatePolicy(rates="blocked")).clients == 1
    assert estimate(RatePolicy(rates="blocked", endpoint=status)).clients == 0


def test_policies_for_all_endpoints_are_not_estimated_where_an_endpoint_has_limits_of_its_own(recorded: Any) -> None:
    burst = Endpoint.objects.create(name="burst", limits="own")
    recorded(record(endpoint_ids=(burst.pk,)), record(caller="user:2"))
    assert [estimate(RatePolicy(rates=rates)).clients for rates in ("5/min", "blocked")] == [1, 2]
    assert estimate(RatePolicy(rates="5/min", endpoint=burst)).clients == 1


def test_queries_do_not_grow_with_policies_and_records(recorded: Any) -> None:
    recorded(record())
    few = queries(lambda: estimate(RatePolicy(rates="1/s")))
    for number in range(20):
        RatePolicy.objects.create(user=User.objects.create(username=f"u{number}"), rates="5/s")
    recorded(*(record(caller=f"user:{number}") for number in range(50)))
    assert queries(lambda: estimate(RatePolicy(rates="1/s"))) <= few


def test_beyond_the_bound_the_same_sample_of_callers_is_estimated(recorded: Any) -> None:
    records = [record(caller=f"user:{number}", admitted=10) for number in range(100)]
    recorded(*records)
    policy = RatePolicy(rates="1/min")
    whole, part = estimate(policy), estimate(policy, most=300)
    assert (whole.share, whole.clients, whole.refused_requests) == (1.0, 100, 900)
    assert (part.share, part.clients, part.refused_requests) == (0.3, 30, 270)
    assert estimate(policy, most=300) == part
    assert any("from 30 % of the customers" in line for line in sentences(part))
    recorded(*records, share=0.5)
    assert estimate(policy, most=300).share == 0.15
    recorded(*records)
    with pytest.raises(NotEstimable, match="more than 300 requests share one counter"):
        estimate(RatePolicy(rates="1/min", counted_per="everyone"), most=300)


def test_callers_that_cannot_be_refused_do_not_count_towards_the_bound(recorded: Any) -> None:
    recorded(
        *(record(caller=f"user:{number}", admitted=10) for number in range(100)), record(admitted=11, caller="x")
    )
    found = estimate(RatePolicy(rates="10/min"), most=20)
    assert (found.share, found.clients, found.refused_requests) == (1.0, 101, 1)


@pytest.mark.parametrize(
    ("rates", "refused"), [("blocked", 5), ("unlimited", 0), ("1/min", 4), ("1/min, 3/day sliding_window_log", 4)]
)
def test_blocked_unlimited_and_several_rates_are_estimated(recorded: Any, rates: str, refused: int) -> None:
    recorded(record(admitted=4, refused=1))
    assert parse_rates(rates)
    assert estimate(RatePolicy(rates=rates)).refused_requests == refused


def test_the_sentences_of_an_estimate() -> None:
    found = Impact(
        since=datetime.fromtimestamp(START, UTC),
        share=0.25,
        clients=4210,
        refused_clients=37,
        requests=100_000,
        refused_requests=1200,
        hit=(),
        unknown_policies=1,
        fits=(),
    )
    assert sentences(found) == [
        "In the last 24 h this would have refused 37 of 4,210 customers, 1.2 % of 100,000 requests.",
        "This is an estimate from 25 % of the customers.",
        "Ignored: 1 policy that takes precedence for customers that the records do not identify.",
    ]


@pytest.mark.parametrize("of_user", [False, True])
def test_a_log_only_policy_is_estimated_as_rolled_out(
    alice: User, recorded: Callable[..., None], of_user: bool
) -> None:
    """The enforced policy of its place, which is newer, had all requests."""
    audience = {"user": alice} if of_user else {}
    recorded(*[record(START + second, caller=f"user:{alice.pk}") for second in range(9)])
    trial = RatePolicy.objects.create(rates="4/hour", mode="log", **audience)
    newer = RatePolicy.objects.create(rates="6/hour", **audience)
    assert [estimate(policy).refused_requests for policy in (trial, newer)] == [5, 3]
