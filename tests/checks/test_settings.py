"""System checks of RATEQUOTA, the middleware and the proxies."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import AbstractUser
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError

from django_ratequota.checks.settings import (
    check_middleware,
    check_proxies,
    check_receivers,
    check_settings,
    check_tenants,
)
from tests.checks import ids

RATEQUOTA_MIDDLEWARE = "django_ratequota.middleware.RateQuotaMiddleware"
AUTHENTICATION = "django.contrib.auth.middleware.AuthenticationMiddleware"


# No database marker, because these checks must not open a connection.
def test_the_settings_of_this_suite_have_no_problems() -> None:
    messages = [message for message in checks.run_checks() if "django_ratequota" in str(message.id)]
    assert messages == []


def test_manage_check_reports_problems(settings: Any) -> None:
    del settings.RATEQUOTA
    assert check_settings() == []
    settings.RATEQUOTA = {"TIMEOUT": "soon", "TIMOUT": 1}
    assert ids(check_settings()) == ["E001", "W001"]
    with pytest.raises(SystemCheckError, match=r"django_ratequota\.E001") as caught:
        call_command("check")
    assert "HINT: Write a number from 0.001 to 60." in str(caught.value)


def test_a_caller_by_identifiers_that_cannot_be_used_is_no_second_problem(settings: Any) -> None:
    settings.RATEQUOTA = {"IDENTIFIERS": {"tenant": "no.such"}, "CALLER": ["tenant", "ip"]}
    [error] = check_settings()
    assert error.msg == "RATEQUOTA['IDENTIFIERS'] = {'tenant': 'no.such'} cannot be used."
    settings.RATEQUOTA = {"CALLER": ["tenant", "ip"]}
    assert ids(check_settings()) == ["E001"]


@pytest.mark.parametrize(
    ("enforce_all", "middleware", "expected"),
    [
        (False, [], []),
        (False, [RATEQUOTA_MIDDLEWARE, AUTHENTICATION], []),
        (True, [AUTHENTICATION, RATEQUOTA_MIDDLEWARE], []),
        (True, [RATEQUOTA_MIDDLEWARE], []),
        (True, [], ["W002"]),
        (True, [AUTHENTICATION], ["W002"]),
        (True, [RATEQUOTA_MIDDLEWARE, AUTHENTICATION], ["W003"]),
    ],
)
def test_a_missing_or_misplaced_middleware_is_a_warning(
    settings: Any, enforce_all: bool, middleware: list[str], expected: list[str]
) -> None:
    settings.RATEQUOTA = {"ENFORCE_ALL": enforce_all}
    settings.MIDDLEWARE = middleware
    assert ids(check_middleware()) == expected


def test_count_unchecked_needs_the_middleware(settings: Any) -> None:
    settings.RATEQUOTA, settings.MIDDLEWARE = {"COUNT_UNCHECKED": True}, []
    assert [message.msg for message in check_middleware()] == [
        "COUNT_UNCHECKED has no effect without the middleware."
    ]
    settings.MIDDLEWARE = [RATEQUOTA_MIDDLEWARE, AUTHENTICATION]
    assert check_middleware() == []


@pytest.mark.parametrize(
    ("networks", "versions"),
    [
        (["0.0.0.0/0"], "all IPv4 addresses"),
        (["::/0"], "all IPv6 addresses"),
        (["10.0.0.0/8", "::/0", "0.0.0.0/0"], "all IPv4 and IPv6 addresses"),
        (["0.0.0.0/1", "128.0.0.0/1"], "all IPv4 addresses"),
        (["::ffff:0:0/96"], "all IPv4 addresses"),
        (["0.0.0.0/1", "10.0.0.0/8", "2001:db8::/32", "unix"], None),
        ([], None),
    ],
)
def test_trusted_proxies_that_include_every_address_are_a_warning(
    settings: Any, networks: list[str], versions: str | None
) -> None:
    settings.RATEQUOTA = {"TRUSTED_PROXIES": networks}
    messages = check_proxies()
    assert ids(messages) == ["W018"] * (versions is not None)
    assert all(f"TRUSTED_PROXIES trusts {versions}, so " in message.msg and message.hint for message in messages)


def test_a_receiver_with_nobody_to_mail_is_a_warning(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_receivers() == []
    both = {"NOTIFY": [f"django_ratequota.notify.mail_{whom}" for whom in ("operators", "customers")]}
    settings.RATEQUOTA = both
    assert [message.msg.split()[2] for message in check_receivers()] == ["mail_operators,"]
    monkeypatch.delattr(AbstractUser, "EMAIL_FIELD")
    assert ids(check_receivers()) == ["W027", "W027"]
    settings.MANAGERS = ["ops@example.com"]
    settings.RATEQUOTA = {**both, "CUSTOMER_EMAILS": "tests.front.test_notify.emails"}
    assert check_receivers() == []


_APPS = {"SHARED_APPS": ["django_ratequota"], "TENANT_APPS": ["shop"]}


@pytest.mark.parametrize(
    ("engine", "apps", "expected"),
    [
        ("django_tenants.postgresql_backend", _APPS, []),
        (
            "django_tenants.postgresql_backend",
            {**_APPS, "TENANT_APPS": ["django_ratequota.apps.A"]},
            ["W029"],
        ),
        ("tenant_schemas.postgresql_backend", {**_APPS, "SHARED_APPS": ["shop"]}, ["W029"]),
        ("django_tenants.postgresql_backend", {"TENANT_TYPES": {"public": {"APPS": ["django_ratequota"]}}}, []),
        ("django_tenants.postgresql_backend", {"TENANT_TYPES": {"shop": {"APPS": ["django_ratequota"]}}}, ["W029"]),
        ("django.db.backends.postgresql", {}, []),
    ],
)
def test_tables_in_the_schema_of_each_tenant_are_a_warning(
    settings: Any, monkeypatch: pytest.MonkeyPatch, engine: str, apps: dict[str, Any], expected: list[str]
) -> None:
    """A process would apply the policies of the schema that it has read first to all tenants."""
    monkeypatch.setitem(settings.DATABASES["default"], "ENGINE", engine)
    for name, value in apps.items():
        setattr(settings, name, value)
    assert ids(check_tenants()) == expected
