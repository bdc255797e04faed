"""Two operators have the same pages open: what either of them changes stays, or is refused in words."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client

from django_ratequota.models import (
    Endpoint,
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    RatePolicy,
    SubjectList,
)
from tests.support.operators import client_of, words_of
from tests.support.pages import form_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BASE = "/admin/django_ratequota"
POLICIES = f"{BASE}/ratepolicy/"


@pytest.fixture
def anna() -> Client:
    return client_of(superuser=True, name="anna")


@pytest.fixture
def ben() -> Client:
    return client_of(superuser=True, name="ben")


@pytest.fixture
def policy(free: Plan) -> RatePolicy:
    return RatePolicy.objects.create(plan=free, rates="30/min")


def form_url(row: Any) -> str:
    return f"{BASE}/{row._meta.model_name}/{row.pk}/change/"


def opened(client: Client, url: str) -> dict[str, str]:
    """Return the form of a page as it was opened."""
    return {**form_of(client.get(url)), "_save": "1"}


def save(client: Client, url: str, form: dict[str, str], **edits: str) -> Any:
    """Send the form with these edits."""
    return client.post(url, {**form, **edits})


def saved(client: Client, url: str, form: dict[str, str], **edits: str) -> None:
    page = save(client, url, form, **edits)
    assert page.status_code == 302, words_of(page)


def last_difference() -> tuple[str, dict[str, tuple[Any, Any]]]:
    """Return who made the newest change, and the fields that it changed."""
    change = PolicyChange.objects.latest("pk")
    before, after = change.before or {}, change.after or {}
    changed = {name: (before.get(name), after[name]) for name in after if before.get(name) != after[name]}
    return str(change.actor), changed


def test_a_field_that_both_changed_is_refused_once(anna: Client, ben: Client, policy: RatePolicy) -> None:
    url = form_url(policy)
    old = opened(ben, url)
    saved(anna, url, opened(anna, url), rates="31/min", mode="log")
    page = save(ben, url, old, rates="29/min", reason="OPS-1", change_reason="OPS-2")
    at = r".{5,40} UTC"
    refusal = rf"anna changed rates from 30/min to 31/min at {at}\. Save again to overwrite that\."
    assert re.search(refusal, words_of(page))
    policy.refresh_from_db()
    assert (policy.rates, policy.mode, policy.reason) == ("31/min", "log", "")
    again = {**form_of(page), "_save": "1"}
    kept = {name: again[name] for name in ("rates", "mode", "reason", "change_reason")}
    assert kept == {"rates": "29/min", "mode": "log", "reason": "OPS-1", "change_reason": "OPS-2"}
    saved(ben, url, again)
    assert last_difference() == ("ben", {"rates": ("31/min", "29/min"), "reason": ("", "OPS-1")})


def test_it_is_refused_again_where_it_was_changed_again(anna: Client, ben: Client, policy: RatePolicy) -> None:
    url = form_url(policy)
    old = opened(ben, url)
    saved(anna, url, opened(anna, url), rates="31/min")
    page = save(ben, url, old, rates="29/min")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="32/min")
    page = save(ben, url, {**form_of(page), "_save": "1"})
    assert "Code or a command changed rates from 31/min to 32/min at" in words_of(page)


def test_a_refused_form_shows_what_is_stored_where_its_operator_changed_nothing(
    anna: Client, ben: Client, policy: RatePolicy
) -> None:
    url = form_url(policy)
    old = opened(ben, url)
    saved(anna, url, opened(anna, url), mode="log")
    page = save(ben, url, old, rates="nonsense")
    again = {**form_of(page), "_save": "1"}
    assert (again["rates"], again["mode"]) == ("nonsense", "log")
    saved(ben, url, again, rates="5/s")
    policy.refresh_from_db()
    assert (policy.rates, policy.mode) == ("5/s", "log")


@pytest.mark.parametrize("damage", ["", "e30:1abc:tampered", "nonsense"])
def test_a_form_that_does_not_say_what_was_seen_is_refused(anna: Client, policy: RatePolicy, damage: str) -> None:
    url = form_url(policy)
    form = opened(anna, url)
    page = save(anna, url, {**form, "seen": damage}, rates="10/min")
    assert "Open it again in another tab and repeat the change." in words_of(page)
    assert form_of(page)["rates"] == "10/min"
    assert save(anna, url, {**form_of(page), "_save": "1"}).status_code == 200
    other = RatePolicy.objects.create(rates="1/s")
    of_other = opened(anna, form_url(other))["seen"]
    assert save(anna, url, {**form, "seen": of_other}, rates="10/min").status_code == 200
    policy.refresh_from_db()
    assert policy.rates == "30/min"


def row(form: dict[str, str], prefix: str, obj: Any) -> str:
    """Return the beginning of the names of the object's row in a table or a list."""
    own = re.compile(rf"{prefix}-\d+-id")
    (name,) = (name for name, value in form.items() if own.fullmatch(name) and value == str(obj.pk))
    return name.removesuffix("id")


def test_every_other_form(anna: Client, ben: Client, alice: User, free: Plan, search: Endpoint) -> None:
    bots = SubjectList.objects.create(name="Bots")
    assignment = PlanAssignment.objects.create(user=alice, plan=free)
    member = ListMember.objects.create(subject_list=bots, subject="ip:203.0.113.7")
    for obj, mine, theirs in (
        (search, {"cost": "2"}, {"description": "Search"}),
        (free, {"name": "Basic"}, {"description": "For all"}),
        (bots, {"name": "Crawlers"}, {"description": "Known ones"}),
        (assignment, {"anchor": "15"}, {"reason": "OPS-1"}),
        (member, {"subject": "ip:203.0.113.8"}, {"reason": "OPS-1"}),
    ):
        url = form_url(obj)
        old = opened(ben, url)
        saved(anna, url, opened(anna, url), **mine)
        saved(ben, url, old, **theirs)
        obj.refresh_from_db()
        assert {name: str(getattr(obj, name)) for name in (*mine, *theirs)} == {**mine, **theirs}
        (name,) = mine
        page = save(ben, url, old, **{name: "7" if mine[name].isdigit() else "ip:198.51.100.1"})
        assert f"anna changed {name}" in words_of(page).replace("months begin on day", "anchor")


def test_lines_that_a_browser_sends_are_no_change(anna: Client, ben: Client) -> None:
    search = Endpoint.objects.create(name="search", routes="/a/*\n/b/*", description="One\r\nTwo")
    url = form_url(search)
    old = {name: value.replace("\r\n", "\n").replace("\n", "\r\n") for name, value in opened(ben, url).items()}
    saved(anna, url, opened(anna, url), routes="/c/*\r\n/d/*", description="Three")
    saved(ben, url, old, cost="2")
    assert last_difference() == ("ben", {"cost": (1, 2)})


def test_a_plan_that_was_deleted_after_its_policy_had_moved(anna: Client, ben: Client, search: Endpoint) -> None:
    free, pro = (Plan.objects.create(name=name, slug=name) for name in ("free", "pro"))
    policy = RatePolicy.objects.create(plan=free, endpoint=search, rates="30/min")
    old = opened(ben, form_url(search))
    saved(anna, form_url(policy), opened(anna, form_url(policy)), plan=str(pro.pk))
    free.delete()
    saved(ben, form_url(search), old, **{f"{row(old, 'policies', policy)}mode": "log"})
    policy.refresh_from_db()
    assert (policy.plan, policy.mode) == (pro, "log")


def test_a_policy_is_duplicated_with_the_values_on_the_page(
    anna: Client, ben: Client, policy: RatePolicy, search: Endpoint
) -> None:
    url, form = form_url(policy), opened(ben, form_url(policy))
    saved(anna, url, opened(anna, url), rates="40/min")
    del form["_save"]
    copied = {"_saveasnew": "1", "endpoint": str(search.pk), "change_reason": "As for all endpoints"}
    saved(ben, url, form, **copied)
    rows = RatePolicy.objects.order_by("pk").values_list("endpoint", "rates")
    assert list(rows) == [(None, "40/min"), (search.pk, "30/min")]
    change = PolicyChange.objects.latest("pk")
    assert (change.action, change.reason, str(change.actor)) == ("create", "As for all endpoints", "ben")
    page = save(ben, url, form, **{**copied, "endpoint": ""})
    assert "already" in words_of(page)
    assert RatePolicy.objects.count() == 2


@pytest.mark.parametrize("page_of", ["plan", "list"])
@pytest.mark.parametrize("edited", [False, True], ids=["untouched", "edited"])
def test_a_row_deleted_meanwhile_is_left_out_and_an_edited_one_refused_once(
    anna: Client, ben: Client, free: Plan, page_of: str, edited: bool
) -> None:
    listed = page_of == "list"
    gone, kept = (
        RatePolicy.objects.create(plan=free, rates=f"{n}/s", counted_per=per, mode="log")
        for n, per in ((1, "ip"), (2, "caller"))
    )
    url, prefix = (POLICIES, "form") if listed else (form_url(free), "policies")
    old = opened(ben, url)
    RatePolicy.objects.filter(pk=gone.pk).delete()
    edits = {f"{row(old, prefix, kept)}mode": "enforce"}
    if edited:
        edits[f"{row(old, prefix, gone)}mode"] = "off"
        page = save(ben, url, old, **edits)
        assert "A row that you changed was deleted in the meantime." in words_of(page)
        old, edits = {**form_of(page), "_save": "1"}, {}
    saved(ben, url, old, **edits)
    assert list(RatePolicy.objects.values_list("rates", "mode")) == [("2/s", "enforce")]


def test_a_save_keeps_the_microseconds_of_other_fields(anna: Client) -> None:
    end = datetime(2100, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    policy = RatePolicy.objects.create(rates="1/s", ends_at=end)
    saved(anna, form_url(policy), opened(anna, form_url(policy)), reason="OPS-1")
    policy.refresh_from_db()
    assert (policy.ends_at, policy.reason) == (end, "OPS-1")


@contextmanager
def interfering(*writes: Callable[[], Any]) -> Iterator[None]:
    """Run one of these after each query that reads policies."""
    rest = [*writes]

    def interfere(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if rest and sql.startswith("SELECT") and 'FROM "django_ratequota_ratepolicy"' in sql.replace("`", '"'):
            rest.pop(0)()
        return result

    with connection.execute_wrapper(interfere):
        yield
    assert not rest


@pytest.mark.parametrize("deleted", [False, True])
def test_code_that_writes_before_the_row_is_locked(anna: Client, policy: RatePolicy, deleted: bool) -> None:
    """What it changed stays, and a deleted object is not created again."""
    form, rows = opened(anna, form_url(policy)), RatePolicy.objects.filter(pk=policy.pk)
    with interfering(rows.delete if deleted else partial(rows.update, reason="by code")):
        page = save(anna, form_url(policy), form, rates="5/s")
    assert list(rows.values_list("rates", "reason")) == ([] if deleted else [("5/s", "by code")])
    assert page.status_code == (200 if deleted else 302)
    assert not deleted or "It was deleted in the meantime." in words_of(page)


def test_code_that_saves_between_reading_and_writing_is_seen(anna: Client, policy: RatePolicy) -> None:
    url, rows = form_url(policy), RatePolicy.objects.filter(pk=policy.pk)
    form = opened(anna, url)
    with interfering(partial(rows.update, reason="by code"), partial(rows.update, rates="10/min")):
        page = save(anna, url, form, rates="5/s", mode="log")
    assert "changed rates from 30/min to 10/min" in words_of(page)
    saved(anna, url, {**form_of(page), "_save": "1"})
    policy.refresh_from_db()
    assert (policy.rates, policy.mode, policy.reason) == ("5/s", "log", "by code")


#: Values of fields to choose from, by the model's name.
VALUES = {
    "ratepolicy": {"rates": ["10/min", "20/min", "blocked", "unlimited"], "mode": ["enforce", "log", "off"]},
    "endpoint": {"cost": ["1", "2", "3"], "description": ["", "a", "b"]},
    "plan": {"description": ["", "x", "y"]},
}
#: (model, primary key, field) -> value.
Values = dict[tuple[str, int, str], str]


@dataclass
class Open:
    """A page that an operator has open: what it showed, what is typed, and the names in its form."""

    url: str
    form: dict[str, str]
    names: dict[tuple[str, int, str], str]
    seen: Values = field(default_factory=dict)

    def typed(self) -> Values:
        return {key: self.form[name] for key, name in self.names.items()}


def fields_of(url: str, form: dict[str, str]) -> dict[tuple[str, int, str], str]:
    """Return the name in the form of each field of ``VALUES``."""
    found = {}
    own = re.search(r"/(\w+)/(\d+)/change/", url)
    if own:
        found = {(own[1], int(own[2]), name): name for name in form if name in VALUES[own[1]]}
    for name, pk in form.items():
        if re.fullmatch(r"(policies|form)-\d+-id", name) and pk:
            prefix = name.removesuffix("id")
            columns = [column for column in VALUES["ratepolicy"] if f"{prefix}{column}" in form]
            found |= {("ratepolicy", int(pk), column): f"{prefix}{column}" for column in columns}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_nothing_is_lost_in_200_edits_of_two_operators(
    anna: Client, ben: Client, free: Plan, search: Endpoint, seed: int
) -> None:
    dice = random.Random(seed)
    policies = [
        RatePolicy.objects.create(plan=free, endpoint=endpoint, rates="10/min", counted_per=name)
        for endpoint, name in ((search, "caller"), (search, "ip"), (None, "caller"))
    ]
    urls = [*map(form_url, (free, search, *policies)), POLICIES]
    stored: Values = {}
    for obj in (free, search, *policies):
        kind = obj._meta.model_name or ""
        stored |= {(kind, obj.pk, name): str(getattr(obj, name)) for name in VALUES[kind]}
    begun = PolicyChange.objects.latest("pk").pk
    history: list[tuple[str, Values]] = []
    pages: dict[str, dict[str, Open]] = {"anna": {}, "ben": {}}
    clients = {"anna": anna, "ben": ben}
    edits = refused = 0
    while edits < 200:
        name, url = dice.choice([*clients]), dice.choice(urls)
        page = pages[name].get(url)
        if page is None or dice.random() < 0.2:
            form = opened(clients[name], url)
            pages[name][url] = page = Open(url, form, fields_of(url, form))
            page.seen = page.typed()
            assert page.seen == {key: stored[key] for key in page.names}, (seed, edits)
            continue
        for key in dice.sample(sorted(page.names), k=min(2, len(page.names))):
            page.form[page.names[key]] = dice.choice(VALUES[key[0]][key[2]])
        typed, edits = page.typed(), edits + 1
        written = {key: typed[key] for key in typed if typed[key] not in (page.seen[key], stored[key])}
        conflicts = {key for key in written if stored[key] != page.seen[key]}
        answer = clients[name].post(url, page.form)
        if conflicts:
            refused += 1
            assert words_of(answer).count("Save again to overwrite that.") == len(conflicts), (seed, edits)
            page.form = {**form_of(answer), "_save": "1"}
            page.seen = {key: stored[key] for key in page.names}
            assert page.typed() == {**page.seen, **written}, (seed, edits)
            continue
        assert answer.status_code == 302, (seed, edits, words_of(answer))
        del pages[name][url]
        if written:
            history.append((name, written))
        stored |= written
    assert refused > 10
    for (kind, pk, column), value in stored.items():
        model = {"ratepolicy": RatePolicy, "endpoint": Endpoint, "plan": Plan}[kind]
        assert str(getattr(model.objects.get(pk=pk), column)) == value
    told: dict[Any, tuple[str, Values]] = {}
    for change in PolicyChange.objects.filter(pk__gt=begun).order_by("pk"):
        was, now = change.before or {}, change.after or {}
        changed = [column for column in now if was[column] != now[column]]
        values = {(change.model, int(change.object_id), column): str(now[column]) for column in changed}
        told.setdefault(change.change_id, (str(change.actor), {}))[1].update(values)
    assert [*told.values()] == history
