"""The README's snippets run as they stand, and its table of settings is the code's."""

from __future__ import annotations

import re
from pathlib import Path

from django_ratequota.conf import KEYS, Settings
from tests.support import server
from tests.support.projects import run_project
from tests.support.snippets import ROOT, snippet

PAGE = ROOT / "README.md"
README = PAGE.read_text()

URLS = """
from django.urls import path
import metered, views
urlpatterns = [path("s/", views.Search.as_view()), path("e/", views.export), path("c/", metered.complete)]
"""
DRIVE = """
from django_ratequota.models import Endpoint, RatePolicy
for name, rates in {"search": "12/hour", "exports": "1/hour", "completions": "400/hour"}.items():
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name=name), rates=rates)
print([get("/s/").status_code for _ in range(3)], get("/s/")["X-RateLimit-Remaining"])
print([get("/e/").status_code for _ in range(2)], get("/e/")["RateLimit-Policy"])
print(get("/c/").json(), get("/c/").json(), get("/c/").status_code)
"""


def test_the_snippets_limit_a_new_project(redis_client: object, tmp_path: Path) -> None:
    lines = snippet(PAGE, "settings.py")
    assert len(lines.splitlines()) == 5, "an app is wired in a comment and four lines"
    added = lines.replace("redis://127.0.0.1:6379/0", server.url())
    assert server.url() in added
    files = {name: snippet(PAGE, name) for name in ("views.py", "metered.py")}
    files |= {"settings.py": f'{added}RATEQUOTA |= {{"PREFIX": "rqtest.readme", "TIMEOUT": 5.0}}', "urls.py": URLS}
    assert run_project(tmp_path, files, DRIVE) == [
        "[200, 200, 429] 2",
        '[200, 429] "exports/hour";q=1;w=3600',
        "{'remaining': 250} {'remaining': 100} 429",
    ]


def test_the_table_has_every_setting_with_its_default() -> None:
    shown = dict(re.findall(r"^\| \[`([A-Z0-9_]+)`\]\(\S+\) \| (.*?) \|", README, re.MULTILINE))
    defaults = {key: getattr(Settings(), key.lower()) for key in KEYS}
    texts = {key: repr(list(value) if isinstance(value, tuple) else value) for key, value in defaults.items()}
    del texts["TIME_ZONE"], shown["TIME_ZONE"]
    assert {key: text.strip("`").replace('"', "'") for key, text in shown.items()} == texts


def test_the_text_before_the_first_link_is_short() -> None:
    before = re.split(r"(?<!!)\[[^\]]+\]\(", README)[0]
    text = re.sub(r"!\[[^\]]+\]\(\S+\)|<picture>.+?</picture>", "", before, flags=re.DOTALL)  # badges are pictures
    assert len(text.split()) < 400
