"""The world around each scene: a database, an editor, a log, and servers of Redis to break."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.enforcement.test_propagation import migrated  # noqa: F401 - a fixture
from tests.faults.conftest import node, nodes, proxies, proxy  # noqa: F401 - fixtures
from tests.support.worker import Process

from .scene import Log, Scene


@pytest.fixture
def environment(tmp_path: Path, migrated: Path, redis_client: redis.Redis) -> dict[str, str]:  # noqa: F811
    """What processes of the scene run with: a database in a file, and the test server."""
    shutil.copy(migrated, tmp_path / "world.sqlite3")
    inherited = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
    return inherited | {
        "DJANGO_SETTINGS_MODULE": "tests.world.settings",
        "RATEQUOTA_TEST_DATABASE": f"sqlite:///{tmp_path / 'world.sqlite3'}",
        "WORLD_LOG": str(tmp_path / "answers"),
    }


@pytest.fixture
def editor(environment: dict[str, str]) -> Iterator[Process]:
    """A process that edits policies and reads the ledger."""
    process = Process(environment)
    try:
        yield process
    finally:
        process.close()


@pytest.fixture
def scenes(editor: Process, environment: dict[str, str]) -> Callable[[int], Scene]:
    """Makes the scene, with the limit that all callers share."""
    return lambda room: Scene(editor, Log(environment["WORLD_LOG"]), room)
