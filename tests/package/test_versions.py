"""The promised versions, the legs of the matrix and the pinned hooks agree."""

from __future__ import annotations

import configparser
import re
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def promised(name: str) -> list[str]:
    """Return the versions of Python or of Django in the classifiers."""
    about = {"Python": "Programming Language", "Django": "Framework"}[name]
    found = [re.fullmatch(rf"{about} :: {name} :: (\d+\.\d+)", text) for text in PROJECT["project"]["classifiers"]]
    return [match[1] for match in found if match]


@pytest.mark.parametrize(("name", "letters"), [("Python", "py"), ("Django", "django")])
def test_every_promised_version_has_a_leg(name: str, letters: str) -> None:
    # django5213 is the lowest Django 5.2.
    legs = {re.sub(r"^(django\d\d)\d+$", r"\1", factor) for factor in factors(rf"{letters}\d+")}
    assert len(promised(name)) > 2
    assert {letters + version.replace(".", "") for version in promised(name)} == legs


@pytest.mark.parametrize("name", ["Python", "Django"])
def test_the_badges_are_in_step_with_the_classifiers(name: str) -> None:
    readme = (ROOT / "README.md").read_text()
    badges = dict(re.findall(r"^!\[(\w+)[: ]\s*([^\]]+)\]", readme, re.MULTILINE))
    assert badges[name] == ", ".join(promised(name))
    assert f"badge/{name}-{'_%7C_'.join(promised(name))}-" in readme
    assert badges["License"] == PROJECT["project"]["license"]


def test_the_lowest_versions_have_a_leg() -> None:
    needed = [text.partition(">=") for text in PROJECT["project"]["dependencies"] if ">=" in text.partition("#")[0]]
    lowest = {name: rest.partition(",")[0] for name, _, rest in needed}
    lowest["python"] = PROJECT["project"]["requires-python"].removeprefix(">=")
    names = {"py": "python", "django": "django", "drf": "djangorestframework", "redispy": "redis"}
    assert any({letters + lowest[name].replace(".", "") for letters, name in names.items()} <= each for each in LEGS)
    for name in ("django-redis", "http-sf"):
        assert f"{name}=={lowest[name]}.*" in TOX["testenv"]["deps"]


def test_the_installation_page_names_the_supported_versions() -> None:
    project = PROJECT["project"]
    page = (ROOT / "docs/installation.md").read_text()
    parts = page.partition("## Versions")[2].partition("## Optional")[::2]
    table, extras = (dict(re.findall(r"^\| (.+?) \| (.+) \|$", part, re.MULTILINE)) for part in parts)
    for name in ("Python", "Django"):
        assert re.findall(r"\d+\.\d+(?=,|$| \()", table[name]) == promised(name)
    [django_bound] = [text for text in project["dependencies"] if text.startswith("django>=")]
    first, *excluded = re.findall(r"[\d.]+", django_bound)
    last = excluded[-1].rpartition(".")
    assert f"from {first}" in table["Django"]
    assert f"6.0 (from {last[0]}.{int(last[2]) + 1})" in table["Django"]
    names = {"Django REST framework": "djangorestframework", "redis-py": "redis", "django-redis": "django-redis"}
    for name, package in names.items():
        assert f"{package}>={table[name].split()[0]}" in project["dependencies"]
    tested = {name: re.search(r"\((.+) are tested\)", table[name])[1] for name in ("Redis", "Valkey")}  # type: ignore[index]
    shown = {f"{name} {version}" for name, cell in tested.items() for version in re.findall(r"\d\.\d", cell)}
    assert shown == {re.sub(r"(\d)(\d)$", r" \1.\2", server).capitalize() for server in leg.SERVERS}
    named = [name.strip("`") for name in extras if name.startswith("`") and "pip" not in name]
    assert named == list(project["optional-dependencies"])


def test_ninja_is_bounded_below_the_next_untested_version() -> None:
    """Private methods of Ninja are wrapped."""
    [extra] = PROJECT["project"]["optional-dependencies"]["ninja"]
    assert extra in PROJECT["dependency-groups"]["test"]
    major, minor = version("django-ninja").split(".")[:2]
    assert re.search(r"<([\d.]+)$", extra)[1] == f"{major}.{int(minor) + 1}"  # type: ignore[index]


def test_the_workflow_of_pull_requests_runs_the_promised_pythons() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == promised("Python")


def test_the_workflows_run_recipes_of_the_makefile() -> None:
    recipes = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text())["jobs"].values()
        steps = [step for job in jobs for step in job["steps"]]
        called = {name for step in steps for name in re.findall(r"^make ([a-z]+)", step.get("run", ""), re.MULTILINE)}
        assert called, path.name
        assert called <= recipes
        # A tag of an action can be moved, a commit cannot.
        uses = re.findall(r"^ *- uses: (.*)$", path.read_text(), re.MULTILINE)
        assert len(uses) == sum("uses" in step for step in steps)
        assert [line for line in uses if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


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


def test_the_slow_tests_and_those_that_ci_names_are_there() -> None:
    tests = ROOT / "tests"
    named = re.findall(r"tests/[\w/.]+", (ROOT / ".ci/run").read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [name for name in SLOW if not (tests / name).is_dir() and not (tests / f"{name}.py").exists()] == []


def test_hooks_pin_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    pins = {pin for hook in hooks for pin in hook["additional_dependencies"]}
    assert all("==" in pin for pin in pins)
    linters = {str(pin) for pin in PROJECT["dependency-groups"]["lint"]}
    assert {pin for pin in pins if pin.startswith("ruff")} <= linters
