"""Optional packages: nobody imports them who does not use them, and a missing one is asked for by its extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from django_ratequota.exceptions import ConfigurationError
from django_ratequota.utils.optional import require
from tests.support.properties import thorough_after

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
#: The module that uses a package -> the extra, and the package.
USERS = {
    "celery": ("celery", "celery"),
    "ninja": ("ninja", "ninja"),
    "openapi": ("spectacular", "drf_spectacular"),
    "metrics.prometheus": ("prometheus", "prometheus_client"),
    "metrics.opentelemetry": ("opentelemetry", "opentelemetry"),
}
PACKAGES = {package for _, package in USERS.values()} - {"opentelemetry"}
SETUP = """
import sys, django
from django.conf import settings
settings.configure(
    SECRET_KEY="extras", ROOT_URLCONF="django_ratequota.urls", USE_TZ=True,
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "django_ratequota"],
    REST_FRAMEWORK={"EXCEPTION_HANDLER": "django_ratequota.errors.exception_handler"},
)
django.setup()
"""
HIDE = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
"""


def run(code: str) -> str:
    """The output of a fresh interpreter, outside any Django project."""
    inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**inherited, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_modules_without_an_extra_import_no_optional_package() -> None:
    modules = "admin, api, apps, checks, decorators, errors, metrics, middleware, throttling, urls"
    code = f"{SETUP}\nfrom django_ratequota import {modules}\nprint(*sys.modules, sep='\\n')"
    code = code.replace('"rest_framework", "dj', '"rest_framework", "django.contrib.admin", "dj')
    imported = set(run(code).split())
    assert imported & {f"django_ratequota.{module}" for module in USERS} == set()
    # redis-py imports OpenTelemetry for itself, where it finds it.
    assert {name.partition(".")[0] for name in imported} & PACKAGES == set()
    assert "rest_framework" in imported


def test_everything_else_does_without_all_of_them() -> None:
    hidden = "".join(HIDE.format(package=package) for package in (*PACKAGES, "opentelemetry"))
    assert run(f"{hidden}{SETUP}\nfrom django_ratequota import errors, metrics, urls\nprint('ran')") == "ran\n"


@pytest.mark.parametrize("module", thorough_after(1, USERS))
def test_a_package_is_used_and_a_missing_one_asked_for_by_its_extra(module: str) -> None:
    extra, package = USERS[module]
    code = f"from importlib import import_module\nimport_module('django_ratequota.{module}')"
    assert package in run(f"{SETUP}\n{code}\nprint(*sys.modules, sep='\\n')").split()
    hidden = f"""{HIDE.format(package=package)}{SETUP}
from django_ratequota.exceptions import ConfigurationError
try:
    {code.replace(chr(10), "; ")}
except ConfigurationError as error:
    print(error)
"""
    said = run(hidden)
    assert re.fullmatch(rf"{package}\S* is not installed: pip install 'django-ratequota\[{extra}\]'\n", said), said
    assert extra in EXTRAS


def test_a_broken_package_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_extra.py").write_text("import no_such_module_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        require("broken_extra", "ninja")
    with pytest.raises(ConfigurationError, match=r"django-ratequota\[ninja\]"):
        require("no_such_module_at_all", "ninja")
    assert require("json", "ninja").loads("[]") == []
