"""The pages under docs/: snippets run, links have targets, references match the code."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from html import unescape
from http import HTTPStatus
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urljoin

import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.core.management import call_command

import django_ratequota
from django_ratequota import checks, conf, runtime, signals
from django_ratequota.changes import publication
from django_ratequota.conf import KEYS
from django_ratequota.enforcement import check_request as enforcement
from django_ratequota.engine.rates import normalize_rates, parse_rates
from django_ratequota.management import maintenance
from django_ratequota.monitoring import alerts
from docs import generate, plots
from example_project.check import Browser, form_fields, log_in, policy_path, set_rates
from example_project.seed import ADMIN
from tests.faults.servers import free_port
from tests.package.test_example_project import Demo, Place, browser_of, place, request
from tests.support import server
from tests.support.projects import SETTINGS, run_python
from tests.support.snippets import ROOT, Snippet, links, snippets

__all__ = ["place"]

DOCS = ROOT / "docs"
PACKAGE = ROOT / "django_ratequota"
NAMES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if "_build" not in page.parts)
#: A print() with its output in a comment.
_PRINTS = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
#: A page that shows this imports its policies by itself.
_IMPORT = "$ python manage.py ratequota import policies.yaml"
#: A page that links to this begins with the settings of that page.
EXAMPLES = "../installation.md#run-the-examples)"
#: Pages whose snippets need a project of their own -> the test that makes it. Here they are only compiled.
_RUN_BY = {
    "api.md": "package/test_client_pages.py",
    "howto/celery.md": "package/test_caller_pages.py",
    "howto/channels.md": "package/test_caller_pages.py",
    "howto/costs.md": "package/test_caller_pages.py",
    "howto/outbound.md": "package/test_caller_pages.py",
    "howto/own-columns.md": "package/test_own_limits.py",
    "howto/saas.md": "package/test_saas.py",
    "metrics.md": "package/test_client_pages.py",
    "migrating.md": "package/test_migrating.py",
    "testing.md": "testing/test_testing.py",
}


def is_served(snippet: Snippet) -> bool:
    """Whether it is for the served example: see test_the_tutorial_shows_what_the_example_project_does."""
    return snippet.language == "console" and re.search(r"^\$ (make demo|curl |for )", snippet.text) is not None


class Page:
    """One page's snippets in their order: settings are set, files and policies imported, the rest executed."""

    def __init__(self, page: Path, settings: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._settings, self._monkeypatch, self._folder = settings, monkeypatch, folder
        self._snippets = snippets(page)
        self._is_example = EXAMPLES in page.read_text()
        self._modules: dict[str, ModuleType] = {}
        self._names = self._module("docs_page")
        exec("from django.urls import path\nurlpatterns = []", self._module("mysite.urls"))  # of startproject
        monkeypatch.chdir(folder)

    def run(self) -> None:
        if self._is_example:
            self._set(next(one for one in snippets(DOCS / "installation.md") if one.file == "mysite/settings.py"))
        for snippet in self._snippets:
            assert snippet.language not in ("py", "pycon", "bash", "sh", "shell"), "these would not run here"
            if snippet.language == "python":
                self._python(snippet)
            elif snippet.language == "html" and snippet.file.startswith("templates/"):
                (self._folder / "templates").mkdir(exist_ok=True)
                (self._folder / snippet.file).write_text(snippet.text)
            elif snippet.language == "yaml" and snippet.text.startswith("version: 1\n"):
                (self._folder / "policies.yaml").write_text(snippet.text)
                if not any(_IMPORT in snippet.text for snippet in self._snippets):
                    call_command("ratequota", "import", "policies.yaml", stdout=io.StringIO())
            elif snippet.language == "console" and not snippet.not_run and not is_served(snippet):
                self._console(snippet)

    def _python(self, snippet: Snippet) -> None:
        code = compile(snippet.padded, str(snippet.page), "exec")
        if snippet.not_run:
            return
        *packages, file = snippet.file.split("/")
        if file == "settings.py":
            self._set(snippet)
        elif file:
            module = ".".join([*packages, file.removesuffix(".py")])
            exec(code, self._module(module))
            if file == "urls.py":
                self._settings.ROOT_URLCONF = module
        else:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, self._names)
            assert printed.getvalue().splitlines() == _PRINTS.findall(snippet.text), f"{snippet.page}:{snippet.line}"

    def _module(self, name: str) -> dict[str, Any]:
        """Return the namespace of a module that other snippets may import, new or with the names so far."""
        if name not in self._modules:
            assert name not in sys.modules, f"{name}.py would hide a module that is there"
            self._modules[name] = ModuleType(name)
            self._monkeypatch.setitem(sys.modules, name, self._modules[name])
        return vars(self._modules[name])

    def _set(self, snippet: Snippet) -> None:
        """Set the page's settings on top of an empty project's; the suite's server and prefix stay."""
        ours = ("django_ratequota", "django_ratequota.")
        found: dict[str, Any] = {
            name: [path for path in getattr(django_settings, name) if not path.startswith(ours)]
            for name in ("INSTALLED_APPS", "MIDDLEWARE")
        }
        found |= {"CACHES": {}, "REST_FRAMEWORK": {}, "RATEQUOTA": {}, "BASE_DIR": self._folder}
        found["TEMPLATES"] = [{"DIRS": [], **engine} for engine in django_settings.TEMPLATES]
        before = deepcopy(found)
        exec(snippet.padded.replace("redis://127.0.0.1:6379/0", server.url()), found)
        found["INSTALLED_APPS"] = list(dict.fromkeys(found["INSTALLED_APPS"]))  # a page may add rest_framework
        for name, value in found.items():
            if name == "RATEQUOTA":
                self._settings.RATEQUOTA = {**django_settings.RATEQUOTA, **value}
            elif name.isupper() and value != before.get(name):
                setattr(self._settings, name, value)

    def _console(self, snippet: Snippet) -> None:
        """Run each ``$`` line, a command of manage.py: the lines below it must be in its output, in this order."""
        for line, expected in commands(snippet):
            words = shlex.split(line)
            assert words[:2] == ["python", "manage.py"], f"{snippet.page}:{snippet.line}: {line}"
            out = io.StringIO()
            call_command(*words[2:], stdout=out)
            printed = iter(out.getvalue().splitlines())
            for wanted in expected:
                assert wanted in printed, f"{wanted!r} is not printed by {line}:\n{out.getvalue()}"


def commands(snippet: Snippet) -> Iterator[tuple[str, list[str]]]:
    """Yield the command after each ``$``, and the lines below it."""
    for block in re.split(r"^\$ ", snippet.text, flags=re.MULTILINE)[1:]:
        line, *printed = block.splitlines()
        yield line, printed


@pytest.fixture
def receivers() -> Iterator[None]:
    found = [getattr(signals, name) for name in signals.__all__]
    before = [sent.receivers for sent in found]
    for sent in found:
        sent.receivers = list(sent.receivers)
    yield
    for sent, connected in zip(found, before, strict=True):
        sent.receivers = connected
        sent.sender_receivers_cache.clear()


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies", "receivers", "recording")
@pytest.mark.parametrize("name", NAMES)
def test_snippets_run(name: str, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if name in _RUN_BY:
        assert Path(name).name in (ROOT / "tests" / _RUN_BY[name]).read_text()
        for snippet in snippets(DOCS / name):
            if snippet.language == "python":
                compile(snippet.padded, name, "exec")
        return
    for user in ("alice", "bob"):
        User.objects.create_user(user, password="secret")
    Page(DOCS / name, settings, monkeypatch, tmp_path).run()


@cache
def slugs(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_the_asgi_module_names_its_settings(tmp_path: Path) -> None:
    """A server imports it in a process without settings."""
    (tmp_path / "mysite").mkdir()
    (tmp_path / "mysite/settings.py").write_text(f"{SETTINGS}INSTALLED_APPS += ['django_ratequota']\n")
    [module] = [one.text for one in snippets(DOCS / "servers.md") if one.file == "mysite/asgi.py"]
    (tmp_path / "mysite/asgi.py").write_text(module)
    assert run_python("import mysite.asgi as module; print(module.__name__)", folder=tmp_path) == ["mysite.asgi"]


def test_links_lead_somewhere() -> None:
    others = (ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "tests/security/README.md"))
    for page in (*others, *(DOCS / name for name in NAMES)):
        assert [link for link in links(page) if not (page.parent / link).exists()] == [], page.name
        text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for file, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", text):
            assert anchor in slugs(page.parent / file if file else page), f"{page.name}: {file}#{anchor}"


def title(page: Path) -> str:
    """Return the first heading of the page."""
    return page.read_text().partition("\n")[0].removeprefix("# ")


def test_the_index_calls_each_page_by_its_title() -> None:
    named = re.findall(r"\[([^\]]+)\]\(([^)]+\.md)\)", (DOCS / "index.md").read_text())
    assert {file: " ".join(name.split()) for name, file in named} == {file: title(DOCS / file) for _, file in named}
    listed = {file for _, file in named} | {"index.md", "changelog.md"}
    assert [name for name in NAMES if name not in listed and not name.startswith("decisions/0")] == []


#: What readers type into the search of the site -> the page that they mean.
_SEARCHED = {
    "3 a.m.": "runbook.md",
    "429": "support/customer-reports-a-429.md",
    "allowlist": "support/block.md",
    "API key": "howto/customers.md",
    "AWS load balancer": "howto/proxies.md",
    "brute force": "howto/login.md",
    "CF-Connecting-IP": "howto/proxies.md",
    "Cloudflare": "howto/proxies.md",
    "DDoS": "when-not-to-use.md",
    "disable rate limiting": "howto/without-redis.md",
    "dry run": "support/roll-out.md",
    "ElastiCache": "hosted-redis.md",
    "GDPR": "howto/personal-data.md",
    "GitOps": "policies-as-code.md",
    "Grafana": "metrics.md",
    "GraphQL": "howto/costs.md",
    "gunicorn": "servers.md",
    "invoices": "howto/saas.md",
    "kill switch": "runbook.md",
    "liveness probe": "deployment.md",
    "LLM tokens": "howto/costs.md",
    "parallel requests": "howto/concurrency.md",
    "Prometheus": "metrics.md",
    "Retry-After": "reference/headers.md",
    "shadow mode": "support/roll-out.md",
    "sliding window": "algorithms.md",
    "status": "status.md",
    "temporary increase": "support/raise-or-refund.md",
    "token bucket": "algorithms.md",
    "Upstash": "hosted-redis.md",
    "uWSGI": "servers.md",
    "WebSockets": "howto/channels.md",
    "X-Forwarded-For": "howto/proxies.md",
}


def found_by(name: str) -> str:
    """Return the texts of the page that the site's search ranks highest: its title and its other names."""
    page = DOCS / name
    return " ".join([title(page), *re.findall(r"^Also known as: (.+)\.$", page.read_text(), re.MULTILINE)]).lower()


@pytest.mark.parametrize("words", _SEARCHED)
def test_a_search_finds_the_page(words: str) -> None:
    assert words.lower() in found_by(_SEARCHED[words])


def test_the_page_on_status_has_each_line_that_it_prints() -> None:
    source = inspect.getsource(maintenance)
    printed = {name.strip() for name in re.findall(r"yield f?\"([a-z][a-z ]{11}) \S", source)}
    printed |= {name.strip() for name in re.findall(r"yield f\" {13}([a-z][a-z ]+?)(?=[ :]\{|: )", source)}
    assert len(printed) > 12
    page = (DOCS / "status.md").read_text()
    assert [name for name in sorted(printed) if f"| `{name}" not in page] == []
    assert [state for state in maintenance._STATES.values() if f"| *{state}*" not in page] == []


def test_every_setting_is_linked_to_its_section() -> None:
    text = (DOCS / "reference/settings.md").read_text().partition("<!-- generated")[0]
    assert set(re.findall(r"\[`([A-Z_0-9]+)`\]\(#\w+\)", text)) == set(KEYS)


def test_files_named_in_the_pages_exist() -> None:
    pages = [ROOT / "CONTRIBUTING.md", *(DOCS / name for name in NAMES)]
    named = {path for page in pages for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|lua))`", page.read_text())}
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists() and not (PACKAGE / path).exists()] == []


def test_the_architecture_lists_the_layers_of_the_import_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    table = (DOCS / "architecture.md").read_text().partition("## Folders")[2].partition("\n## ")[0]
    shown = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines() if line.startswith("| `")]
    assert shown == [layer.split(" | ") for layer in reversed(contract["layers"])]


#: Headers that differ each time.
_VOLATILE = {"Retry-After", "X-RateLimit-Refusal"}


def test_the_tutorial_shows_what_the_example_project_does(place: Place, redis_client: object) -> None:
    shown = [command for one in filter(is_served, snippets(DOCS / "tutorial.md")) for command in commands(one)]
    assert [line.split()[0] for line, _ in shown] == ["make", "curl", "for", "curl", "curl"]
    demo = Demo(place, REDIS_URL=server.url(), RATEQUOTA_PREFIX="rqtest:tutorial")
    demo.ready()
    served = [(line.replace("http://127.0.0.1:8000", demo.address), printed) for line, printed in shown[1:]]
    for line, printed in served[:-1]:
        assert answer(line, demo.address, printed) == printed
    admin = log_in(demo.address)
    assert "`3/hour` to `6/hour`" in (DOCS / "tutorial.md").read_text()
    assert set_rates(admin, policy_path(admin, "Free", "exports"), "6/hour") == "3/hour"
    line, printed = served[-1]
    assert answer(line, demo.address, printed) == printed
    assert demo.stop(by=signal.SIGINT, everyone=True) == (0, "\nStopped; nothing is left behind.\n")


class TypedProject:
    """A project that a reader types: files as the page shows them, served without autoreload."""

    def __init__(self, folder: Path) -> None:
        self.address = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        self._serving: subprocess.Popen[str] | None = None
        environment = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        environment |= {"PYTHONPATH": str(ROOT), "DJANGO_SUPERUSER_PASSWORD": ADMIN[1]}
        self._where: Any = {"cwd": folder, "env": environment, "text": True}

    def run(self, *words: str) -> str:
        """Run Python with these arguments, and return what it prints."""
        done = subprocess.run([sys.executable, *words], capture_output=True, timeout=60, **self._where)
        assert done.returncode == 0, done.stderr
        return str(done.stdout + done.stderr)

    def write(self, one: Snippet) -> None:
        """Add the snippet to the end of its file."""
        assert one.file
        text, path = one.text, self._folder / one.file
        if one.file == "mysite/settings.py" and "redis://" in text:
            text = text.replace("redis://127.0.0.1:6379/0", server.url())
            text += 'RATEQUOTA |= {"PREFIX": "rqtest:typed", "TIMEOUT": 5.0}\n'
        with path.open("a") as file:
            file.write(text)
        if self._serving:  # as runserver would
            self.serve()

    def serve(self) -> None:
        """Serve the project, again if it is served already."""
        self.stop()
        address = self.address.removeprefix("http://")
        command = [sys.executable, "-u", "manage.py", "runserver", "--noreload", address]
        self._serving = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **self._where)
        assert any("Starting" in line for line in self._serving.stdout or ())

    def stop(self) -> None:
        """End the server."""
        if self._serving:
            self._serving.terminate()
            self._serving.communicate()
        self._serving = None


_ENDPOINTS = "/admin/django_ratequota/endpoint/"


def add_endpoint(admin: Browser, text: str, rates: str) -> None:
    """Click the link with this text in the list of endpoints, add a policy with these rates, and save."""
    listed = admin.get(_ENDPOINTS).text
    [address] = re.findall(rf'<a href="([^"]*)">{re.escape(text)}</a>', listed)
    fields = form_fields(admin.get(urljoin(_ENDPOINTS, unescape(address))).text)
    row = {name.replace("__prefix__", "0"): value for name, value in fields.items() if "__prefix__" in name}
    save(admin, f"{_ENDPOINTS}add/", {**fields, **row, "policies-TOTAL_FORMS": "1", "policies-0-rates": rates})


def edit_endpoint(admin: Browser, rates: str) -> None:
    """Open the only endpoint, change the rates of its only policy, and save."""
    [path] = re.findall(rf'href="({_ENDPOINTS}\d+/change/)[^"]*"', admin.get(_ENDPOINTS).text)
    save(admin, path, {**form_fields(admin.get(path).text), "policies-0-rates": rates})


def save(admin: Browser, path: str, fields: dict[str, str]) -> None:
    """Send a form of the admin, which must be valid."""
    assert "successfully" in admin.post(path, fields).text


@pytest.mark.thorough
def test_the_quickstart_works_as_typed(redis_client: object, tmp_path: Path) -> None:
    page = DOCS / "quickstart.md"
    text, project = page.read_text(), TypedProject(tmp_path)
    assert "\n    django-admin startproject mysite .\n" in text
    project.run("-m", "django", "startproject", "mysite", ".")
    done = []
    try:
        for one in snippets(page):
            if one.language == "python":
                project.write(one)
            for line, printed in commands(one) if one.language == "console" else ():
                words = shlex.split(line)
                if "createsuperuser" in words:
                    project.run(*words[1:], "--noinput", "--username", ADMIN[0], "--email", "")
                elif "runserver" in words:
                    project.serve()
                    add_endpoint(log_in(project.address), "Create the endpoint search", rates="3/min")
                elif words[0] == "for" or words[0] == "curl":
                    if printed[0] == "HTTP/1.1 200 OK":
                        admin = log_in(project.address)
                        found = admin.get("/admin/django_ratequota/ratepolicy/explain/?id=127.0.0.1").text
                        assert [shown for shown in ("Refused now", "search: 3/min") if shown not in found] == []
                        edit_endpoint(admin, rates="6/min")
                    line = line.replace("http://127.0.0.1:8000", project.address)
                    assert timeless(answer(line, project.address, printed)) == timeless(printed)
                else:
                    assert words[:2] == ["python", "manage.py"]
                    out = project.run(*words[1:]).splitlines()
                    assert [wanted for wanted in printed if wanted not in out] == [], out
                done.append(" ".join(words[:3]))
    finally:
        project.stop()
    assert "python manage.py runserver" in done
    assert [action for action in ("*Create the endpoint search*", "`3/min` to `6/min`") if action not in text] == []


def timeless(lines: list[str]) -> list[str]:
    """Return the lines without the seconds until there is more, which pass while a page is read."""
    return [re.sub(r"\bt=\d+", "t", line) for line in lines]


def answer(line: str, address: str, shown: list[str]) -> list[str]:
    """Return what the command prints: statuses, or the status line and the headers that the page shows."""
    words = shlex.split(line)
    if words[0] == "for":
        return [str(status) for status in request(words, address)]
    response = browser_of(words, address).get(words[-1].removeprefix(address))
    found = [f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}"]
    for name, _, value in (one.partition(": ") for one in shown[1:]):
        found.append(f"{name}: {value if name in _VOLATILE and name in response.headers else response.headers[name]}")
    return found


@pytest.mark.parametrize("name", generate.TABLES)
def test_generated_tables_are_up_to_date(name: str, redis_client: object) -> None:
    """``make pages`` writes them."""
    assert (DOCS / generate.TABLES[name][0]).read_text() == generate.page(name)


def test_the_plots_are_up_to_date(redis_client: object) -> None:
    """``make pages`` draws them."""
    for file, drawing in plots.draw().items():
        assert (plots.IMAGES / file).read_text() == drawing, file


def test_rates_in_the_table_are_valid() -> None:
    shown = rows("reference/rates.md")
    assert "unlimited" in shown
    for text in list(shown)[: list(shown).index("blocked") + 1]:
        normalize_rates(text)
        parse_rates(text)


def rows(page: str) -> dict[str, str]:
    """Return the rows of the page's tables by the code in their first cell."""
    return {line.split("`")[1]: line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")}


def test_every_check_is_in_the_table_with_its_hint() -> None:
    modules = [Path(conf.__file__), *Path(checks.__file__).parent.glob("*.py")]
    source = "".join(module.read_text() for module in modules)
    shown = rows("reference/checks.md")
    assert set(shown) == set(re.findall(r"\bid=\"django_ratequota\.([^\"]+)\"", source))
    page = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", "\n".join(shown.values()))
    hints = re.findall(r"hint ?= ?\"([^\"]+?)[.,]? ?\"", source)
    assert len(hints) >= 5
    assert [hint for hint in hints if hint not in page] == []


def test_checks_named_on_a_page_exist() -> None:
    ids = set(rows("reference/checks.md"))
    for name in NAMES:
        assert set(re.findall(r"\b[EWI]0\d\d\b", (DOCS / name).read_text())) <= ids, name


def test_every_signal_is_in_the_table_with_its_arguments() -> None:
    shown = rows("reference/signals.md")
    assert set(shown) == set(signals.__all__)
    for name, module in {
        "request_refused": enforcement,
        "quota_threshold": alerts,
        "store_state_changed": runtime,
        "policies_changed": publication,
    }.items():
        sends = rf"\b{name}(?:\.send_robust\(|,)\s*(sender=[^()]*(?:\([^()]*\)[^()]*)*)\)"
        [sent] = set(re.findall(sends, inspect.getsource(module)))
        arguments = set(re.findall(r"(\w+)=", sent)) - {"sender"}
        assert arguments == set(re.findall(r"`(\w+)`", shown[name].split("|")[3])) & arguments, name


def test_the_python_api_page_has_every_exported_name() -> None:
    shown = re.findall(
        r"^\.\. auto\w+:: django_ratequota\.(\w+)$", (DOCS / "reference/python.md").read_text(), re.MULTILINE
    )
    assert set(shown) == set(django_ratequota.__all__)
