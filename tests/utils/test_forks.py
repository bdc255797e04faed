"""A forked child renews what only its parent may use, also where Python is not told of the fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORKING = """
import ctypes, os, signal, sys, threading
from django_ratequota.utils import forks

class Holder:
    def __init__(self, name):
        self.name = name
        forks.after_fork(self.renew)

    def renew(self):
        renewed.append(self.name)

renewed, lock = [], forks.lock()
kept, dropped = Holder("kept"), Holder("dropped")
forks.after_fork(lambda: renewed.append("function"))
del dropped
held, over = threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        over.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
assert not lock.acquire(blocking=False)
child = FORK()
if not child:
    signal.alarm(20)  # its default action ends a process that hangs
    doors = [threading.Thread(target=forks.check) for _ in range(8)]
    for door in doors:
        door.start()
    for door in doors:
        door.join()
    with lock:
        taken = not lock.acquire(blocking=False)
    os._exit(0 if taken and lock.acquire(blocking=False) and renewed == ["kept", "function"] else 1)
_, status = os.waitpid(child, 0)
over.set()
thread.join()
forks.check()
assert lock.acquire(blocking=False) and not renewed
sys.exit(os.waitstatus_to_exitcode(status))
"""

#: A child of a fork that found SQLite's lock taken could open no database.
WAITING = """
import os, threading, time
from django_ratequota.utils import forks

lock, begun, done = forks.quiet_lock(), threading.Event(), threading.Event()

def work():
    with lock:
        begun.set()
        time.sleep(0.2)
        done.set()

thread = threading.Thread(target=work)
thread.start()
begun.wait()
child = os.fork()
if not child:
    os._exit(not (done.is_set() and lock.acquire(blocking=False)))
_, status = os.waitpid(child, 0)
assert status == 0, status
thread.join()
thread = threading.Thread(target=lock.acquire)
thread.start()
thread.join()
began_at = time.monotonic()
child = os.fork()
if not child:
    os._exit(not lock.acquire(blocking=False))
assert os.waitpid(child, 0)[1] == 0
assert 1 <= time.monotonic() - began_at < 2
"""

#: The holder's own functions may fork, and so may signals that arrive during a fork.
WITHIN = """
import os, threading, time

def nested():
    if not forked:
        forked.append(True)
        fork()

forked = [True]
os.register_at_fork(before=nested)  # begun after those of later registrations
from django_ratequota.utils import forks

locks = [forks.quiet_lock(), forks.quiet_lock()]

def fork():
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)

began_at = time.monotonic()
with locks[0]:
    fork()
forked.clear()
fork()
assert time.monotonic() - began_at < 0.9

class Broken:
    def acquire(self, timeout):
        raise OSError
    _at_fork_reinit = print

forks._quiet = [*locks, Broken()]
fork()
free = []
thread = threading.Thread(target=lambda: free.extend(lock.acquire(blocking=False) for lock in locks))
thread.start()
thread.join()
assert free == [True, True], free
"""


def run(code: str) -> tuple[int, str]:
    # Later Pythons warn of any fork with threads; that is what is tried here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    return result.returncode, result.stderr


def test_a_fork_waits_for_what_must_not_be_half_done_in_the_child_a_second_at_most() -> None:
    assert run(WAITING) == (0, "")


def test_a_fork_waits_for_nothing_that_its_own_thread_holds_and_leaves_no_lock_taken() -> None:
    code, errors = run(WITHIN)
    assert code == 0, errors
    assert errors.count("OSError") == 1


@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_child_renews_its_state_once_and_finds_locks_of_other_threads_unlocked(fork: str) -> None:
    assert run(FORKING.replace("FORK", fork)) == (0, "")
