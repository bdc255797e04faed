"""The impact estimate on a policy's form, and the warnings after a save."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from html import unescape
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, connections, transaction
from django.test import Client

import django_ratequota
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring import attempts
from django_ratequota.monitoring.attempts import Attempts, RecordedAttempts
from django_ratequota.operations import advice
from tests.support.operators import client_of
from tests.support.pages import form_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/ratepolicy/"
IMPACT = f"{LIST}impact/"
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
    monkeypatch.setattr(attempts, "recorded_attempts", lambda hours=24, endpoint_id=None: usage)


@pytest.fixture
def store_down(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 0.2}


def form(**fields: Any) -> dict[str, Any]:
    """Return the form data of a policy's form."""
    plain = {"counted_per": "caller", "algorithm": "token_bucket", "mode": "enforce", "rates": "100/min burst 20"}
    return {**plain, **fields}


def content(page: Any) -> str:
    assert page.status_code == 200
    return str(page.content.decode())


def text_of(page: Any) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", content(page))).split())


def test_unreadable_rates_have_the_message_of_saving(operator: Client) -> None:
    for rates in ("100/fortnight", "5/s, 6/s", "1/month gcra", HOSTILE):
        saved = operator.post(f"{LIST}add/", form(rates=rates))
        errors = list(saved.context["adminform"].form.errors["rates"])
        assert errors
        html = operator.post(IMPACT, form(rates=rates)).content.decode()
        assert [unescape(text) for text in re.findall(r"<li>Rates: (.*?)</li>", html)] == errors
        assert "<script>" not in html


def test_the_form_computes_nothing(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = RatePolicy.objects.create(rates="10/min")
    monkeypatch.setattr("django_ratequota.admin.estimate.estimate", None)
    monkeypatch.setattr("django_ratequota.admin.estimate.about_saved", None)
    html = operator.get(f"{LIST}{policy.pk}/change/").content.decode()
    assert f'data-ask="{IMPACT}?object={policy.pk}"' in html
    assert "django_ratequota/estimate.js" in html
    own = html[html.index('class="module ratequota-estimate"') : html.index('class="submit-row"')]
    assert not re.search(r"<script|<style|<svg|\sstyle=|\son\w+=|javascript:", own)
    assert f'data-ask="{IMPACT}"' in operator.get(f"{LIST}add/").content.decode()


def test_a_policy_is_checked_as_the_stored_one(operator: Client) -> None:
    policy = RatePolicy.objects.create(rates="10/min")
    assert "Correct these errors first" in text_of(operator.post(IMPACT, form()))
    assert "The policy does not apply to any request" in text_of(
        operator.post(f"{IMPACT}?object={policy.pk}", form())
    )
    for unknown in ("4711", "nonsense"):
        assert "Correct these errors first" in text_of(operator.post(f"{IMPACT}?object={unknown}", form()))


@pytest.mark.usefixtures("recorded")
def test_the_estimate_names_the_callers_affected_most() -> None:
    client_of(superuser=True)
    granter, adder = client_of("view_ratepolicy", name="granter"), client_of("add_ratepolicy", name="adder")
    users = [
        User.objects.update_or_create(pk=number, defaults={"username": f"caller{number}"})[0] for number in (3, 4)
    ]
    page = content(granter.post(f"{IMPACT}?object={RatePolicy.objects.create(rates='2/min').pk}"))
    rows = re.findall(r'<tr><th scope="row"><a href="([^"]*)">(.*?)</a></th><td>(.*?)</td><td>(.*?)</td>', page)
    explain = f"{LIST}explain/?user="
    assert rows == [(f"{explain}4", f"user {users[1]}", "3", "5"), (f"{explain}3", f"user {users[0]}", "1", "3")]
    RatePolicy.objects.all().delete()
    page = content(adder.post(IMPACT, form(rates="2/min")))
    assert "2 of 4 customers" in page
    assert "caller4" not in page


@pytest.mark.usefixtures("recorded")
def test_a_policy_that_cannot_be_estimated_is_reported(operator: Client, api_keys: None) -> None:
    assert "cannot be estimated" in text_of(operator.post(IMPACT, form(counted_per="tenant")))


# --- Redis down, and permissions. ---


@pytest.mark.usefixtures("store_down")
def test_redis_down_and_unreadable_records_are_reported(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    page = text_of(operator.post(IMPACT, form(mode="off")))
    assert "because its mode is “off”" in page
    assert "Redis did not answer (connection). The impact cannot be estimated." in page

    def usage(hours: int = 24, endpoint_id: int | None = None) -> RecordedAttempts:
        raise django_ratequota.exceptions.StoreError("timeout", "too late")

    monkeypatch.setattr(attempts, "recorded_attempts", usage)
    assert "Redis did not answer (timeout)" in text_of(operator.post(IMPACT, form()))


@pytest.mark.usefixtures("recorded", "redis_client")
def test_viewers_see_the_estimate_of_the_stored_policy() -> None:
    client = client_of("view_ratepolicy")
    policy = RatePolicy.objects.create(rates="2/min")
    assert 'name="rates"' not in client.get(f"{LIST}{policy.pk}/change/").content.decode()
    # Their form has a CSRF token and no fields.
    assert "would have refused 2 of 4 customers" in text_of(client.post(f"{IMPACT}?object={policy.pk}"))
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
    assert ["because its mode is “off”" in text for text in warnings(operator, page)] == [True]
    assert warnings(operator, operator.post(f"{LIST}{policy.pk}/change/", form())) == []


@pytest.mark.parametrize("atomic", [False, True], ids=["autocommit", "ATOMIC_REQUESTS"])
def test_advice_is_worked_out_after_the_commit(
    operator: Client, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    """All other operators' saves waited until the URLconf was searched, which was inside the transaction."""
    locked: list[bool] = []

    def noting(work_out: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def noted(about: Any) -> Any:
            locked.append(connection.in_atomic_block)
            return work_out(about)

        return noted

    for function in (advice.about_endpoint, advice.about_saved):
        monkeypatch.setattr(advice, function.__name__, noting(function))
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", atomic)
    endpoint = Endpoint.objects.create(name="nowhere")
    policy = RatePolicy.objects.create(rates="1/s")
    edits: list[tuple[str, dict[str, Any], int]] = [
        (f"{LIST}add/", {"rates": "1/min", "mode": "off", "endpoint": endpoint.pk}, 2),
        (f"{LIST}{policy.pk}/change/", {"mode": "off"}, 1),
        (LIST, {f"form-{row}-mode": "log" for row in range(2)} | {"_save": "1"}, 1),
        (f"/admin/django_ratequota/endpoint/{endpoint.pk}/change/", {"cost": "2"}, 1),
    ]
    for url, edit, number in edits:
        page = operator.post(url, {**form_of(operator.get(url)), **edit})
        assert len(warnings(operator, page)) == number, url
    assert (len(locked), any(locked)) == (8, False)


def test_advice_is_shown_without_autocommit(operator: Client) -> None:
    """Django runs no hook after a commit there: each would stay, with its request, until the connection is closed."""
    transaction.set_autocommit(False)
    try:
        saved = operator.post(f"{LIST}add/", form(mode="off"))
        assert len(warnings(operator, saved)) == 1
        assert not any(isinstance(hook, partial) for _savepoints, hook, _robust in connection.run_on_commit)
    finally:
        transaction.rollback()
        connection.run_on_commit = []
        transaction.set_autocommit(True)


def test_a_refused_save_warns_of_no_policy(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise IntegrityError

    monkeypatch.setattr(admin.ModelAdmin, "log_addition", refuse)
    assert warnings(operator, operator.post(f"{LIST}add/", form(mode="off"))) == []
    assert not RatePolicy.objects.exists()


@pytest.mark.parametrize(
    ("limits", "number", "last"),
    [
        ("none", 10, "is exempt"),
        ("besides", 1, "plan Free × e2: 5/s and 10 more: This policy never applies, because its mode is “off”"),
    ],
)
def test_many_warnings_are_cut_short(operator: Client, limits: str, number: int, last: str) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    endpoints = [Endpoint.objects.create(name=f"e{at}", limits=limits) for at in range(13)]
    fields = {"name": "Free", "slug": "free", "description": "", "default_for": "", "position": "0"}
    fields |= {"policies-TOTAL_FORMS": "13", "policies-INITIAL_FORMS": "0"}
    for at, endpoint in enumerate(endpoints):
        row = {"endpoint": endpoint.pk, "counted_per": "caller", "rates": "5/s", "mode": "off"}
        fields |= {f"policies-{at}-{name}": value for name, value in {**row, "algorithm": "gcra"}.items()}
    page = operator.post(f"/admin/django_ratequota/plan/{plan.pk}/change/", fields)
    shown = warnings(operator, page)
    assert len(shown) == number
    assert last in shown[-1]
