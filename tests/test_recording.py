"""Every change leaves a row in its own transaction, and is published when that commits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.core import serializers
from django.db import transaction

from django_ratequota.limiter import default_limiter
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.recording import acting
from django_ratequota.signals import policies_changed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


class Rollback(Exception):
    """Ends a transaction that shall not commit."""


@pytest.fixture
def published() -> Iterator[list[int | None]]:
    """The revisions published so far, as the signal tells them."""
    revisions: list[int | None] = []

    def note(revision: int | None, **_: Any) -> None:
        revisions.append(revision)

    policies_changed.connect(note)
    yield revisions
    policies_changed.disconnect(note)


def rows() -> list[tuple[str, str, str]]:
    """(action, model, user touched) of all changes, in the order they were written."""
    return list(PolicyChange.objects.order_by("pk").values_list("action", "model", "touched_user"))


def one(rates: str = "5/min") -> RatePolicy:
    return RatePolicy.objects.create(rates=rates)


def undone(edit: Callable[[], Any]) -> None:
    """Make the edit in a transaction, or a savepoint, that is rolled back."""
    with transaction.atomic():
        edit()
        transaction.set_rollback(True)


def saved() -> None:
    policy = RatePolicy.objects.get()
    policy.rates = "9/min"
    policy.save()


def bulk_updated() -> None:
    policy = RatePolicy.objects.get()
    policy.rates = "9/min"
    RatePolicy.objects.bulk_update([policy], ["rates"])


def loaded() -> None:
    text = serializers.serialize("json", RatePolicy.objects.all()).replace("5/min", "9/min")
    for loaded in serializers.deserialize("json", text):
        loaded.save()


@pytest.mark.parametrize(
    "edit",
    [
        saved,
        bulk_updated,
        loaded,
        lambda: RatePolicy.objects.update(rates="9/min"),
        lambda: RatePolicy.objects.filter(rates="5/min").order_by("endpoint__name").update(rates="9/min"),
        lambda: async_to_sync(RatePolicy.objects.all().aupdate)(rates="9/min"),
        lambda: RatePolicy.objects.update_or_create(pk=RatePolicy.objects.get().pk, defaults={"rates": "9/min"}),
    ],
    ids=["save", "bulk_update", "fixture", "update", "ordered update", "aupdate", "update_or_create"],
)
def test_a_change_by_any_means_is_recorded_with_both_states(
    edit: Callable[[], Any], published: list[int | None]
) -> None:
    one()
    edit()
    assert rows() == [("create", "ratepolicy", ""), ("update", "ratepolicy", "")]
    change = PolicyChange.objects.first()
    assert (change.before["rates"], change.after["rates"]) == ("5/min", "9/min")
    assert len(published) == 2
    assert published == sorted(published)
    assert default_limiter().stored_revision() == published[-1]


def test_bulk_create_is_recorded_row_by_row_and_published_once(published: list[int | None]) -> None:
    RatePolicy.objects.bulk_create([RatePolicy(rates="5/min"), RatePolicy(rates="9/min", counted_per="ip")])
    assert rows() == [("create", "ratepolicy", "")] * 2
    assert [row.object_id for row in PolicyChange.objects.order_by("pk")] == [
        str(policy.pk) for policy in RatePolicy.objects.order_by("pk")
    ]
    assert len(published) == 1


def test_what_the_database_does_not_tell_makes_everything_load_anew() -> None:
    one()
    RatePolicy.objects.bulk_create([RatePolicy(rates="9/min")], ignore_conflicts=True)
    assert rows()[-1] == ("publish", "*", "")


def test_deleting_is_recorded_with_all_that_goes_with_it() -> None:
    alice = User.objects.create(username="alice")
    plan = Plan.objects.create(name="Pro", slug="pro")
    search = Endpoint.objects.create(name="search")
    PlanAssignment.objects.create(user=alice, plan=plan)
    RatePolicy.objects.create(user=alice, rates="1/s")
    RatePolicy.objects.create(plan=plan, endpoint=search, rates="1/s")
    PolicyChange.objects.all().delete()
    key = str(alice.pk)
    alice.delete()
    assert sorted(rows()) == [("delete", "planassignment", key), ("delete", "ratepolicy", key)]
    PolicyChange.objects.all().delete()
    Endpoint.objects.all().delete()
    assert sorted(rows()) == [("delete", "endpoint", ""), ("delete", "ratepolicy", "")]
    plan.delete()
    assert rows()[-1] == ("delete", "plan", "")
    assert PolicyChange.objects.first().before["slug"] == "pro"


def test_a_row_names_the_user_only_where_one_alone_is_touched() -> None:
    alice, bob = User.objects.create(username="alice"), User.objects.create(username="bob")
    policy = RatePolicy.objects.create(user=alice, rates="1/s")
    assert rows()[-1][2] == str(alice.pk)
    policy.rates = "2/s"
    policy.save()
    assert rows()[-1][2] == str(alice.pk)
    policy.user = bob
    policy.save()
    assert rows()[-1][2] == "", "both users lose or gain something"
    policy.user = None
    policy.save()
    assert rows()[-1][2] == "", "everyone gains something"


def test_nothing_is_recorded_where_nothing_changed(published: list[int | None]) -> None:
    policy = one()
    policy.save()
    RatePolicy.objects.update(rates="5/min")
    RatePolicy.objects.none().update(rates="7/min")
    assert len(rows()) == len(published) == 1


def test_a_rolled_back_change_leaves_no_row_and_no_revision(published: list[int | None]) -> None:
    undone(one)
    assert rows() == []
    with transaction.atomic():
        undone(one)
        assert not published
    assert rows() == []
    assert published == []
    assert default_limiter().stored_revision() == 0


def test_a_savepoint_that_is_rolled_back_does_not_take_the_publication_along(published: list[int | None]) -> None:
    """Registering once a transaction must not hang on an inner block that is undone."""
    with transaction.atomic():
        undone(one)
        one("5/min")
        undone(lambda: RatePolicy.objects.update(rates="8/min"))
    assert len(published) == 1
    assert RatePolicy.objects.get().rates == "5/min"


def test_the_row_is_in_the_saves_own_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a transaction Django commits a save before post_save is sent: a failing record must undo it."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise Rollback

    monkeypatch.setattr("django_ratequota.recording._write", fail)
    with pytest.raises(Rollback):
        one()
    assert not RatePolicy.objects.exists()


def test_a_hundred_saves_in_one_transaction_are_one_publication(published: list[int | None]) -> None:
    with transaction.atomic():
        for number in range(100):
            Endpoint.objects.create(name=f"e{number}")
    assert len(rows()) == 100
    assert len(published) == 1


def test_actor_and_reason_are_kept() -> None:
    alice = User.objects.create(username="alice")
    with acting(alice, "OPS-7"):
        policy = one()
    policy.reason = "contract"
    policy.save()
    assert [(row.actor, row.reason) for row in PolicyChange.objects.order_by("pk")] == [
        (alice, "OPS-7"),
        (None, "contract"),
    ]


def test_an_unreachable_store_fails_no_save(
    settings: Any, published: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0"}
    with caplog.at_level(logging.ERROR, "django_ratequota"):
        one()
    assert RatePolicy.objects.exists()
    assert published == [None]
    assert "could not be published" in caplog.text


def test_the_revision_grows_though_redis_lost_its_data(
    published: list[int | None], redis_client: redis.Redis
) -> None:
    one()
    redis_client.delete("rqtest:revision")
    RatePolicy.objects.update(rates="9/min")
    assert published[1] > published[0]  # type: ignore[operator]


def test_the_revision_grows_though_the_stored_one_is_ahead_of_the_clock(
    published: list[int | None], redis_client: redis.Redis
) -> None:
    redis_client.set("rqtest:revision", 2**52)
    one()
    assert published == [2**52 + 1]


def test_loaddata_is_recorded(tmp_path: Path) -> None:
    from django.core.management import call_command

    one()
    file = tmp_path / "policies.json"
    call_command("dumpdata", "django_ratequota.ratepolicy", output=str(file), verbosity=0)
    file.write_text(file.read_text().replace("5/min", "9/min"))
    call_command("loaddata", str(file), verbosity=0)
    assert rows()[-1] == ("update", "ratepolicy", "")
