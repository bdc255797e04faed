"""The ledger against a log of requests: what threads of several processes were admitted, charged and refunded.

Meanwhile Redis is flushed twice. One transaction in ten fails before its commit, and one in ten after it.
"""

from __future__ import annotations

import csv
import io
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import redis

from tests.enforcement.test_propagation import environment, migrated  # noqa: F401 - fixtures
from tests.faults import poll
from tests.support.properties import thorough_after
from tests.support.worker import Process

THREADS, TURNS = 3, 60
_WORK = """
import random, threading
from django.db import OperationalError, connection as database
from django_ratequota import check_request
from django_ratequota.ledger import book, rows
from tests.project.views import request_from
from tests.support import spending

def work(seed, users, turns, log):
    dice = random.Random(seed)
    for turn in range(turns):
        user, cost = dice.choice(users), dice.randint(1, 4)
        decision = check_request(request_from(user), cost=cost)
        if decision.error:
            raise RuntimeError(decision.error)
        if not decision.allowed:
            log.append([user.username, "refused", 0, 0])
            continue
        log.append([user.username, "admitted", cost, 1])
        what = dice.random()
        if what < 0.2:
            units = dice.randint(1, cost)
            decision.refund(units)
            log.append([user.username, "refunded", -units, 0])
        elif what < 0.4:
            units = dice.randint(1, 3)
            decision.charge(units)
            log.append([user.username, "charged", units, 0])
        if turn % 5 == 0:
            book.flush()  # as the thread does, and more often
    database.close()

add, add_once, failing, failed = book.add, rows.add_once, random.Random(SEED), [0, 0]

def fail(at, chance):
    if failing.random() < chance:
        failed[at] += 1
        raise OperationalError("the connection is gone")

def add_and_fail(*args):
    totals = add(*args)
    fail(1, 0.1)
    return totals

def add_and_roll_back(*args):
    totals = add_once(*args)
    fail(0, 0.1)
    return totals

book.add, rows.add_once = add_and_fail, add_and_roll_back
users = list(User.objects.order_by("pk"))
logs = [[] for _ in range(THREADS)]
threads = [
    threading.Thread(target=work, args=(SEED * 10 + number, users, TURNS, log)) for number, log in enumerate(logs)
]
"""
_START = "answer = [thread.start() for thread in threads] and True"
_DONE = "answer = sum(sum(entry[1] in ('admitted', 'refused') for entry in log) for log in logs)"
_JOIN = """
for thread in threads:
    thread.join()
answer = [entry for log in logs for entry in log]
"""
_BUCKETS = """
from django_ratequota.operations.counters import give_back, peek
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller

def durable(user):
    caller = DescribedCaller(user_id=str(user.pk), address=None)
    return [bucket for bucket in explain_caller(caller, scope=None).resolution.buckets if bucket.durable]
"""
_IN_REDIS = """
statuses = [(user, status) for user in users for status in peek(durable(user)).values()]
answer = [[user.username, str(status.bucket.rate), status.used + status.debt] for user, status in statuses]
"""
_GIVE_BACK = """
fail = lambda at, chance: None
buckets = [bucket for bucket in durable(users[0]) if bucket.rate.counts == "units"]
give_back(buckets, 5, reason="A mistake of ours")
answer = len(buckets)
"""
_USAGE = """
import io
from django.core.management import call_command
out = io.StringIO()
call_command("ratequota", "usage", "--month", MONTH, "--format", "csv", stdout=out)
answer = out.getvalue()
"""


@pytest.fixture(params=thorough_after(2, range(10)))
def seed(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def workers(environment: dict[str, str], seed: int) -> Iterator[list[Process]]:  # noqa: F811
    found = [Process(environment) for _ in range(4)]
    try:
        found[0].run("User.objects.bulk_create(User(username=f'user{n}') for n in range(4))")
        found[0].run("RatePolicy.objects.create(rates='200/month, 150 requests/month, 10000/day fixed_window')")
        for number, one in enumerate(found):
            one.run(f"SEED, THREADS, TURNS = {seed * 4 + number}, {THREADS}, {TURNS}\n{_WORK}{_BUCKETS}")
        yield found
    finally:
        for one in found:
            one.close()


def test_usage_of_the_month_is_the_sum_of_the_log(
    workers: list[Process], redis_client: redis.Redis, seed: int
) -> None:
    month, one = f"{datetime.now(UTC):%Y-%m}", workers[0]
    for worker in workers:
        worker.run(_START)
    requests = len(workers) * THREADS * TURNS
    for at in sorted(random.Random(seed).sample(range(requests // 10, requests * 9 // 10), 2)):
        poll(lambda at=at: sum(worker.run(_DONE) for worker in workers) >= at, 60, "more requests")
        redis_client.flushall()
    log = [entry for worker in workers for entry in worker.run(_JOIN)]
    for worker in workers:
        poll(lambda worker=worker: worker.run("answer = spending.flush_all()"), 60, "the ledger is written")
    failed = [worker.run("answer = failed") for worker in workers]
    assert all(map(sum, zip(*failed, strict=True))), "commits failed before and after they were carried out"
    kinds = Counter(kind for _user, kind, *_ in log)
    assert kinds["admitted"] + kinds["refused"] == requests
    assert min(kinds[kind] for kind in ("admitted", "refused", "refunded", "charged")) > 10
    expected: Counter[tuple[str, str]] = Counter()
    for user, _kind, units, counted in log:
        expected[user, "200/month"] += units
        expected[user, "10000/day fixed_window"] += units
        expected[user, "150 requests/month"] += counted
    names = dict(one.run("answer = [[f'user:{u.pk}', u.username] for u in User.objects.all()]"))

    def used() -> dict[tuple[str, str], int]:
        rows = csv.DictReader(io.StringIO(one.run(f"MONTH = {month!r}\n{_USAGE}")))
        return {(names[row["subject"]], row["rate"]): int(row["used"]) for row in rows}

    def in_redis() -> dict[tuple[str, str], int]:
        return {(user, rate): units for user, rate, units in one.run(_IN_REDIS)}

    assert used() == dict(expected)
    assert in_redis() == dict(expected)
    assert workers[1].run(_GIVE_BACK) == 2
    for rate in ("200/month", "10000/day fixed_window"):
        expected["user0", rate] -= 5
    assert used() == dict(expected)
    assert in_redis() == dict(expected)
