"""``python -m benchmarks [PART ...] [--quick]``: run the parts beside one server, write RESULTS.md."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import server
from benchmarks.measure import Result, markdown
from benchmarks.processes import run_part, set_django_up
from benchmarks.summary import summarize
from benchmarks.surroundings import INTRODUCTION, describe
from benchmarks.targets import compare

#: Modules of this package, in the order of the report.
PARTS = (
    "one_decision",
    "counting",
    "server_side",
    "whole_request",
    "refused",
    "without_redis",
    "resolver",
    "ledger",
    "memory",
    "turns",
    "setting_up",
)
RESULTS = Path(__file__).with_name("RESULTS.md")


def main(arguments: list[str] | None = None) -> None:
    """Run what was asked for; all parts together write RESULTS.md, some or quick ones only print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    results: dict[str, Result] = {}
    failed: dict[str, Exception] = {}
    with server.running() as url:
        os.environ["REDIS_URL"] = url
        for name in options.parts or PARTS:
            print(f"{datetime.now(UTC):%H:%M:%S} {name} ...", file=sys.stderr)
            try:
                results[name] = _run(name, options.quick)
            except Exception as error:  # what the other parts measured is worth keeping
                traceback.print_exc()
                failed[name] = error
            text = _report(results, failed, url, whole=not options.parts)
            if not options.parts and not options.quick:
                RESULTS.write_text(text)  # after each part: a run that is ended early leaves what it has
    print(text)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}; see above")


def _end(*_: object) -> None:
    """Whoever ends this ends the part that is running, and the server."""
    for part in multiprocessing.active_children():
        part.terminate()
    sys.exit(143)


def _run(name: str, quick: bool) -> Result:
    """The part in a process of its own: what one leaves running or in memory disturbs no other."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_django_up) as process:
        return process.submit(run_part, name, quick).result()


def _report(results: dict[str, Result], failed: dict[str, Exception], url: str, whole: bool) -> str:
    figures = {name: value for result in results.values() for name, value in result.figures.items()}
    tables = [summarize(figures), replace(compare(figures, whole=whole), title="")]
    parts = ["# What a decision costs", INTRODUCTION, markdown(tables[0]), "## Targets", markdown(tables[1])]
    parts += ["## Appendix", describe(url)]
    for name, result in results.items():
        parts += [f"### {name.replace('_', ' ').capitalize()}", *map(markdown, result.tables)]
    parts += [f"### {name}\n\nNot measured: {type(error).__name__}: {error}" for name, error in failed.items()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
