"""A lock that another thread held at the fork is free in the child, wherever the package keeps one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FORKING = """
import os, signal, sys, threading
from django_ratequota.utils.locks import ForkSafeLock

lock = ForkSafeLock()
held, over = threading.Event(), threading.Event()

def hold():
    with lock:
        held.set()
        over.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
assert not lock.acquire(blocking=False)
child = os.fork()
if not child:
    signal.alarm(20)  # its default action ends a process that hangs
    with lock:
        taken = not lock.acquire(blocking=False)
    os._exit(0 if taken and lock.acquire(blocking=False) else 1)
_, status = os.waitpid(child, 0)
over.set()
thread.join()
assert lock.acquire(blocking=False)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_while_another_thread_holds_the_lock_does_not_hang() -> None:
    # Later Pythons warn of any fork with threads; that is what is tried here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING]
    result = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
