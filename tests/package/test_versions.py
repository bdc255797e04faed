"""The promised versions, the legs of the matrix and the pinned hooks agree."""

from __future__ import annotations

import configparser
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import django
import pytest
import yaml

from tests.conftest import SLOW
from tests.support import leg

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini")
LEGS = [set(name.split("-")) for name in TOX["tox"]["env_list"].split()]


def factors(pattern: str) -> set[str]:
    """Return the parts of the legs' names that match."""
    return {factor for factors in LEGS for factor in factors if re.fullmatch(pattern, factor)}


@pytest.mark.parametrize(
    ("about", "letters"), [("Programming Language :: Python", "py"), ("Framework :: Django", "django")]
)
def test_every_promised_version_has_a_leg(about: str, letters: str) -> None:
    found = [re.fullmatch(rf"{about} :: (\d+)\.(\d+)", text) for text in PROJECT["project"]["classifiers"]]
    promised = {letters + match[1] + match[2] for match in found if match}
    assert len(promised) > 2
    # A leg may try what is promised only once it has run somewhere.
    assert promised <= factors(rf"{letters}\d+")


def test_the_lowest_versions_have_a_leg() -> None:
    needed = [text.partition(">=") for text in PROJECT["project"]["dependencies"] if ">=" in text.partition("#")[0]]
    lowest = {name: rest.partition(",")[0] for name, _, rest in needed}
    lowest["python"] = PROJECT["project"]["requires-python"].removeprefix(">=")
    names = {"py": "python", "django": "django", "drf": "djangorestframework", "redispy": "redis"}
    assert any({letters + lowest[name].replace(".", "") for letters, name in names.items()} <= each for each in LEGS)
    for name in ("django-redis", "http-sf"):
        assert f"{name}=={lowest[name]}.*" in TOX["testenv"]["deps"]


def test_every_kind_of_server_and_database_has_a_leg() -> None:
    assert factors(r"(redis|valkey)\d+") == set(leg.SERVERS)
    assert all(len(factors & set(leg.SERVERS)) == 1 for factors in LEGS)
    assert {"postgresql", "uuid", "drfnew"} <= factors("[a-z]+")


def test_every_file_that_a_leg_runs_exists() -> None:
    named = [name for factors in LEGS for name in leg.tests_of(factors) if not name.startswith("--deselect=")]
    assert {name for names in leg.PARTS.values() for name in names.split()} == {name[6:-3] for name in named}
    assert [name for name in named if not (ROOT / name).exists()] == []
    for file, name in (test.split("::") for test in leg.NUMBERED):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def test_the_slow_tests_are_there() -> None:
    tests = ROOT / "tests"
    assert [name for name in SLOW if not (tests / name).is_dir() and not (tests / f"{name}.py").exists()] == []


def test_hooks_pin_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    pins = {pin for hook in hooks for pin in hook["additional_dependencies"]}
    assert all("==" in pin for pin in pins)
    linters = {str(pin) for pin in PROJECT["dependency-groups"]["lint"]}
    assert {pin for pin in pins if pin.startswith("ruff")} <= linters


@pytest.mark.parametrize(
    ("output", "factor", "fits"),
    [
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=ae4d7c971a948f0", "redis70", True),
        ("Redis server v=8.0.2 sha=00000000:1 malloc=jemalloc-5.3.0 bits=64 build=ae4d7c971a948f0", "redis70", False),
        ("Valkey server v=9.1.2 sha=00000000:1 malloc=libc bits=64 build=0", "valkey91", True),
        ("Valkey server v=7.0.1 sha=00000000:1 malloc=libc bits=64 build=0", "redis70", False),
    ],
)
def test_a_server_has_the_version_of_its_leg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, factor: str, fits: bool
) -> None:
    program = tmp_path / "server"
    program.write_text(f"#!/bin/sh\necho '{output}'\n")
    program.chmod(0o755)
    monkeypatch.setitem(leg.SERVERS, factor, lambda: str(program))
    found, name = leg.find_server(factor)
    assert found == (str(program) if fits else None)
    assert output.split()[2].removeprefix("v=") in name


def test_a_missing_server_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(leg.SERVERS, "redis70", lambda: None)
    monkeypatch.setenv("RATEQUOTA_MATRIX", str(tmp_path / "legs"))
    name = f"py{sys.version_info[0]}{sys.version_info[1]}-redis70"
    assert leg.main(name, []) == 0
    assert capsys.readouterr().out == (tmp_path / "legs").read_text() == f"not run: {name}: no redis70 is here\n"


def test_a_leg_fails_with_versions_other_than_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    python = f"py{sys.version_info[0]}{sys.version_info[1]}"
    assert leg.mismatches([python, f"django{django.VERSION[0]}{django.VERSION[1]}", "drfnew", "uuid"]) == []
    assert leg.main(f"{python}-django11-drfnew-valkey91", []) == 1
    assert f"it has Django {django.__version__}" in capsys.readouterr().out
    assert len(leg.mismatches(["py27"])) == 1
