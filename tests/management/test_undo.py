"""``manage.py ratequota undo``: the same as the page of a save, for saves of any size."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.management import CommandError

from django_ratequota.admin.formatting import moment
from django_ratequota.models import Endpoint, Plan, PolicyChange, RatePolicy
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def undo(change: PolicyChange, *options: str) -> list[str]:
    return run("undo", str(change.change_id), *options).splitlines()


@pytest.fixture
def change(free: Plan, search: Endpoint) -> PolicyChange:
    """One save that edited two policies, one of which was edited again since then."""
    policy = RatePolicy.objects.create(plan=free, rates="1/s")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="2/s")
    RatePolicy.objects.update(mode="log")
    RatePolicy.objects.filter(pk=policy.pk).update(mode="off")
    return PolicyChange.objects.all()[1]


def modes() -> list[str]:
    return list(RatePolicy.objects.order_by("rates").values_list("mode", flat=True))


def test_a_save_is_undone_except_later_edits(change: PolicyChange, published: list[Any]) -> None:
    later = PolicyChange.objects.all()[0]
    stays = (
        "stays unchanged: ratepolicy plan Free × all endpoints: 1/s: Code or a command changed mode from log only to "
        f"off at {moment(later.at)}."
    )
    counted = "0 created, 1 changed, 0 deleted"
    assert undo(change, "--dry-run") == [stays, f"Dry run: would be {counted}. No changes were made."]
    assert modes() == ["off", "log"]
    assert undo(change, "--reason", "OPS-7") == [stays, counted]
    assert modes() == ["off", "enforce"]
    assert PolicyChange.objects.all()[0].reason == "OPS-7"
    assert len(published) == 1
    assert undo(change) == [stays, "Nothing to undo"]


def test_an_unknown_id_is_refused(free: Plan) -> None:
    unknown = PolicyChange()
    with pytest.raises(CommandError, match="No change has the id"):
        undo(unknown)
    with pytest.raises(CommandError, match="write a change id, such as import and boost print, not '4711'"):
        run("undo", "4711")
