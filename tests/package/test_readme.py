"""The README's snippets run as they stand, and the refusal that it shows is theirs; fresh_projects.py types them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.projects import run_project
from tests.support.snippets import ROOT, snippets

PAGE = ROOT / "README.md"
README = PAGE.read_text()

#: Below the README's lines, in a project whose ``urls.py`` is as ``startproject`` makes it.
VIEW = """
from rest_framework.views import APIView
class API(APIView):
    throttle_scope = "search"
urlpatterns += [path("api/", API.as_view())]
"""
DRIVE = """
call_command("ratequota", "import", "policies.yaml", stdout=io.StringIO())
print([get("/search/").status_code for _ in range(3)])
refused = get("/search/")
print(refused.status_code, refused.reason_phrase)
for name in ("Retry-After", "RateLimit-Policy", "RateLimit"):
    print(f"{name}: {refused[name]}")
print(get("/api/")["RateLimit-Policy"])
"""


def test_the_snippets_limit_a_new_project(tmp_path: Path) -> None:
    files = {"mysite/urls.py": "from django.urls import path\nurlpatterns = []\n", "mysite/settings.py": ""}
    for one in snippets(PAGE):
        if one.language == "yaml":
            files["policies.yaml"] = one.text
        elif one.file:
            files[one.file] += one.text
    files["urls.py"], files["settings.py"] = files.pop("mysite/urls.py") + VIEW, files.pop("mysite/settings.py")
    assert len(files["policies.yaml"].splitlines()) == 3
    shown = README.partition("\nHTTP/1.1 ")[2].partition("\n```")[0]
    assert run_project(tmp_path, files, DRIVE) == [
        "[200, 200, 200]",
        *shown.splitlines(),
        '"search/min";q=3;w=60',
    ]


def test_the_text_before_the_first_link_is_short() -> None:
    before = re.split(r"(?<!!)\[[^\]]+\]\(", README)[0]
    text = re.sub(r"!\[[^\]]+\]\(\S+\)|<picture>.+?</picture>", "", before, flags=re.DOTALL)  # badges are pictures
    assert len(text.split()) < 400
