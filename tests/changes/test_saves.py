"""Which changes are one save: they share a change id, and send ``policies_changed`` once, after the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import Client, TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_ratequota.changes.writer import changed_by, write_publication, write_reset
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from django_ratequota.signals import policies_changed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


class Failure(Exception):
    """An error raised by a test."""


def fail(**_: Any) -> None:
    raise Failure("no mail server")


@pytest.fixture
def sent() -> Iterator[list[dict[str, Any]]]:
    """The arguments that ``policies_changed`` was sent with during the test."""
    signals: list[dict[str, Any]] = []

    def receive(sender: Any, signal: Any, **arguments: Any) -> None:
        signals.append(arguments)

    policies_changed.connect(receive)
    yield signals
    policies_changed.disconnect(receive)


def saves() -> list[list[str]]:
    """Return the objects of each save, in order; assert that exactly the first row of each is marked."""
    found: dict[UUID, list[str]] = {}
    for change in PolicyChange.objects.order_by("pk"):
        assert change.first is (change.change_id not in found), change
        found.setdefault(change.change_id, []).append(change.object_text)
    return list(found.values())


def plan(name: str) -> Plan:
    return Plan.objects.create(name=name, slug=name.lower())


def test_a_transaction_is_one_save(sent: list[dict[str, Any]]) -> None:
    with transaction.atomic():
        plan("Free")
        with transaction.atomic():
            Plan.objects.bulk_create([Plan(name="Pro", slug="pro"), Plan(name="Max", slug="max")])
        Plan.objects.filter(slug="max").update(name="Top")
        assert sent == []
    assert saves() == [["Free", "Pro", "Max", "Top"]]
    assert [one["change_id"] for one in sent] == [PolicyChange.objects.all()[0].change_id]


def test_each_call_outside_of_a_transaction_is_a_save(sent: list[dict[str, Any]]) -> None:
    free = plan("Free")
    Plan.objects.bulk_create([Plan(name="Pro", slug="pro"), Plan(name="Max", slug="max")])
    Plan.objects.exclude(pk=free.pk).update(description="Paid", default_for="")
    Plan.objects.filter(slug="pro").update(slug="p")
    free.delete()
    assert saves() == [["Free"], ["Pro", "Max"], ["Pro", "Max"], ["Pro"], ["Free"]]
    assert len(sent) == 4, "descriptions are not sent"


def test_a_deletion_and_its_cascade_are_one_save() -> None:
    free = plan("Free")
    for per in ("ip", "caller"):
        RatePolicy.objects.create(plan=free, rates="1/s", counted_per=per)
    free.delete()
    assert sorted(saves()[-1]) == ["Free", "plan Free × all endpoints: 1/s", "plan Free × all endpoints: 1/s"]


def test_an_import_is_one_save(sent: list[dict[str, Any]]) -> None:
    apply_file("version: 1\nplans:\n- {name: Free, slug: free}\n- {name: Pro, slug: pro}\n", reason="OPS-7")
    assert saves() == [["Free", "Pro"]]
    assert [(one["reason"], one["changes"].count()) for one in sent] == [("OPS-7", 2)]


def test_one_author_makes_one_save_of_several_transactions(sent: list[dict[str, Any]], alice: User) -> None:
    with changed_by(alice, "Ticket 4711"):
        plan("Free")
        with changed_by(alice, "A part of it"):
            plan("Pro")
        assert sent == []
    plan("Max")
    assert saves() == [["Free", "Pro"], ["Max"]]
    first, second = sent
    assert (first["actor"], first["reason"], first["changes"].count()) == (alice, "Ticket 4711", 2)
    assert (second["actor"], second["reason"]) == (None, "")
    assert first["revision"] < second["revision"]


def test_authors_inside_of_a_transaction_make_a_save_each(sent: list[dict[str, Any]], alice: User) -> None:
    with transaction.atomic():
        plan("Free")
        with changed_by(alice, "first"):
            plan("Pro")
        with changed_by(None, "second"):
            plan("Max")
        assert sent == []
    assert saves() == [["Free"], ["Pro"], ["Max"]]
    assert [one["reason"] for one in sent] == ["", "first", "second"]
    assert len({one["revision"] for one in sent}) == 1


def test_what_is_committed_is_sent_if_the_rest_fails(sent: list[dict[str, Any]]) -> None:
    def edit() -> None:
        with changed_by(None, "by hand"):
            plan("Free")
            with transaction.atomic():
                plan("Pro")
                raise Failure

    with pytest.raises(Failure):
        edit()
    assert saves() == [["Free"]]
    assert [[row.object_text for row in one["changes"]] for one in sent] == [["Free"]]


@pytest.mark.parametrize("author", [False, True])
def test_the_first_row_left_by_a_savepoint_is_marked(sent: list[dict[str, Any]], author: bool) -> None:
    """The list of saves shows marked rows only: without one, the save was not in the list."""

    def edit() -> None:
        try:
            with transaction.atomic():
                plan("Free")
                fail()
        except Failure:
            plan("Pro")
        plan("Max")

    with transaction.atomic():
        if author:
            with changed_by(None, "x"):
                edit()
        else:
            edit()
    assert saves() == [["Pro", "Max"]]
    assert len(sent) == 1


def test_a_page_of_the_admin_is_one_save(operator: Client, sent: list[dict[str, Any]]) -> None:
    for name in ("Free", "Pro", "Max"):
        plan(name)
    sent.clear()
    keys = list(Plan.objects.values_list("pk", flat=True))
    done = operator.post(
        reverse("admin:django_ratequota_plan_changelist"),
        {"action": "delete_selected", "_selected_action": keys, "post": "yes", "change_reason": "Ticket 4711"},
    )
    assert done.status_code == 302
    assert sorted(saves()[-1]) == ["Free", "Max", "Pro"]
    assert [(one["actor"].username, one["reason"]) for one in sent] == [("operator", "Ticket 4711")]


def test_a_page_inside_of_the_requests_transaction_is_sent_after_it(
    operator: Client, sent: list[dict[str, Any]]
) -> None:
    connection.settings_dict["ATOMIC_REQUESTS"] = True
    try:
        path = reverse("admin:django_ratequota_plan_add")
        form = {"name": "Free", "slug": "free", "position": 1, "change_reason": "Ticket 4711"}
        management = {"policies-TOTAL_FORMS": 1, "policies-INITIAL_FORMS": 0}
        row = {"policies-0-rates": "1/s", "policies-0-algorithm": "gcra", "policies-0-mode": "enforce"}
        done = operator.post(path, {**form, **management, **row, "policies-0-counted_per": "ip"})
        assert done.status_code == 302
    finally:
        connection.settings_dict["ATOMIC_REQUESTS"] = False
    assert saves() == [["Free", "plan Free × all endpoints: 1/s"]]
    assert [(one["reason"], one["revision"] is None) for one in sent] == [("Ticket 4711", False)]


def test_async_code_makes_one_save_of_a_transaction(sent: list[dict[str, Any]]) -> None:
    def edit() -> None:
        with transaction.atomic():
            plan("Free")
            plan("Pro")

    async def run() -> None:
        await sync_to_async(edit)()
        await Plan.objects.acreate(name="Max", slug="max")

    async_to_sync(run)()
    assert saves() == [["Free", "Pro"], ["Max"]]
    assert len(sent) == 2


def test_a_failing_receiver_breaks_nothing(sent: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    policies_changed.connect(fail)
    try:
        plan("Free")
    finally:
        policies_changed.disconnect(fail)
    assert Plan.objects.exists()
    assert len(sent) == 1
    assert "no mail server" in caplog.text


def test_the_rows_of_a_signal_are_read_when_asked_for(sent: list[dict[str, Any]]) -> None:
    with CaptureQueriesContext(connection) as queries:
        Plan.objects.bulk_create([Plan(name=f"P{number}", slug=f"p{number}") for number in range(700)])
    assert not [query for query in queries if query["sql"].startswith("SELECT") and "policychange" in query["sql"]][
        1:
    ]
    [one] = sent
    assert [row.object_text for row in one["changes"][:2]] == ["P0", "P1"]
    assert one["changes"].count() == 700


def test_a_row_of_a_save_costs_one_query_more() -> None:
    """Whether it is the first one; the first row itself asks nothing."""
    for number in (1, 3, 30):
        with CaptureQueriesContext(connection) as queries, transaction.atomic():
            for position in range(number):
                plan(f"P{number}-{position}")
        asked = sum("change_id" in query["sql"] and query["sql"].startswith("SELECT") for query in queries)
        assert asked == number - 1


def test_captured_hooks_end_a_save(sent: list[dict[str, Any]]) -> None:
    with transaction.atomic():
        for name in ("Free", "Pro"):
            with TestCase.captureOnCommitCallbacks(execute=True):
                plan(name)
        transaction.set_rollback(True)
    assert len({one["change_id"] for one in sent}) == len(sent) == 2


def test_publications_and_resets_have_a_change_id() -> None:
    write_publication("by hand")
    write_reset("everyone", [])
    with changed_by(None, "both"):
        write_reset("ip:203.0.113.7", [])
        write_reset("everyone", [])
    assert saves() == [[""], ["everyone"], ["ip:203.0.113.7", "everyone"]]


@pytest.mark.parametrize(
    ("change", "plans"),
    [
        (lambda free, pro: free.save(), []),
        (lambda free, pro: Plan.objects.filter(pk=free.pk).update(name="F"), ["free"]),
        (lambda free, pro: RatePolicy.objects.create(plan=pro, rates="1/s"), ["pro"]),
        (lambda free, pro: RatePolicy.objects.create(rates="1/s"), [""]),
        (lambda free, pro: RatePolicy.objects.create(plan=pro, rates="1/s").delete(), ["pro", "pro"]),
        (lambda free, pro: Endpoint.objects.create(name="search"), [""]),
        (lambda free, pro: moved(free, pro), ["free", "pro"]),
        (
            lambda free, pro: PlanAssignment.objects.create(user=User.objects.create(username="a"), plan=free),
            ["free"],
        ),
    ],
)
def test_a_row_names_the_plan_that_it_touches(change: Callable[[Plan, Plan], Any], plans: list[str]) -> None:
    free, pro = plan("Free"), plan("Pro")
    known = {"": "", str(free.pk): "free", str(pro.pk): "pro"}
    change(free, pro)
    assert [known[row.touched_plan] for row in PolicyChange.objects.order_by("pk")[2:]] == plans


def moved(free: Plan, pro: Plan) -> None:
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    policy.plan = pro
    policy.save()
