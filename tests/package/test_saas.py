"""docs/howto/saas.md: the project that the page builds, and four months of its traffic (``saas_traffic``)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.package.test_docs import DOCS, commands
from tests.support import server
from tests.support.projects import run_python
from tests.support.snippets import snippets

PAGE = snippets(DOCS / "howto" / "saas.md")
SETTINGS = "mysite/settings.py"
#: The app's own: the first part of its settings, its models, and how it authenticates requests.
OWN = [next(one for one in PAGE if one.file == SETTINGS)]
OWN += [one for one in PAGE if one.file in ("accounts/models.py", "accounts/authentication.py")]
#: Of its views and routes, only such lines are about quotas.
ABOUT_QUOTAS = re.compile("ratequota|throttle")
#: The suite's server, a host, no waiting for disks, and sessions that last for months.
TESTED = """
RATEQUOTA |= {"PREFIX": "rqtest:saas", "TIMEOUT": 5.0, "DENY_CACHE_SECONDS": 0, "STATISTICS_SECONDS": 0}
TIME_ZONE = "Europe/Berlin"
ALLOWED_HOSTS = ["testserver"]
DEBUG = False
if "MAILERS" in globals():  # since Django 6.1
    MAILERS = {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}
else:
    EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
SESSION_COOKIE_AGE = 365 * 86_400
DATABASES["default"]["OPTIONS"] = {"init_command": "PRAGMA synchronous = OFF", "timeout": 20}
"""
RUN = """
import django, sys
django.setup()
from tests.package import saas_traffic
saas_traffic.main(eval(sys.argv[1]), int(sys.argv[2]))
"""


def test_the_code_that_the_page_asks_for_is_short() -> None:
    found = []
    for one in PAGE:
        if one not in OWN and (one.language == "yaml" or one.file.endswith(".py")):
            # Without blank lines, comments and docstrings.
            lines = [line for line in one.text.splitlines() if re.match(r'\s*(?!#|""")\S', line)]
            is_views = one.file in ("mysite/views.py", "mysite/urls.py")
            found += [line for line in lines if not is_views or ABOUT_QUOTAS.search(line)]
    assert len(found) <= 40


@pytest.mark.thorough  # four months of traffic take half a minute
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_every_figure_is_that_of_the_request_log(redis_client: redis.Redis, tmp_path: Path, seed: int) -> None:
    typed = []
    for one in PAGE:
        file = tmp_path / ("policies.yaml" if one.language == "yaml" else one.file or "shell.py")
        if one.language == "console":
            for words in (shlex.split(line) for line, _ in commands(one)):
                if words[1:3] == ["-m", "django"] or words[2] == "startapp":
                    subprocess.run([sys.executable, *words[1:]], cwd=tmp_path, check=True)
                elif words[1] == "manage.py":
                    typed.append(words[2:])
        else:
            text = one.text.replace("redis://127.0.0.1:6379/0", server.url())
            file.parent.mkdir(exist_ok=True)
            file.write_text(file.read_text() + text if one.file == SETTINGS else text)
    settings = tmp_path / SETTINGS
    settings.write_text(settings.read_text() + TESTED)
    said = run_python(RUN, repr(typed), str(seed), folder=tmp_path, DJANGO_SETTINGS_MODULE="mysite.settings")
    assert said[-1] == "all equal"
