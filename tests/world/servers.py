"""Servers and workers of others, each in a process group of its own that ends with its test, and their clients."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.faults import poll
from tests.faults.test_http_servers import GUARD
from tests.support.projects import ROOT

from .scene import Answer, Log

#: Seconds that a server may take to start, to answer, or to end.
SECONDS = 30.0
#: Where the commands of this environment are.
BIN = Path(sys.executable).parent


@contextmanager
def running(
    command: Sequence[object], environment: dict[str, str], output: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command to the end of the block, then SIGTERM it; it and all its children are gone afterwards.

    They are gone as well if the tests are killed, which runs no ``finally``. Its input is a pipe.
    """
    with output.open("w") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
        process.terminate()
        process.wait(timeout=SECONDS)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
        guard.kill()  # before its input closes: the id may belong to another process by then
        guard.communicate()


def request(port: int, path: str, caller: int) -> Answer:
    """Ask once, on a connection of its own, so that any worker may answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path, headers={"X-Caller": str(caller), "Connection": "close"})
        response = connection.getresponse()
        body = response.read()
        assert response.status in (200, 429), body
        return Answer(**json.loads(body))
    finally:
        connection.close()


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    """Ask for a page that is not there: that checks nothing."""

    def listens() -> bool:
        connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        try:
            connection.request("GET", "/none/", headers={"Connection": "close"})
            return connection.getresponse().status == 404
        except HTTPException:
            return False
        finally:
            connection.close()

    poll(lambda: process.poll() is not None or listens(), SECONDS, "the server listens")
    assert process.poll() is None, f"the server ended: {output.read_text()}"


class Clients:
    """Clients that ask at once, each one thing after the other, and log what they are told."""

    def __init__(self, port: int, path: str, log: Log, callers: int) -> None:
        self._port, self._path, self._log, self._callers = port, path, log, range(1, callers + 1)

    def ask(self, times: int) -> list[Answer]:
        """Each client asks so many times."""
        with ThreadPoolExecutor(len(self._callers)) as threads:
            told = list(threads.map(lambda caller: self._client(caller, times), self._callers))
        return [answer for answers in told for answer in answers]

    def ask_all(self, processes: set[int]) -> list[Answer]:
        """Ask until each of these processes has answered again, if it still lives."""
        told = self.ask(1)
        poll(lambda: not self._missing(processes, told) or told.extend(self.ask(1)), SECONDS, "each process answers")
        return told

    def _missing(self, processes: set[int], told: list[Answer]) -> set[int]:
        return {each for each in processes if lives(each)} - {answer.process for answer in told}

    def _client(self, caller: int, times: int) -> list[Answer]:
        told = []
        for _ in range(times):
            answer = request(self._port, self._path, caller)
            self._log.note(answer)
            told.append(answer)
        return told


def lives(process: int) -> bool:
    """Whether there is a process with this id, which has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
