"""``ratequota import --from-drf-settings``: DEFAULT_THROTTLE_RATES as policies with the same limits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.core.management import CommandError, call_command
from rest_framework import throttling
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from django_ratequota.compat import drf
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.throttling import QuotaThrottle

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

ANON, USER, SCOPED = (f"rest_framework.throttling.{name}RateThrottle" for name in ("Anon", "User", "Scoped"))
REASON = "reason from DEFAULT_THROTTLE_RATES"


class Burst(throttling.UserRateThrottle):
    scope = "burst"


class Sustained(drf.UserRateThrottle):
    scope = "sustained"


class Fixed(throttling.UserRateThrottle):
    """Has the rate in the class."""

    rate = "7/day"


class Quarter(throttling.UserRateThrottle):
    scope = "quarter"

    def parse_rate(self, rate: Any) -> Any:
        return (int(rate.partition("/")[0]), 900)


class PerTenant(throttling.SimpleRateThrottle):
    scope = "tenant"

    def get_cache_key(self, request: Any, view: Any) -> str:
        return "acme"


class Lenient(throttling.UserRateThrottle):
    scope = "lenient"

    def allow_request(self, request: Any, view: Any) -> bool:
        return True


def run(settings: Any, rates: Any, *classes: Any, options: tuple[str, ...] = ()) -> list[str]:
    names = [name if isinstance(name, str) else f"{name.__module__}.{name.__qualname__}" for name in classes]
    settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_RATES": rates, "DEFAULT_THROTTLE_CLASSES": names}
    out = io.StringIO()
    call_command("ratequota", "import", "--from-drf-settings", *options, stdout=out)
    return out.getvalue().splitlines()


USUAL = {"anon": "100/day", "user": "1000/day", "uploads": "20/hour", "contacts": None}
DIFF = [
    "+ plan anonymous: name Anonymous, default_for anonymous",
    "+ endpoint uploads",
    f"+ policy everyone × all endpoints: rates 1000/day, algorithm sliding_window_log, {REASON}",
    f"+ policy anonymous × all endpoints: rates 100/day, algorithm sliding_window_log, {REASON}",
    f"+ policy everyone × uploads: rates 20/hour, algorithm sliding_window_log, {REASON}",
]


def test_common_settings_are_imported(settings: Any) -> None:
    classes = (ANON, USER, SCOPED)
    assert run(settings, USUAL, *classes, options=("--dry-run",)) == [
        *DIFF,
        "Dry run: 5 to create, 0 to change, 0 to delete; nothing was changed",
    ]
    assert not PolicyChange.objects.exists()
    assert run(settings, USUAL, *classes, options=("--reason", "OPS-7")) == [*DIFF, "5 created, 0 changed, 0 deleted"]
    assert set(PolicyChange.objects.values_list("reason", flat=True)) == {"OPS-7"}
    again = run(settings, USUAL, *classes)
    assert again == ["Nothing to do: the database equals DEFAULT_THROTTLE_RATES"]
    assert run(settings, USUAL | {"uploads": "30/hour"}, *classes) == [
        "~ policy everyone × uploads: rates 20/hour -> 30/hour",
        "0 created, 1 changed, 0 deleted",
    ]


def outcomes(classes: list[type], names: list[Any], scopes: list[Any]) -> list[int]:
    def view(scope: Any) -> Any:
        body = {"throttle_classes": classes, "throttle_scope": scope, "get": lambda self, request: Response()}
        return type("View", (APIView,), body).as_view()

    users = {name: User.objects.get_or_create(username=name)[0] for name in names if name}
    codes = []
    for name, scope in zip(names, scopes, strict=True):
        request = APIRequestFactory().get("/")
        request.user = users.get(name, AnonymousUser())
        codes.append(view(scope)(request).status_code)
    return codes


@pytest.mark.parametrize(
    "rates",
    [
        {"anon": "3/day", "user": "5/day", "uploads": "2/day"},
        {"anon": "5/day", "user": "3/day", "uploads": "9/day"},
        {"anon": "0/day", "user": "4/day", "uploads": "1/hour"},
        {"anon": "3/day", "user": None, "uploads": "1/min"},
    ],
)
def test_callers_are_admitted_as_before(
    settings: Any, monkeypatch: pytest.MonkeyPatch, rates: dict[str, Any]
) -> None:
    """In an order in which it does not matter that DRF charges a request to one throttle that another refuses."""
    names = ["alice", None, "bob"] * 7
    scopes = ["uploads"] * 9 + [None] * 12
    classes = [drf.ScopedRateThrottle, drf.AnonRateThrottle, drf.UserRateThrottle]
    run(settings, rates, ANON, USER, SCOPED)
    monkeypatch.setattr(drf.SimpleRateThrottle, "THROTTLE_RATES", rates, raising=False)
    quota = outcomes([QuotaThrottle], names[9:], scopes[9:])
    own = outcomes(classes[1:], names[9:], scopes[9:])
    assert quota == own
    assert {200, 429} == set(own)
    RatePolicy.objects.filter(endpoint=None).delete()
    assert outcomes([QuotaThrottle], names[:9], scopes[:9]) == outcomes(classes[:1], names[:9], scopes[:9])


def policies() -> dict[tuple[str, str], str]:
    rows = RatePolicy.objects.select_related("plan", "endpoint")
    return {(str(row.plan or ""), str(row.endpoint or "")): row.rates for row in rows}


def test_custom_user_throttles_become_one_policy(settings: Any) -> None:
    rates = {"burst": "60/min", "sustained": "1000/day", "quarter": "200/15m"}
    lines = run(settings, rates, Burst, Sustained, Fixed, Quarter, QuotaThrottle)
    assert policies() == {("", ""): "60/min, 7/day, 200/15min"}
    assert lines[-1] == "1 created, 0 changed, 0 deleted"


def test_anonymous_callers_get_the_rates_of_both_throttles(settings: Any) -> None:
    run(settings, {"anon": "100/day", "burst": "60/min", "user": "90/day"}, ANON, Burst, USER)
    assert policies() == {("", ""): "60/min, 90/day", ("Anonymous", ""): "90/day, 60/min"}


def test_an_existing_plan_for_anonymous_callers_is_used(settings: Any) -> None:
    Plan.objects.create(name="Guests", slug="guests", default_for="anonymous")
    run(settings, {"anon": "100/day"}, ANON)
    assert policies() == {("Guests", ""): "100/day"}
    assert Plan.objects.count() == 1


def test_throttles_that_count_in_their_own_way_are_named_and_left_out(settings: Any) -> None:
    lines = run(settings, {"user": "9/day", "tenant": "5/day", "lenient": "5/day"}, USER, PerTenant, Lenient)
    assert policies() == {("", ""): "9/day"}
    assert lines[-2:] == [
        f"Note: {__name__}.{name} has its own way of counting: write its policy yourself"
        for name in ("PerTenant", "Lenient")
    ]


def test_rates_without_a_default_throttle_are_imported_for_all_endpoints_with_a_note(settings: Any) -> None:
    """For example after QuotaThrottle has replaced the throttles."""
    lines = run(settings, {"anon": "100/day", "user": "9/day"}, QuotaThrottle)
    assert policies() == {("", ""): "9/day", ("Anonymous", ""): "9/day"}
    assert lines[-2:] == [
        f"Note: {scope!r} is for all endpoints now, though DEFAULT_THROTTLE_CLASSES had no throttle of that scope"
        for scope in ("anon", "user")
    ]


def test_existing_policies_are_kept_unless_pruned(settings: Any) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="5/min")
    lines = run(settings, {"user": "9/day"}, USER)
    assert lines[-1] == "Kept although the file does not name them: 1 policy; --prune deletes them"
    assert run(settings, {"user": "9/day"}, USER, options=("--prune",))[-1] == "0 created, 0 changed, 1 deleted"


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({}, r"REST_FRAMEWORK\['DEFAULT_THROTTLE_RATES'\] has no rate to import"),
        ({"anon": None, "user": None}, "has no rate to import"),
        (
            {"x": "many/day"},
            r"DEFAULT_THROTTLE_RATES\['x'\] = 'many/day' cannot be read; DRF needs text such as 100/day",
        ),
        ({"x": "5/fortnight"}, "cannot be read; DRF needs"),
        ({"x": "5"}, "cannot be read; DRF needs"),
        ({"x": 5}, "cannot be read; DRF needs"),
        ({"x": "10000000000000/day"}, "cannot be read: limit must be a whole number from 1 to"),
        ({"user.login": "5/day"}, "1 problem in DEFAULT_THROTTLE_RATES; nothing was changed"),
    ],
)
def test_unreadable_rates_are_an_error_and_change_nothing(settings: Any, rates: Any, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        run(settings, rates)
    assert not PolicyChange.objects.exists()


def test_a_throttle_class_that_cannot_be_imported_is_an_error(settings: Any) -> None:
    with pytest.raises(CommandError, match=r"DEFAULT_THROTTLE_CLASSES'\] cannot be read: .*nowhere"):
        run(settings, {"user": "9/day"}, "nowhere.Throttle")


@pytest.mark.parametrize("arguments", [[], ["some.yaml", "--from-drf-settings"]])
def test_import_needs_either_a_file_or_the_settings(arguments: list[str]) -> None:
    with pytest.raises(CommandError, match=r"one of the arguments|not allowed with"):
        call_command("ratequota", "import", *arguments)
