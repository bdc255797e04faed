"""The ledger against a log of requests: what threads of several processes were admitted, charged and refunded."""

from __future__ import annotations

import csv
import io
import os
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis

from django_ratequota.engine.keys import birth_key
from tests.support.worker import Process

_WORK = """
import random, threading
from django.db import connection as database
from django_ratequota import check_request
from django_ratequota.monitoring import checkpoints
from tests.project.views import request_from

def work(seed, users, turns):
    dice, log = random.Random(seed), []
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
        if turn % 7 == 0:
            checkpoints.flush()  # as the thread does, and more often
    logs.append(log)
    database.close()

logs = []
users = list(User.objects.order_by("pk"))
threads = [threading.Thread(target=work, args=(SEED * 10 + number, users, 60)) for number in range(3)]
"""
_START = "answer = [thread.start() for thread in threads] and True"
_JOIN = """
for thread in threads:
    thread.join()
answer = [entry for log in logs for entry in log]
"""
_FLUSH = "checkpoints.flush(); answer = len(checkpoints._dirty)"
_GIVE_BACK = """
from django_ratequota.operations.counters import grant
from django_ratequota.operations.explain import explain_caller
from django_ratequota.policies.requests.caller import DescribedCaller
user = User.objects.get(username="user0")
caller = DescribedCaller(user_id=str(user.pk), address=None)
buckets = [b for b in explain_caller(caller, scope=None).resolution.buckets if b.rate.counts == "units" and b.durable]
grant(buckets, 5, "A mistake of ours")
answer = len(buckets)
"""
_USAGE = """
import io
from django.core.management import call_command
out = io.StringIO()
call_command("ratequota", "usage", "--month", MONTH, "--format", "csv", stdout=out)
answer = out.getvalue()
"""


@pytest.fixture
def workers(tmp_path: Any, redis_client: redis.Redis) -> Iterator[list[Process]]:
    environment = os.environ | {"RATEQUOTA_TEST_DATABASE": f"sqlite:///{tmp_path / 'workers.sqlite3'}"}
    found = [Process(environment) for _ in range(3)]
    try:
        found[0].run(
            "from django.core.management import call_command; call_command('migrate', run_syncdb=True, verbosity=0)"
        )
        found[0].run("User.objects.bulk_create(User(username=f'user{n}') for n in range(4))")
        found[0].run("RatePolicy.objects.create(rates='200/month, 150 requests/month, 10000/day fixed_window')")
        # In Redis' first second, rows may be restored although units were given back since.
        redis_client.set(birth_key("rqtest"), time.time_ns() // 1000 - 5 * 10**6)
        for number, one in enumerate(found):
            one.run(f"SEED = {number}\n{_WORK}")
        yield found
    finally:
        for one in found:
            one.close()


def test_usage_of_the_month_is_the_sum_of_the_log(workers: list[Process]) -> None:
    month = f"{datetime.now(UTC):%Y-%m}"
    for one in workers:
        one.run(_START)
    log = [entry for one in workers for entry in one.run(_JOIN)]
    # A process whose figure is below a row's waits for the process that gave units back.
    while sum(one.run(_FLUSH) for one in workers):
        pass
    kinds = Counter(kind for _user, kind, *_ in log)
    assert min(kinds[kind] for kind in ("admitted", "refused", "refunded", "charged")) > 10
    expected: Counter[tuple[str, str]] = Counter()
    for user, _kind, units, requests in log:
        expected[user, "200/month"] += units
        expected[user, "10000/day fixed_window"] += units
        expected[user, "150 requests/month"] += requests
    names = dict(workers[0].run("answer = [[f'user:{u.pk}', u.username] for u in User.objects.all()]"))

    def used() -> dict[tuple[str, str], int]:
        rows = csv.DictReader(io.StringIO(workers[0].run(f"MONTH = {month!r}\n{_USAGE}")))
        return {(names[row["subject"]], row["rate"]): int(row["used"]) for row in rows}

    assert used() == dict(expected)
    assert workers[1].run(_GIVE_BACK) == 2
    for rate in ("200/month", "10000/day fixed_window"):
        expected["user0", rate] -= 5
    assert used() == dict(expected)
