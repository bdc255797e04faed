"""What operators may write, what the database refuses, and what is told to whoever is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.utils import timezone

from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy, canonical_subject

pytestmark = pytest.mark.django_db

FIELDS = [
    (model.__name__, field)
    for model in apps.get_app_config("django_ratequota").get_models()
    for field in model._meta.get_fields()
    if field.concrete and not field.auto_created
]


@pytest.mark.parametrize(("model", "field"), FIELDS, ids=lambda value: getattr(value, "name", value))
def test_every_field_explains_itself(model: str, field: Any) -> None:
    assert str(field.help_text).endswith("."), f"{model}.{field.name}"
    assert "<" not in str(field.help_text), "the admin shows help_text as markup"


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("100/60sec", "100/min"),
        (" 10 / s ,1_000/hours  BURST 50 ", "10/s, 1000/hour burst 50"),
        ("5/15min gcra", "5/15min gcra"),
        ("Unlimited", "unlimited"),
        ("7/24h", "7/day"),
    ],
)
def test_rates_are_stored_in_canonical_form_by_every_way(written: str, stored: str) -> None:
    policy = RatePolicy.objects.create(rates=written)
    assert policy.rates == stored
    policy.refresh_from_db()
    assert policy.rates == stored
    RatePolicy.objects.update(rates="1/s")
    RatePolicy.objects.update(rates=written)
    assert RatePolicy.objects.get().rates == stored
    RatePolicy.objects.bulk_create([RatePolicy(rates=written, counted_per="ip")])
    assert RatePolicy.objects.get(counted_per="ip").rates == stored


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"rates": "ten/min"}, "rates", "expected a limit (a number) at character 1"),
        ({"rates": "10/fortnight"}, "rates", "expected a unit (s, min, hour, day, week or month) at character 4"),
        ({"rates": ""}, "rates", "cannot be blank"),
        ({"rates": "9" * 10**6 + "/s"}, "rates", "rate text may have 255 characters, this has 1000002"),
        ({"rates": "5/min, 9/60s"}, "rates", "have the same algorithm and period; keep the stricter one"),
        ({"rates": "5/min burst 9", "algorithm": "fixed_window"}, "rates", "drop 'burst 9'"),
        ({"rates": "5/month gcra"}, "rates", "write 5/30day gcra"),
        ({"counted_per": "tenant"}, "counted_per", "Nothing is counted per 'tenant'; choose caller, ip"),
        ({"subject": "acme"}, "subject", "Write kind:value"),
        ({"subject": "ip:203.0.113.0/33"}, "subject", "write an address such as 203.0.113.7 or a network"),
        ({"subject": "ip:203.0.113.7/24"}, "subject", "has host bits set"),
        ({"starts_at": timezone.now(), "ends_at": timezone.now() - timedelta(1)}, "ends_at", "after the start"),
        ({"mode": "shadow"}, "mode", "not a valid choice"),
    ],
)
def test_a_bad_policy_is_told_what_to_write_instead(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RatePolicy(**{"rates": "5/min", **fields}).full_clean()
    assert any(message in text for text in caught.value.message_dict[field]), caught.value.message_dict


def test_several_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValidationError) as caught:
        RatePolicy(rates="5/min burst 9", algorithm="fixed_window", counted_per="x", subject="y").full_clean()
    assert set(caught.value.message_dict) == {"rates", "counted_per", "subject"}


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("ip:203.0.113.7", "ip:203.0.113.7"),
        (" ip:2001:DB8::0:1 ", "ip:2001:db8::1"),
        ("ip:203.0.113.0/24", "ip:203.0.113.0/24"),
        ("ip:2001:db8::/32", "ip:2001:db8::/32"),
    ],
)
def test_subjects_have_one_spelling(written: str, canonical: str) -> None:
    assert canonical_subject(written) == canonical


def test_a_configured_identifier_is_a_kind_of_subject(settings: Any) -> None:
    settings.RATEQUOTA = {"IDENTIFIERS": {"tenant": "builtins.repr"}}
    assert canonical_subject("tenant:{acme}") == "tenant:{acme}"
    RatePolicy(rates="1/s", subject="tenant:acme", counted_per="tenant").full_clean()


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"routes": " reports:* \r\n\r\n/api/*\n"}, {"routes": "reports:*\n/api/*"}),
        ({"methods": "get, post  head"}, {"methods": "GET POST"}),
        ({"methods": "options"}, {"methods": "OPTIONS"}),
    ],
)
def test_endpoints_are_brought_into_canonical_form(fields: dict[str, Any], stored: dict[str, Any]) -> None:
    endpoint = Endpoint(name="reports", **fields)
    endpoint.full_clean()
    assert {name: getattr(endpoint, name) for name in stored} == stored


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"routes": "two words"}, "routes", "'two words' is no pattern"),
        ({"routes": "ok\n/" + "x" * 10**6}, "routes", "is no pattern"),
        ({"routes": "https://example.com/api/"}, "routes", "write the route only"),
        ({"routes": "/api/?page=*"}, "routes", "no host or query"),
        ({"methods": "GET FETCH"}, "methods", "'FETCH' is no HTTP method; write some of GET, POST"),
        ({"cost": 0}, "cost", "greater than or equal to 1"),
        ({"name": "a b"}, "name", "valid “slug”"),
        ({"name": "ä"}, "name", "valid “slug”"),
        ({"name": "all"}, "name", "choose another name"),
    ],
)
def test_a_bad_endpoint_is_told_what_to_write_instead(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Endpoint(**{"name": "reports", **fields}).full_clean()
    assert any(message in text for text in caught.value.message_dict[field]), caught.value.message_dict


AUDIENCES = ["everyone", "user", "subject", "plan"]


def policy(audience: str, everywhere: bool, **fields: Any) -> RatePolicy:
    chosen: dict[str, Any] = {"everyone": {}, "subject": {"subject": "ip:203.0.113.7"}}.get(audience, {})
    if audience == "user":
        chosen = {"user": User.objects.get_or_create(username="alice")[0]}
    if audience == "plan":
        chosen = {"plan": Plan.objects.get_or_create(name="Free", slug="free")[0]}
    endpoint = None if everywhere else Endpoint.objects.get_or_create(name="search")[0]
    return RatePolicy(**{"rates": "5/min", "endpoint": endpoint, **chosen, **fields})


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("audience", AUDIENCES)
def test_an_undated_policy_has_no_twin(audience: str, everywhere: bool) -> None:
    policy(audience, everywhere).save()
    twin = policy(audience, everywhere, rates="9/min")
    with pytest.raises(ValidationError, match="There is such a policy without dates already"):
        twin.full_clean()
    with pytest.raises(IntegrityError), transaction.atomic():
        twin.save()
    policy(audience, everywhere, rates="9/min", starts_at=timezone.now()).save()
    policy(audience, everywhere, rates="9/min", ends_at=timezone.now()).save()
    policy(audience, everywhere, counted_per="ip").save()
    for other in set(AUDIENCES) - {audience}:
        policy(other, everywhere).save()
    policy(audience, not everywhere).save()


@pytest.mark.parametrize("pair", [("user", "plan"), ("user", "subject"), ("subject", "plan")])
def test_a_policy_has_one_audience(pair: tuple[str, str]) -> None:
    both = policy(pair[0], True)
    other = policy(pair[1], True)
    setattr(both, pair[1], getattr(other, pair[1]))
    with pytest.raises(ValidationError, match="Choose one audience"):
        both.full_clean()
    with pytest.raises(IntegrityError), transaction.atomic():
        both.save()


def test_one_plan_is_the_default_of_each_kind() -> None:
    Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    Plan.objects.create(name="Visitors", slug="visitors", default_for="anonymous")
    Plan.objects.create(name="Pro", slug="pro")
    Plan.objects.create(name="Enterprise", slug="enterprise")
    second = Plan(name="Basic", slug="basic", default_for="authenticated")
    with pytest.raises(ValidationError, match="Another plan is the default for these callers"):
        second.full_clean()
    with pytest.raises(IntegrityError), transaction.atomic():
        second.save()


def test_an_assignment_ends_after_it_starts() -> None:
    user = User.objects.create(username="alice")
    plan = Plan.objects.create(name="Pro", slug="pro")
    start = timezone.now()
    with pytest.raises(ValidationError, match="The end must lie after the start"):
        PlanAssignment(user=user, plan=plan, starts_at=start, ends_at=start).full_clean()


def test_everything_has_a_name() -> None:
    user = User.objects.create(username="alice")
    plan = Plan.objects.create(name="Pro", slug="pro")
    search = Endpoint.objects.create(name="search")
    assert str(PlanAssignment.objects.create(user=user, plan=plan)) == "alice: Pro"
    assert str(RatePolicy(rates="5/min", user=user, endpoint=search)) == "user alice × search: 5/min"
    assert str(RatePolicy(rates="5/min", plan=plan)) == "plan Pro × all endpoints: 5/min"
    assert str(RatePolicy(rates="5/min", subject="ip:::1")) == "ip:::1 × all endpoints: 5/min"
    assert str(RatePolicy(rates="5/min")) == "everyone × all endpoints: 5/min"
    assert str(PolicyChange.objects.first()) == "created: alice: Pro"
