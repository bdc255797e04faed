"""The benchmark's machinery, and a quick run of its parts with the packages that are here: most others are not."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import overshoot, population
from benchmarks.measure import Table, ainterleave, interleave, interleave_by, markdown
from benchmarks.targets import TARGETS, compare
from django_ratequota.models import PlanAssignment, RatePolicy

ROOT = Path(__file__).parents[2]


def test_blocks_take_turns_and_rotate_who_begins() -> None:
    made: list[str] = []
    interleave({name: lambda name=name: made.append(name) for name in "abc"}, blocks=3, times=2)
    assert "".join(made) == "aabbcc" + "bbccaa" + "ccaabb" + "aabbcc"
    made.clear()

    async def note(name: str) -> None:
        made.append(name)

    asyncio.run(ainterleave({name: lambda name=name: note(name) for name in "ab"}, 2, 1))
    assert "".join(made) == "abbaab"


def test_a_figure_is_the_median_of_all_blocks_but_the_first() -> None:
    now = 0.0
    steps = iter([100.0, 1.0, 2.0, 9.0])

    def call() -> None:
        nonlocal now
        now += next(steps)

    assert interleave({"it": call}, blocks=3, times=1, clock=lambda: now) == {"it": 2.0}


def test_several_clocks_are_read_around_the_same_blocks() -> None:
    clocks = (lambda: 3.0, iter(range(100)).__next__)
    assert interleave_by(clocks, {"it": int}, blocks=2, times=4) == [{"it": 0.0}, {"it": 0.25}]


def test_a_table_aligns_numbers_and_shows_three_digits() -> None:
    table = Table("Title", ("what", "times"), [("one", 1.0), ("more | less", 1234.5), ("none", "")], "Note.")
    assert markdown(table).splitlines() == [
        "### Title",
        "",
        "| what         | times |",
        "| ------------ | ----: |",
        "| one          |  1.00 |",
        "| more \\| less | 1,234 |",
        "| none         |       |",
        "",
        "Note.",
    ]


def test_a_target_says_whether_and_by_how_much_it_is_missed() -> None:
    rows = compare({"check_1": 1.15, "peers_3": 2.0, "log_entry_bytes": 20.0}, whole=False).rows
    assert [row[1:] for row in rows] == [
        ("≤ 1.15 ×", "1.15 ×", "met"),
        ("≥ 2.5 ×", "2 ×", "not met, by 20%"),
        ("≤ 16 bytes", "20 bytes", "not met, by 25%"),
    ]
    assert [row[3] for row in compare({}, whole=True).rows] == ["not measured"] * len(TARGETS)


@pytest.mark.thorough
def test_a_quick_run_measures_and_names_missing_packages() -> None:
    words = [sys.executable, "-m", "benchmarks", "one_decision", "memory", "turns", "--quick"]
    inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(words, cwd=ROOT, env=inherited, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured = {row.split(" | ")[0].strip("| ") for row in done.stdout.splitlines() if row.startswith("|")}
    assert {"Limiter.check, gcra, 5 buckets", "check_request, 3 policies", "DRF: UserRateThrottle"} <= measured
    assert {"sliding log, bytes an entry", "`check_request`, 3 policies, warm", "async with turn"} <= measured
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
