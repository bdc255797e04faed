"""``python -m benchmarks.scale``: seed a large installation, open the admin's pages on it, write SCALE.md.

The rows are kept in a file of .scale/ until what makes them changes; with DATABASE_URL they are made in that database
if it has no users. ``--serve PORT`` serves the admin on them instead (log in as admin, password admin).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import server
from benchmarks.measure import markdown
from benchmarks.scale import SMALL, Size
from benchmarks.surroundings import machine

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "SCALE.md"
_HOW = """\
The admin's pages with 1,000,000 users, as many assignments (half of users, half of subjects), 200 plans, 500
endpoints, 100,000 policies and as many entries in the history, and requests of a week. Times are the median of five
of the server's part, in one process. They differ between machines, so the third column compares them with Django's
own list of users. A page, a save and an estimate should take at most 1 s and 300 kB. `make scale` measures again and
writes this; `make scale DATABASE=postgresql` on PostgreSQL.
"""


def main() -> None:
    """Make the rows, then open the pages or serve them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("pages", nargs="*", help="parts of names: only these are opened, and nothing is written")
    parser.add_argument("--small", action="store_true", help="a thousandth of the rows; nothing is written")
    parser.add_argument("--serve", type=int, metavar="PORT", help="serve the admin on the rows")
    options = parser.parse_args()
    size = SMALL if options.small else Size()
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.scale.settings"
    if "DATABASE_URL" not in os.environ:
        os.environ["DATABASE_URL"] = f"sqlite:///{_file(size)}"
    with server.running() as url:
        os.environ["REDIS_URL"] = url
        _prepare(size)
        if options.serve:
            _serve(options.serve)
        else:
            _measure(options.pages, write=not options.small and not options.pages)


def _file(size: Size) -> Path:
    """Return the file of the rows; another one as soon as the code that makes them changes."""
    code = (Path(__file__).with_name("seed.py"), *sorted(ROOT.glob("django_ratequota/migrations/0*.py")))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in code) + repr(size).encode()).hexdigest()
    folder = ROOT / ".scale"
    folder.mkdir(exist_ok=True)
    return folder / f"{digest[:12]}.sqlite3"


def _prepare(size: Size) -> None:
    import django
    from django.core.management import call_command

    django.setup()
    from django.contrib.auth.models import User

    from benchmarks.scale import seed, traffic

    call_command("migrate", verbosity=0)
    if not User.objects.exists():
        _note("rows")
        seed.seed(size)
    _note("requests")
    traffic.record(size)


def _serve(port: int) -> None:
    from django.core.management import call_command

    call_command("runserver", f"127.0.0.1:{port}", use_reloader=False, insecure_serving=True)


def _measure(parts: list[str], *, write: bool) -> None:
    from django.db import connection

    from benchmarks.scale.measuring import open_pages, table
    from benchmarks.scale.pages import BASE, pages

    _note("pages")
    chosen = {
        name: page
        for name, page in pages().items()
        if not parts or name == BASE or any(part in name for part in parts)
    }
    title = connection.display_name
    text = markdown(table(title, open_pages(chosen))).replace("#### ", "## ", 1)
    sys.stdout.write(f"{text}\n")
    if write:
        _write(title, text.replace("\n", f"\n\n{_when(connection)}\n", 1))


def _when(connection: object) -> str:
    version = ".".join(map(str, connection.get_database_version()))  # type: ignore[attr-defined]
    return f"{datetime.now(UTC):%Y-%m-%d}, version {version}, {machine()}"


def _write(title: str, text: str) -> None:
    """Put the table of one database into SCALE.md, which keeps those of others."""
    stored = RESULTS.read_text() if RESULTS.exists() else ""
    tables = {part.split("\n", 1)[0]: part for part in re.split(r"^## ", stored, flags=re.MULTILINE)[1:]}
    tables[title] = text.removeprefix("## ")
    parts = [
        "# Pages of a large installation",
        _HOW.strip(),
        *(f"## {tables[name].strip()}" for name in sorted(tables)),
    ]
    RESULTS.write_text("\n\n".join(parts) + "\n")


def _note(what: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {what} ...\n")


if __name__ == "__main__":
    main()
