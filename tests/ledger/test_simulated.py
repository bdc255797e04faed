"""Months of customers' usage, simulated: whatever goes wrong, nobody is billed for more than was used.

Three workers reserve, settle, and write for twenty customers; others reset and refund, move months and edit limits.
Workers are killed at any point and suspended for more than ten minutes; Redis loses its data, or goes back to an
older state; replies and commits are lost.
"""

from __future__ import annotations

import random
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from django.core.exceptions import ValidationError
from django.db import OperationalError
from django.db.models.functions import Now

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.enforcement.earlier_checks import RequestChecks
from django_ratequota.enforcement.on_error import enforce
from django_ratequota.enforcement.settlement import StoreSettler
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.keys import window_key
from django_ratequota.exceptions import StoreError
from django_ratequota.ledger import book
from django_ratequota.models import LedgerWriter, QuotaDay, QuotaWindow
from django_ratequota.operations.counters import give_back
from django_ratequota.operations.past_windows import Invoices
from django_ratequota.runtime import process
from django_ratequota.utils.sansio import Twins, call, drive
from tests.conftest import Clock
from tests.support.properties import thorough_after
from tests.support.reference_models import begins_month

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("checkpointing")]

#: A customer, the length and the first day of one of its windows.
Window = tuple[str, str, date]
_LIMIT = {"day": 40, "month": 600}
_MONTHS = ("2025-12", *(f"2026-{number:02}" for number in range(1, 13)))


class Killed(BaseException):
    """A worker is killed at this point."""


class Running:
    """A request that has reserved units."""

    def __init__(self, decision: Decision, units: int, checks: RequestChecks, windows: list[Window]) -> None:
        self.decision, self.units, self.checks, self.windows = decision, units, checks, windows


class Worker:
    """A process: its ledger, the requests that it runs, and what it has noted since it last wrote, net."""

    def __init__(self) -> None:
        self.ledger = book.Ledger()
        self.running: list[Running] = []
        self.unwritten: Counter[Window] = Counter()
        #: All units that these requests had charged, and those that run.
        self.charged: Counter[Window] = Counter()


class Simulation:
    """What happens is drawn, and kept in a log of what each window has really used."""

    def __init__(self, seed: int, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, faults: bool) -> None:
        self.dice, self.client, self.faults, self.patch = random.Random(seed), client, faults, monkeypatch
        self.clock = Clock(round(datetime(2026, 1, 30, 21, tzinfo=UTC).timestamp()) * 10**6)
        self.zone = self.dice.choice([ZoneInfo("UTC"), ZoneInfo("Europe/Berlin"), ZoneInfo("America/Sao_Paulo")])
        self.limiter = Limiter(client=client, prefix="rqtest", clock=self.clock, time_zone=self.zone, timeout=5)
        monkeypatch.setattr(process, "limiter", lambda: self.limiter)
        self.anchors = {f"tenant:{number}": self.dice.choice([1, 1, 1, 15, 31]) for number in range(20)}
        #: The policy of each customer, and by how much it multiplies the limits.
        self.policies = dict.fromkeys(self.anchors, 1)
        self.factors = {1: 1, 2: 2}
        self.workers = [Worker() for _ in range(3)]
        #: Units of requests that have ended, minus those that operators have given back.
        self.used: Counter[Window] = Counter()
        #: By how much a row may have more, or less: what was not written when it was reset, or a worker was killed.
        self.more: Counter[Window] = Counter()
        self.less: Counter[Window] = Counter()
        #: Units by which a window may exceed its limit: what was not written when Redis lost it.
        self.excess: Counter[Window] = Counter()
        #: Units by which Redis may differ from a row: charged or refunded there alone by a worker that was killed.
        self.lost: Counter[Window] = Counter()
        self.older: dict[bytes, bytes] = {}
        self.keys: list[tuple[str, Any]] = []
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        verbs = [self.request, self.reserve, self.reserve, self.end, self.end, self.end, self.flush]
        rare = [
            self.wait,
            self.move_day,
            self.change_plan,
            self.edit_limits,
            self.reset,
            self.refund,
            self.refund_twice,
        ]
        faulty = [self.kill, self.kill, self.suspend, self.lose_all, self.go_back, self.jump, self.lose_reply]
        faulty.append(self.fail_commit)
        for _ in range(steps):
            self.clock.advance(self.dice.choice([0.2, 5, 600]))
            self.enter(self.dice.choice(self.workers))
            chosen = self.dice.random()
            verb = self.dice.choice(faulty if self.faults and chosen < 0.05 else rare if chosen < 0.12 else verbs)
            verb()
            self.done[verb.__name__] += 1
            if QuotaWindow.objects.filter(used__lt=0).exists() or QuotaWindow.objects.filter(held__lt=0).exists():
                self.problems.append(f"below zero after {verb.__name__}")
        for worker in self.workers:
            self.enter(worker)
            while worker.running:
                self.end()
            self.flush()
        self.drop()
        # Redis is raised to the rows of those that are charged.
        self.now = {customer: self.ask(1, customer, None) for customer in self.anchors}
        self.flush()

    def enter(self, worker: Worker) -> None:
        self.worker, book.ledger = worker, worker.ledger

    # What customers do.

    def request(self) -> None:
        """A check that is final at once."""
        self.ask(self.dice.randint(1, 4), self.customer(), None)

    def reserve(self) -> None:
        self.ask(self.dice.randint(5, 30), self.customer(), RequestChecks())

    def customer(self) -> str:
        return self.dice.choice(list(self.anchors))

    def ask(self, units: int, customer: str, checks: RequestChecks | None) -> bool:
        buckets = self.buckets(customer)
        found: Any = SimpleNamespace(buckets=buckets, durable=True, blocked_by=(), unreadable=())
        request = LimitRequest(mode="check", buckets=buckets, cost=units, settler=StoreSettler(self.limiter))
        decision = drive(enforce(self.limiter, found, request, checks), self.do)
        if not decision.allowed or decision.error:
            return False
        windows = [self.window(bucket, decision.at_us) for bucket in buckets]
        if checks is None:
            self.note(windows, units)
        else:
            self.worker.running.append(Running(decision, units, checks, windows))
        self.worker.charged.update(dict.fromkeys(windows, units))
        return True

    def end(self) -> None:
        """Settle, or just end; in any order, also when the month is over."""
        if not self.worker.running:
            return
        one = self.worker.running.pop(self.dice.randrange(len(self.worker.running)))
        actual = self.dice.choice([one.units, self.dice.randint(0, one.units), 0])
        if actual != one.units or self.dice.random() < 0.5:
            one.decision.settle(actual)
        one.checks.ended = True
        self.note(one.windows, actual)

    def note(self, windows: list[Window], units: int) -> None:
        self.used.update(dict.fromkeys(windows, units))
        self.worker.unwritten.update(dict.fromkeys(windows, units))

    # What operators do.

    def move_day(self) -> None:
        self.anchors[self.customer()] = self.dice.randint(1, 31)

    def change_plan(self) -> None:
        self.policies[self.customer()] = self.dice.choice([1, 2])

    def edit_limits(self) -> None:
        self.factors[self.dice.choice([1, 2])] = self.dice.choice([1, 2])

    def reset(self) -> None:
        self.correct(None)

    def refund(self) -> None:
        self.correct(self.dice.choice([1, 5, 30]))

    def refund_twice(self) -> None:
        """A double click, or a webhook that is sent again."""
        self.correct(self.dice.choice([1, 5, 30]), key=f"key{len(self.keys)}")
        if self.keys:
            key, made = self.dice.choice(self.keys)
            assert give_back(self.buckets(self.customer()), 3, key=key) == made

    def correct(self, units: int | None, key: str = "") -> None:
        """The windows that run, or those of an earlier month."""
        customer, first_day = self.customer(), None
        rows = list(QuotaWindow.objects.filter(subject=customer, period="month").order_by("first_day"))
        if rows and self.dice.random() < 0.5:
            first_day = self.dice.choice(rows).first_day
        buckets = self.buckets(customer)
        self.flush()  # as the operator's process does, which is this one
        try:
            made = give_back(buckets, units, key=key, first_day=first_day)
        except ValidationError:  # fewer are used, or there is no such month
            return
        if key:
            self.keys.append((key, made))
        for one in made:
            assert one.first_day is not None
            window = (customer, "month" if "month" in one.title else "day", one.first_day)
            # What other workers have not written is billed once they write it.
            self.more[window] += sum(max(0, worker.unwritten[window]) for worker in self.workers)
            self.excess[window] += sum(
                each.units for worker in self.workers for each in worker.running if window in each.windows
            )
            self.used[window] = max(0, self.used[window] - one.units)

    # What time does, and the processes.

    def wait(self) -> None:
        self.clock.advance(self.dice.choice([3600, 86_400, 5 * 86_400]))

    def flush(self) -> None:
        book.flush()
        self.worker.unwritten.clear()
        self.worker.charged.clear()
        for one in self.worker.running:
            self.worker.charged.update(dict.fromkeys(one.windows, one.units))

    # What goes wrong.

    def kill(self) -> None:
        """At any point of a flush, or between two."""
        point = self.dice.choice(["before", "added", "raised", None])
        with self.patch.context() as patch, suppress(Killed):
            if point:
                self._die_at(point, patch)
                book.flush()
        if point in ("added", "raised"):
            self.worker.unwritten.clear()
        for window, units in self.worker.unwritten.items():
            self.less[window] += max(0, units)
            self.excess[window] += max(0, units)
        self.lost.update(self.worker.charged)
        self.workers[self.workers.index(self.worker)] = Worker()
        if self.dice.random() < 0.5:
            self.drop()

    def _die_at(self, point: str, patch: pytest.MonkeyPatch) -> None:
        add = book.add

        def die(*args: Any) -> Any:
            if point != "before":
                add(*args)
            raise Killed

        def die_there() -> None:
            raise Killed

        if point == "raised":
            patch.setattr(book, "raise_store", die_there)
        else:
            patch.setattr(book, "add", die)

    def suspend(self) -> None:
        """For eleven minutes: the others drop it, and then it goes on."""
        for one in self.worker.running:
            self.excess.update(dict.fromkeys(one.windows, one.units))
        writer = self.worker.ledger._writer
        LedgerWriter.objects.filter(pk=writer).update(written_at=Now() - timedelta(minutes=11))
        self.enter(self.workers[self.workers.index(self.worker) - 1])
        self.drop(dead=False)

    def drop(self, dead: bool = True) -> None:
        if dead:
            living = [worker.ledger._writer for worker in self.workers]
            LedgerWriter.objects.exclude(pk__in=living).update(written_at=Now() - timedelta(minutes=11))
        book.drop()
        book.raise_store()

    def lose_all(self) -> None:
        self.allow_excess()
        self.forget()

    def go_back(self) -> None:
        """An older snapshot; the first call takes it."""
        keys = list(self.client.scan_iter("rqtest:*"))
        if self.older:
            # What was admitted since then, or is before the next flush, may be admitted again.
            for window, units in self.used.items():
                self.excess[window] += units + 1000
            self.forget()
            for key, value in self.older.items():
                self.client.set(key, value)
        self.older = {key: self.client.get(key) or b"" for key in keys}  # type: ignore[misc]

    def jump(self) -> None:
        """A new server, whose clock is wrong."""
        self.lose_all()
        self.clock.advance(self.dice.choice([-3600, -30, 3600]))

    def lose_reply(self) -> None:
        """Of a settlement, carried out by Redis or not."""
        ask, carried_out = self.limiter.backend.ask, self.dice.random() < 0.5

        def lose(*args: Any) -> Iterator[Any]:
            if carried_out:
                yield from ask(*args)
            raise StoreError("timeout", "no reply")

        with self.patch.context() as patch:
            patch.setattr(self.limiter.backend, "ask", lose)
            self.end()

    def fail_commit(self) -> None:
        add, committed = book.add, self.dice.random() < 0.5

        def fail(*args: Any) -> Any:
            if committed:
                add(*args)
            raise OperationalError("the connection is gone")

        with self.patch.context() as patch:
            patch.setattr(book, "add", fail)
            book.flush()
        self.flush()

    # The log.

    def do(self, step: Any) -> Any:
        return call(step) if isinstance(step, Twins) else self.limiter.store.execute(step)

    def buckets(self, customer: str) -> tuple[Bucket, ...]:
        policy, anchor = self.policies[customer], self.anchors[customer]
        factor = self.factors[policy]
        rates = [Rate.parse(f"{limit * factor}/{unit} fixed_window") for unit, limit in _LIMIT.items()]
        return tuple(Bucket(customer, rate, durable=True, anchor=anchor, policy_id=policy) for rate in rates)

    def local_day(self, at_us: int) -> date:
        return datetime.fromtimestamp(at_us // 10**6, self.zone).date()

    def window(self, bucket: Bucket, at_us: int) -> Window:
        day, unit = self.local_day(at_us), bucket.rate.calendar
        while unit == "month" and not begins_month(day, bucket.anchor):
            day -= timedelta(days=1)
        return bucket.subject, unit, day

    def forget(self) -> None:
        for key in self.client.scan_iter("rqtest:*"):
            self.client.delete(key)

    def allow_excess(self) -> None:
        for worker in self.workers:
            self.excess.update(worker.unwritten)
            for one in worker.running:
                self.excess.update(dict.fromkeys(one.windows, one.units))


def check(simulation: Simulation) -> None:
    assert simulation.problems == []
    rows = {(row.subject, row.period, row.first_day): row for row in QuotaWindow.objects.all()}
    assert {row.held for row in rows.values()} <= {0}
    for window, used in simulation.used.items():
        billed = rows[window].used if window in rows else 0
        least, most = used - simulation.less[window], used + simulation.more[window]
        assert max(0, least) <= billed <= most, (window, used, billed)
    for row in rows.values():
        _in_redis(simulation, row)
    days: defaultdict[tuple[str, date], int] = defaultdict(int)
    for day in QuotaDay.objects.all():
        days[day.counter, day.first_day] += day.charged - day.refunded
    months = {(row.counter, row.first_day): row.used for row in rows.values() if row.period == "month"}
    assert {name: units for name, units in days.items() if units} == {
        n: units for n, units in months.items() if units
    }
    invoiced: Counter[tuple[str, str]] = Counter()
    for month in _MONTHS:
        for line in Invoices(month=month).lines():
            assert 0 <= line.over <= line.used
            invoiced[line.subject, line.period] += line.used
    billed_in_all: Counter[tuple[str, str]] = Counter()
    for (subject, period, _first_day), row in rows.items():
        billed_in_all[subject, period] += row.used
    assert +invoiced == +billed_in_all


def _in_redis(simulation: Simulation, row: QuotaWindow) -> None:
    """After a quiet minute Redis has what the row has, but for what a killed worker did not write."""
    if not simulation.now[row.subject]:
        return
    bucket = next(one for one in simulation.buckets(row.subject) if one.rate.calendar == row.period)
    window = row.subject, row.period, row.first_day
    if window != simulation.window(bucket, simulation.clock.now_us):
        return
    value = simulation.client.get(window_key(f"rqtest:{row.counter}", row.first_day)) or b""
    charged, refunded = struct.unpack(">dd", value)  # type: ignore[arg-type]
    extra = charged - refunded - row.used - row.held
    assert abs(extra) <= simulation.lost[window], (window, row.used, row.held, charged, refunded)


@pytest.mark.parametrize("seed", thorough_after(8, range(200)))
def test_nobody_is_billed_for_more_than_was_used(
    seed: int, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(seed, redis_client, monkeypatch, faults=seed % 4 > 0)
    own = book.ledger
    try:
        simulation.run(300)
    finally:
        book.ledger = own
        simulation.limiter.store.close()
    check(simulation)
    for window, units in simulation.used.items():
        assert units <= 2 * _LIMIT[window[1]] + simulation.excess[window]
