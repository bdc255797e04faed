"""The README's snippets run as they stand, and the refusal that it shows is theirs."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.projects import run_project
from tests.support.snippets import ROOT, snippet

PAGE = ROOT / "README.md"
README = PAGE.read_text()

URLS = """
from django.urls import path
import views
urlpatterns = [path("s/", views.Search.as_view()), path("e/", views.export)]
"""
DRIVE = """
from django_ratequota.models import Endpoint, RatePolicy
for name, rates in {"search": "3/min", "exports": "1/hour"}.items():
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name=name), rates=rates)
print([get("/s/").status_code for _ in range(3)])
refused = get("/s/")
print(refused.status_code, refused.reason_phrase)
for name in ("Retry-After", "RateLimit-Policy", "RateLimit"):
    print(f"{name}: {refused[name]}")
print([get("/e/").status_code for _ in range(2)], get("/e/")["RateLimit-Policy"])
"""


def test_the_snippets_limit_a_new_project(tmp_path: Path) -> None:
    lines = snippet(PAGE, "settings.py")
    assert len(lines.splitlines()) == 5, "an app is wired in a comment and four lines"
    files = {"settings.py": lines, "views.py": snippet(PAGE, "views.py"), "urls.py": URLS}
    shown = README.partition("```http\nHTTP/1.1 ")[2].partition("\n```")[0]
    assert run_project(tmp_path, files, DRIVE) == [
        "[200, 200, 200]",
        *shown.splitlines(),
        '[200, 429] "exports/hour";q=1;w=3600',
    ]


def test_the_text_before_the_first_link_is_short() -> None:
    before = re.split(r"(?<!!)\[[^\]]+\]\(", README)[0]
    text = re.sub(r"!\[[^\]]+\]\(\S+\)|<picture>.+?</picture>", "", before, flags=re.DOTALL)  # badges are pictures
    assert len(text.split()) < 400
