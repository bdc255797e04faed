"""Which changes are one save: they share a change id, and send ``policies_changed`` once, after the commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import Client
from django.urls import reverse

from django_ratequota.changes.writer import changed_by, write_counted, write_publication
from django_ratequota.models import Plan, PolicyChange
from django_ratequota.signals import policies_changed
from tests.support.failure import Failure, fail

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


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
    @changed_by(None, "by hand")
    def edit() -> None:
        plan("Free")
        with transaction.atomic():
            plan("Pro")
            fail()

    with pytest.raises(Failure):
        edit()
    assert saves() == [["Free"]]
    assert [[row.object_text for row in one["changes"]] for one in sent] == [["Free"]]


@pytest.mark.parametrize("author", [False, True])
def test_the_first_row_left_by_a_savepoint_is_marked(sent: list[dict[str, Any]], author: bool) -> None:
    """The list of saves shows marked rows only: without one, the save was not in the list."""
    with transaction.atomic(), changed_by(None, "x") if author else nullcontext():
        with transaction.atomic():
            plan("Free")
            transaction.set_rollback(True)
        plan("Pro")
        plan("Max")
    assert saves() == [["Pro", "Max"]]
    assert len(sent) == 1


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


def test_a_failing_receiver_breaks_nothing(sent: list[dict[str, Any]], caplog: pytest.LogCaptureFixture) -> None:
    policies_changed.connect(fail)
    try:
        plan("Free")
    finally:
        policies_changed.disconnect(fail)
    assert Plan.objects.exists()
    assert len(sent) == 1
    assert "it fails" in caplog.text


def test_publications_and_resets_have_a_change_id() -> None:
    write_publication("by hand")
    write_counted("everyone", "reset", before={}, after={})
    with changed_by(None, "both"):
        write_counted("ip:203.0.113.7", "reset", before={}, after={})
        write_counted("everyone", "reset", before={}, after={})
    assert saves() == [[""], ["everyone"], ["ip:203.0.113.7", "everyone"]]
