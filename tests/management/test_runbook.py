"""docs/runbook.md: its commands do what the person on call relies on."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from django.core.management import call_command

from django_ratequota.models import Endpoint, RatePolicy
from tests.package.test_docs import commands
from tests.support.commands import run
from tests.support.requests import check_from
from tests.support.snippets import ROOT, snippets

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

ATTACKER = "203.0.113.7"


@pytest.fixture(autouse=True)
def limits() -> None:
    search = Endpoint.objects.create(name="search")
    RatePolicy.objects.create(endpoint=search, rates="1/3650day", on_error="deny")
    RatePolicy.objects.create(subject=f"ip:{ATTACKER}", rates="blocked")


def type_command(part: str) -> None:
    """Run the only command of the page that contains this text."""
    page = snippets(ROOT / "docs" / "runbook.md")
    lines = [line for one in page if one.language == "console" for line, _printed in commands(one)]
    [found] = [line for line in lines if part in line]
    call_command(*shlex.split(found)[2:])


def undo_as_status_says() -> None:
    [verb] = re.findall(r"^to undo it   manage\.py ratequota (.+)$", run("status"), re.MULTILINE)
    run(*verb.split())


def admitted(address: str = "198.51.100.1") -> bool:
    return check_from(address=address, scope="search").allowed


def test_all_limits_but_blocks_become_log_only() -> None:
    """A log-only policy next to an enforced one must not make the command fail."""
    RatePolicy.objects.create(endpoint=Endpoint.objects.get(), rates="1/hour", mode="log")
    before = sorted(RatePolicy.objects.values_list("pk", "mode"))
    assert [admitted(), admitted()] == [True, False]
    type_command("update(mode='log')")
    assert [admitted(), admitted(ATTACKER)] == [True, False]
    undo_as_status_says()
    assert not admitted()
    assert sorted(RatePolicy.objects.values_list("pk", "mode")) == before


def test_one_endpoint_is_exempt() -> None:
    assert [admitted(), admitted()] == [True, False]
    type_command("update(limits='none')")
    assert admitted()
    undo_as_status_says()
    assert not admitted()


def test_blocks_hold_while_redis_is_down(settings: Any) -> None:
    type_command("update(on_error='allow')")
    assert not admitted(ATTACKER)
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5.0, "STATISTICS_SECONDS": 0}
    assert [admitted(), admitted(ATTACKER)] == [True, False]


def test_policies_stop_denying() -> None:
    type_command("update(on_error='allow')")
    assert set(RatePolicy.objects.filter(rates="1/3650day").values_list("on_error", flat=True)) == {"allow"}
