"""A process with an exception at each line of one verb in turn: run as ``python -m tests.world.interrupted VERB``.

As a signal handler may raise one at any line, or a thread that another one interrupts.
"""

from __future__ import annotations

import dis
import faulthandler
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import django
import redis

import django_ratequota
from django_ratequota import Bucket, Decision, Limiter, Rate
from django_ratequota.exceptions import StoreError
from tests.faults import poll
from tests.support import server

from .scene import OWN, Answer, Log, answer_of, cost_of

#: How often each line is interrupted, the checks afterwards, and how many of them at once.
ROUNDS, AFTERWARDS, AT_ONCE = 6, 40, 8
#: Checks that are not decided after which it is known that none is any more.
ENOUGH = 3
#: Seconds after which a check is stuck: no lock is to be left held.
STUCK = 20.0
#: More lines than any verb has: a bound.
MOST_LINES = 3000
#: The limit of what is released, and the seconds until a lease of it has ended.
SLOTS, SECONDS = 100, 10.0
PACKAGE = str(Path(django_ratequota.__file__).parent) + os.sep


class Interruption(Exception):
    """Raised at a line."""


def is_never_interrupted(frame: FrameType) -> bool:
    """Whether it is about to enter a ``try`` block or to leave a ``with`` block, where Python handles no signal.

    The compiler relies on that: an exception there would leave the locks of ``with`` blocks locked.
    """
    names = _names(frame.f_code)
    at = [offset for offset, _ in names].index(frame.f_lasti)
    if names[at][1].startswith("NOP"):
        return True
    rest = [name for _, name in names[at : at + 5] if not name.startswith("SWAP")]
    return rest[:3] == ["LOAD_CONST None"] * 3


@cache
def _names(code: CodeType) -> list[tuple[int, str]]:
    return [(each.offset, f"{each.opname} {each.argval}") for each in dis.get_instructions(code)]


def interrupt(line: int, work: Callable[[], object]) -> tuple[str, object]:
    """Do the work, and raise at the line of the package that is run as the ``line``-th; returns what came of it.

    That is "" where there are fewer lines, "heard", or the line at which the exception was swallowed; and what the
    work has returned.
    """
    left, place, done = line, "", None

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left, place
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line" and not is_never_interrupted(frame):
            left -= 1
            if not left:
                place = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
                raise Interruption(place)
        return trace

    sys.settrace(trace)
    try:
        done = work()
    except Interruption:
        place = "heard"
    except StoreError:
        assert place
    finally:
        sys.settrace(None)
    return place, done


def sockets() -> int:
    """How many this process has open."""
    found = 0
    for file in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{file}").startswith("socket:")
        except OSError:  # that of the listing
            pass
    return found


def verbs(log: Log, ask_limiter: Callable[[int], Answer]) -> dict[str, Callable[[int], Callable[[], object]]]:
    """What begins each verb for a caller, and returns what is interrupted."""
    from django.test import RequestFactory

    from django_ratequota import check_caller, check_request
    from django_ratequota.ledger import book

    from .site import ask_and_note

    def check(caller: int) -> Callable[[], object]:
        return lambda: ask_limiter(caller)

    def request(caller: int) -> Callable[[], object]:
        request = RequestFactory().get("/view/", headers={"X-Caller": str(caller)})
        cost = cost_of(caller)
        return lambda: answer_of(caller, check_request(request, scope="world", cost=cost))

    def charged_twice(caller: int) -> Decision:
        cost = 2 * cost_of(caller)
        decision = check_caller(identifiers={"tenant": str(caller)}, scope="world", cost=cost)
        answer = answer_of(caller, decision)
        log.note(answer._replace(left=answer.left + cost_of(caller)))  # as it is once the half is given back
        return decision

    def settle(caller: int) -> Callable[[], object]:
        return partial(charged_twice(caller).settle, cost_of(caller))

    def refund(caller: int) -> Callable[[], object]:
        return partial(charged_twice(caller).refund, cost_of(caller))

    def release(caller: int) -> Callable[[], object]:
        poll(lambda: running() < SLOTS, SECONDS, "an interrupted release ends with its lease")
        decision = check_caller(scope="slots")
        assert decision.allowed
        return partial(decision.__exit__, None, None, None)

    def flush(caller: int) -> Callable[[], object]:
        book.flush()  # what an interrupted one has left
        ask_and_note(caller, log)
        return book.flush

    return {
        "check": check,
        "check_request": request,
        "settle": settle,
        "refund": refund,
        "release": release,
        "flush": flush,
    }


def limiter_check() -> Callable[[int], Answer]:
    """What checks a caller by a limiter on a client, without Django."""
    limiter = Limiter(client=redis.Redis.from_url(server.url()), prefix="rqtest", timeout=5)
    own, room = Rate.parse(f"{OWN}/3650day fixed_window"), Bucket("everyone", Rate.parse("1000000/3650day"))

    def ask(caller: int) -> Answer:
        return answer_of(caller, limiter.check([Bucket(f"user:{caller}", own), room], cost_of(caller)))

    return ask


def running() -> int:
    """How many slots are held; all where that was not decided."""
    from django_ratequota import peek_caller

    return SLOTS - sum(status.remaining for status in peek_caller(scope="slots").statuses)


def main(verb: str) -> None:
    django.setup()
    from django_ratequota.ledger import book

    from .site import ask as ask_policies

    log = Log(os.environ["WORLD_LOG"])
    ask_limiter = limiter_check()
    begin, ask = verbs(log, ask_limiter)[verb], ask_limiter if verb == "check" else ask_policies

    def note(done: object) -> None:
        if isinstance(done, Answer):
            log.note(done)

    for caller in range(MOST_LINES, MOST_LINES + 5):
        note(begin(caller)())
        log.note(ask(0))
    before, lines, undecided = sockets(), 0, 0
    interrupted, swallowed = list[int](), Counter[str]()
    for _ in range(ROUNDS):
        ended = 0
        for line in range(1, MOST_LINES):
            faulthandler.dump_traceback_later(STUCK, exit=True)
            answer = ask(0)  # which connects again, if need be
            log.note(answer)
            undecided += bool(answer.error)
            if undecided == ENOUGH or ended == 2:
                break
            came, done = interrupt(line, begin(line))  # a caller for each line
            ended = 0 if came else ended + 1
            if came:
                interrupted.append(line)
                lines = max(lines, line)
            else:
                note(done)
            if came not in ("", "heard"):
                swallowed[came] += 1
    gc.collect()
    left_open = sockets() - before
    faulthandler.dump_traceback_later(4 * STUCK, exit=True)
    again = Log(os.environ["WORLD_LOG"] + ".afterwards")
    for _ in range(AFTERWARDS if undecided < ENOUGH else 1):
        again.note(ask(0))
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for answer in threads.map(ask, range(10**5, 10**5 + AFTERWARDS)):
            again.note(answer)
    if verb == "release":
        poll(lambda: not running(), SECONDS, "all slots are free")
    book.flush()
    faulthandler.cancel_dump_traceback_later()
    found = {"lines": lines, "interrupted": interrupted, "swallowed": swallowed, "left open": left_open}
    print(json.dumps(found), flush=True)
    sys.stdin.buffer.raw.read()  # until the test has looked at the ledger


if __name__ == "__main__":
    main(sys.argv[1])
