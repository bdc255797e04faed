"""Months of customers' usage, simulated: every row of the ledger equals the log, whatever went wrong meanwhile."""

from __future__ import annotations

import random
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import redis
from django.db import OperationalError

from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.enforcement.on_error import enforce
from django_ratequota.enforcement.settlement import StoreSettler
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.keys import window_key
from django_ratequota.exceptions import StoreError
from django_ratequota.ledger import book
from django_ratequota.models import QuotaDay, QuotaWindow
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
#: A day, and the policy that limited the customer's charges then.
Day = tuple[date, int]
_LIMIT = {"day": 40, "month": 600}
_MONTHS = ("2025-12", *(f"2026-{number:02}" for number in range(1, 13)))


class Simulation:
    """Four months of twenty customers and three processes: what happens is drawn, and kept in a log."""

    def __init__(self, seed: int, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, faults: bool) -> None:
        self.dice, self.client, self.faults = random.Random(seed), client, faults
        self.clock = Clock(round(datetime(2026, 1, 30, 21, tzinfo=UTC).timestamp()) * 10**6)
        self.zone = self.dice.choice([ZoneInfo("UTC"), ZoneInfo("Europe/Berlin"), ZoneInfo("America/Sao_Paulo")])
        limiter = Limiter(client=client, prefix="rqtest", clock=self.clock, time_zone=self.zone, timeout=5)
        monkeypatch.setattr(process, "limiter", lambda: limiter)
        monkeypatch.setattr(book, "ledger", book.ledger)  # to be put back
        self.limiter, self.patch = limiter, monkeypatch
        self.anchors = {f"tenant:{number}": self.dice.choice([1, 1, 1, 15, 31]) for number in range(20)}
        #: The policy of each customer, whose limits are so many times the usual ones.
        self.policies = dict.fromkeys(self.anchors, 1)
        self.processes = [book.Ledger() for _ in range(3)]
        #: Units charged and refunded; the share of each process that is not written yet; of months, by day.
        self.log = {True: Counter[Window](), False: Counter[Window]()}
        self.unwritten: dict[int, list[tuple[bool, Window, Day, int]]] = defaultdict(list)
        self.days = {True: Counter[tuple[Window, Day]](), False: Counter[tuple[Window, Day]]()}
        #: Units by which a window may exceed its limit: what was not written when Redis lost it.
        self.excess: Counter[Window] = Counter()
        self.reserved: list[tuple[Decision, int]] = []
        self.older: dict[bytes, bytes] = {}
        self.admitted: set[str] = set()
        self.killed = False

    def run(self, steps: int) -> None:
        verbs = [self.request, self.request, self.request, self.reserve, self.settle, self.settle, self.flush]
        rare = [self.wait, self.move_day, self.change_plan, self.reset]
        faulty = [self.kill, self.lose_all, self.go_back, self.jump, self.lose_reply, self.fail_commit]
        for _ in range(steps):
            self.clock.advance(self.dice.choice([0.2, 5, 600]))
            self.process = self.dice.randrange(3)
            self.patch.setattr(book, "ledger", self.processes[self.process])
            chosen = self.dice.random()
            self.dice.choice(faulty if self.faults and chosen < 0.03 else rare if chosen < 0.1 else verbs)()
        for self.process in range(3):
            self.flush()
        # Redis is raised to the rows of those that are charged.
        found = {customer: self.ask(1, customer) for customer in self.anchors}
        assert not any(decision.error for decision in found.values())
        self.admitted = {customer for customer, decision in found.items() if decision.allowed}
        self.flush()

    # What customers do.

    def request(self) -> None:
        self.ask(self.dice.randint(1, 4))

    def reserve(self) -> None:
        units = self.dice.randint(5, 30)
        decision = self.ask(units)
        if decision.allowed and not decision.error:
            self.reserved.append((decision, units))

    def ask(self, units: int, customer: str = "") -> Decision:
        customer = customer or self.dice.choice(list(self.anchors))
        buckets = self.buckets(customer)
        found: Any = SimpleNamespace(buckets=buckets, durable=True, blocked_by=(), unreadable=())
        request = LimitRequest(mode="check", buckets=buckets, cost=units, settler=StoreSettler(self.limiter))
        decision = drive(enforce(self.limiter, found, request), self.do)
        if decision.allowed and not decision.error:
            self.note(True, buckets[0], units, decision.at_us, decision.at_us)
        return decision

    def settle(self) -> None:
        """By any process, in any order, also when the month is over."""
        if not self.reserved:
            return
        decision, units = self.reserved.pop(self.dice.randrange(len(self.reserved)))
        actual = self.dice.randint(0, units)
        decision.settle(actual)
        bucket = decision.statuses[0].bucket
        self.note(False, bucket, units - actual, decision.at_us, self.clock.now_us)

    # What operators do.

    def move_day(self) -> None:
        self.anchors[self.dice.choice(list(self.anchors))] = self.dice.randint(1, 31)

    def change_plan(self) -> None:
        self.policies[self.dice.choice(list(self.anchors))] = self.dice.choice([1, 2])

    def reset(self) -> None:
        customer = self.dice.choice(list(self.anchors))
        out = {decision.statuses[0].bucket.subject for decision, _ in self.reserved}
        if customer in out and not self.faults:
            return  # what is reserved is given back now, and again when it is settled
        own = self.process
        # What others have not written is charged once more: by the reset, as Redis knows it, and by themselves.
        flushed = [own] if self.faults else [*range(3), own]
        for self.process in flushed:
            self.flush()
        found = QuotaWindow.objects.filter(subject=customer)
        rows = {(customer, row.period, row.first_day): row.used for row in found}
        for bucket, made in zip(self.buckets(customer), give_back(self.buckets(customer)), strict=True):
            window, given = self.window(bucket, self.clock.now_us), made.units
            in_row = rows.get(window, 0)
            assert given >= max(0, in_row)
            day, policy = self.local_day(self.clock.now_us), self.policies[customer]
            # What Redis alone knows.
            self.add(True, window, (day, policy), given - min(given, in_row), written=True)
            # Of what the other policy has limited, too.
            share = max(0, min(given, self.written(window, 3 - policy)))
            self.add(False, window, (day, policy), given - share, written=True)
            self.add(False, window, (day, 3 - policy), share, written=True)

    def written(self, window: Window, policy: int) -> int:
        """What the rows say that the policy has limited of a month and that is not given back."""
        waiting = [entry for entries in self.unwritten.values() for entry in entries]
        found = [(kind, at, n) for kind, of in self.days.items() for at, n in of.items()]
        found += [(kind, (own, day), -n) for kind, own, day, n in waiting]
        return sum(
            n if kind else -n for kind, (own, (_, limited_by)), n in found if (own, limited_by) == (window, policy)
        )

    # What time does, and the processes.

    def wait(self) -> None:
        self.clock.advance(self.dice.choice([3600, 86_400, 5 * 86_400]))

    def flush(self) -> None:
        self.patch.setattr(book, "ledger", self.processes[self.process])
        book.flush()
        self.unwritten[self.process].clear()

    # What goes wrong.

    def kill(self) -> None:
        """What the process had not written is gone, both ways."""
        for charged, window, day, units in self.unwritten[self.process]:
            self.add(charged, window, day, -units, written=True)
        self.unwritten[self.process].clear()
        self.processes[self.process] = book.Ledger()
        self.killed = True

    def lose_all(self) -> None:
        self.allow_excess()
        self.forget()

    def go_back(self) -> None:
        """An older snapshot; the first call takes it."""
        keys = list(self.client.scan_iter("rqtest:*"))
        if self.older:
            # What was admitted since then, or is before the next flush, may be admitted again.
            for window, units in self.log[True].items():
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
            self.settle()

    def fail_commit(self) -> None:
        add, committed = book.add, self.dice.random() < 0.5

        def fail(*args: Any) -> Any:
            if committed:
                add(*args)
            raise OperationalError("the connection is gone")

        with self.patch.context() as patch:
            patch.setattr(book, "add", fail)
            book.flush()
        book.flush()
        self.unwritten[self.process].clear()

    # The log.

    def do(self, step: Any) -> Any:
        return call(step) if isinstance(step, Twins) else self.limiter.store.execute(step)

    def buckets(self, customer: str) -> tuple[Bucket, ...]:
        policy, anchor = self.policies[customer], self.anchors[customer]
        rates = [Rate.parse(f"{limit * policy}/{unit} fixed_window") for unit, limit in _LIMIT.items()]
        return tuple(Bucket(customer, rate, durable=True, anchor=anchor, policy_id=policy) for rate in rates)

    def local_day(self, at_us: int) -> date:
        return datetime.fromtimestamp(at_us // 10**6, self.zone).date()

    def window(self, bucket: Bucket, at_us: int) -> Window:
        day, unit = self.local_day(at_us), bucket.rate.calendar
        while unit == "month" and not begins_month(day, bucket.anchor):
            day -= timedelta(days=1)
        return bucket.subject, unit, day

    def note(self, charged: bool, of: Bucket, units: int, charged_us: int, at_us: int) -> None:
        for unit in _LIMIT:
            bucket = replace(of, rate=Rate.parse(f"1/{unit} fixed_window"))
            self.add(charged, self.window(bucket, charged_us), (self.local_day(at_us), of.policy_id or 0), units)

    def add(self, charged: bool, window: Window, day: Day, units: int, *, written: bool = False) -> None:
        self.log[charged][window] += units
        self.days[charged][window, day] += units if window[1] == "month" else 0
        if not written:
            self.unwritten[self.process].append((charged, window, day, units))

    def forget(self) -> None:
        for key in self.client.scan_iter("rqtest:*"):
            self.client.delete(key)

    def allow_excess(self) -> None:
        for entries in self.unwritten.values():
            for charged, window, _day, units in entries:
                self.excess[window] += units if charged else 0


def check(simulation: Simulation) -> None:
    rows: dict[bool, Counter[Window]] = {True: Counter(), False: Counter()}
    for row in QuotaWindow.objects.all():
        window = (row.subject, row.period, row.first_day)
        rows[True][window], rows[False][window] = row.charged, row.refunded
        value = simulation.client.get(window_key(f"rqtest:{row.counter}", row.first_day)) or b""
        bucket = next(one for one in simulation.buckets(row.subject) if one.rate.calendar == row.period)
        if row.subject in simulation.admitted and window == simulation.window(bucket, simulation.clock.now_us):
            charged, refunded = struct.unpack(">dd", value)
            # More where a killed process did not write it.
            assert charged >= row.charged if simulation.killed else charged == row.charged
            given = min(row.refunded, charged)  # more where what was reserved was reset before it was settled
            assert refunded >= given if simulation.killed else refunded == given
    for kind, log in simulation.log.items():
        assert +rows[kind] == +log
    days: dict[bool, Counter[tuple[Window, Day]]] = {True: Counter(), False: Counter()}
    for row in QuotaDay.objects.all():
        subject = QuotaWindow.objects.get(counter=row.counter, first_day=row.first_day).subject
        days[True][(subject, "month", row.first_day), (row.day, row.policy_id)] += row.charged
        days[False][(subject, "month", row.first_day), (row.day, row.policy_id)] += row.refunded
    for kind, by_day in simulation.days.items():
        assert +days[kind] == +by_day
    check_invoices(simulation)


def check_invoices(simulation: Simulation) -> None:
    """Each month has a line for each policy, with what the log says. A reset takes from the other policy, too."""
    invoiced: dict[Window, dict[int | None, int]] = defaultdict(dict)
    for line in (line for month in _MONTHS for line in Invoices(month=month).lines()):
        if line.rate.endswith("/month"):
            invoiced[line.subject, "month", line.begins][line.policy] = line.used
            assert 0 <= line.over <= max(0, line.used)
    expected: dict[Window, Counter[int]] = defaultdict(Counter)
    for kind, by_day in simulation.days.items():
        for (window, (_day, policy)), units in by_day.items():
            expected[window][policy] += units if kind else -units
    for window, used in expected.items():
        assert sum(invoiced[window].values()) == used.total()
        if used.total() < 0:
            continue  # units that were reserved were given back twice: on either line
        for policy in (1, 2):
            if used[policy] < 0:
                used[3 - policy] += used.pop(policy)
        assert {policy: units for policy, units in invoiced[window].items() if units} == +used


@pytest.mark.parametrize("seed", thorough_after(8, range(200)))
def test_every_row_equals_the_log(seed: int, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(seed, redis_client, monkeypatch, faults=seed % 4 > 0)
    simulation.run(400)
    check(simulation)
    used = simulation.log[True] - simulation.log[False]
    assert all(units <= 2 * _LIMIT[window[1]] + simulation.excess[window] for window, units in used.items())
    assert simulation.faults or not any(one.raised for one in simulation.processes)
