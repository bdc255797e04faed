"""Sphinx configuration: ``make docs`` builds the site from the pages, which also work on a code host."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
# autodoc imports the package, and some of its modules read Django's settings.
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")

import django  # noqa: E402

django.setup()

import django_ratequota  # noqa: E402

project = "django-ratequota"
author = "The django-ratequota maintainers"
copyright = author
release = version = django_ratequota.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_reredirects"]
exclude_patterns = ["_build"]
highlight_language = "text"
smartquotes = False
nitpicky = True
# Signatures name classes of other projects, whose pages are not here.
nitpick_ignore_regex = [(r"py:.*", r"(?!django_ratequota).*")]
# Only annotations name these.
nitpick_ignore = [
    ("py:class", "django_ratequota.engine.decision.Charge"),
    ("py:class", "django_ratequota.engine.decision.Charged"),
    ("py:class", "django_ratequota.engine.decision.Charges"),
    ("py:class", "django_ratequota.engine.decision.SlotTaker"),
    ("py:class", "django_ratequota.engine.decision.Settler"),
    ("py:class", "django_ratequota.decorators.View"),
    ("py:class", "django_ratequota.headers.Headers"),
]

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

#: Pages that have moved.
redirects = {
    "operators": "support/index.html",
    "outcome": "howto/costs.html",
    "templates": "howto/django.html",
    "howto/batches": "costs.html",
    "howto/graphql": "costs.html",
    "howto/tokens": "costs.html",
    "howto/tenants": "customers.html",
}

html_theme = "furo"
html_title = f"{project} {release}"
html_show_copyright = False
html_show_sphinx = False


#: Files that are pages of the site.
PAGES = {HERE.parent / "CHANGELOG.md": HERE / "changelog.md"}


def copy_images(app: Any, exception: Exception | None) -> None:
    """Copy the screenshots, because Sphinx does not copy the files of ``<picture>``."""
    if exception is None:
        shutil.copytree(HERE / "images", Path(app.outdir) / "images", dirs_exist_ok=True)


def read_page(app: Any, docname: str, source: list[str]) -> None:
    """Turn links to files outside docs/, which work on a code host, into downloads."""
    here = folder = (HERE / docname).parent
    if docname == "changelog":
        folder = HERE.parent
        source[0] = (folder / "CHANGELOG.md").read_text()

    def target(link: re.Match[str]) -> str:
        path = (folder / link[1]).resolve()
        if not path.exists():  # Sphinx reports it, or it is no link
            return link[0]
        path = PAGES.get(path, path)
        scheme = "" if path.is_relative_to(HERE) else "path:"
        return f"]({scheme}{os.path.relpath(path, here)}{link[2] or ''})"

    source[0] = re.sub(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)", target, source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_page)
    app.connect("build-finished", copy_images)
