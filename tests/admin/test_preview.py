"""The preview on a policy's form, the impact estimate, and the warnings after a save."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone, translation

import django_ratequota
from django_ratequota.engine.rates import parse_rates
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.monitoring import attempts
from django_ratequota.monitoring.attempts import Attempts, RecordedAttempts
from django_ratequota.operations.replay import replay
from django_ratequota.operations.scenarios import at_once, duration, scenarios
from tests.conftest import NOON_US
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/ratepolicy/"
PREVIEW, IMPACT = f"{LIST}preview/", f"{LIST}impact/"
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 10_000
START = 1_795_218_600


@pytest.fixture
def root(redis_client: redis.Redis) -> Client:
    return client_of(superuser=True)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Attempts(
            second=START,
            caller=f"user:{number}",
            ip="ip:203.0.113.7",
            plan_id=None,
            endpoint_ids=(),
            cost=1,
            admitted=number,
            refused=number // 4,
        )
        for number in range(1, 5)
    ]
    usage = RecordedAttempts(attempts=tuple(rows), share=1.0, since=datetime.fromtimestamp(START, UTC))
    monkeypatch.setattr(attempts, "recorded_attempts", lambda hours=24: usage)


@pytest.fixture
def store_down(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 0.2}


def form(**fields: Any) -> dict[str, Any]:
    """Return the form data of a policy's form."""
    plain = {"counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce", "rates": "100/min burst 20"}
    return {**plain, **fields}


def text_of(page: Any) -> str:
    assert page.status_code == 200
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page.content.decode())).split())


# --- Scenarios. ---


@pytest.mark.parametrize(
    ("text", "edge", "pause"),
    [
        ("100/min fixed_window", "100 and 100 pass", "100 pass. Then"),
        ("100/min sliding_window_log", "100 and 0 pass", "100 pass. Then"),
        ("100/min sliding_window_counter", "100 and 0 pass", "100 pass. Then"),
        ("100/min burst 20", "20 and 0 pass", "20 pass. Then"),
        ("100/min burst 20 leaky_bucket", "20 and 0 pass", "20 pass. Then"),
        ("100/min burst 20 gcra", "20 and 0 pass", "20 pass. Then"),
        ("100/month", "100 and 100 pass", "100 pass. Then"),
        ("1/day", "1 and 0 pass", "1 pass. Then"),
        ("1000000000/s", "1,000,000,000 and 1,000,000 pass", "1,000,000,000 pass. Then"),
    ],
)
def test_sentences_differ_by_algorithm(redis_client: redis.Redis, text: str, edge: str, pause: str) -> None:
    (rate,) = parse_rates(text)
    stream, at_edge, after_pause = scenarios([rate], rate)
    assert "evenly: in the first" in stream.sentence
    assert edge in at_edge.sentence
    assert pause in after_pause.sentence


def test_charts_hold_the_admitted_and_refused_units(redis_client: redis.Redis) -> None:
    (rate,) = parse_rates("100/min fixed_window")
    stream, edge, pause = scenarios([rate], rate)
    assert (sum(stream.admitted), sum(stream.refused)) == (400, 200)
    assert stream.admitted[:10] == (15, 15, 15, 15, 15, 15, 10, 0, 0, 0)
    assert {at: edge.admitted[at] for at in range(20) if edge.admitted[at]} == {9: 100, 10: 100}
    assert edge.labels[10] == "0"
    assert sum(pause.admitted[:8]) + sum(pause.refused[:8]) == 0, "the pause"
    assert (pause.labels[8], pause.admitted[8]) == ("0", 100)
    for one in (stream, edge, pause):
        assert len(one.labels) == len(one.admitted) == len(one.refused)


def test_all_rates_hold_together(redis_client: redis.Redis) -> None:
    rates = parse_rates("10/s, 1000/hour fixed_window")
    assert not isinstance(rates, str)
    assert "10 and 10 pass" in scenarios(rates, rates[1])[1].sentence


@pytest.mark.parametrize("units", [0, 1, 2, 3, 7, 100, 10**12])
def test_simulated_requests_are_batched(redis_client: redis.Redis, units: int) -> None:
    """A request of several units admits as many units as that many requests of 1 unit."""
    costs = list(at_once(units))
    assert sum(costs) == units
    assert len(costs) <= 41
    for room in {1, 2, 3, 5, 64, max(1, units // 3), max(1, units - 1), units + 1}:
        rates = parse_rates(f"{min(room, 10**12)}/min")
        assert not isinstance(rates, str)
        outcome = replay(rates, [(NOON_US, cost) for cost in costs])
        assert sum(cost for cost, ok in zip(costs, outcome, strict=True) if ok) == min(units, room, 10**12)


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0"),
        (1500, "1.5 ms"),
        (10**6, "1 s"),
        (-90 * 10**6, "−1.5 min"),
        (7200 * 10**6, "2 h"),
        (86_400_000_000, "1 d"),
    ],
)
def test_durations(us: int, text: str) -> None:
    assert duration(us) == text


def test_numbers_are_written_in_the_operators_language() -> None:
    with translation.override("de"):
        assert duration(90 * 10**6) == "1,5 min"


# --- The preview. ---


def test_the_unsaved_form_is_drawn_and_nothing_is_saved(root: Client, redis_client: redis.Redis) -> None:
    keys = redis_client.keys("rqtest:*")
    page = root.post(PREVIEW, form(rates="100/min burst 20, 9/s gcra"))
    text = text_of(page)
    assert page.content.decode().count('<svg class="ratequota-plot-drawing"') == 6
    assert "A steady stream above the limit: 100/min burst 20" in text
    assert "A burst after a pause: 9/s gcra" in text
    assert not RatePolicy.objects.exists()
    assert not PolicyChange.objects.exists()
    assert redis_client.keys("rqtest:*") == keys


def test_a_rate_that_counts_requests_is_drawn_in_requests(root: Client) -> None:
    text = root.post(PREVIEW, form(rates="2 requests/min, 90/hour")).content.decode()
    assert "(requests)" in text
    assert "(units)" in text


def test_ids_of_the_drawings_are_unique(root: Client) -> None:
    page = root.post(PREVIEW, form(rates="100/min, 9/s gcra, 8/h, 7/day")).content.decode()
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids)) > 12


def test_rates_beyond_a_few_are_counted_not_drawn(root: Client) -> None:
    rates = ", ".join(f"5/{count}min" for count in range(1, 7))
    page = root.post(PREVIEW, form(rates=rates))
    assert page.content.decode().count('<svg class="ratequota-plot-drawing"') == 12
    assert "and 2 more rates" in text_of(page)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"rates": "unlimited"}, "Every request is admitted, and nothing is counted."),
        ({"rates": "blocked"}, "Every request is refused."),
        ({"rates": " "}, "Enter rates above"),
        ({"mode": "off"}, "Its mode is off"),
        ({"ends_at_0": "2020-01-01", "ends_at_1": "00:00"}, "It has ended"),
    ],
)
def test_advice_is_shown_before_saving(root: Client, fields: dict[str, str], advice: str) -> None:
    assert advice in text_of(root.post(PREVIEW, form(**fields)))


@pytest.mark.parametrize("rates", ["100/fortnight", "5/s, 6/s", "1/month gcra", HOSTILE])
def test_unreadable_rates_have_the_message_of_saving(root: Client, rates: str) -> None:
    saved = root.post(f"{LIST}add/", form(rates=rates))
    errors = list(saved.context["adminform"].form.errors["rates"])
    assert errors
    previewed = root.post(PREVIEW, form(rates=rates))
    assert [unescape(text) for text in re.findall(r"<li>(.*?)</li>", previewed.content.decode())] == errors
    assert "<script>" not in previewed.content.decode()


def test_an_algorithm_that_does_not_fit_is_reported(root: Client) -> None:
    text = text_of(root.post(PREVIEW, form(rates="5/s burst 9", algorithm="fixed_window")))
    assert "burst belongs to gcra, leaky_bucket, token_bucket" in text


def test_an_incomplete_form_is_drawn(root: Client) -> None:
    """The audience matters to the advice only, and an invalid form gets none."""
    page = root.post(PREVIEW, {"rates": "10/min", "mode": "off", "algorithm": "token_bucket", "user": "nobody"})
    assert "A steady stream" in text_of(page)
    assert "Its mode is off" not in text_of(page)


def test_the_stored_rates_are_drawn_without_a_script(root: Client) -> None:
    policy = RatePolicy.objects.create(rates="10000/hour, 100/min", mode="off")
    page = root.get(f"{LIST}{policy.pk}/change/")
    text = text_of(page)
    assert "A steady stream above the limit: 10000/hour" in text
    assert "Its mode is off" in text
    html = page.content.decode()
    assert f'data-preview="{PREVIEW}?object={policy.pk}"' in html
    assert f'data-impact="{IMPACT}?object={policy.pk}"' in html
    assert "django_ratequota/preview.js" in html
    own = html[html.index('class="module ratequota-preview"') : html.index('class="submit-row"')]
    assert not re.search(r"<script|<style|\sstyle=|\son\w+=|javascript:", own)
    add = root.get(f"{LIST}add/")
    assert "Enter rates above" in text_of(add)
    assert f'data-preview="{PREVIEW}"' in add.content.decode()


def test_a_form_that_was_refused_keeps_its_preview(root: Client) -> None:
    policy = RatePolicy.objects.create(rates="10/min")
    page = root.post(f"{LIST}{policy.pk}/change/", form(rates="7/min", counted_per="nothing"))
    assert "A steady stream above the limit: 7/min" in text_of(page)
    page = root.post(f"{LIST}{policy.pk}/change/", form(rates="7/fortnight"))
    assert text_of(page).count("expected a unit") >= 1


def test_a_policy_is_not_compared_with_itself(root: Client) -> None:
    policy = RatePolicy.objects.create(rates="10/min", starts_at=timezone.now() - timedelta(days=1))
    dates = {"starts_at_0": "2000-01-01", "starts_at_1": "00:00"}
    assert "never wins" in text_of(root.post(PREVIEW, form(**dates)))
    assert "never wins" not in text_of(root.post(f"{PREVIEW}?object={policy.pk}", form(**dates)))
    assert "A steady stream" in text_of(root.post(f"{PREVIEW}?object=4711", form()))
    assert "A steady stream" in text_of(root.post(f"{PREVIEW}?object=nonsense", form()))


def test_queries_do_not_grow(root: Client) -> None:
    policy = RatePolicy.objects.create(plan=Plan.objects.create(name="p", slug="p"), rates="5/s")

    def count() -> list[int]:
        counts = []
        for request in (
            lambda: root.get(f"{LIST}{policy.pk}/change/"),
            lambda: root.post(f"{PREVIEW}?object={policy.pk}", form(plan=policy.plan_id)),
        ):
            with CaptureQueriesContext(connection) as captured:
                assert request().status_code == 200
            counts.append(len(captured))
        return counts

    count()  # for what Django caches
    few = count()
    for number in range(20):
        plan = Plan.objects.create(name=f"p{number}", slug=f"p{number}")
        RatePolicy.objects.create(plan=plan, rates="5/s")
        RatePolicy.objects.create(user=User.objects.create(username=f"u{number}"), rates="5/s")
    assert count() == few


def test_an_endpoint_that_matches_nothing_is_reported(root: Client) -> None:
    for name, reported in (("search", False), ("nowhere", True)):
        endpoint = Endpoint.objects.create(name=name)
        assert (
            f"Nothing in the URLconf uses “{name}”" in text_of(root.post(PREVIEW, form(endpoint=endpoint.pk)))
        ) is reported
        page = root.post(f"{LIST}add/", form(endpoint=endpoint.pk))
        assert ["Nothing in the URLconf uses" in text for text in warnings(root, page)] == [True] * reported


def test_hostile_names_are_shown_harmlessly(root: Client) -> None:
    plan = Plan.objects.create(name=HOSTILE, slug="p")
    for page in (
        root.post(PREVIEW, form(plan=plan.pk)),
        root.get(f"{LIST}{RatePolicy.objects.create(plan=plan, rates='5/s').pk}/change/"),
    ):
        html = page.content.decode()
        panel = html[max(0, html.find('class="module ratequota-preview"')) :]
        assert "<script>alert" not in html
        assert "\u202e" not in panel
        assert "x" * 200 not in panel


# --- The estimate. ---


@pytest.mark.usefixtures("recorded")
def test_the_estimate_counts_what_would_have_been_refused(root: Client) -> None:
    text = text_of(root.post(IMPACT, form(rates="2/min")))
    assert "In the last 24 h this would have refused 2 of 4 clients, 36.4 % of 11 requests." in text
    assert "Of the same requests 9.1 % were really refused, by any policy, to 1 client." in text
    assert "Based on the requests recorded since" in text


@pytest.mark.usefixtures("recorded")
def test_the_estimate_of_an_invalid_form_lists_its_errors(root: Client) -> None:
    text = text_of(root.post(IMPACT, form(rates="2/fortnight", subject="nonsense")))
    assert "Correct these errors first" in text
    assert "Rates: expected a unit" in text
    assert "Subject: Write kind:value" in text


@pytest.mark.usefixtures("recorded")
def test_a_policy_that_cannot_be_estimated_is_reported(root: Client, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}}
    assert "Cannot be estimated" in text_of(root.post(IMPACT, form(counted_per="tenant")))


# --- Redis down, and permissions. ---


@pytest.mark.usefixtures("store_down", "recorded")
def test_redis_down_is_reported(root: Client) -> None:
    policy = RatePolicy.objects.create(rates="10/min")
    assert "Redis did not answer (connection)" in text_of(root.post(PREVIEW, form()))
    url = f"{IMPACT}?object={policy.pk}"
    assert "Redis did not answer (connection)" in text_of(root.post(url, form(rates="1/min")))
    assert "Redis did not answer" in text_of(root.get(f"{LIST}{policy.pk}/change/"))
    assert root.get(f"{LIST}add/").status_code == 200


@pytest.mark.usefixtures("store_down")
def test_unreadable_records_are_reported(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(hours: int = 24) -> RecordedAttempts:
        raise django_ratequota.exceptions.StoreError("timeout", "too late")

    monkeypatch.setattr(attempts, "recorded_attempts", usage)
    assert "Redis did not answer (timeout)" in text_of(root.post(IMPACT, form()))


@pytest.mark.usefixtures("recorded", "redis_client")
@pytest.mark.parametrize(
    ("permissions", "status"),
    [
        ((), 403),
        (("view_plan",), 403),
        (("view_ratepolicy",), 200),
        (("change_ratepolicy",), 200),
        (("add_ratepolicy",), 200),
        (("grant_override",), 200),
        (("reset_usage",), 200),
    ],
)
def test_the_preview_needs_a_permission(permissions: tuple[str, ...], status: int) -> None:
    client = client_of(*permissions)
    policy = RatePolicy.objects.create(rates="10/min")
    for url in (PREVIEW, IMPACT):
        assert client.post(url, form()).status_code == status
        assert client.get(f"{url}?object={policy.pk}").status_code == status
        assert Client().post(url, form()).status_code == 302, "to the login"
        assert operator_without_staff().post(url, form()).status_code == 302


def operator_without_staff() -> Client:
    client = Client()
    client.force_login(User.objects.get_or_create(username="customer")[0])
    return client


@pytest.mark.usefixtures("recorded", "redis_client")
def test_viewers_see_the_preview_of_the_stored_policy() -> None:
    client = client_of("view_ratepolicy")
    policy = RatePolicy.objects.create(rates="2/min")
    page = client.get(f"{LIST}{policy.pk}/change/")
    assert "A steady stream above the limit: 2/min" in text_of(page)
    assert 'name="rates"' not in page.content.decode()
    # Their form has a CSRF token and no fields.
    assert "A steady stream above the limit: 2/min" in text_of(client.post(f"{PREVIEW}?object={policy.pk}"))
    assert "would have refused 2 of 4 clients" in text_of(client.post(f"{IMPACT}?object={policy.pk}"))
    assert "Enter rates above first" in text_of(client.post(IMPACT))


@pytest.mark.usefixtures("recorded", "redis_client")
def test_advice_names_no_policy_that_granters_may_not_see() -> None:
    client = client_of("grant_override")
    policy = RatePolicy.objects.create(rates="2/min", starts_at=timezone.now() - timedelta(days=1))
    assert "never wins" not in text_of(client.post(PREVIEW, form()))
    assert "Enter rates above" in text_of(client.post(f"{PREVIEW}?object={policy.pk}"))
    assert "Enter rates above first" in text_of(client.post(f"{IMPACT}?object={policy.pk}"))


def test_posting_needs_the_csrf_token(root: Client) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.get(username="operator"))
    page = client.get(f"{LIST}add/").content.decode()
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page)
    assert token is not None
    for url in (PREVIEW, f"{IMPACT}?object=1"):
        assert client.post(url, form()).status_code == 403
        assert client.post(url, form(csrfmiddlewaretoken=token[1], rates="")).status_code == 200


# --- Warnings on save. ---


def warnings(client: Client, page: Any) -> list[str]:
    """Return the warnings that the next page shows, which removes them."""
    assert page.status_code == 302
    shown = client.get(page["Location"])
    return [str(message) for message in shown.context["messages"] if message.level_tag == "warning"]


def test_saving_a_policy_warns_and_saves(root: Client) -> None:
    page = root.post(f"{LIST}add/", form(rates="10/min", mode="off"))
    assert page.status_code == 302
    policy = RatePolicy.objects.get()
    assert warnings(root, page) == [
        "everyone × all endpoints: 10/min: Its mode is off: it limits nobody. Choose “enforce” or “log only” to "
        "use it."
    ]
    page = root.post(f"{LIST}{policy.pk}/change/", form(mode="off"))
    assert ["Its mode is off" in text for text in warnings(root, page)] == [True]
    assert warnings(root, root.post(f"{LIST}{policy.pk}/change/", form())) == []


def test_saving_a_plan_warns_of_the_rows_that_were_edited(root: Client) -> None:
    plan = Plan.objects.create(name="<b>Gold</b>\u202e", slug="gold")
    old = RatePolicy.objects.create(plan=plan, rates="5/s", counted_per="ip", mode="off")
    fields = {"name": plan.name, "slug": "gold", "description": "", "default_for": "", "position": "0"}
    fields |= {"policies-TOTAL_FORMS": "2", "policies-INITIAL_FORMS": "1"}
    stored = {"id": old.pk, "plan": plan.pk, "endpoint": "", "counted_per": "ip", "rates": "5/s", "mode": "off"}
    new = {"endpoint": "", "counted_per": "caller", "rates": "9/s", "mode": "off"}
    for number, row in enumerate((stored, new)):
        fields |= {f"policies-{number}-{name}": value for name, value in {**row, "algorithm": "token_bucket"}.items()}
    page = root.post(f"/admin/django_ratequota/plan/{plan.pk}/change/", fields)
    assert page.status_code == 302
    (warning,) = warnings(root, page)
    assert "9/s: Its mode is off" in warning
    assert "\u202e" not in warning
    assert "<b>Gold" not in root.get(page["Location"]).content.decode()


@pytest.mark.parametrize(("name", "warned"), [("search", False), ("nowhere", True)])
def test_saving_an_endpoint_that_nothing_matches_warns(root: Client, name: str, warned: bool) -> None:
    fields = {"name": name, "description": "", "routes": "", "methods": "", "cost": "1"}
    fields |= {"policies-TOTAL_FORMS": "0", "policies-INITIAL_FORMS": "0"}
    page = root.post("/admin/django_ratequota/endpoint/add/", fields)
    assert page.status_code == 302
    assert Endpoint.objects.filter(name=name).exists()
    assert ["Nothing in the URLconf uses" in text for text in warnings(root, page)] == [True] * warned


def test_many_warnings_are_cut_short(root: Client) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    endpoints = [Endpoint.objects.create(name=f"e{number}") for number in range(13)]
    fields = {"name": "Free", "slug": "free", "description": "", "default_for": "", "position": "0"}
    fields |= {"policies-TOTAL_FORMS": "13", "policies-INITIAL_FORMS": "0"}
    for number, endpoint in enumerate(endpoints):
        row = {"endpoint": endpoint.pk, "counted_per": "caller", "rates": "5/s", "mode": "off"}
        fields |= {f"policies-{number}-{name}": value for name, value in {**row, "algorithm": "gcra"}.items()}
    page = root.post(f"/admin/django_ratequota/plan/{plan.pk}/change/", fields)
    shown = warnings(root, page)
    assert (len(shown), shown[-1]) == (11, "and 3 more warnings")


# --- The files. ---


def test_the_script_writes_no_style_and_evaluates_nothing() -> None:
    script = (Path(django_ratequota.__file__).parent / "static/django_ratequota/preview.js").read_text()
    assert not re.search(r"\.style\b|setAttribute\(\"style|\beval\b|new Function|onclick", script)
