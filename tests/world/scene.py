"""What each scene asserts, whatever it is about.

- No answer of another caller. Each caller has a counter and a cost of its own, so what is left of the counter tells
  whose answer it is, and how often its caller has been admitted.
- Never above a limit that all callers share.
- A ledger that equals the log: each caller's row of the month, and the row of all callers.
- A process that still decides afterwards.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults import poll
from tests.support.worker import Process

#: The limit of each caller's own counter, and what its requests cost beside the caller's number.
OWN, COST = 10**12, 10**6
#: Seconds after which what was admitted is in the ledger, on a busy machine.
WRITTEN = 8.0
#: The policies. ``ROOM`` is the limit that all callers share.
POLICIES = f"""
from django_ratequota.models import Endpoint, RatePolicy
world = Endpoint.objects.create(name="world")
make = RatePolicy.objects.create
make(endpoint=world, counted_per="everyone", rates="ROOM requests/3650day, 1000000 requests/month")
make(endpoint=world, counted_per="tenant", rates="{OWN}/3650day fixed_window, {OWN}/month")
"""
ROWS = "answer = list(QuotaWindow.objects.values_list('subject', 'used'))"


def cost_of(caller: int) -> int:
    """What each request of the caller costs, as no other's does."""
    return COST + caller


class Answer(NamedTuple):
    """What a caller was told."""

    caller: int
    admitted: bool
    #: What was left of the caller's own counter; -1 = the answer did not say.
    left: int
    #: Why the store did not decide; "" = it did.
    error: str
    #: The process that answered.
    process: int

    @property
    def times(self) -> int:
        """How often its caller has been admitted, by the counter; -1 = that is another's counter, or no counter."""
        times, rest = divmod(OWN - self.left, cost_of(self.caller))
        return -1 if rest or self.left < 0 else times


class Log:
    """The answers so far, in a file that all processes append to."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def note(self, answer: Answer) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{json.dumps(answer)}\n".encode())
        finally:
            os.close(file)

    def answers(self) -> list[Answer]:
        path = Path(self.path)
        return [Answer(*json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self) -> set[int]:
        """The processes that have answered."""
        return {answer.process for answer in self.answers()}


class Scene:
    """A database with the policies, a process that edits and reads it, and the log."""

    def __init__(self, editor: Process, log: Log, room: int = 10**9) -> None:
        """``room`` is the limit that all callers share."""
        self.log, self.room, self._editor = log, room, editor
        editor.run(POLICIES.replace("ROOM", str(room)))

    def ledger(self) -> tuple[int, dict[int, int]]:
        """The units in the rows of the month: of all callers, and of each; -1 = of an unknown one."""
        rows = dict(self._editor.run(ROWS))
        everyone = rows.pop("everyone", 0)
        return everyone, {int(subject.rpartition(":")[2] or -1): used for subject, used in rows.items()}

    def is_written(self, answers: list[Answer]) -> bool:
        """Whether the ledger soon has what these answers admitted, and nothing else."""
        with suppress(AssertionError):
            poll(lambda: not self._wrong_rows(answers, Counter()), WRITTEN, "the ledger is written")
        return not self._wrong_rows(answers, Counter())

    def holds(
        self,
        afterwards: Callable[[], Iterable[Answer]],
        interrupted: Iterable[int] = (),
        others: Iterable[Answer] = (),
        *,
        has_ledger: bool = True,
    ) -> None:
        """Assert the four things; fails with the figures of all of them.

        ``afterwards`` asks each process again and returns what was told. ``interrupted`` has the caller of each check
        that was interrupted: that counts once or not at all. ``others`` are answers that are in another log.
        A limiter without Django has no ledger.
        """
        may_be = Counter(interrupted)
        answers = [*self.log.answers(), *others]
        found = [
            *_answers_of_others(answers, may_be),
            *_undecided("", answers),
            *self._above_the_limit(answers),
        ]
        if has_ledger:
            with suppress(AssertionError):
                poll(lambda: not self._wrong_rows(answers, may_be), WRITTEN, "the ledger is written")
            found += self._wrong_rows(answers, may_be)
        again = list(afterwards())
        found += [*_undecided("afterwards, ", again), *_answers_of_others(again, may_be, in_order=False)]
        assert answers
        assert again
        assert not found, "; ".join(found)

    def _above_the_limit(self, answers: list[Answer]) -> list[str]:
        admitted = sum(answer.admitted for answer in answers)
        return [f"{admitted} admitted of a limit of {self.room}"] if admitted > self.room else []

    def _wrong_rows(self, answers: list[Answer], may_be: Counter[int]) -> list[str]:
        everyone, own = self.ledger()
        own.pop(-1, 0)
        admitted = Counter(answer.caller for answer in answers if answer.admitted and not answer.error)
        requests, wrong = admitted.total(), []
        if not requests <= everyone <= requests + may_be.total():
            wrong.append(f"{everyone} of {requests} in the ledger")
        callers = {*own, *admitted}
        rows = {
            caller
            for caller in callers
            if own.get(caller, 0) not in _possible(cost_of(caller), admitted[caller], may_be[caller])
        }
        if rows:
            wrong.append(f"{len(rows)} of {len(callers)} callers' rows are not what they were admitted")
        return wrong


def _possible(cost: int, times: int, may_be: int) -> set[int]:
    return {cost * count for count in range(times, times + may_be + 1)}


def _answers_of_others(answers: list[Answer], may_be: Counter[int], *, in_order: bool = True) -> list[str]:
    """The answers that do not tell how often their caller was admitted, as it asks one thing after the other."""
    before, wrong = Counter[int](), 0
    for answer in answers:
        if answer.error:
            continue
        known, times = before[answer.caller], answer.times
        most = known + answer.admitted + may_be[answer.caller]
        if times < 0 or (in_order and not known + answer.admitted <= times <= most):
            wrong += 1
        if times >= 0:
            before[answer.caller] = times
    return [f"{wrong} of {len(answers)} answers were of another caller"] if wrong else []


def _undecided(when: str, answers: list[Answer]) -> list[str]:
    errors = Counter(answer.error for answer in answers if answer.error)
    return [f"{when}{errors.total()} of {len(answers)} were not decided: {dict(errors)}"] if errors else []


def answer_of(caller: int, decision: Any) -> Answer:
    """What a decision tells the caller."""
    own = [status.remaining for status in decision.statuses if status.limit == OWN]
    return Answer(caller, decision.allowed, own[0] if own else -1, decision.error, os.getpid())
