"""The preview and the impact estimate on a policy's form, and the warnings after a save."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape
from typing import Any

import pytest
import redis
from django.test import Client
from django.utils import translation

import django_ratequota
from django_ratequota.engine.rates import parse_rates
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from django_ratequota.monitoring import attempts
from django_ratequota.monitoring.attempts import Attempts, RecordedAttempts
from django_ratequota.operations.replay import replay
from django_ratequota.operations.scenarios import Scenario, at_once, duration, fastest, stream
from tests.conftest import NOON_US
from tests.support.operators import client_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/ratepolicy/"
PREVIEW, IMPACT = f"{LIST}preview/", f"{LIST}impact/"
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 10_000
START = 1_795_218_600


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


# --- The scenario. ---


def scenario(text: str) -> Scenario:
    rates = parse_rates(text)
    assert not isinstance(rates, str)
    return stream(rates, fastest(rates))


def test_the_sentence_is_about_the_rates_together(redis_client: redis.Redis) -> None:
    both = "Requests 15/min, evenly: in the first 40 s all pass; in the last 50 min 34 of 750."
    start, end = "Requests 150/min, evenly: in the first", "all pass; in the last 1 min 100 of 150."
    sentences = {
        "100/min fixed_window": f"{start} 39.8 s {end}",
        "100/min burst 20": f"{start} 22.5 s {end}",
        "1/day": "Requests 1.5/day, evenly: in the first 16 h all pass; in the last 1 d 0 of 1.",
        "10/min burst 5, 1000/day": both,
        "1000/day, 10/min burst 5": both,
    }
    assert {text: scenario(text).sentence for text in sentences} == sentences


def test_the_chart_holds_the_admitted_and_refused_units(redis_client: redis.Redis) -> None:
    found = scenario("100/min fixed_window")
    assert (sum(found.admitted), sum(found.refused)) == (400, 200)
    assert list(found.admitted[:10]) == [15, 15, 15, 15, 15, 15, 10, 0, 0, 0]
    assert len(found.labels) == len(found.admitted) == len(found.refused)


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


def test_durations_are_written_in_the_operators_language() -> None:
    texts = ["0", "1.5 ms", "1 s", "1.5 min", "2 h", "1 d"]
    assert [duration(us) for us in (0, 1500, 10**6, 90 * 10**6, 7200 * 10**6, 86_400 * 10**6)] == texts
    with translation.override("de"):
        assert duration(90 * 10**6) == "1,5 min"


# --- The preview. ---


def test_the_unsaved_form_is_drawn_and_nothing_is_saved(operator: Client, redis_client: redis.Redis) -> None:
    keys = redis_client.keys("rqtest:*")
    page = operator.post(PREVIEW, form(rates="100/min burst 20, 9/s gcra", mode="off"))
    text = text_of(page)
    assert page.content.decode().count('<svg class="ratequota-plot-drawing"') == 1
    assert "A steady stream above the limit: 100/min burst 20, 9/s gcra" in text
    assert "Requests 13.5/s, evenly: " in text
    assert "Note: Its mode is off" in text
    assert not RatePolicy.objects.exists()
    assert not PolicyChange.objects.exists()
    assert redis_client.keys("rqtest:*") == keys


def test_rates_without_counters_are_sentences(operator: Client) -> None:
    for rates, text in (("unlimited", "Every request is admitted"), ("blocked", "Every request is refused.")):
        assert text in text_of(operator.post(PREVIEW, form(rates=rates)))


def test_unreadable_rates_have_the_message_of_saving(operator: Client) -> None:
    for rates in ("100/fortnight", "5/s, 6/s", "1/month gcra", HOSTILE):
        saved = operator.post(f"{LIST}add/", form(rates=rates))
        errors = list(saved.context["adminform"].form.errors["rates"])
        assert errors
        html = operator.post(PREVIEW, form(rates=rates)).content.decode()
        assert [unescape(text) for text in re.findall(r"<li>Rates: (.*?)</li>", html)] == errors
        assert "<script>" not in html


def test_the_form_computes_neither(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RatePolicy.objects.create(rates="10/min")
    monkeypatch.setattr("django_ratequota.admin.preview.stream", None)
    monkeypatch.setattr("django_ratequota.admin.preview.about_saved", None)
    html = operator.get(f"{LIST}{policy.pk}/change/").content.decode()
    assert f'data-ask="{PREVIEW}?object={policy.pk}"' in html
    assert f'data-ask="{IMPACT}?object={policy.pk}"' in html
    assert "django_ratequota/preview.js" in html
    own = html[html.index('class="module ratequota-preview"') : html.index('class="submit-row"')]
    assert not re.search(r"<script|<style|<svg|\sstyle=|\son\w+=|javascript:", own)
    assert f'data-ask="{PREVIEW}"' in operator.get(f"{LIST}add/").content.decode()


def test_a_policy_is_checked_as_the_stored_one(operator: Client) -> None:
    policy = RatePolicy.objects.create(rates="10/min")
    assert "Correct these errors first" in text_of(operator.post(PREVIEW, form()))
    assert "A steady stream above the limit" in text_of(operator.post(f"{PREVIEW}?object={policy.pk}", form()))
    for unknown in ("4711", "nonsense"):
        assert "Correct these errors first" in text_of(operator.post(f"{PREVIEW}?object={unknown}", form()))


# --- The estimate. ---


@pytest.mark.usefixtures("recorded")
def test_the_estimate_counts_what_would_have_been_refused(operator: Client) -> None:
    text = text_of(operator.post(IMPACT, form(rates="2/min")))
    assert "In the last 24 h this would have refused 2 of 4 clients, 36.4 % of 11 requests." in text
    assert "Of the same requests 9.1 % were really refused, by any policy, to 1 client." in text
    assert "A limit of 5/min would have refused nobody." in text
    assert "Based on the requests recorded since" in text


@pytest.mark.usefixtures("recorded")
def test_a_policy_that_cannot_be_estimated_is_reported(operator: Client, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}}
    assert "Cannot be estimated" in text_of(operator.post(IMPACT, form(counted_per="tenant")))


# --- Redis down, and permissions. ---


@pytest.mark.usefixtures("store_down")
def test_redis_down_and_unreadable_records_are_reported(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Redis did not answer (connection). The preview cannot be shown." in text_of(
        operator.post(PREVIEW, form())
    )

    def usage(hours: int = 24) -> RecordedAttempts:
        raise django_ratequota.exceptions.StoreError("timeout", "too late")

    monkeypatch.setattr(attempts, "recorded_attempts", usage)
    assert "Redis did not answer (timeout)" in text_of(operator.post(IMPACT, form()))


@pytest.mark.usefixtures("recorded", "redis_client")
def test_viewers_see_the_preview_of_the_stored_policy() -> None:
    client = client_of("view_ratepolicy")
    policy = RatePolicy.objects.create(rates="2/min")
    assert 'name="rates"' not in client.get(f"{LIST}{policy.pk}/change/").content.decode()
    # Their form has a CSRF token and no fields.
    assert "A steady stream above the limit: 2/min" in text_of(client.post(f"{PREVIEW}?object={policy.pk}"))
    assert "would have refused 2 of 4 clients" in text_of(client.post(f"{IMPACT}?object={policy.pk}"))
    assert "Enter rates above first" in text_of(client.post(IMPACT))


# --- Warnings on save. ---


def warnings(client: Client, page: Any) -> list[str]:
    """Return the warnings that the next page shows, which removes them."""
    assert page.status_code == 302
    shown = client.get(page["Location"])
    return [str(message) for message in shown.context["messages"] if message.level_tag == "warning"]


def test_saving_a_policy_warns_and_saves(operator: Client) -> None:
    page = operator.post(f"{LIST}add/", form(mode="off"))
    policy = RatePolicy.objects.get()
    assert ["Its mode is off" in text for text in warnings(operator, page)] == [True]
    assert warnings(operator, operator.post(f"{LIST}{policy.pk}/change/", form())) == []


@pytest.mark.parametrize(
    ("exempt", "number", "last"),
    [(True, 11, "and 3 more warnings"), (False, 1, "plan Free × e2: 5/s and 10 more: Its mode is off")],
)
def test_many_warnings_are_cut_short(operator: Client, exempt: bool, number: int, last: str) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    endpoints = [Endpoint.objects.create(name=f"e{at}", exempt=exempt) for at in range(13)]
    fields = {"name": "Free", "slug": "free", "description": "", "default_for": "", "position": "0"}
    fields |= {"policies-TOTAL_FORMS": "13", "policies-INITIAL_FORMS": "0"}
    for at, endpoint in enumerate(endpoints):
        row = {"endpoint": endpoint.pk, "counted_per": "caller", "rates": "5/s", "mode": "off"}
        fields |= {f"policies-{at}-{name}": value for name, value in {**row, "algorithm": "gcra"}.items()}
    page = operator.post(f"/admin/django_ratequota/plan/{plan.pk}/change/", fields)
    shown = warnings(operator, page)
    assert len(shown) == number
    assert last in shown[-1]
