"""System checks where Redis is missing, not used, or not needed."""

from __future__ import annotations

from typing import Any

import pytest
from django.conf import settings as now
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.test import override_settings
from django.test.utils import setup_test_environment, teardown_test_environment

from django_ratequota.checks.store import check_exposed, check_store
from tests.checks import ids

LOCAL = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def run_all(deploy: bool = False) -> list[str]:
    """Run all checks, and return the ids of ours that are about Redis."""
    found = ids(checks.run_checks(include_deployment_checks=deploy))
    return [name for name in found if name in ("E002", "W005", "W008", "W019", "W020", "W021")]


@pytest.fixture
def unconfigured(settings: Any) -> None:
    settings.CACHES, settings.RATEQUOTA = LOCAL, {}


@pytest.mark.usefixtures("unconfigured")
def test_without_redis_commands_stop_unless_debug_is_on(settings: Any, capsys: Any) -> None:
    assert run_all() == ["E002"]
    with pytest.raises(SystemCheckError, match=r"E002.*CACHES\['default'\] is django\.core\.cache"):
        call_command("check")
    settings.DEBUG = True
    [warning] = check_store()
    assert ids([warning]) == ["W019"]
    assert warning.msg.startswith("Limits need Redis, but none is configured. CACHES['default'] is django.core.")
    for way in ("RATEQUOTA['REDIS_URL'] = 'memory://'", "RATEQUOTA['ENABLED'] = False"):
        assert way in str(warning.hint)
    call_command("check")
    assert "W019" in capsys.readouterr().err


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("debug", [True, False])
def test_test_runners_check_with_the_projects_own_debug(debug: bool) -> None:
    """They set DEBUG to False first."""
    teardown_test_environment()
    with override_settings(DEBUG=debug):
        setup_test_environment(debug=False)
        found = (now.DEBUG, ids(check_store()))
        teardown_test_environment()
    setup_test_environment(debug=False)
    assert found == (False, ["W019"] if debug else ["E002"])


@pytest.mark.parametrize("url", ["redis//localhost", "memory://localhost", "MEMORY://"])
def test_a_url_that_cannot_be_used_stays_an_error_under_debug(settings: Any, url: str) -> None:
    settings.DEBUG, settings.RATEQUOTA = True, {"REDIS_URL": url}
    assert ids(check_store()) == ["E002"]


@pytest.mark.parametrize(
    ("raw", "now", "deployed"),
    [
        ({"ENABLED": False}, ["W020"], ["W020"]),
        ({"ENABLED": False, "REDIS_URL": "redis://127.0.0.1:1"}, ["W020"], ["W020"]),
        ({"REDIS_URL": "memory://"}, [], ["W021"]),
    ],
)
def test_projects_without_redis_do_not_connect(
    settings: Any, raw: dict[str, Any], now: list[str], deployed: list[str]
) -> None:
    settings.CACHES, settings.RATEQUOTA = LOCAL, raw
    assert (run_all(), run_all(deploy=True)) == (now, deployed)
    assert [*check_store(), *check_exposed()] == []
