"""Endpoints with limits of their own, and exempt ones: which policies apply there, and what operators see."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from django.test import Client
from django.urls import resolve

from django_ratequota import check_request
from django_ratequota.checks.database import check_outcome
from django_ratequota.checks.views import check_unlimited
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.operations.advice import about_saved
from django_ratequota.operations.caller_limits import caller_limits, tightest
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.policies.matching import Where, match_endpoints
from django_ratequota.policies.requests.caller import DescribedCaller
from tests.conftest import Check, Get
from tests.enforcement.test_check import room
from tests.policies.test_resolver import picture
from tests.policies.test_unreadable import write
from tests.project.views import request_from
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

ADDRESS = "203.0.113.7"


@pytest.fixture
def health() -> Endpoint:
    return Endpoint.objects.create(name="health", routes="/plain/\n/aplain/", limits="none")


@pytest.fixture
def blocked() -> None:
    """Every kind of policy refuses everybody."""
    everything = Endpoint.objects.create(name="everything", routes="/*")
    for endpoint in (None, everything, *Endpoint.objects.filter(limits="none")):
        RatePolicy.objects.create(endpoint=endpoint, counted_per="ip", rates="blocked")
        RatePolicy.objects.create(endpoint=endpoint, subject="ip:127.0.0.1", rates="blocked")
        RatePolicy.objects.create(endpoint=endpoint, counted_per="everyone", rates="1/day", on_error="deny")


def matrix_row(name: str) -> str:
    """Return the words of an endpoint's row."""
    page = client_of(superuser=True).get("/admin/django_ratequota/plan/matrix/").content.decode()
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.S)
    row = next(row for row in rows if name in row)
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", row)).split())


@pytest.fixture
def burst() -> Endpoint:
    """5 a minute for all endpoints together, and an endpoint with 20 of its own."""
    RatePolicy.objects.create(rates="5/min")
    endpoint = Endpoint.objects.create(name="burst", routes="/plain/", limits="own")
    RatePolicy.objects.create(endpoint=endpoint, rates="20/min")
    return endpoint


class TestOwnLimits:
    """As a view whose ``throttle_classes`` replace the default ones."""

    def test_its_own_limits_replace_those_for_all_endpoints(self, check: Check, burst: Endpoint) -> None:
        def admitted(*scopes: str | None, address: str = ADDRESS) -> list[int]:
            return [sum(check(request_from(address=address), scope).allowed for _ in range(21)) for scope in scopes]

        assert admitted("burst", None, "other") == [20, 5, 0]
        RatePolicy.objects.create(subject="ip:198.51.100.7", rates="blocked")
        assert admitted("burst", None, address="198.51.100.7") == [0, 0]

    @pytest.mark.parametrize(
        ("policies", "blocked_by"),
        [
            ([{"rates": "blocked"}], ("all/blocked",)),
            ([{"rates": "blocked"}, {"subject": f"ip:{ADDRESS}", "rates": "9/min"}], ()),
            ([{"rates": "9/min"}, {"subject": f"ip:{ADDRESS}", "rates": "blocked"}], ("all/blocked",)),
            ([{"rates": "9/min"}, {"rates": "blocked", "counted_per": "everyone"}], ("all/blocked",)),
        ],
    )
    def test_a_block_for_all_endpoints_binds_where_it_wins(
        self, check: Check, policies: list[dict[str, Any]], blocked_by: tuple[str, ...]
    ) -> None:
        Endpoint.objects.create(name="burst", limits="own")
        for fields in policies:
            RatePolicy.objects.create(**fields)
        assert check(request_from(address=ADDRESS), "burst").blocked_by == blocked_by

    def test_every_kind_of_policy_for_all_endpoints_stands_back(self, check: Check, burst: Endpoint) -> None:
        RatePolicy.objects.filter(endpoint=None).update(mode="log")
        RatePolicy.objects.create(counted_per="everyone", rates="1 concurrent")
        write(RatePolicy.objects.create(counted_per="ip", rates="1/s", on_error="deny"), "unreadable")
        decision = check(request_from(), "burst", cost=3)
        assert (decision.allowed, room(decision)) == (True, ["17/20"])

    def test_policies_of_other_endpoints_apply(self, check: Check, burst: Endpoint) -> None:
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="plain", routes="/plain/"), rates="30/min")
        assert room(check(request_from(resolver_match=resolve("/plain/")))) == ["19/20", "29/30"]

    def test_an_exempt_endpoint_takes_precedence(self, check: Check, burst: Endpoint, health: Endpoint) -> None:
        assert room(check(request_from(resolver_match=resolve("/plain/")))) == []

    def test_explain_says_why_others_stand_back(self, burst: Endpoint) -> None:
        override = RatePolicy.objects.create(subject=f"ip:{ADDRESS}", rates="9/min")
        explanation = ExplainQuery(ip=ADDRESS, endpoint="burst").explain()
        assert [candidate.reason for candidate in explanation.candidates] == [
            "lost: it stands back, because the endpoint burst has limits of its own",
            f"lost: policy {override.pk} for ip:203.0.113.7 is more specific",
            "wins: everyone is the most specific audience here",
        ]

    def test_limits_at_every_endpoint_include_those_for_all(self, burst: Endpoint) -> None:
        caller = DescribedCaller(user_id=None, address=ADDRESS)

        def shown(scope: str | None = None) -> list[str]:
            return [bucket.title for bucket, _status in caller_limits(caller, scope).limits]

        assert shown() == ["all/min", "burst/min"]
        assert shown("burst") == ["burst/min"]
        assert tightest([f"ip:{ADDRESS}"], "burst")[f"ip:{ADDRESS}"].limit == 20
        assert tightest([f"ip:{ADDRESS}"])[f"ip:{ADDRESS}"].limit in (5, 20)
        assert len(ExplainQuery(ip=ADDRESS).explain().candidates) == 2

    def test_the_matrix_marks_it(self, burst: Endpoint) -> None:
        assert matrix_row("burst") == "burst only its own policies 20/min , everyone for burst"


class TestRequests:
    @pytest.mark.usefixtures("health", "everything_checks", "blocked")
    def test_a_matching_route_is_limited_by_nothing(self, get: Get) -> None:
        assert get("/decorated/").status_code == 429
        collector.clear()
        for _ in range(3):
            response = get("/plain/")
            assert response.status_code == 200
            assert [name for name in response.headers if "ratelimit" in name.lower()] == []
        assert len(collector.pending) == 0, "nothing is counted"

    def test_the_next_request_sees_an_edit(self, check: Check, health: Endpoint) -> None:
        RatePolicy.objects.create(rates="5/hour")
        assert room(check(request_from(), "health")) == []
        health.limits = "besides"
        health.save()
        assert room(check(request_from(), "health")) == ["4/5"]
        Endpoint.objects.update(limits="none")
        assert room(check(request_from(), "health")) == []
        assert room(check(request_from())) == ["3/5"]

    def test_no_user_is_read_for_it(self, settings: Any, health: Endpoint, blocked: None) -> None:
        """That may take queries, and adds ``Vary: Cookie``."""
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["ip"]}
        plan = Plan.objects.create(name="Pro", slug="pro")
        RatePolicy.objects.create(plan=plan, rates="5/hour")

        class Unread:
            @property
            def is_authenticated(self) -> bool:
                raise AssertionError("the user was read")

        assert check_request(request_from(Unread()), "health").allowed


class TestMethods:
    """Clients choose the method, so an exemption is never wider than what the operator wrote."""

    @pytest.mark.parametrize(
        ("methods", "exempted"),
        [
            ("", {"GET", "HEAD", "POST", "PUT", "BREW", "OPTIONS"}),
            ("GET", {"GET", "HEAD"}),
            ("POST", {"POST"}),
            ("GET OPTIONS", {"GET", "HEAD", "OPTIONS"}),
        ],
    )
    def test_only_the_methods_it_names_are_exempt(self, client: Client, methods: str, exempted: set[str]) -> None:
        Endpoint.objects.create(name="reads", routes="/bare/", methods=methods, limits="none")
        RatePolicy.objects.create(rates="blocked")
        names = ("GET", "HEAD", "POST", "PUT", "BREW", "OPTIONS")
        assert {name for name in names if client.generic(name, "/bare/").status_code == 200} == exempted

    def test_other_endpoints_still_match(self) -> None:
        """Traffic and Explain name them."""
        health = Endpoint(pk=1, name="health", routes="/x/", limits="none")
        other = Endpoint(pk=2, name="other", routes="/x/")
        from django_ratequota.policies.facts import endpoint_facts

        snapshot = picture([endpoint_facts(health), endpoint_facts(other)])
        found = match_endpoints(snapshot, Where(scope=None, route="/x/", name=None, method="GET"))
        assert [endpoint.name for endpoint in found] == ["health", "other"]


class TestWhatIsShown:
    def test_explain_says_so(self, health: Endpoint, blocked: None) -> None:
        explanation = ExplainQuery(ip="127.0.0.1", path="/plain/").explain()
        assert explanation.decision.allowed
        assert explanation.exempt == "the endpoint health is exempt"
        assert {candidate.reason for candidate in explanation.candidates} == {"lost: the endpoint health is exempt"}
        assert len(explanation.candidates) == 9

    def test_the_matrix_shows_no_rates_in_force(self, health: Endpoint) -> None:
        RatePolicy.objects.create(endpoint=health, rates="5/hour")
        assert matrix_row("health") == "health exempt (never limited) –"

    def test_a_policy_saved_there_is_warned_about(self, health: Endpoint) -> None:
        policy = RatePolicy.objects.create(endpoint=health, rates="5/hour")
        assert about_saved([policy]) == [
            [
                "This policy never applies, because the endpoint “health” is exempt. "
                "To use the policy, change “limits” of the endpoint."
            ]
        ]

    def test_checks_leave_it_alone(self, settings: Any) -> None:
        """Nothing is charged there, and nothing should be."""
        settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}
        settings.MIDDLEWARE = []
        counted = Endpoint.objects.create(name="counted", routes="/*", methods="POST", charged_statuses="418")
        RatePolicy.objects.create(endpoint=counted, counted_per="ip", subject="ip:192.0.2.1", rates="5/hour")
        checks = (check_outcome, check_unlimited)
        found = [message.id for check in checks for message in check()]
        assert found == ["django_ratequota.W006", "django_ratequota.W017"]
        Endpoint.objects.update(limits="none")
        assert [message for check in checks for message in check()] == []
