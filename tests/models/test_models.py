"""The models: help texts, what ``full_clean`` refuses, what the database refuses, and ``str``."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.core.exceptions import NON_FIELD_ERRORS, ValidationError
from django.db import IntegrityError, transaction
from django.utils.functional import Promise

from django_ratequota.changes.validators import canonical_subject
from django_ratequota.engine.rates import MAX_UNITS
from django_ratequota.models import Endpoint, ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.policies.requests.routes import known_routes

pytestmark = pytest.mark.django_db

MEGABYTE = 10**6
JANUARY, FEBRUARY = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC)


def refusals(instance: Any) -> dict[str, list[str]]:
    """Return the messages of ``full_clean`` by field; empty if it accepts the object."""
    try:
        instance.full_clean()
    except ValidationError as error:
        return error.message_dict
    return {}


def refusal(instance: Any, field: str) -> str:
    """Return the only message, which is about this field."""
    found = refusals(instance)
    assert list(found) == [field]
    assert len(found[field]) == 1
    return found[field][0]


def test_every_field_has_a_translatable_name_and_help_text() -> None:
    fields = [
        field
        for model in apps.get_app_config("django_ratequota").get_models()
        for field in model._meta.local_fields
        if not field.auto_created
    ]
    assert len(fields) > 30
    for field in fields:
        assert isinstance(field.verbose_name, Promise), field
        assert isinstance(field.help_text, Promise), field
        assert str(field.verbose_name), field
        assert str(field.help_text).endswith("."), field


def test_a_megabyte_of_text_is_refused_with_a_short_message() -> None:
    for model, field, value in (
        (RatePolicy, "rates", "1" * MEGABYTE),
        (RatePolicy, "subject", "ip:203.0.113.7/" + "9" * MEGABYTE),
        (RatePolicy, "reason", "r" * MEGABYTE),
        (Endpoint, "routes", "/" + "a" * MEGABYTE),
        (Endpoint, "methods", "G" * MEGABYTE),
    ):
        assert 0 < sum(map(len, refusals(model(**{field: value}))[field])) < 1000


def test_routes_are_stored_one_per_line() -> None:
    """``/api/reports/(?P<pk>[^/.]+)/`` of a DRF router, which the admin offers, was refused for its question mark."""
    same = ["", "/straße/日本/", "/" + "a" * 499, *(f"{route}\n{name}".strip() for route, name in known_routes())]
    for text, stored in (
        (" \n\t\n", ""),
        ("  /api/v1/reports/*  \r\n\r\nreports:list\n", "/api/v1/reports/*\nreports:list"),
        *zip(same, same, strict=True),
    ):
        endpoint = Endpoint(name="reports", routes=text)
        endpoint.full_clean()
        assert endpoint.routes == stored


def test_routes_that_can_never_match_are_refused() -> None:
    for text, message in (
        ("/ok/\nreports list", "'reports list' is not a valid pattern. Enter a URL name or a route without spaces."),
        ("/a\tb/", "'/a\\tb/' is not a valid pattern"),
        ("/a\u00a0b/", "is not a valid pattern"),
        ("/a\x00b/", "is not a valid pattern"),
        ("/" + "a" * 500, "is not a valid pattern"),
        ("https://example.com/api/", "has a host or a query. Enter only the route, such as /api/reports/*."),
        ("/search/?q=*", "'/search/?q=*' has a host or a query. Enter only the route"),
        ("api/x", "'api/x' has a / but does not begin with one. Begin routes with /, such as /api/reports/*."),
        ("^/api/$", "'^/api/$' has ^ or $. Enter the route without them, such as /api/reports/*."),
        ("/api/^reports/", "has ^ or $. Enter the route without them"),
    ):
        assert message in refusal(Endpoint(name="reports", routes=text), "routes")


def test_values_that_endpoints_refuse() -> None:
    known = "is not an HTTP method. Choose from GET, POST, PUT, PATCH, DELETE, OPTIONS, TRACE, CONNECT."
    for fields, message in (
        *(
            ({"methods": text}, f"'{wrong}' {known}")
            for text, wrong in (("GET FETCH", "FETCH"), ("GET;POST",) * 2, ("ı", "I"))
        ),
        ({"cost": 0}, "greater than or equal to 1"),
        ({"cost": MAX_UNITS + 1}, "less than or equal"),
        ({"name": "all"}, "Choose another name"),
        *(({"name": name}, "") for name in ("", "with space", "naïve", "a/b", 'a"b')),
    ):
        [field] = fields
        assert message in refusal(Endpoint(**({"name": "reports"} | fields)), field)


@pytest.mark.usefixtures("tenants")
def test_subjects_are_stored_in_canonical_form() -> None:
    for text, stored in (
        (" tenant:acme ", "tenant:acme"),
        ("tenant:Straße 日本", "tenant:Straße 日本"),
        ("ip:203.0.113.0/255.255.255.0", "ip:203.0.113.0/24"),
        ("ip:2001:DB8:0:0::1", "ip:2001:db8::1"),
        ("ip:2001:0db8::/32", "ip:2001:db8::/32"),
        # an address or network alone
        ("203.0.113.0/24", "ip:203.0.113.0/24"),
        (" 203.0.113.7 ", "ip:203.0.113.7"),
        ("::ffff:203.0.113.0/120", "ip:203.0.113.0/24"),
        ("::1", "ip:::1"),
        # Regression: it matched nobody, because the addresses of callers are unmapped.
        ("ip:::ffff:203.0.113.7", "ip:203.0.113.7"),
    ):
        policy = RatePolicy(subject=text, rates="1/s")
        policy.full_clean()
        assert policy.subject == stored
        assert canonical_subject(stored) == stored


@pytest.mark.usefixtures("tenants")
def test_invalid_subjects_are_refused() -> None:
    for text, message in (
        ("203.0.113.7/24", "203.0.113.7/24 has host bits set. Enter an address such as 203.0.113.7 or a network"),
        ("acme", "Enter kind:value, such as ip:203.0.113.7. The kind is one of ip, tenant. RATEQUOTA['IDENTIFIERS']"),
        ("tenant:", "Enter kind:value"),
        (":acme", "Enter kind:value"),
        ("user:42", "Choose the user instead of user:42."),
        ("10.0.0.0/33", "'10.0.0.0/33' does not appear to be an IPv4 or IPv6 network. Enter an address such as"),
        ("999.1.1.1", "'999.1.1.1' does not appear to be an IPv4 or IPv6 address. Enter an address such as"),
        ("2001:db8::/129", "'2001:db8::/129' does not appear to be an IPv4 or IPv6 network"),
        ("tenant: acme", "Enter tenant:acme without a space after the colon."),
        ("tenant:ac\x00me", "A subject cannot contain NUL characters."),
        ("ip:203.0.113", "'203.0.113' does not appear to be an IPv4 or IPv6 address. Enter an address such as"),
        ("ip:203.0.113.7/24", "203.0.113.7/24 has host bits set. Enter an address such as 203.0.113.7"),
        ("ip:203.0.113.7:80", "does not appear to be"),
        ("ip:010.0.0.1", "Enter an address such as"),
    ):
        found = refusals(RatePolicy(subject=text, rates="1/s"))["subject"]
        assert any(message in line for line in found)


AUDIENCES = ["user", "subject", "list", "plan", "everyone"]


@pytest.fixture
def audiences(alice: User, free: Plan) -> dict[str, dict[str, Any]]:
    listed = {"subject_list": SubjectList.objects.create(name="Bad bots")}
    chosen = ({"user": alice}, {"subject": "ip:203.0.113.7"}, listed, {"plan": free}, {})
    return dict(zip(AUDIENCES, chosen, strict=True))


def assert_database_refuses(instance: Any) -> None:
    for write in (instance.save, lambda: type(instance).objects.bulk_create([instance])):
        with pytest.raises(IntegrityError), transaction.atomic():
            write()


def test_a_policy_has_one_audience(audiences: dict[str, dict[str, Any]]) -> None:
    for names in (*combinations(AUDIENCES[:4], 2), tuple(AUDIENCES)):
        fields = {key: value for name in names for key, value in audiences[name].items()}
        policy = RatePolicy(rates="1/s", **fields)
        message = refusal(policy, NON_FIELD_ERRORS)
        assert message == "Choose only one audience (user, subject, list or plan). Leave the others empty."
        assert_database_refuses(policy)


def test_a_second_undated_policy_for_the_same_audience_is_refused(
    audiences: dict[str, dict[str, Any]], search: Endpoint
) -> None:
    """A plain unique constraint allowed these pairs, because NULLs differ from each other."""
    places = [
        {"endpoint": endpoint, "counted_per": counted_per, **audience}
        for endpoint in (None, search)
        for counted_per in ("caller", "everyone")
        for audience in audiences.values()
    ]
    for place in places:
        policy = RatePolicy(rates="1/s", **place)
        policy.save()
        policy.full_clean()  # it does not conflict with itself
    for place in places:
        # Rates and algorithm may differ, and one of the two may be off: the policies still conflict.
        for mode in ("enforce", "off", "log"):
            second = RatePolicy(rates="2/s", mode=mode, algorithm="gcra", **place)
            if mode == "log":  # the first one is allowed
                RatePolicy.objects.create(rates="3/s", mode="log", **place).full_clean()
            message = refusal(second, NON_FIELD_ERRORS)
            assert message.startswith(
                "A policy without dates already has the same audience, endpoint and “counted per”."
            )
            assert_database_refuses(second)
        for dates in ({"starts_at": JANUARY}, {"ends_at": FEBRUARY}, {"starts_at": JANUARY, "ends_at": FEBRUARY}):
            dated = RatePolicy(rates="3/s", **place, **dates)
            dated.full_clean()
            dated.save()
        with pytest.raises(IntegrityError), transaction.atomic():
            RatePolicy.objects.filter(pk=dated.pk).update(starts_at=None, ends_at=None)


def test_a_second_default_plan_for_the_same_callers_is_refused(free: Plan) -> None:
    for default_for in ("authenticated", "anonymous"):
        second = Plan(name="Other", slug="other", default_for=default_for)
        second.full_clean()
        Plan.objects.create(name=default_for, slug=default_for, default_for=default_for)
        message = refusal(second, NON_FIELD_ERRORS)
        assert message == "Another plan is the default for these customers. Change that plan first."
        assert_database_refuses(second)
        with pytest.raises(IntegrityError), transaction.atomic():
            Plan.objects.filter(pk=free.pk).update(default_for=default_for)


def test_dates_that_are_refused(alice: User, free: Plan) -> None:
    last_moment = (9999, 12, 31, 23, 59, 59)
    for row in (
        PlanAssignment(user=alice, plan=free, starts_at=None),
        RatePolicy(user=alice, rates="1/s"),
        ListMember(user=alice, subject_list=SubjectList.objects.create(name="Bots")),
    ):
        for name, time in (
            ("ends_at", datetime(*last_moment, tzinfo=ZoneInfo("America/New_York"))),
            ("ends_at", datetime(*last_moment, tzinfo=UTC)),
            ("starts_at", datetime(1, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))),
        ):
            row.starts_at, row.ends_at = JANUARY, None
            setattr(row, name, time)
            text = "The year must be between 2 and 9998. Leave the field empty for a time that never comes."
            assert refusal(row, name) == text
        row.starts_at = JANUARY
        for length in (timedelta(0), timedelta(microseconds=-1), timedelta(days=-1)):
            row.ends_at = JANUARY + length
            assert refusal(row, "ends_at") == "The end must be after the start."
        row.ends_at = JANUARY + timedelta(microseconds=1)
        row.full_clean()
