"""Other packages, each asked the way its documentation tells: one candidate for each algorithm that it has.

A candidate decides for client number n under one or more rates, and reads out what there is to tell the client. All
talk to the same server, over connections that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.scene import RATES, Each, Rate, Rates, Requests

#: (units still free, seconds until the limit is back to full) of each limit; None = the package does not say.
Told = list[tuple[float | None, float | None]]
Both = tuple[float | None, float | None]
Hit = Callable[[int], Told]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way of one package to decide."""

    package: str
    #: What is called.
    way: str
    #: The algorithm, by this package's name for it.
    algorithm: str
    #: (rates) -> (client's number -> what is known after the decision).
    prepare: Callable[[Rates], Hit]
    #: Whether a request that one limit refuses is charged nowhere.
    all_or_nothing: str = "no"
    #: It takes a request and finds out who asks; else it is given a key.
    takes_request: bool = False
    #: It writes headers with what it tells.
    writes_headers: bool = False

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.package}: {self.way}"


def candidates(url: str, requests: Requests) -> tuple[list[Candidate], dict[str, str]]:
    """All that work here, each tried once, and why the others do not: package -> error."""
    found: list[Candidate] = []
    missing: dict[str, str] = {}
    for package, ways in _PACKAGES.items():
        try:
            own = list(ways(url, requests))
            for candidate in own:
                for limits in (1, 3):
                    candidate.prepare(RATES[:limits])(1)
        except Exception as error:  # one that is absent or broken must not end the run, and is named in the table
            missing[package] = f"{type(error).__name__}: {error}"
        else:
            found += own
    return found, missing


def _rest_framework(url: str, requests: Requests) -> Iterator[Candidate]:
    from rest_framework.throttling import UserRateThrottle

    def prepare(rates: Rates) -> Hit:
        kinds = [
            type("Throttle", (UserRateThrottle,), {"scope": f"drf{at}", "rate": f"{limit}/{unit}"})
            for at, (limit, unit, _) in enumerate(rates)
        ]

        def hit(n: int) -> Told:
            told: Told = []
            for kind in kinds:
                throttle: Any = kind()
                throttle.allow_request(requests.rest[n], requests.view)
                history = throttle.history
                reset = history[0] + throttle.duration - throttle.now if history else 0
                told.append((throttle.num_requests - len(history), reset))
            return told

        return hit

    yield Candidate("DRF", "UserRateThrottle", "sliding_window_log", prepare, takes_request=True)


def _django_ratelimit(url: str, requests: Requests) -> Iterator[Candidate]:
    from django_ratelimit.core import get_usage

    def prepare(rates: Rates) -> Hit:
        texts = [f"{limit}/{unit[0]}" for limit, unit, _ in rates]

        def hit(n: int) -> Told:
            told: Told = []
            for rate in texts:
                usage = get_usage(requests.plain[n], group="search", key="user", rate=rate, increment=True)
                told.append((usage["limit"] - usage["count"], usage["time_left"]))
            return told

        return hit

    yield Candidate("django-ratelimit", "get_usage", "fixed_window", prepare, takes_request=True)


def _smart_ratelimit(url: str, requests: Requests) -> Iterator[Candidate]:
    from django_smart_ratelimit.algorithms import LeakyBucketAlgorithm, TokenBucketAlgorithm
    from django_smart_ratelimit.backends.redis_backend import RedisBackend
    from django_smart_ratelimit.context import RateLimitContext
    from django_smart_ratelimit.decorator import check_rate_limit
    from django_smart_ratelimit.integrations.drf import SmartRateLimitThrottle

    token, leaky = TokenBucketAlgorithm(), LeakyBucketAlgorithm()
    backends = {name: RedisBackend() for name in ("sliding_window", "fixed_window")}
    for name, backend in backends.items():
        backend.algorithm = name

    def tokens(n: int, rate: Rate) -> Both:
        limit, unit, period = rate
        _, told = token.is_allowed(backends["fixed_window"], f"user:{n}:{unit}", limit, period)
        return told["tokens_remaining"], told["time_to_refill"]

    def level(n: int, rate: Rate) -> Both:
        limit, unit, period = rate
        _, told = leaky.is_allowed(backends["fixed_window"], f"user:{n}:{unit}", limit, period)
        return told["space_remaining"], told["bucket_level"] / told["leak_rate"]

    def window(name: str) -> Callable[[int, Rate], Both]:
        def decide(n: int, rate: Rate) -> Both:
            limit, unit, period = rate
            context = RateLimitContext(
                request=requests.plain[n], key=f"user:{n}:{unit}", limit=limit, period=period, backend_name="redis"
            )
            check_rate_limit(context, backends[name])
            written = dict[str, str]()
            written.update(context.to_headers())
            return context.remaining, context.reset_time

        return decide

    def throttles(rates: Rates) -> Hit:
        kinds = [
            type("Throttle", (SmartRateLimitThrottle,), {"rate": f"{limit}/{unit[0]}", "key_func": _keyed(unit)})
            for limit, unit, _ in rates
        ]

        def hit(n: int) -> Told:
            told: Told = []
            for kind in kinds:
                throttle: Any = kind()
                throttle.allow_request(requests.rest[n], requests.view)
                told.append((None, throttle.wait()))
            return told

        return hit

    def batch(rates: Rates) -> Hit:
        def hit(n: int) -> Told:
            checks = [{"key": f"batch:{n}:{unit}", "limit": limit, "period": period} for limit, unit, period in rates]
            results = backends["fixed_window"].check_batch(checks)
            return [(check["limit"] - told["count"], None) for check, (_, told) in zip(checks, results, strict=True)]

        return hit

    package = "django-smart-ratelimit"
    yield Candidate(package, "TokenBucketAlgorithm", "token_bucket", _in_a_row(tokens))
    yield Candidate(package, "LeakyBucketAlgorithm", "leaky_bucket", _in_a_row(level))
    for name, algorithm in (("fixed_window", "fixed_window"), ("sliding_window", "sliding_window_log")):
        one_by_one = _in_a_row(window(name))
        yield Candidate(package, name, algorithm, one_by_one, takes_request=True, writes_headers=True)
    yield Candidate(package, "check_batch, fixed_window", "fixed_window", batch)
    yield Candidate(package, "SmartRateLimitThrottle", "sliding_window_log", throttles, takes_request=True)


def _keyed(unit: str) -> Callable[[Any, Any], str]:
    return lambda request, view: f"user:{request.user.pk}:{unit}"


def _ratelimit_plus(url: str, requests: Requests) -> Iterator[Candidate]:
    from drf_ratelimit_plus import RateLimitHeadersMixin, rate_limit

    class Answered:
        throttles: list[Any]

        def get_throttles(self) -> list[Any]:
            return self.throttles

        def finalize_response(self, request: Any, response: Any) -> Any:
            return response

    class View(RateLimitHeadersMixin, Answered):
        pass

    def way(algorithm: str) -> Callable[[Rates], Hit]:
        def prepare(rates: Rates) -> Hit:
            kinds = [
                rate_limit(rate=f"{limit}/{unit[0]}", algorithm=algorithm, key="user", scope=unit)
                for limit, unit, _ in rates
            ]

            def hit(n: int) -> Told:
                view: Any = View()
                view.throttles = [kind() for kind in kinds]
                for throttle in view.throttles:
                    throttle.allow_request(requests.rest[n], requests.view)
                view.finalize_response(requests.rest[n], {})
                results = [throttle.last_result for throttle in view.throttles]
                return [(result.remaining, result.reset_seconds) for result in results]

            return hit

        return prepare

    for theirs, ours in _PLUS.items():
        yield Candidate("drf-ratelimit-plus", theirs, ours, way(theirs), takes_request=True, writes_headers=True)


_PLUS = {
    "fixed_window": "fixed_window",
    "sliding_window": "sliding_window_counter",
    "token_bucket": "token_bucket",
}


def _limits(url: str, requests: Requests) -> Iterator[Candidate]:
    from limits import parse, strategies
    from limits.storage import RedisStorage

    items = Each(lambda rate: parse(f"{rate[0]}/{rate[1]}"))

    def way(strategy: Any, *, stats: bool) -> Callable[[int, Rate], Both]:
        def decide(n: int, rate: Rate) -> Both:
            item = items[rate]
            strategy.hit(item, "search", str(n))
            if not stats:
                return None, None
            reset, remaining = strategy.get_window_stats(item, "search", str(n))
            return remaining, reset

        return decide

    for kind, algorithm in (
        (strategies.FixedWindowRateLimiter, "fixed_window"),
        (strategies.MovingWindowRateLimiter, "sliding_window_log"),
        (strategies.SlidingWindowCounterRateLimiter, "sliding_window_counter"),
    ):
        name = kind.__name__.removesuffix("RateLimiter")
        strategy = kind(RedisStorage(url, key_prefix=name))  # their keys would be the same, their values not
        for words, stats in (("hit", False), ("hit + get_window_stats", True)):
            yield Candidate("limits", f"{name}, {words}", algorithm, _in_a_row(way(strategy, stats=stats)))


def _throttled(url: str, requests: Requests) -> Iterator[Candidate]:
    from throttled import RateLimiterType, Throttled
    from throttled.store import RedisStore

    store = RedisStore(server=url)

    def way(kind: Any) -> Callable[[int, Rate], Both]:
        throttles = Each(lambda rate: Throttled(using=kind.value, quota=f"{rate[0]}/{rate[1][0]}", store=store))

        def decide(n: int, rate: Rate) -> Both:
            state = throttles[rate].limit(f"user:{n}:{rate[1]}").state
            return state.remaining, state.reset_after

        return decide

    for kind, algorithm in (
        (RateLimiterType.FIXED_WINDOW, "fixed_window"),
        (RateLimiterType.SLIDING_WINDOW, "sliding_window_counter"),
        (RateLimiterType.TOKEN_BUCKET, "token_bucket"),
        (RateLimiterType.LEAKING_BUCKET, "leaky_bucket"),
        (RateLimiterType.GCRA, "gcra"),
    ):
        yield Candidate("throttled-py", kind.value, algorithm, _in_a_row(way(kind)))


def _pyrate(url: str, requests: Requests) -> Iterator[Candidate]:
    from pyrate_limiter import Duration, Limiter, RedisBucket, RedisStateStore, StateBucket
    from pyrate_limiter import Rate as Window
    from pyrate_limiter.limiter import SingleBucketFactory

    client = redis.Redis.from_url(url)

    def prepare(make: Callable[[int, list[Any]], Any], reset: bool) -> Callable[[Rates], Hit]:
        def prepared(rates: Rates) -> Hit:
            theirs = [Window(limit, Duration.SECOND * period) for limit, _, period in rates]
            buckets: dict[int, tuple[Any, Any]] = {}

            def hit(n: int) -> Told:
                known = buckets.get(n)
                if known is None:
                    bucket = make(n, theirs)
                    limiter = Limiter(SingleBucketFactory(bucket, schedule_leak=False))
                    known = buckets[n] = (limiter, bucket)
                limiter, bucket = known
                limiter.try_acquire("search", blocking=False)
                used = bucket.count()
                # It counts what is used of the fullest rate, or of all together: nothing of the others.
                limit, _, period = rates[0]
                seconds = used * period / limit if reset and len(rates) == 1 else None
                return [(limit - used, seconds), *[(None, None)] * (len(rates) - 1)]

            return hit

        return prepared

    def log(n: int, rates: list[Any]) -> Any:
        return RedisBucket.init(rates, client, f"pyrate:{len(rates)}:user:{n}")

    def state(n: int, rates: list[Any]) -> Any:
        store = RedisStateStore(client, f"pyrate:state:{len(rates)}:user:{n}")
        return StateBucket(rates, store=store)

    for make, name, algorithm, reset in (
        (log, "RedisBucket", "sliding_window_log", False),
        (state, "StateBucket", "gcra", True),
    ):
        yield Candidate(
            "pyrate-limiter", f"{name}, try_acquire + count", algorithm, prepare(make, reset), all_or_nothing="yes"
        )


def _in_a_row(decide: Callable[[int, Rate], Both]) -> Callable[[Rates], Hit]:
    """Several limits where a package judges one at a time."""
    return lambda rates: lambda n: [decide(n, rate) for rate in rates]


_PACKAGES: dict[str, Callable[[str, Requests], Iterator[Candidate]]] = {
    "DRF": _rest_framework,
    "django-ratelimit": _django_ratelimit,
    "django-smart-ratelimit": _smart_ratelimit,
    "drf-ratelimit-plus": _ratelimit_plus,
    "limits": _limits,
    "throttled-py": _throttled,
    "pyrate-limiter": _pyrate,
}
