"""``python -m benchmarks [PART ...] [--quick]``: run the parts beside one server, write RESULTS.md."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import server
from benchmarks.measure import Result, markdown

#: Modules of this package, in the order of the issue.
PARTS = (
    "one_decision",
    "counting",
    "server_side",
    "whole_request",
    "refused",
    "resolver",
    "memory",
    "threads",
    "importing",
)
RESULTS = Path(__file__).with_name("RESULTS.md")


def main(arguments: list[str] | None = None) -> None:
    """Run what was asked for; all parts together write RESULTS.md, some or quick ones only print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    options = parser.parse_args(arguments)
    names = options.parts or PARTS
    with server.running() as url:
        os.environ["REDIS_URL"] = url
        set_django_up()
        results = {name: _run(name, options.quick) for name in names}
        text = _report(results, url)
    print(text)
    if not options.parts and not options.quick:
        RESULTS.write_text(text)
        print(f"Written to {RESULTS}", file=sys.stderr)


def set_django_up() -> None:
    """Django with the settings of the benchmark, its database empty."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "benchmarks.settings")
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)


def _run(name: str, quick: bool) -> Result:
    print(f"{datetime.now(UTC):%H:%M:%S} {name} ...", file=sys.stderr)
    result: Result = importlib.import_module(f"benchmarks.{name}").run(quick)
    return result


def _report(results: dict[str, Result], url: str) -> str:
    from benchmarks.surroundings import describe
    from benchmarks.targets import compare

    figures = {name: value for result in results.values() for name, value in result.figures.items()}
    parts = [
        f"## {name.replace('_', ' ').capitalize()}\n\n" + "\n\n".join(markdown(table) for table in result.tables)
        for name, result in results.items()
    ]
    return (
        "\n\n".join(
            [
                "# What a decision costs",
                describe(url),
                markdown(compare(figures, whole=len(results) == len(PARTS))),
                *parts,
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
