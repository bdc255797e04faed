"""New interpreters, and small projects that run in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: What a project has before it adds the app; a test's own lines come below.
SETTINGS = """
SECRET_KEY = "project"
ROOT_URLCONF = "urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes"]
MIDDLEWARE = []
ALLOWED_HOSTS = ["testserver"]
"""
_SET_UP = """
import io, django
django.setup()
from django.core.management import call_command
from django.test import Client
call_command("check", fail_level="WARNING", stdout=io.StringIO())
call_command("migrate", verbosity=0)
get = Client().get
"""


def run_python(
    code: str, *arguments: str, folder: Path = ROOT, warnings: str = "error", **environment: str
) -> list[str]:
    """Run code in a new interpreter, outside of the suite's project; return the lines it prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-W", warnings, "-c", code, *arguments],
        cwd=folder,
        env={**inherited, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_project(folder: Path, files: dict[str, str], code: str, **environment: str) -> list[str]:
    """Write the files, of which ``settings.py`` adds to ``SETTINGS``; run code with a test client's ``get``."""
    for name, text in {**files, "settings.py": SETTINGS + files["settings.py"]}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return run_python(_SET_UP + code, folder=folder, DJANGO_SETTINGS_MODULE="settings", **environment)
