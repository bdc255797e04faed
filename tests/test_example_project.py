"""The example as a new user meets it: real processes, real HTTP, and nothing left behind."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import redis

from tests import server

ROOT = Path(__file__).parent.parent
#: Far above what it takes; a machine may stall.
DEADLINE = 90


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A user's environment: neither this suite's settings nor its servers, and a temporary folder of its own."""
    ours = (
        "DJANGO_SETTINGS_MODULE",
        "DATABASE_URL",
        "REDIS_URL",
        "RATEQUOTA_TEST_REDIS_URL",
        "RATEQUOTA_TEST_DATABASE",
    )
    plain = {name: value for name, value in os.environ.items() if name not in ours}
    (tmp_path / "tmp").mkdir()
    return plain | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def nothing_left(environment: dict[str, str]) -> Iterator[None]:
    """After the test, no file and no process of the demo is there."""
    before = {path for path in ROOT.rglob("*") if "__pycache__" not in path.parts and ".venv" not in path.parts}
    yield
    after = {path for path in ROOT.rglob("*") if "__pycache__" not in path.parts and ".venv" not in path.parts}
    assert not {path for path in after - before if path.suffix in (".sqlite3", ".rdb", ".log", ".conf")}
    left = processes(environment["TMPDIR"])
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left
    assert list(Path(environment["TMPDIR"]).iterdir()) == []


def processes(folder: str) -> list[int]:
    """The processes that have the folder as their temporary one, or work in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc").is_dir() else ():
        try:
            named = f"TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes()
            # Valkey writes its title over its environment, but it works in its data folder.
            if named or os.readlink(entry / "cwd").startswith(folder):
                found.append(int(entry.name))
        except OSError:  # it ended, or is not ours
            continue
    return found


def demo(environment: dict[str, str], *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "manage.py"), "demo", *args]
    return subprocess.Popen(
        command,
        env=environment,
        cwd=environment["TMPDIR"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def status(url: str, user: str = "") -> int:
    headers = {"Authorization": "Basic " + base64.b64encode(f"{user}:demo".encode()).decode()} if user else {}
    try:
        with urlopen(Request(url, headers=headers), timeout=30) as response:
            return int(response.status)
    except HTTPError as error:
        with error:
            return error.code


@pytest.mark.usefixtures("nothing_left")
def test_the_check_drives_the_whole_way(environment: dict[str, str]) -> None:
    with demo(environment, "--check") as process:
        text = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, text
    assert "export 4: 429, Retry-After" in text
    assert "raised 3/hour to 6/hour" in text
    assert "export 5: 200, X-RateLimit-Remaining 2" in text
    assert text.rstrip().endswith("All as expected.")


@pytest.mark.usefixtures("nothing_left")
def test_the_check_leaves_a_shared_redis_as_it_was(environment: dict[str, str], redis_client: redis.Redis) -> None:
    before = set(redis_client.scan_iter("*"))
    with demo(environment | {"REDIS_URL": server.url()}, "--check") as process:
        text = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 0, text
    assert set(redis_client.scan_iter("*")) == before


@pytest.mark.usefixtures("nothing_left")
def test_a_difference_fails_the_check_and_is_told(environment: dict[str, str]) -> None:
    """Without a Redis nothing is counted: the example serves, and the check says what it missed."""
    with demo(environment | {"REDIS_URL": f"redis://127.0.0.1:{free_port()}/0"}, "--check") as process:
        text = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 1
    assert "CommandError: units left: expected '0', saw None" in text, text


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_demo_serves_what_it_prints_until_it_is_stopped(
    environment: dict[str, str], stop: signal.Signals
) -> None:
    port = free_port()
    started = time.monotonic()
    with demo(environment, "--port", str(port)) as process:
        try:
            assert process.stdout is not None
            text = "".join(iter(process.stdout.readline, "Ctrl-C stops it.\n"))
            print(f"ready after {time.monotonic() - started:.1f} s")
            assert f"http://127.0.0.1:{port}/admin/   (user admin, password admin)" in text
            curls = re.findall(r"^  (?:for .*)?(curl .*)$", text, re.MULTILINE)
            assert len(curls) == 3
            urls = [re.findall(r"http://[^' ;]+", line)[0] for line in curls]
            assert [status(url, "alice") for url in urls[:2]] == [200, 200]
            assert [status(urls[2], "alice") for _ in range(4)] == [200, 200, 200, 429]
            assert status(f"http://127.0.0.1:{port}/admin/login/") == 200
            assert status(f"http://127.0.0.1:{port}/static/admin/css/base.css") == 200
            assert status(f"http://127.0.0.1:{port}/api/status/") == 200
            assert len(processes(environment["TMPDIR"])) == 3, "the demo, its server, its Redis"
            process.send_signal(stop)
            assert "nothing is left behind" in process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 0


def test_a_taken_port_is_told_with_another(environment: dict[str, str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with demo(environment, "--port", str(port)) as process:
            text = process.communicate(timeout=DEADLINE)[0]
    assert process.returncode == 1
    assert f"Port {port} is taken; choose another: make demo PORT={port + 1}" in text


@pytest.mark.django_db(transaction=True)
def test_seeding_again_keeps_what_operators_changed(redis_client: redis.Redis) -> None:
    from django_ratequota.models import Plan, PolicyChange, RatePolicy
    from example_project.seed import seed

    seed()
    RatePolicy.objects.filter(plan__slug="free", endpoint__name="exports").update(rates="9/s")
    Plan.objects.filter(slug="pro").update(description="Ours")
    changes = PolicyChange.objects.count()
    policies = RatePolicy.objects.count()
    seed()
    assert RatePolicy.objects.get(plan__slug="free", endpoint__name="exports").rates == "9/s"
    assert Plan.objects.get(slug="pro").description == "Ours"
    assert (PolicyChange.objects.count(), RatePolicy.objects.count()) == (changes, policies)
    for policy in RatePolicy.objects.all():
        policy.full_clean()
