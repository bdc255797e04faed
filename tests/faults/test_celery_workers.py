"""Real workers of Celery: what ``rate_limited`` promises while they are stopped, and amid an edit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.faults import poll
from tests.support import server
from tests.support.projects import ROOT, SETTINGS, run_python

APP = """
import os
import redis
from celery import Celery
from django_ratequota.celery import rate_limited

URL = os.environ["SERVER"]
app = Celery("tasks", broker=URL, broker_transport_options={"global_keyprefix": "rqtest:celery:"})
client = redis.Redis.from_url(URL)


def note(number):
    second, us = client.time()
    client.rpush("rqtest:ran", f"{number} {second * 10**6 + us}")


@app.task
@rate_limited("partner", "4/s")
def of_its_own(number):
    note(number)


@app.task
@rate_limited("exports")
def of_an_endpoint(number):
    note(number)


@app.task
def edit(rates):
    from django_ratequota.models import RatePolicy

    policy = RatePolicy.objects.get()
    policy.rates = rates
    policy.save()
    note("edited")
"""
MORE_SETTINGS = """
import os
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE"]}}
INSTALLED_APPS += ["django_ratequota"]
RATEQUOTA = {"REDIS_URL": os.environ["SERVER"], "PREFIX": "rqtest", "TIMEOUT": 5.0}
"""
SET_UP = """
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from django_ratequota.models import Endpoint, RatePolicy
RatePolicy.objects.create(
    endpoint=Endpoint.objects.create(name="exports"), rates="20/s sliding_window_log", counted_per="everyone"
)
"""
#: Sends tasks: their name, and an argument for each.
SEND = """
import sys, django
django.setup()
import tasks
name, arguments = sys.argv[1], sys.argv[2:]
for argument in arguments:
    getattr(tasks, name).delay(argument)
"""


class Workers:
    """Two workers with four threads each, and what their tasks have noted."""

    def __init__(self, folder: Path, client: redis.Redis, environment: dict[str, str]) -> None:
        self._client, self._folder, self._environment = client, folder, environment
        command = [
            sys.executable,
            "-m",
            "celery",
            "--app",
            "tasks",
            "worker",
            "--pool",
            "threads",
            "--concurrency",
            "4",
        ]
        self.processes = [
            subprocess.Popen(
                [
                    *command,
                    "--loglevel",
                    "ERROR",
                    "--without-gossip",
                    "--without-mingle",
                    "--hostname",
                    f"{name}@here",
                ],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for name in ("one", "two")
        ]

    def send(self, name: str, *arguments: str) -> None:
        run_python(SEND, name, *arguments, folder=self._folder, warnings="default", **self._environment)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def ran(self) -> list[tuple[str, int]]:
        """What ran, and when by the server's clock (µs)."""
        words = [entry.decode().split() for entry in self._client.lrange("rqtest:ran", 0, -1)]
        return [(number, int(at)) for number, at in words]

    def now_us(self) -> int:
        """The server's clock."""
        second, us = self._client.time()
        return int(second) * 10**6 + int(us)

    def times(self) -> list[int]:
        return sorted(at for number, at in self.ran() if number != "edited")


def most_in_a_second(times: list[int]) -> int:
    return max(sum(begin <= at < begin + 10**6 for at in times) for begin in times)


@pytest.fixture
def workers(tmp_path: Path, redis_client: redis.Redis) -> Iterator[Workers]:
    environment = {
        "DJANGO_SETTINGS_MODULE": "settings",
        "SERVER": server.url(),
        "DATABASE": str(tmp_path / "database"),
    }
    (tmp_path / "settings.py").write_text(SETTINGS + MORE_SETTINGS)
    (tmp_path / "urls.py").write_text("urlpatterns = []")
    (tmp_path / "tasks.py").write_text("import django\ndjango.setup()\n" + APP)
    run_python(SET_UP, folder=tmp_path, warnings="default", **environment)
    started = Workers(tmp_path, redis_client, environment)
    try:
        yield started
    finally:
        started.signal(signal.SIGCONT)
        started.signal(signal.SIGKILL)
        for process in started.processes:
            process.wait(30)


def test_stopped_workers_do_not_catch_up(workers: Workers) -> None:
    """Tasks that had booked their time ran all at once when their workers went on: 101 in a second."""
    numbers = [str(number) for number in range(40)]
    workers.send("of_its_own", *numbers)
    poll(lambda: len(workers.times()) >= 8, 60, "eight have run")
    workers.signal(signal.SIGSTOP)
    stopped_at = workers.now_us()
    # They hold tasks, whose time comes meanwhile.
    poll(lambda: workers.now_us() > stopped_at + 4 * 10**6, 30, "four seconds")
    workers.signal(signal.SIGCONT)
    poll(lambda: len(workers.times()) >= 40, 120, "all have run")
    assert sorted((number for number, _ in workers.ran()), key=int) == numbers, "each ran once"
    # Twice the limit, because a busy machine delays a task between its check and its note.
    assert most_in_a_second(workers.times()) <= 8


def test_an_edit_holds_for_tasks_that_wait(workers: Workers) -> None:
    """Tasks went on at the old rate: 20/s."""
    workers.send("of_an_endpoint", *[str(number) for number in range(100)])
    poll(lambda: len(workers.times()) >= 20, 60, "twenty have run")
    workers.send("edit", "2/s sliding_window_log")
    poll(lambda: any(number == "edited" for number, _ in workers.ran()), 30, "the policy is edited")
    [edited_at] = [at for number, at in workers.ran() if number == "edited"]
    poll(lambda: workers.now_us() > edited_at + 5 * 10**6, 30, "five seconds")
    after = [at for at in workers.times() if at > edited_at + 10**6]
    assert after
    assert most_in_a_second(after) <= 6
    numbers = [number for number, _ in workers.ran()]
    assert len(numbers) == len(set(numbers)), "each ran once"
