"""Parts that measure each database in a process of its own, on data of its own.

SQLite, and PostgreSQL where DATABASE_URL names one (``tests/postgresql.sh make bench``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import Result, markdown


def in_each(module: str, quick: bool) -> dict[str, dict[str, Any]]:
    """What ``measure`` of the module returns, by the database's name."""
    with TemporaryDirectory(prefix="ratequota-bench-") as folder:
        databases = {"SQLite": f"sqlite:///{folder}/bench.sqlite3"}
        given = os.environ.get("DATABASE_URL", "")
        if given.startswith("postgres"):
            databases["PostgreSQL"] = given
        return {name: _in_a_process(module, url, quick) for name, url in databases.items()}


def _in_a_process(module: str, url: str, quick: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", module, "--measure", *(["--quick"] if quick else [])]
    environment = {**os.environ, "DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "benchmarks.settings"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(measure: Callable[[bool], dict[str, Any]], run: Callable[[bool], Result]) -> None:
    """Measure one database, as ``in_each`` asks; else run the part alone and print its tables."""
    quick = "--quick" in sys.argv
    if "--measure" in sys.argv:
        import django

        django.setup()
        with _empty_database():
            print(json.dumps(measure(quick)))
        return
    from benchmarks import server

    with server.running() as url:
        os.environ["REDIS_URL"] = url
        for table in run(quick).tables:
            print(f"{markdown(table)}\n")


@contextmanager
def _empty_database() -> Iterator[None]:
    """The tables, without rows, for the time of the measurement."""
    from django.core.management import call_command
    from django.db import connection

    if connection.vendor == "sqlite":
        call_command("migrate", verbosity=0)
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")  # else reads make saves wait
        yield
        return
    name = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True, serialize=False)
    try:
        yield
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)
