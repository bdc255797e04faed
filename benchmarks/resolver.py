"""Finding out what applies, in a project of 10 to 10,000 policies, 1,000 endpoints and a million users; and edits."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from benchmarks.databases import in_each, main
from benchmarks.measure import Result, Table, interleave

SIZES, USERS = (10, 100, 1_000, 10_000), 1_000_000
#: Policies of subjects that are there besides, for a second run of edits.
SUBJECTS = 100_000
#: Users that make requests.
WARM = 1_000


def run(quick: bool = False) -> Result:
    """Warm, new and cold callers by the number of policies; and edits."""
    measured = in_each("benchmarks.resolver", quick)
    sizes, users, edited = (
        [(name, *row) for name, one in measured.items() for row in one[part]] for part in ("sizes", "users", "edits")
    )
    names = measured["SQLite"]["figures"]
    figures = {name: max(one["figures"][name] for one in measured.values()) for name in names}
    return Result([_by_size(sizes), _by_user(users), _by_edit(edited)], figures)


def _by_size(rows: list[Any]) -> Table:
    columns = ("database", "policies", "× 10 policies", "warm, µs", "with identity, µs", "new caller, µs")
    note = (
        "One request under three policies, from the route, the user's entry and the snapshot to the buckets; with "
        "identity: from the request's user and address on; a new caller has not been seen before; CPU time. 1,000 "
        "endpoints. Loading reads everything except what belongs to one user; memory is that of the snapshot."
    )
    return Table("Resolving", (*columns, "building the snapshot, ms", "snapshot, MB"), rows, note)


def _by_user(rows: list[Any]) -> Table:
    note = "Users read on their first request; the last column is what one holds in memory once it was resolved."
    return Table("Cold users", ("database", "users", "queries", "ms", "kB"), rows, note)


def _by_edit(rows: list[Any]) -> Table:
    columns = ("database", "policies", "loading all by warm(), ms", "an edit, ms", "of 100 policies, ms")
    note = (
        "CPU of a process that takes in all policies, an edit of one and an edit of a hundred. Edits are "
        "medians. Only the policies edited are read again."
    )
    return Table("Edits", columns, rows, note)


def measure(quick: bool) -> dict[str, Any]:
    """What a process of its own hands back, as JSON values."""
    from benchmarks import population
    from django_ratequota.policies.cache import policies

    users, until = (20_000, 1_000) if quick else (USERS, SIZES[-1])
    population.add_endpoints()
    snapshots: dict[int, Any] = {}
    rows: dict[int, tuple[float, ...]] = {}
    for size in (size for size in SIZES if size <= until):
        population.add_policies(size)
        snapshots[size], rows[size] = _load(3 if quick else 5)
    population.add_users(users)
    policies.reload(time.time_ns() // 1000)
    cold, figures = _cold(users, 50 if quick else 200)
    warm = _warm(snapshots, 5 if quick else 30)
    for size, (resolving, identifying, new) in warm.items():
        rows[size] = (
            size,
            resolving / warm[SIZES[0]][0],
            *(1e6 * each for each in (resolving, identifying, new)),
            *rows[size],
        )
    figures |= {"resolve_growth": warm[until][0] / warm[SIZES[0]][0], "resolve_us": warm[until][0] * 1e6}
    edited = _edits(quick)
    figures |= {"dropped_users": _dropped(), "load_ms": edited[-1][1], "edit_ms": edited[-1][2]}
    return {"sizes": list(rows.values()), "users": cold, "edits": edited, "figures": figures}


def _edits(quick: bool) -> list[tuple[float, ...]]:
    """Rows (policies, CPU ms to load all, for an edit of one policy, and for one of 100)."""
    from benchmarks import population
    from django_ratequota import warm
    from django_ratequota.models import RatePolicy
    from django_ratequota.policies.cache import policies
    from django_ratequota.runtime import default_limiter

    rows = []
    for more in (0, 5_000 if quick else SUBJECTS):
        if more:
            population.add_subjects(more)
        policies.forget()
        loading = _ms(warm)
        subjects = RatePolicy.objects.filter(endpoint__isnull=True).exclude(subject="").order_by("pk")
        spent: dict[int, list[float]] = {1: [], 100: []}
        for edited, each in spent.items():
            pks = list(subjects.values_list("pk", flat=True)[:edited])
            for number in range(10 if quick else 50):
                RatePolicy.objects.filter(pk__in=pks).update(rates=f"{100 + number}/min")
                revision = default_limiter().stored_revision()
                each.append(_ms(lambda revision=revision: policies.reload(revision)))
        size = RatePolicy.objects.filter(user__isnull=True).count()
        rows.append((size, loading, *map(median, spent.values())))
    return rows


def _ms(work: Callable[[], object]) -> float:
    """CPU of the process."""
    begun = time.process_time()
    work()
    return 1e3 * (time.process_time() - begun)


def _dropped() -> int:
    """How many users are forgotten when one gets a policy of their own."""
    from django_ratequota.models import RatePolicy
    from django_ratequota.policies.cache import policies
    from django_ratequota.runtime import default_limiter

    before = {user_id: policies.load_user(str(user_id)) for user_id in range(1, WARM + 1)}
    RatePolicy.objects.create(user_id=WARM // 2 + 1, rates="3000000/min")
    policies.reload(default_limiter().stored_revision())
    return sum(policies.user(str(user_id)) is not entry for user_id, entry in before.items())


def request_of(user_id: int | None, address: str = "203.0.113.7") -> Any:
    """A request of the user, or of nobody, to the endpoint that all policies are about."""
    from django.contrib.auth.models import AnonymousUser, User
    from django.http import HttpRequest
    from django.urls import resolve

    from benchmarks.population import ROUTE

    request = HttpRequest()
    request.method, request.path, request.META = "GET", ROUTE, {"REMOTE_ADDR": address}
    request.user = AnonymousUser() if user_id is None else User(pk=user_id)
    request.resolver_match = resolve(ROUTE)
    return request


def _load(times: int) -> tuple[Any, tuple[float, float]]:
    """A snapshot, and (ms to load, MB held)."""
    from django_ratequota.policies.loading import load_snapshot

    spent = [_ms(lambda: load_snapshot(1)) for _ in range(times)]
    held, snapshot = _held(lambda: load_snapshot(1))
    return snapshot, (median(spent), held / 1e6)


def _held(make: Callable[[], Any]) -> tuple[int, Any]:
    """(bytes that what ``make`` returns or keeps elsewhere holds, what it returns)."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    made = make()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held, made


def _asking(snapshot: Any, request: Any, entry: Any) -> Callable[[Any], Any]:
    """Resolves what the caller may do at the request's route, as ``enforcement`` does."""
    from django_ratequota.policies.matching import Where
    from django_ratequota.policies.requests.routes import resolved
    from django_ratequota.policies.requests.view_facts import facts_of
    from django_ratequota.policies.resolve_for import Own, resolve_for

    now_us = time.time_ns() // 1000

    def ask(caller: Any) -> Any:
        route, name = resolved(request.resolver_match)
        handling = facts_of(request.resolver_match.func).handling("GET", authenticated=False)
        where = Where("search", route, name, "GET", handling)
        return resolve_for(caller, where, snapshot, now_us, Own(entry))[1]

    return ask


def _warm(snapshots: dict[int, Any], blocks: int) -> dict[int, tuple[float, ...]]:
    """Seconds by the number of policies, all measured in turn: (resolving, with identity, of a new caller)."""
    from benchmarks.population import ASSIGNED
    from django_ratequota.policies.cache import policies
    from django_ratequota.policies.facts import NOBODY
    from django_ratequota.policies.requests.caller import Caller

    user_id = 7 * ASSIGNED
    request, entry = request_of(user_id), policies.load_user(str(user_id))
    known, nobody = Caller(request), request_of(None).user
    numbers = count()

    def new_caller(ask: Callable[[Any], Any]) -> Any:
        number = next(numbers)
        request.META["REMOTE_ADDR"] = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        return ask(Caller(request, nobody))

    calls: dict[str, Callable[[], Any]] = {}
    for size, snapshot in snapshots.items():
        mine, nobodys = _asking(snapshot, request, entry), _asking(snapshot, request, NOBODY)
        found = mine(known)
        assert [str(bucket.rate.limit) for bucket in found.buckets] == ["1000000", "100000", "10000000"], found
        calls[f"{size} resolving"] = partial(mine, known)
        calls[f"{size} identifying"] = lambda mine=mine: mine(Caller(request))
        calls[f"{size} new"] = partial(new_caller, nobodys)
    spent = interleave(calls, blocks, 200)
    return {
        size: tuple(median(spent[f"{size} {what}"].client) for what in ("resolving", "identifying", "new"))
        for size in snapshots
    }


def _cold(users: int, times: int) -> tuple[list[Any], dict[str, float]]:
    """Rows about users read on their first request, and the figure."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    from benchmarks.population import OVERRIDDEN
    from django_ratequota.policies.cache import policies
    from django_ratequota.policies.requests.caller import Caller

    most = 0
    for user_id in (1, 10, OVERRIDDEN):
        with CaptureQueriesContext(connection) as captured:
            policies.load_user(str(user_id))
        most = max(most, len(captured))
    step = users // times // OVERRIDDEN * OVERRIDDEN or OVERRIDDEN
    spent = []
    for user_id in range(step, users + 1, step):
        begun = time.perf_counter()
        policies.load_user(str(user_id))
        spent.append((time.perf_counter() - begun) * 1e3)
    snapshot = policies.current()
    ids = range(1, WARM + 1)

    def first_requests() -> None:
        for user_id in ids:
            request = request_of(user_id)
            _asking(snapshot, request, policies.load_user(str(user_id)))(Caller(request))

    first_requests()  # what routes and places take is not the users'
    policies.forget()
    policies.reload(time.time_ns() // 1000)
    snapshot = policies.current()
    _asking(snapshot, request_of(0), policies.load_user("0"))(Caller(request_of(0)))
    held, _ = _held(first_requests)
    return [(users, most, median(spent), held / len(ids) / 1e3)], {"cold_queries": float(most)}


if __name__ == "__main__":
    main(measure, run)
