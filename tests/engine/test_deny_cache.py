"""The deny cache: refused in process what Redis would refuse, as it would refuse it, and not a moment longer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import Bucket, Decision, Limiter, Rate, acheck_request, check_request
from django_ratequota.engine.decision import LimitRequest, Steps
from django_ratequota.engine.deny_cache import DenyCache
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.engine.types import BucketStatus
from django_ratequota.exceptions import InvalidCost, NewerRevision, StoreError
from django_ratequota.headers import decision_headers, retry_after_seconds
from django_ratequota.models import RatePolicy
from django_ratequota.monitoring.collector import collector, counting
from django_ratequota.monitoring.health import reporting
from django_ratequota.monitoring.timeline import timeline
from django_ratequota.signals import request_refused
from django_ratequota.store.base import Call
from django_ratequota.utils.sansio import drive
from tests.conftest import Clock
from tests.project.views import request_from
from tests.support.properties import examples
from tests.support.threads import by_hand


def bucket(rate: str, subject: str = "user:1", **more: Any) -> Bucket:
    return Bucket(subject, Rate.parse(rate), **more)


MINUTE = [bucket("1/min")]


@pytest.fixture
def cached(redis_client: redis.Redis, clock: Clock) -> Iterator[Limiter]:
    """A limiter that repeats refusals for two seconds of the injected clock."""
    limiter = Limiter(client=redis_client, clock=clock, prefix="rqtest", timeout=5, deny_cache_seconds=2)
    yield limiter
    limiter.store.close()


@pytest.fixture
def asked(redis_client: redis.Redis) -> Callable[[], int]:
    """How many scripts the server ran since it was last called."""
    before = [0]

    def count() -> int:
        calls = redis_client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
        since, before[0] = calls - before[0], calls
        return since

    count()
    return count


def refuse(limiter: Limiter, buckets: list[Bucket], cost: int = 1) -> Decision:
    """Check until it is refused."""
    while (decision := limiter.check(buckets, cost)).allowed:
        pass
    return decision


# --- Which refusals are repeated, and for how long. ---


def test_a_refused_client_asks_redis_once_in_the_setting_s_seconds(
    cached: Limiter, clock: Clock, asked: Callable[[], int]
) -> None:
    cached.check(MINUTE)
    asked()
    for _ in range(10):  # five periods of two seconds
        for _ in range(20):
            clock.advance(0.05)
            assert not cached.check(MINUTE).allowed
    assert asked() == 5


def test_times_are_counted_down_to_the_microsecond_and_name_one_instant(cached: Limiter, clock: Clock) -> None:
    buckets = [bucket("1/min"), bucket("100/hour", scope="all"), bucket("2/hour gcra", "everyone", mode="log")]
    first = refuse(cached, buckets)
    clock.advance(us=1_234_567)
    again = cached.check(buckets)
    assert again.at_us == first.at_us + 1_234_567
    assert [status.bucket for status in again.statuses] == buckets
    for was, now in zip(first.statuses, again.statuses, strict=True):
        timeless = {"retry_after_us": None, "reset_after_us": 0, "next_after_us": None}
        assert replace(was, **timeless) == replace(now, **timeless)
        assert now.reset_after_us == was.reset_after_us - 1_234_567
        assert was.next_after_us
        assert now.next_after_us == was.next_after_us - 1_234_567
    waits = [status.retry_after_us for status in again.statuses]
    assert waits == [60 * 10**6 - 1_234_567, 0, 0]
    assert again.retry_after_us == waits[0]
    assert (again.allowed, again.violated, again.binding) == (False, first.violated, again.statuses[0])
    assert replace(again, statuses=first.statuses, at_us=first.at_us) == first
    assert again.settler is cached
    for value in (again, *again.statuses):  # whole: each of the fields is there
        assert replace(value) == value
        assert repr(value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_next_after_is_unknown_once_units_came_back(cached: Limiter, clock: Clock, algorithm: str) -> None:
    """A refusal that lacks four units is repeated while one or two of them come back."""
    asked = [bucket(f"60/min {algorithm}")]
    cached.check(asked, cost=59)
    refused = cached.check(asked, cost=60)
    assert not refused.allowed
    next_us, wait_us = refused.statuses[0].next_after_us, refused.retry_after_us
    assert next_us is not None
    assert wait_us is not None
    clock.advance(us=min(next_us, wait_us) - 1)
    assert cached.check(asked, cost=60).statuses[0].next_after_us == (1 if next_us <= wait_us else None)
    if next_us < wait_us:
        clock.advance(us=1)
        assert cached.check(asked, cost=60).statuses[0].next_after_us is None
        assert cached.peek(asked).statuses[0].next_after_us


def test_a_cost_that_never_fits_is_repeated(cached: Limiter, clock: Clock, asked: Callable[[], int]) -> None:
    assert cached.check(MINUTE, 2).retry_after is None
    asked()
    clock.advance(1.999999)
    assert cached.check(MINUTE, 2).retry_after is None
    assert asked() == 0
    clock.advance(us=1)
    assert cached.check(MINUTE, 2).retry_after is None
    assert asked() == 1


def test_a_clock_that_steps_back_asks(cached: Limiter, clock: Clock, asked: Callable[[], int]) -> None:
    refuse(cached, MINUTE)
    clock.advance(-5)
    asked()
    assert not cached.check(MINUTE).allowed
    assert asked() == 1


def test_others_are_sent_to_redis(cached: Limiter, asked: Callable[[], int]) -> None:
    for other in (
        *([bucket(rate)] for rate in ("2/min", "1/min burst 3", "1/hour", "1/min gcra")),
        *(
            [bucket("1/min", **more)]
            for more in ({"scope": "a"}, {"subject": "user:2"}, {"mode": "log"}, {"name": "b"})
        ),
        [*MINUTE, bucket("9/min", scope="b")],
    ):
        cached.reset(MINUTE)
        refuse(cached, MINUTE)
        asked()
        cached.check(other)
        assert asked() == 1, other
    for cost in (2, 0):
        cached.check(MINUTE, cost)
        assert asked() == 1, cost


@pytest.mark.parametrize("cost", [True, 1.0, -1, "1"])
def test_an_invalid_cost_raises_although_the_refusal_is_cached(cost: Any, cached: Limiter) -> None:
    refuse(cached, MINUTE)
    with pytest.raises(InvalidCost):
        cached.check(MINUTE, cost)


def test_peek_is_always_sent_to_redis(cached: Limiter, redis_client: redis.Redis) -> None:
    refuse(cached, MINUTE)
    redis_client.flushdb()
    assert not cached.check(MINUTE).allowed
    assert cached.peek(MINUTE).allowed


def test_acquire_is_always_sent_to_redis(cached: Limiter, clock: Clock) -> None:
    queue = bucket("10/s burst 1 leaky_bucket", queued=True)
    refuse(cached, [queue])
    waits = [cached.acquire(queue, timeout=1).retry_after for _ in range(3)]
    assert waits == [0.1, 0.2, 0.3]
    assert cached.check([queue]).retry_after == 0.4


# --- What ends a refusal earlier. ---


def test_charges_of_a_bucket_with_room_do_not_end_the_refusal(cached: Limiter, asked: Callable[[], int]) -> None:
    shared = bucket("1000/hour", "everyone")
    refuse(cached, [*MINUTE, shared])
    asked()
    for number in range(2, 12):
        cached.check([bucket("1/min", f"user:{number}"), shared])
        cached.check([*MINUTE, shared])
    assert asked() == 10


def steps_of(limiter: Limiter, revision: int | None, buckets: list[Bucket] = MINUTE) -> Decision:
    request = LimitRequest(mode="check", buckets=tuple(buckets), revision=revision)
    return drive(limiter.ask(request), Call(limiter.store).do)


def test_a_refusal_belongs_to_its_revision(cached: Limiter, asked: Callable[[], int]) -> None:
    old = cached.publish()
    steps_of(cached, old)
    assert not steps_of(cached, old).allowed
    asked()
    assert steps_of(cached, old).revision == old
    assert asked() == 0
    assert not steps_of(cached, None).allowed
    assert asked() == 1


def test_a_publication_elsewhere_is_seen_at_the_next_command(cached: Limiter, limiter: Limiter, clock: Clock) -> None:
    old = cached.publish()
    steps_of(cached, old)
    assert not steps_of(cached, old).allowed
    limiter.publish()
    assert not steps_of(cached, old).allowed
    with pytest.raises(NewerRevision):
        steps_of(cached, old, [bucket("1/min", "user:2")])
    with pytest.raises(NewerRevision):  # what that one learned holds for all
        steps_of(cached, old)


# --- Replies that were on their way during a change. ---


def interrupted(limiter: Limiter, meanwhile: Callable[[], object], revision: int | None = None) -> Decision:
    """A check whose reply is read only after another action."""

    def do(command: Any) -> Any:
        reply = limiter.store.execute(command)
        meanwhile()
        return reply

    return drive(limiter.ask(LimitRequest(mode="check", buckets=tuple(MINUTE), revision=revision)), do)


@pytest.mark.parametrize("change", ["refund", "reset"])
def test_an_answer_from_before_units_came_back_is_not_kept(change: str, cached: Limiter) -> None:
    cached.check(MINUTE)
    give_back = {"refund": lambda: cached.refund(MINUTE, 1), "reset": lambda: cached.reset(MINUTE)}[change]
    assert not interrupted(cached, give_back).allowed
    assert cached.check(MINUTE).allowed


def test_an_answer_from_before_an_edit_is_not_kept(cached: Limiter, clock: Clock) -> None:
    old = cached.publish()
    steps_of(cached, old)
    assert not interrupted(cached, cached.publish, old).allowed
    with pytest.raises(NewerRevision):
        steps_of(cached, old)
    old = cached.stored_revision()
    assert not steps_of(cached, old).allowed
    clock.advance(2)  # now where it is counted is known
    assert not interrupted(cached, cached.publish, old).allowed
    with pytest.raises(NewerRevision):
        steps_of(cached, old)


def test_an_answer_from_before_another_client_got_units_back_is_kept(
    cached: Limiter, asked: Callable[[], int]
) -> None:
    cached.check(MINUTE)
    assert not interrupted(cached, lambda: cached.refund([bucket("1/min", "user:2")], 1)).allowed
    asked()
    assert not cached.check(MINUTE).allowed
    assert asked() == 0


def test_a_refund_whose_reply_was_lost_ends_the_refusal(cached: Limiter) -> None:
    refuse(cached, MINUTE)
    server: Any = cached.store.server
    send = server.pool.send

    def lose(*args: Any) -> Any:
        send(*args)
        raise ConnectionError("the answer was lost")

    server.pool.send = lose
    with pytest.raises(StoreError):
        cached.refund(MINUTE, 1)
    server.pool.send = send
    assert cached.check(MINUTE).allowed


def test_a_refusal_expires_by_the_time_of_sending_and_retry_after_counts_from_the_reply() -> None:
    """Sent at 0, decided in between, reply at 300 µs: it expires in time, and names the same moment throughout."""
    clock = Clock(0)
    answer = Decision(allowed=False, statuses=(refused_status(MINUTE[0], 1000),), at_us=5_000_000)
    denials = DenyCache(Answers(answer, lambda: clock.advance(us=300)), 60, clock)

    def check() -> Decision:
        return drive(denials.ask(LimitRequest(mode="check", buckets=tuple(MINUTE))), Exception)

    assert check() is answer
    clock.advance(us=699)
    repeated = check()
    assert (repeated.at_us, repeated.retry_after_us) == (5_000_699, 301)
    clock.advance(us=1)  # 1000 µs after the question: it may be over, so it is asked
    assert check() is answer


class Answers:
    """The link below the cache: it gives this answer, after ``meanwhile``; None = it refuses by all buckets."""

    def __init__(self, answer: Decision | None = None, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.answer, self.meanwhile, self.asked = answer, meanwhile, 0

    def ask(self, request: LimitRequest) -> Steps:
        self.asked += 1
        self.meanwhile()
        statuses = tuple(refused_status(each, 10**9) for each in request.buckets)
        return self.answer or Decision(allowed=False, statuses=statuses)
        yield


def refused_status(bucket: Bucket, wait_us: int) -> Any:
    return BucketStatus(
        bucket=bucket, allowed=False, remaining=0, retry_after_us=wait_us, reset_after_us=wait_us, window_us=10**6
    )


# --- Bounds, threads, processes. ---


def repeats(denials: DenyCache, server: Answers, subject: str) -> bool:
    """Check the bucket of a subject; returns whether the cache refused it without asking."""
    before = server.asked
    request = LimitRequest(mode="check", buckets=(bucket("1/min", subject),))
    assert not drive(denials.ask(request), Exception).allowed
    return server.asked == before


def test_what_is_kept_is_bounded() -> None:
    server = Answers()
    denials = DenyCache(server, 60, Clock(), size=100)
    for number in range(100):
        repeats(denials, server, f"user:{number}")
    assert repeats(denials, server, "user:0")
    assert not repeats(denials, server, "user:100")
    assert not repeats(denials, server, "user:0")
    assert not repeats(denials, server, "user:1")
    for number in range(1000):
        denials.freed((bucket("1/min", f"user:{1000 + number}"),))
        assert len(denials) <= 2
    assert not repeats(denials, server, "user:1")
    assert repeats(denials, server, "user:1")


def test_a_refund_while_an_answer_is_on_its_way_counts_though_many_come_after_it() -> None:
    def refunds() -> None:
        for number in range(1, 10):
            denials.freed((bucket("1/min", f"user:{number}"),))

    server = Answers(meanwhile=refunds)
    denials = DenyCache(server, 60, Clock(), size=2)
    assert not repeats(denials, server, "user:1")
    server.meanwhile = bool
    assert not repeats(denials, server, "user:1")
    assert repeats(denials, server, "user:1")


# --- Compared with a limiter without the cache. ---

RATES = [
    f"{limit}/{period}{burst} {algorithm}"
    for algorithm in ALGORITHMS
    for limit, period, burst in [(1, "s", ""), (3, "s", ""), (7, "2s", ""), (4, "min", "")]
] + ["3/s burst 5", "5/s burst 2 gcra", "2/s burst 6 leaky_bucket", "5/day fixed_window", "6/month"]

#: Requests share counters in part: own ones, the same at other limits, and one that all share.
REQUESTS = st.lists(
    st.builds(
        Bucket,
        st.sampled_from(["user:1", "user:2", "everyone"]),
        st.sampled_from([Rate.parse(text) for text in RATES]),
        scope=st.sampled_from(["", "search"]),
        mode=st.sampled_from(["enforce", "enforce", "enforce", "log"]),
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda bucket: bucket.counter,
)
#: Checks come four at a time, with a pause in between.
FLOODS = st.tuples(
    st.just("check"),
    st.integers(0, 2),
    st.sampled_from([1, 1, 1, 2, 3, 0, 9]),
    st.sampled_from([0, 1, 1_000, 100_000, 600_000]),
)
STEPS = st.one_of(
    FLOODS,
    FLOODS,
    st.tuples(st.sampled_from(["charge", "refund"]), st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.just("reset"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("advance"), st.sampled_from([0, 0, 1, 999_999, 10**6]) | st.integers(0, 4 * 10**6), st.just(0)),
    st.tuples(st.just("wait"), st.integers(-1, 1), st.just(0)),
)


@given(
    requests=st.lists(REQUESTS, min_size=3, max_size=3),
    steps=st.lists(STEPS, min_size=10, max_size=40),
    start=st.integers(0, 3 * 10**6),
)
@examples(150)
def test_one_with_it_decides_as_one_without_it(
    redis_client: redis.Redis, clock: Clock, requests: list[list[Bucket]], steps: list[tuple[Any, ...]], start: int
) -> None:
    for key in redis_client.scan_iter("rqtest:*", count=1000):
        redis_client.delete(key)
    clock.advance(us=start)
    plain = Limiter(client=redis_client, clock=clock, prefix="rqtest:plain", timeout=5)
    cached = Limiter(client=redis_client, clock=clock, prefix="rqtest:cached", timeout=5, deny_cache_seconds=1.5)
    wait_us: int | None = None
    try:
        for verb, which, cost, *pause_us in steps:
            if verb == "advance":
                clock.advance(us=which)
            elif verb == "wait":  # to the instant that the last refusal named, or a µs beside it
                clock.advance(us=max(0, (wait_us or 0) + which))
                wait_us = None
            elif verb == "reset":
                assert plain.reset(requests[which]) == cached.reset(requests[which])
            else:
                for _ in range(4 if pause_us else 1):
                    true, found = (getattr(each, verb)(requests[which], cost) for each in (plain, cached))
                    _assert_same(true, found)
                    if not true.allowed:
                        wait_us = found.retry_after_us
                    for us in pause_us:
                        clock.advance(us=us)
                        wait_us = wait_us and max(0, wait_us - us)
    finally:
        plain.store.close()
        cached.store.close()


def _assert_same(true: Decision, found: Decision) -> None:
    assert found.allowed == true.allowed
    assert found.at_us == true.at_us
    if true.allowed:
        assert found.statuses == true.statuses
        return
    # Others may have charged the buckets that had room: only Redis' next reply shows that.
    for one, other in zip(true.statuses, found.statuses, strict=True):
        if not other.allowed:
            assert (one.allowed, one.retry_after_us) == (False, other.retry_after_us)
            assert one.reset_after_us == other.reset_after_us
    if [status.bucket for status in true.refusing] == [status.bucket for status in found.refusing]:
        assert found.retry_after_us == true.retry_after_us


# --- From a request on. ---


@pytest.fixture
def remembering(settings: Any, fresh_policies: None, monkeypatch: Any) -> Iterator[None]:
    """Refusals are cached and counted; the counts are flushed when the test asks for it."""
    by_hand(monkeypatch, counting, reporting)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "DENY_CACHE_SECONDS": 60, "STATISTICS_SECONDS": 1}
    collector.clear()
    yield
    collector.clear()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("check", [check_request, async_to_sync(acheck_request)], ids=["sync", "async"])
def test_a_repeated_refusal_is_a_refused_request_like_any_other(
    check: Callable[..., Decision], asked: Callable[[], int]
) -> None:
    RatePolicy.objects.create(rates="1/day, 1000/month")
    heard: list[Decision] = []

    def receiver(decision: Decision, **_: Any) -> None:
        heard.append(decision)

    request_refused.connect(receiver)
    try:
        check(request_from())
        first = check(request_from())
        asked()
        again = check(request_from())
    finally:
        request_refused.disconnect(receiver)
    assert asked() == 0
    assert heard == [first, again]
    assert again.refusal_id
    assert again.revision == first.revision > 0
    assert retry_after_seconds(again) in (retry_after_seconds(first), (retry_after_seconds(first) or 0) - 1)
    assert decision_headers(again).keys() == decision_headers(first).keys()
    collector.flush()
    total = timeline("hour").total
    assert (sum(one.admitted for one in total), sum(one.refused for one in total)) == (1, 2)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("remembering")
def test_a_blocked_client_asks_each_time(asked: Callable[[], int]) -> None:
    RatePolicy.objects.create(rates="blocked")
    check_request(request_from())
    asked()
    assert not check_request(request_from()).allowed
    assert asked() == 1


def test_limiters_from_the_settings_repeat_refusals_by_default(settings: Any, clock: Clock) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "DENY_CACHE_SECONDS": 60}
    for limiter, expected in ((Limiter(clock=clock), 1), (Limiter(clock=clock, deny_cache_seconds=0), 2)):
        limiter.reset(MINUTE)
        refuse(limiter, MINUTE)
        before = sum(limiter.latency.counts)
        limiter.check(MINUTE)
        assert sum(limiter.latency.counts) - before == expected - 1
        limiter.reset(MINUTE)
        limiter.store.close()
