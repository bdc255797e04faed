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

from django_ratequota.checks.store import check_enabled, check_exposed, check_memory, check_round_trip, check_store
from tests.checks import ids

LOCAL = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


def run_all(deploy: bool = False) -> list[str]:
    """Run all checks, and return the ids of ours that are about Redis."""
    found = ids(checks.run_checks(include_deployment_checks=deploy))
    return [name for name in found if name in ("E002", "W005", "W008", "W019", "W020", "W021")]


class TestNoRedisConfigured:
    @pytest.fixture(autouse=True)
    def _unconfigured(self, settings: Any) -> None:
        settings.CACHES, settings.RATEQUOTA = LOCAL, {}

    def test_it_stops_commands_without_debug(self) -> None:
        assert run_all() == ["E002"]
        with pytest.raises(SystemCheckError, match=r"E002.*CACHES\['default'\] is django\.core\.cache"):
            call_command("check")

    def test_under_debug_it_is_a_warning_that_names_two_ways_without_redis(self, settings: Any, capsys: Any) -> None:
        settings.DEBUG = True
        [warning] = check_store()
        assert (ids([warning]), warning.level) == (["W019"], checks.WARNING)
        assert warning.msg.startswith("Limits need Redis, and none is configured: CACHES['default'] is django.core.")
        assert "RATEQUOTA['REDIS_URL'] = 'memory://'" in str(warning.hint)
        assert "RATEQUOTA['ENABLED'] = False" in str(warning.hint)
        call_command("check")
        assert "W019" in capsys.readouterr().err

    @pytest.mark.parametrize("debug", [True, False])
    def test_test_runners_check_with_the_projects_own_debug(self, debug: bool) -> None:
        """They set DEBUG to False first."""
        teardown_test_environment()
        with override_settings(DEBUG=debug):
            setup_test_environment(debug=False)
            found = (now.DEBUG, ids(check_store()))
            teardown_test_environment()
        setup_test_environment(debug=False)
        assert found == (False, ["W019"] if debug else ["E002"])

    @pytest.mark.parametrize("url", ["redis//localhost", "memory://localhost", "MEMORY://"])
    def test_a_url_that_cannot_be_used_stays_an_error_under_debug(self, settings: Any, url: str) -> None:
        settings.DEBUG, settings.RATEQUOTA = True, {"REDIS_URL": url}
        [error] = check_store()
        assert ids([error]) == ["E002"]
        for scheme in ("redis://", "rediss://", "unix://", "redis+sentinel://", "'memory://'"):
            assert scheme in str(error.hint)


def test_a_disabled_project_has_one_warning(settings: Any) -> None:
    settings.CACHES, settings.RATEQUOTA = LOCAL, {"ENABLED": False}
    assert run_all(deploy=True) == ["W020"]
    [warning] = check_enabled()
    assert warning.msg == "RATEQUOTA['ENABLED'] is False: nothing is enforced."
    assert [*check_store(), *check_exposed(), *check_memory(), *check_round_trip(databases=["default"])] == []


def test_a_disabled_project_does_not_connect(settings: Any) -> None:
    settings.RATEQUOTA = {"ENABLED": False, "REDIS_URL": "redis://127.0.0.1:1"}
    assert run_all(deploy=True) == ["W020"]
    assert check_round_trip(databases=["default"]) == []


def test_counting_in_memory_is_a_warning_for_deployments_only(settings: Any) -> None:
    settings.CACHES, settings.RATEQUOTA = LOCAL, {"REDIS_URL": "memory://"}
    assert run_all() == []
    assert run_all(deploy=True) == ["W021"]
    assert check_round_trip(databases=["default"]) == []
