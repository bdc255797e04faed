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


@pytest.mark.parametrize("fork", ["os.fork", "ctypes.PyDLL(None).fork"])
def test_a_child_renews_its_state_once_and_finds_locks_of_other_threads_unlocked(fork: str) -> None:
    # Later Pythons warn of any fork with threads; that is what is tried here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING.replace("FORK", fork)]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
