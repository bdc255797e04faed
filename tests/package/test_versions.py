"""The promised versions, the legs of the matrix and the pinned hooks agree."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import tomllib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

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
    clients = re.findall(r"[\d.]+(?=, | and \d| are tested)", table["redis-py"])
    assert {f"redispy{version.replace('.', '')}" for version in clients} == factors(r"redispy\d+")
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


RELEASE: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]


def run_step(job: str, name: str, folder: Path, **environment: str) -> int:
    """Run a step of the release with bash, as its runner does; return its exit status."""
    [step] = [step for step in RELEASE[job]["steps"] if step.get("name", "").startswith(name)]
    given = {key: value for key, value in step.get("env", {}).items() if "${{" not in value} | environment
    command = ["bash", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(command, cwd=folder, env={**os.environ, **given}, capture_output=True).returncode


def test_a_release_is_built_by_locked_packages_apart_from_its_check() -> None:
    """Some twenty packages of no fixed version ran beside the files that were published."""
    needs = {name: job.get("needs") for name, job in RELEASE.items()}
    assert needs == {"tag": None, "build": "tag", "check": "build", "publish": ["build", "check"]}
    text = "\n".join(step.get("run", "") for step in RELEASE["build"]["steps"])
    assert re.findall(r"^.* (?:install|build|make) .*$", text, re.MULTILINE) == [
        "python -m pip install --require-hashes --no-deps --only-binary :all: --requirement .github/release.txt",
        "python -m build --no-isolation",
    ]
    assert [step["run"] for step in RELEASE["check"]["steps"] if "run" in step] == ["make wheel BUILT=dist"]
    artifacts = [
        step["with"]["artifact-ids"]
        for name in ("check", "publish")
        for step in RELEASE[name]["steps"]
        if step.get("uses", "").startswith("actions/download-artifact@")
    ]
    assert artifacts == ["${{ needs.build.outputs.artifact }}"] * 2
    assert [name for name, job in RELEASE.items() if "id-token" in job["permissions"]] == ["publish"]


def test_the_lock_has_what_a_release_is_built_with() -> None:
    """``make lock`` writes it."""
    lock = (ROOT / ".github/release.txt").read_text()
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+) \\$", lock, re.MULTILINE))
    assert lock.count("--hash=sha256:") >= len(pins) == len(re.findall(r"^\S", lock, re.MULTILINE))
    wanted = [Requirement(text) for text in PROJECT["dependency-groups"]["release"]]
    assert PROJECT["build-system"]["requires"][0] in map(str, wanted)
    assert all(one.specifier.contains(pins[one.name]) for one in wanted)


def test_only_the_files_that_were_built_are_published(tmp_path: Path) -> None:
    dist, output = tmp_path / "dist", tmp_path / "output"
    dist.mkdir()
    for name in ("one.whl", "one.tar.gz"):
        (dist / name).write_text(name)
    assert run_step("build", "Note their sums", dist, GITHUB_OUTPUT=str(output)) == 0
    sums = re.fullmatch(r"sums<<END\n(.*)\nEND\n", output.read_text(), re.DOTALL)
    assert sums
    compared = partial(run_step, "publish", "They are the files", dist, SUMS=sums[1])
    assert compared() == 0
    (dist / "two.whl").touch()
    assert compared() == 1
    (dist / "two.whl").unlink()
    (dist / "one.whl").write_text("another")
    assert compared() == 1


def test_a_tag_must_be_on_main_with_a_run_of_ci_that_passed(tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    commit = "commit --quiet --allow-empty --message"
    for words in ("init --quiet", f"{commit} one", f"{commit} two", "update-ref refs/remotes/origin/main HEAD"):
        subprocess.run([*git, *words.split()], check=True)
    on_main = partial(run_step, "tag", "The tag is on main", tmp_path)
    assert on_main() == 0
    subprocess.run([*git, "checkout", "--quiet", "HEAD~"], check=True)
    assert on_main() == 0
    subprocess.run([*git, *commit.split(), "elsewhere"], check=True)
    assert on_main() == 1
    (tmp_path / "gh").write_text('#!/bin/sh\ncase $2 in runs*head_sha=????????*branch=main*) echo "$PASSED";; esac\n')
    (tmp_path / "gh").chmod(0o755)
    ci = partial(run_step, "tag", "CI has passed", tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", RUNS="runs")
    assert [ci(PASSED=count) for count in ("1", "0", "")] == [0, 1, 2]


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
