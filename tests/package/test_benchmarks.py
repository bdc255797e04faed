"""The benchmark's machinery, and a quick run of its parts with the packages that are here: most others are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import redis

from benchmarks import overshoot, population
from benchmarks.measure import Spent, interleave
from benchmarks.server import packed, recorded
from benchmarks.targets import TARGETS, compare
from django_ratequota.models import PlanAssignment, RatePolicy
from tests.support import server

ROOT = Path(__file__).parents[2]


def test_each_clock_is_read_around_all_blocks_but_the_first() -> None:
    now = 0.0
    steps = iter([100.0, 1.0, 2.0, 9.0])

    def call() -> None:
        nonlocal now
        now += next(steps)

    spent = interleave({"it": call}, 3, 1, lambda: 2 * now, (lambda: now, lambda: 3 * now))["it"]
    assert (spent.wall, spent.client, spent.server) == ([1, 2, 9], [3, 6, 27], [2, 4, 18])
    assert spent.us() == (10e6, 4e6, 2e6)


def test_a_ratio_compares_what_ran_in_the_same_block() -> None:
    """A machine that slows down halfway changes both medians, not the ratio."""
    one, two = Spent(), Spent()
    for slowness, faster in ((1, 1), (5, 1), (7, 5)):
        one.add(9, 300 * slowness, 100 * slowness, calls=100)
        two.add(9, 500 * slowness, 300 * slowness, calls=100 * faster)
    assert two.times(one) == 2


def test_a_target_says_whether_and_by_how_much_it_is_missed() -> None:
    rows = compare({"check_request_3": 1.05, "decisions_3": 30_000.0, "log_entry_bytes": 20.0}, whole=False).rows
    assert [row[1:] for row in rows] == [
        ("≤ 1.05 ×", "1.05 ×", "met"),
        ("≥ 40,000", "30,000", "not met, by 25%"),
        ("≤ 16 bytes", "20 bytes", "not met, by 25%"),
    ]
    absent = Counter(row[3] for row in compare({}, whole=True).rows)
    assert absent == {"not measured": len(TARGETS) - 3, "needs PostgreSQL": 3}


def test_commands_are_recorded_as_they_were_sent(redis_client: redis.Redis) -> None:
    value = bytes(range(256))
    with recorded(server.url()) as commands:
        redis_client.set("rqtest:recorded", value)
        redis_client.eval("return redis.call('GET', KEYS[1])", 1, "rqtest:recorded")
    assert [words for words in commands if words[0] == b"SET"] == [[b"SET", b"rqtest:recorded", value]]
    assert [words[0] for words in commands if b"rqtest:recorded" in words] == [b"SET", b"EVAL"]
    assert packed(["SET", b"\x00"]) == b"*2\r\n$3\r\nSET\r\n$1\r\n\x00\r\n"


@pytest.mark.thorough
def test_a_quick_run_measures_and_names_missing_packages() -> None:
    words = [sys.executable, "-m", "benchmarks", "one_decision", "memory", "turns", "--quick"]
    inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(words, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = {row.split(" | ")[0].strip("| ") for row in done.stdout.splitlines() if row.startswith("|")}
    assert {"Limiter.check, 3 buckets", "check_request, 3 policies", "DRF: UserRateThrottle"} <= measured
    assert {"async with turn", "sliding log, bytes an entry"} <= measured
    assert "`check_request`, 3 policies / the same EVALSHA" in measured
    for package in ("django-ratelimit", "limits", "throttled-py", "pyrate-limiter"):
        assert package in measured or any(name.startswith(f"{package}: ") for name in measured)


@pytest.mark.django_db
def test_the_population_of_the_resolver_s_part_fits_the_tables() -> None:
    population.add_endpoints()
    population.add_policies(20)
    population.add_subjects(6)
    population.add_users(200)
    overrides = RatePolicy.objects.filter(user__isnull=False)
    assert (RatePolicy.objects.count(), overrides.count(), PlanAssignment.objects.count()) == (20 + 6 + 2, 2, 20)


def test_ours_admits_the_limit_where_the_textbooks_overshoot(redis_client: object) -> None:
    times = {
        case.name: tuple(round(sum(passed) / case.allowed, 1) for passed in (case.decide(case.load), case.ours()))
        for case in overshoot.cases()
    }
    assert times == {"edge": (2.0, 1.0), "stale": (1.8, 1.0), "race": (1.5, 1.0), "clocks": (1.8, 1.0)}
    [race] = [case for case in overshoot.cases() if case.name == "race"]
    assert sum(race.decide(race.load)) == race.allowed + 50 - 1, "as many more as were under way beside the last one"
