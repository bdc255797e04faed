"""Boosts, units given back and resets of one caller: each is confirmed first, and recorded."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib import admin
from django.contrib.admin import AdminSite
from django.contrib.admin.models import LogEntry
from django.contrib.admin.templatetags.admin_urls import admin_urlname
from django.contrib.auth import get_permission_codename
from django.contrib.auth.admin import UserAdmin
from django.contrib.auth.models import Permission, User
from django.test import Client, RequestFactory
from django.urls import reverse
from django.utils import timezone

import django_ratequota
from django_ratequota.admin import QuotaLinkMixin
from django_ratequota.engine.rates import ALGORITHMS, MAX_UNITS, Rate, parse_rates
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.monitoring import refusals
from django_ratequota.monitoring.refusals import CallerRefusals
from django_ratequota.operations.explain import ExplainQuery
from django_ratequota.operations.overrides import doubled, propose_boost, propose_boosts
from django_ratequota.policies.change_feed import ChangeCursor
from django_ratequota.policies.facts import to_us
from django_ratequota.runtime import default_limiter
from tests.admin.test_explain import DOWN, IDENTIFIERS, LIST, PAGE, explain, staff
from tests.support.operators import client_of, words_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BOOST, COUNTERS = f"{LIST}boost/", f"{LIST}counters/"


@pytest.fixture(autouse=True)
def no_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "find_refusal", lambda refusal_id: None)
    monkeypatch.setattr(refusals, "caller_refusals", lambda caller: CallerRefusals())


@pytest.fixture
def alice() -> User:
    """A user on Free: 10/hour and 100/day for search, and 1000/month for it that all callers share."""
    user = User.objects.create(username="alice")
    free = Plan.objects.create(name="Free", slug="free")
    PlanAssignment.objects.create(user=user, plan=free)
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(
        plan=free, endpoint=search, rates="10/hour, 100/day", reason="as sold", on_error="local", leads_headers=True
    )
    RatePolicy.objects.create(endpoint=search, counted_per="everyone", rates="1000/month")
    return user


def plan_policy() -> RatePolicy:
    return RatePolicy.objects.get(plan__isnull=False)


def query(user: User, **more: Any) -> str:
    return urlencode({"user": user.pk, "endpoint": "search", **more}, doseq=True)


def boost_url(user: User, policy: RatePolicy | None = None, **more: Any) -> str:
    return f"{BOOST}?{query(user, policy=(policy or plan_policy()).pk, **more)}"


def boosted(client: Client, url: str, rates: str, **sent: str) -> Any:
    """Return the answer to the form that asks, whose only row gets these rates."""
    [name] = re.findall(r'name="(\w+-rates)"', client.get(url).content.decode())
    form = {name: rates, "until": "hour", "reason": "Ticket 4711", **sent}
    return client.post(url, {key: text for key, text in form.items() if text})


def remaining_units(user: User) -> dict[str, int]:
    explanation = ExplainQuery(user_id=str(user.pk), endpoint="search").explain()
    return {status.bucket.title: status.remaining for status in explanation.decision.statuses}


# --- Boosts. ---


def test_a_boost_is_confirmed_and_applies_to_the_next_request(operator: Client, alice: User) -> None:
    for _ in range(10):
        assert check_from(alice, scope="search").allowed
    assert not check_from(alice, scope="search").allowed
    now = f"policy {plan_policy().pk}"
    page = words_of(operator.get(boost_url(alice)))
    assert re.search(rf'<bdi>10/hour, 100/day</bdi> \({now}\) →.*-rates" value="20/hour, 200/day"', page)
    assert RatePolicy.objects.count() == 2, "looking grants nothing"
    done = boosted(operator, boost_url(alice), "30 / 60min, 300/day")
    assert (done.status_code, done["Location"]) == (302, f"{PAGE}?{query(alice)}")
    boost = RatePolicy.objects.get(user=alice)
    assert (boost.rates, boost.reason, boost.endpoint, boost.counted_per) == (
        "30/hour, 300/day",
        "Ticket 4711",
        plan_policy().endpoint,
        "caller",
    )
    assert (boost.algorithm, boost.mode, boost.on_error) == (plan_policy().algorithm, "enforce", "local")
    assert boost.leads_headers
    assert boost.ends_at is not None
    assert boost.starts_at is not None
    assert abs((boost.ends_at - timezone.now()) - timedelta(hours=1)) < timedelta(seconds=30)
    decision = check_from(alice, scope="search")
    assert decision.allowed
    assert [s.remaining for s in decision.statuses if s.bucket.policy_id == boost.pk] == [19, 289]
    entry = PolicyChange.objects.get(model="ratepolicy", object_id=str(boost.pk))
    assert (entry.action, entry.actor, entry.reason) == (
        "create",
        User.objects.get(username="operator"),
        "Ticket 4711",
    )
    logged = LogEntry.objects.get(object_id=str(boost.pk))
    assert "Boost granted for search: 30/hour, 300/day until" in logged.get_change_message()
    text = explain(operator, user=alice.pk, endpoint="search")
    assert f'<a href="{LIST}{boost.pk}/change/">See the override.</a>' in text


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        ({"rates": "20/fortnight"}, "expected a unit"),
        ({"rates": ""}, "Enter rates for at least one policy."),
        ({"reason": ""}, "This field is required."),
        ({"reason": "x" * 201}, "at most 200 characters"),
        ({"until": "never"}, "never is not one of the available choices."),
        ({"until": ""}, "Choose a duration or enter a date."),
        ({"ends_at_0": "2020-01-01", "ends_at_1": "00:00"}, "The end must be after the start."),
        ({"ends_at_0": "soon", "ends_at_1": "00:00"}, "Enter a valid date."),
        ({"ends_at_1": "00:00"}, "Enter a valid date."),
        ({"rates": "9/hour, 200/day"}, "A boost cannot admit less than 10/hour, 100/day."),
        ({"rates": "10/hour burst 9, 100/day"}, "A boost cannot admit less than 10/hour, 100/day."),
        ({"rates": "1/day"}, "A boost cannot admit less than 10/hour, 100/day."),
        ({"rates": "1/week"}, "A boost cannot admit less than 10/hour, 100/day."),
        ({"rates": "blocked"}, "A boost cannot admit less than 10/hour, 100/day."),
    ],
)
def test_an_invalid_boost_is_reported_and_not_granted(
    operator: Client, alice: User, sent: dict[str, str], error: str
) -> None:
    page = words_of(boosted(operator, boost_url(alice), **{"rates": "20/hour", **sent}))
    assert error in page
    assert "Your changes were not saved." in page
    assert not RatePolicy.objects.filter(user=alice).exists()


def test_rates_that_the_algorithm_lacks_are_reported_at_their_field(operator: Client, alice: User) -> None:
    RatePolicy.objects.filter(plan__isnull=False).update(algorithm="fixed_window")
    page = boosted(operator, boost_url(alice), "20/hour burst 30")
    assert [*page.context["form"].errors] == [f"{plan_policy().pk}-rates"]


@pytest.mark.parametrize(("time", "end"), [("04:05:06", (4, 5, 6)), ("", (23, 59, 59))])
def test_a_typed_date_replaces_the_choice(operator: Client, alice: User, time: str, end: tuple[int, ...]) -> None:
    """Regression: a date was refused without a time, and while “for 1 hour” stayed chosen."""
    sent = {"until": "hour", "ends_at_0": "2100-02-03", "ends_at_1": time}
    assert boosted(operator, boost_url(alice), "20/hour", **sent).status_code == 302
    assert RatePolicy.objects.get(user=alice).ends_at == datetime(2100, 2, 3, *end, tzinfo=UTC)


def test_a_boost_starts_no_earlier_than_the_override_it_replaces(alice: User) -> None:
    """Boosts start on a whole second, and of two dated policies the one that started last wins."""
    half = timezone.now().replace(microsecond=500_000) - timedelta(days=1)
    usual = RatePolicy.objects.create(user=alice, endpoint=Endpoint.objects.get(), rates="15/hour", starts_at=half)
    explanation = ExplainQuery(user_id=str(alice.pk), endpoint="search").explain()
    explanation.context.now_us = to_us(half) + 1
    boost = propose_boost(explanation, usual)
    assert boost.starts_at == half


@pytest.mark.parametrize(
    ("policy", "caller", "audience"),
    [
        ({}, {"ip": "203.0.113.7"}, "ip:203.0.113.7"),
        ({"counted_per": "ip"}, {"ip": "203.0.113.7"}, "ip:203.0.113.7"),
        ({"subject": "ip:203.0.113.0/24"}, {"ip": "203.0.113.7"}, "ip:203.0.113.7"),
        ({}, {"ip": "2001:db8::7"}, "ip:2001:db8::/64"),
        # The policy names less than one client: a boost for the client would lose to it.
        ({"subject": "ip:2001:db8::7"}, {"ip": "2001:db8::7"}, "ip:2001:db8::7"),
        ({"subject": "tenant:acme"}, {"ip": "203.0.113.7", "identifiers": {"tenant": "acme"}}, "tenant:acme"),
        ({"counted_per": "tenant"}, {"identifiers": {"tenant": "acme"}}, "tenant:acme"),
        ({"counted_per": "tenant"}, {"ip": "::1", "identifiers": {"tenant": "a:b=c&d"}}, "tenant:a:b=c&d"),
        # Identifiers come before addresses.
        ({"subject": "ip:::1", "counted_per": "tenant"}, {"ip": "::1", "identifiers": {"tenant": "x"}}, "tenant:x"),
        ({"user_id": 7, "counted_per": "ip"}, {"user_id": "7", "ip": "::1"}, "user:7"),
        # No policy can have this subject, but the user's can count it.
        ({"user_id": 7, "counted_per": "tenant"}, {"user_id": "7", "identifiers": {"tenant": "acme "}}, "user:7"),
        ({"algorithm": "fixed_window", "durable": True, "on_error": "deny"}, {"ip": "203.0.113.7"}, "ip:203.0.113.7"),
    ],
)
def test_a_boost_is_for_the_subject_that_is_counted(
    settings: Any, policy: dict[str, Any], caller: dict[str, Any], audience: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    User.objects.create(pk=7, username="bob")
    winner = RatePolicy.objects.create(rates="5/hour", **policy)
    query = ExplainQuery(**caller)
    [(_winner, boost)] = propose_boosts(query.explain(), [str(winner.pk)])
    assert (boost.subject or f"user:{boost.user_id}") == audience
    for name in ("counted_per", "algorithm", "durable", "on_error"):
        assert getattr(boost, name) == getattr(winner, name)
    boost.ends_at = timezone.now() + timedelta(hours=1)
    boost.save()
    assert query.explain().resolution.policy_ids == (boost.pk,)


@pytest.mark.parametrize(
    ("policy", "caller", "reason"),
    [
        ({"counted_per": "everyone"}, {"ip": "::1"}, "Several customers share this counter."),
        ({"counted_per": "plan"}, {"ip": "::1"}, "Several customers share this counter."),
        ({}, {"ip": "unknown"}, "Several customers share this counter."),
        ({"rates": "unlimited"}, {"ip": "::1"}, "It is unlimited already."),
        ({"mode": "log"}, {"ip": "::1"}, "The policy never refuses requests, because its mode is “log only”."),
        ({"rates": "blocked", "subject": "ip:::/16"}, {"ip": "::1"}, "The customer is blocked here."),
        ({"counted_per": "tenant"}, {"identifier_tenant": "x" * 198}, "A policy cannot have this subject"),
        ({"counted_per": "tenant"}, {"identifier_tenant": "acme "}, "A policy cannot have this subject"),
    ],
)
def test_the_reason_why_no_boost_is_offered_is_shown(
    operator: Client, settings: Any, policy: dict[str, str], caller: dict[str, str], reason: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    Plan.objects.create(name="Free", slug="free", default_for="anonymous")
    winner = RatePolicy.objects.create(**{"rates": "5/hour", **policy})
    text = explain(operator, **caller)
    assert f"No boost: {reason}" in text or f"{reason[:-1]}, so it cannot be boosted or reset" in text
    assert f'href="{BOOST}' not in text
    page = operator.get(f"{BOOST}?{urlencode({**caller, 'policy': winner.pk})}", follow=True)
    assert reason in unescape(page.content.decode())
    assert RatePolicy.objects.count() == 1


@pytest.mark.parametrize("rates", ["10/hour, 100/day", "5/s, 101/day", "unlimited", "100/min"])
def test_a_boost_may_have_any_rates_that_admit_no_less(operator: Client, alice: User, rates: str) -> None:
    assert boosted(operator, boost_url(alice), rates).status_code == 302
    assert RatePolicy.objects.get(user=alice).rates == rates


@pytest.mark.parametrize("rates", ["20/hour", "unlimited"])
def test_a_boost_is_ended_where_explain_shows_it(operator: Client, alice: User, rates: str) -> None:
    boosted(operator, boost_url(alice), rates)
    text = explain(operator, user=alice.pk, endpoint="search")
    boost = RatePolicy.objects.get(user=alice)
    assert re.search(
        rf'<a href="{re.escape(boost_url(alice, boost)).replace("&", "&(?:amp;)?")}">In force until .* UTC: End it…',
        text,
    )
    page = words_of(operator.get(boost_url(alice, boost)))
    assert "search: user alice: Ticket 4711" in page
    assert ("Yes, boost" in page) is (rates != "unlimited")
    done = words_of(operator.post(boost_url(alice, boost), {"end": boost.pk, "change_reason": "Solved"}, follow=True))
    assert "The override has ended: user alice." in done
    change = PolicyChange.objects.latest("pk")
    assert (change.object_id, change.action, change.reason) == (str(boost.pk), "update", "Solved")
    assert not ExplainQuery(user_id=str(alice.pk), endpoint="search").explain().resolution.winners[0].user
    again = operator.post(boost_url(alice, boost), {"end": boost.pk}, follow=True)
    assert "That override has already ended." in words_of(again)


@pytest.mark.parametrize("dated", ["", "from no date on", "log only"])
def test_a_limit_of_the_customers_own_is_not_ended_as_a_boost(operator: Client, alice: User, dated: str) -> None:
    """Boosts are enforced, and begin and end at a time."""
    own = RatePolicy.objects.create(
        user=alice,
        endpoint=plan_policy().endpoint,
        rates="50/hour, 500/day",
        mode="log" if dated == "log only" else "enforce",
        starts_at=timezone.now() - timedelta(days=1) if dated == "log only" else None,
        ends_at=(end := timezone.now() + timedelta(days=90) if dated else None),
    )
    assert "End it…" not in explain(operator, user=alice.pk, endpoint="search")
    page = words_of(operator.post(boost_url(alice, own), {"end": own.pk}, follow=True))
    assert "That override has already ended." in page
    own.refresh_from_db()
    assert own.ends_at == end


def test_a_colleagues_boost_is_named_where_the_page_was_open(operator: Client, alice: User) -> None:
    """Regression: it said that the policy did not apply, and not why."""
    colleague = client_of(superuser=True, name="colleague")
    assert boosted(colleague, boost_url(alice), "40/hour, 400/day").status_code == 302
    page = words_of(operator.get(boost_url(alice), follow=True))
    assert "A boost was granted here by colleague at " in page
    assert ": 40/hour, 400/day until " in page


@pytest.mark.parametrize("policy", ["", "4711", "x", []])
def test_a_policy_that_is_not_in_force_is_not_boosted(operator: Client, alice: User, policy: Any) -> None:
    page = operator.get(f"{BOOST}?{query(alice, policy=policy)}", follow=True)
    assert page.redirect_chain[0][0] == f"{PAGE}?{query(alice)}"
    assert "That policy does not apply to this request. Choose again." in unescape(page.content.decode())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("text", ["10/hour", "10/hour burst 3 gcra, 7/s token_bucket", "5/month, 7/day fixed_window"])
def test_doubled_rates_use_the_same_counters(algorithm: str, text: str) -> None:
    rates = parse_rates(text, algorithm)
    assert not isinstance(rates, str)
    twice = parse_rates(doubled(rates, algorithm), algorithm)
    assert not isinstance(twice, str)
    assert [(r.algorithm, r.period, r.limit, r.capacity) for r in twice] == [
        (r.algorithm, r.period, 2 * r.limit, 2 * r.capacity) for r in rates
    ]


def test_doubled_rates_stay_within_the_maximum() -> None:
    assert doubled((Rate(limit=MAX_UNITS, period=60, burst=MAX_UNITS - 1),), "token_bucket") == (
        f"{MAX_UNITS}/min burst {MAX_UNITS}"
    )
    assert doubled("blocked", "gcra") == ""


# --- Units given back. ---


def test_units_are_given_back_and_recorded(operator: Client, alice: User) -> None:
    for _ in range(6):
        check_from(alice, scope="search")
    _, seen = ChangeCursor.from_history()
    revision = default_limiter().stored_revision()
    url = f"{COUNTERS}?{query(alice, bucket=['search/hour', 'search/day'])}"
    page = words_of(operator.get(url))
    assert (
        '<th scope="row">search: 10/hour</th> <td class="ratequota-words">user alice</td> <td>6</td> <td>4 of' in page
    )
    assert remaining_units(alice) == {"search/hour": 4, "search/day": 94, "search/month per everyone": 994}
    done = operator.post(url, {"units": "6", "reason": "Ticket 4711"})
    assert (done.status_code, done["Location"]) == (302, f"{PAGE}?{query(alice)}")
    assert remaining_units(alice) == {"search/hour": 10, "search/day": 100, "search/month per everyone": 994}
    entry = PolicyChange.objects.get(action="grant")
    assert (entry.model, entry.object_text, entry.touched_user) == ("counter", f"user:{alice.pk}", str(alice.pk))
    assert (entry.actor, entry.reason) == (User.objects.get(username="operator"), "Ticket 4711")
    assert entry.before == {"search/hour": {"used": 6, "remaining": 4}, "search/day": {"used": 6, "remaining": 94}}
    assert entry.after == {"search/hour": {"used": 0, "remaining": 10}, "search/day": {"used": 0, "remaining": 100}}
    assert default_limiter().stored_revision() == revision, "no process has to reload"
    assert seen.read_unseen()[0] == []
    logged = LogEntry.objects.get(object_id=str(plan_policy().pk)).get_change_message()
    assert logged == "Refunded 6 to each of 2 counters."
    assert logged in explain(operator, user=alice.pk)
    page = words_of(operator.get(f"/admin/django_ratequota/policychange/save/{entry.change_id}/"))
    assert '<th scope="row">search/hour</th><td>6 used, 4 left</td><td>0 used, 10 left</td>' in page
    assert "refunded" in page
    assert "/revert/" not in page, "counters have moved on"


def test_a_double_click_refunds_once(operator: Client, alice: User) -> None:
    for _ in range(6):
        check_from(alice, scope="search")
    url = f"{COUNTERS}?{query(alice, bucket='search/day')}"
    page = operator.get(url)
    key = page.context["form"]["key"].value()
    assert f'<input type="hidden" name="key" value="{key}"' in words_of(page)
    assert key != operator.get(url).context["form"]["key"].value()
    for _ in range(2):
        operator.post(url, {"units": "2", "key": key})
    assert remaining_units(alice)["search/day"] == 96
    assert LogEntry.objects.count() == 1
    assert "The form was sent twice. The counters changed only once." in explain(operator, user=alice.pk)


def test_invalid_units_are_refused(operator: Client, alice: User) -> None:
    check_from(alice, scope="search")
    url = f"{COUNTERS}?{query(alice, bucket=['search/hour', 'search/day'])}"
    for units, error in (
        *((units, "errorlist") for units in ("0", "-1", "1.5", "x", str(10**13))),
        ("2", "Refund at most 1 to search: 10/hour, because no more is used."),
    ):
        assert error in words_of(operator.post(url, {"units": units})), units
    assert remaining_units(alice)["search/hour"] == 9
    assert not PolicyChange.objects.filter(model="counter").exists()


# --- Resets. ---


def test_selected_counters_are_reset(operator: Client, alice: User) -> None:
    for _ in range(6):
        check_from(alice, scope="search")
    url = f"{COUNTERS}?{query(alice, bucket='search/day')}"
    assert "<td>6</td> <td>94 of 100</td>" in words_of(operator.get(url))
    assert remaining_units(alice)["search/day"] == 94
    assert operator.post(url, {"reason": "R"})["Location"] == f"{PAGE}?{query(alice)}"
    assert remaining_units(alice) == {"search/hour": 4, "search/day": 100, "search/month per everyone": 994}
    entry = PolicyChange.objects.get(action="reset")
    assert (entry.reason, entry.touched_user, list(entry.before or {})) == ("R", str(alice.pk), ["search/day"])
    assert [entry.object_id for entry in LogEntry.objects.all()] == [str(plan_policy().pk)]
    assert "1 counter was reset." in explain(operator, user=alice.pk)


@pytest.mark.parametrize("bucket", ["search/month per everyone", "nonsense", ""])
def test_shared_and_unknown_counters_are_not_changed(operator: Client, alice: User, bucket: str) -> None:
    check_from(alice, scope="search")
    answer = operator.post(f"{COUNTERS}?{query(alice, bucket=bucket)}", {"units": "1"}, follow=True)
    assert "Select at least one of the customer's own counters." in unescape(answer.content.decode())
    assert remaining_units(alice)["search/month per everyone"] == 999
    assert not PolicyChange.objects.filter(model="counter").exists()


# --- Permissions, failures, hostile input. ---


@pytest.mark.parametrize("permission", ["add_ratepolicy", "grant_override", "reset_usage"])
def test_boosts_grants_and_resets_need_permissions(alice: User, permission: str) -> None:
    check_from(alice, scope="search")
    client = staff((permission, "view_ratepolicy", "change_ratepolicy"))
    form = {"units": "1", "reason": "R", "until": "hour", f"{plan_policy().pk}-rates": "20/hour"}
    for url, needed in (
        (f"{COUNTERS}?{query(alice, bucket='search/hour')}", "reset_usage"),
        (boost_url(alice), "grant_override"),
    ):
        found = (client.get(url).status_code, client.post(url, form).status_code)
        assert found == ((200, 302) if permission == needed else (403, 403))
    assert RatePolicy.objects.filter(user=alice).exists() is (permission == "grant_override")
    assert PolicyChange.objects.filter(model="counter").count() == (permission == "reset_usage")


@pytest.mark.parametrize("page", [BOOST, COUNTERS])
def test_an_invalid_query_redirects_to_explain_with_the_error(operator: Client, page: str) -> None:
    answer = operator.get(f"{page}?ip=nonsense&bucket=all/min&policy=1", follow=True)
    assert answer.redirect_chain == [(f"{PAGE}?ip=nonsense", 302)]
    assert "does not appear to be an IPv4 or IPv6 address" in answer.content.decode()
    assert operator.get(page).status_code == 302


def test_redis_down_is_reported_and_only_boosts_are_saved(operator: Client, alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    for sent in ({"units": "1"}, {}):
        url = f"{COUNTERS}?{query(alice, bucket='search/hour')}"
        assert "Redis did not answer (connection). The counters cannot be shown" in words_of(operator.get(url))
        answer = operator.post(url, sent, follow=True)
        assert answer.status_code == 200
        assert "Redis did not answer (connection). Some counters may already have changed" in answer.content.decode()
    assert not PolicyChange.objects.filter(model="counter").exists()
    assert not LogEntry.objects.exists()
    # A boost is saved in the database, and applies once Redis answers.
    assert boosted(operator, boost_url(alice), "30/hour").status_code == 302
    assert RatePolicy.objects.filter(user=alice).exists()


# --- From the user's own page. ---


@pytest.mark.parametrize(
    ("permissions", "offered"),
    [(None, True), (("view_ratepolicy",), True), (("grant_override",), True), (("reset_usage",), True), ((), False)],
)
def test_the_users_page_links_to_explain(alice: User, permissions: tuple[str, ...] | None, offered: bool) -> None:
    client = staff(permissions)
    if permissions is not None:
        view = Permission.objects.get(codename=get_permission_codename("view", User._meta))
        User.objects.get(username="support").user_permissions.add(view)
    page = client.get(reverse(admin_urlname(User._meta, "change"), args=[alice.pk]))
    assert page.status_code == 200
    assert (f'<li><a href="{PAGE}?user={alice.pk}">Quota</a></li>' in page.content.decode()) is offered
    assert "historylink" in page.content.decode()


class Pinned(UserAdmin):  # type: ignore[type-arg]
    """A project's own admin, with a template of its own."""

    change_form_template = "pinned.html"


@pytest.mark.parametrize("own", [UserAdmin, Pinned])
def test_the_link_keeps_the_templates_of_a_projects_user_admin(
    own: type[UserAdmin[User]], alice: User, tmp_path: Path, settings: Any
) -> None:
    folder = tmp_path / "admin" / User._meta.app_label / str(User._meta.model_name)
    folder.mkdir(parents=True)
    page = '{% extends "admin/change_form.html" %}{% block form_top %}of the project{% endblock %}'
    for path in (tmp_path / "pinned.html", folder / "change_form.html"):
        path.write_text(page.replace("project", path.stem))
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    staff(None)
    request = RequestFactory().get("/")
    request.user = User.objects.get(username="support")
    for site, offered in ((admin.site, True), (AdminSite("other"), False)):
        request.current_app = site.name  # type: ignore[attr-defined]
        users = type("LinkedAdmin", (QuotaLinkMixin, own), {})(User, site)
        text = users.change_view(request, str(alice.pk)).render().content.decode()
        assert (f'<a href="{PAGE}?user={alice.pk}">Quota</a>' in text) is offered
        assert ("of the pinned" if own is Pinned else "of the change_form") in text


def test_no_template_is_named_like_one_of_another_app() -> None:
    """Templates of the same name hide each other, depending on the order of INSTALLED_APPS."""
    templates = Path(django_ratequota.__file__).parent / "templates"
    names = {path.relative_to(templates).as_posix() for path in templates.rglob("*.html")}
    assert len(names) > 20
    assert [name for name in names if "django_ratequota/" not in name] == []
