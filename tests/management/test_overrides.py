"""``manage.py ratequota block``, ``boost`` and ``give-back``: what operators do in the admin, in the terminal."""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError

from django_ratequota.models import Endpoint, PolicyChange, QuotaWindow, RatePolicy
from tests.support.commands import run
from tests.support.operators import a_customer
from tests.support.requests import check_from
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


@pytest.fixture
def alice() -> User:
    return a_customer()


def limits(user: User) -> list[int]:
    return [status.limit for status in check_from(user, scope="search").statuses]


def printed_command(text: str) -> str:
    """Run the command that the last line of an output offers; returns its output."""
    words = shlex.split(text.splitlines()[-1].partition(": ")[2])
    assert words[:2] == ["manage.py", "ratequota"]
    return run(*words[2:])


@pytest.mark.parametrize("by", ["name", "key"])
def test_a_user_is_blocked_until_somebody_ends_it(alice: User, by: str) -> None:
    who = "alice" if by == "name" else str(alice.pk)
    text = run("block", "--user", who, "--reason", "OPS-7")
    assert text.startswith(f"Blocked until somebody ends it: user:{alice.pk} (alice)\n")
    with pytest.raises(
        CommandError, match=r"is already blocked until somebody ends it\. End that block first with --end\."
    ):
        run("block", "--user", who)
    assert not check_from(alice).allowed
    assert PolicyChange.objects.all()[0].reason == "OPS-7"
    assert printed_command(f"{text.strip()} --reason OPS-8") == f"No longer blocked: user:{alice.pk} (alice)\n"
    assert PolicyChange.objects.all()[0].reason == "OPS-8"
    assert check_from(alice).allowed
    with pytest.raises(CommandError, match=rf"user:{alice.pk} \(alice\) is not blocked"):
        run("block", "--user", who, "--end")


def test_a_network_is_blocked_for_hours(alice: User) -> None:
    text = run("block", "--subject", "203.0.113.0/24", "--hours", "2")
    [block] = RatePolicy.objects.filter(subject="ip:203.0.113.0/24")
    assert block.ends_at is not None
    assert block.starts_at is not None
    assert 7199 <= (block.ends_at - block.starts_at).total_seconds() <= 7201
    assert re.match(r"Blocked until .* UTC: ip:203", text)
    assert not check_from(None, "203.0.113.9").allowed
    assert printed_command(text) == "No longer blocked: ip:203.0.113.0/24\n"
    assert check_from(None, "203.0.113.9").allowed


def test_a_boost_doubles_the_limits_of_a_request(alice: User) -> None:
    assert limits(alice) == [1000, 10, 10000]
    text = run("boost", "--user", "alice", "--endpoint", "search", "--reason", "OPS-7")
    assert "user alice × search: 20/min instead of 10/min" in text
    assert limits(alice) == [2000, 20, 10000], "what all share stays as it is"
    [reason] = {change.reason for change in PolicyChange.objects.all()[:2]}
    assert reason == "OPS-7"
    assert "2 deleted" in printed_command(text)
    assert limits(alice) == [1000, 10, 10000]


def test_a_boost_of_one_policy_has_rates_of_its_own(alice: User) -> None:
    [policy] = RatePolicy.objects.filter(rates="10/min")
    request = ["boost", "--user", "alice", "--endpoint", "search", "--rates", "70/min", "--hours", "5"]
    with pytest.raises(CommandError, match=rf"--rates is for one policy. Choose it with --policy, .*{policy.pk}"):
        run(*request)
    run(*request, "--policy", str(policy.pk))
    assert limits(alice) == [1000, 70, 10000]
    run("boost", "--user", "alice", "--policy", str(RatePolicy.objects.get(rates="1000/day").pk))
    assert limits(alice) == [2000, 70, 10000]


def test_units_are_given_back_to_the_counters_that_are_chosen(alice: User) -> None:
    for _ in range(11):
        check_from(alice, scope="search")
    request = ["give-back", "--user", "alice", "--endpoint", "search"]
    text = run(*request, "--units", "4", "--limit", "search: 10/min", "--reason", "OPS-7")
    assert text.splitlines() == [
        f"refunded 4 to search: 10/min of user:{alice.pk}: 10 used before, 6 now",
        "1 counter changed",
    ]
    assert [status.remaining for status in check_from(alice, scope="search").statuses] == [989, 3, 9989]
    assert PolicyChange.objects.all()[0].reason == "OPS-7"
    run("reset", *request[1:], "--limit", "search: 10/min")
    assert [status.remaining for status in check_from(alice, scope="search").statuses] == [988, 9, 9988]


@pytest.mark.usefixtures("checkpointing")
def test_past_periods_are_refunded_and_reset(alice: User) -> None:
    subject = f"user:{alice.pk}"
    starts_at, ends_at = datetime(2025, 10, 1, tzinfo=UTC), datetime(2025, 11, 1, tzinfo=UTC)
    for pk in (None, Endpoint.objects.get(name="search").pk):
        named = {"subject": subject, "counter": f"{{{subject}}}:{pk or 0}:fwmonth", "endpoint_id": pk}
        counted(starts_at=starts_at, ends_at=ends_at, used=50, limit=70, **named)
    past = ["--user", "alice", "--first-day", "2025-10-01"]
    printed = run("give-back", *past, "--units", "20", "--key", "evt_1", "--endpoint", "search")
    assert printed.splitlines() == [
        f"refunded 20 to all endpoints: 70/month of {subject}: 50 used before, 30 now",
        f"refunded 20 to search: 70/month of {subject}: 50 used before, 30 now",
        "2 counters changed",
    ]
    printed = run("give-back", *past, "--units", "25", "--key", "evt_1", "--endpoint", "search")
    assert printed.splitlines()[1:] == [
        f"refunded 20 to search: 70/month of {subject}: 50 used before, 30 now",
        "Nothing changed now, because the key was used before",
    ]
    run("reset", *past, "--endpoint", "search", "--limit", "search: 70/month")
    run("reset", *past, "--key", "evt_2")
    assert set(QuotaWindow.objects.values_list("used", "charged")) == {(0, 50)}
    assert "has no counters there" in run("reset", "--user", "alice", "--first-day", "2025-10-02")
    for day in ("October", "2025-02-30"):
        with pytest.raises(CommandError, match="write a day as in 2026-10-01"):
            run("reset", "--user", "alice", "--first-day", day)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("block --user nobody", "There is no user 'nobody'"),
        ("block --user ''", "There is no user ''"),
        (f"block --subject ::1 --reason {'x' * 201}", "Ensure this value has at most 200 characters"),
        ("block --subject user:7", "Choose the user instead of user:7."),
        ("block --subject 10.0.0.0/33", "does not appear to be an IPv4 or IPv6 network"),
        ("block --subject ::1 --hours 0", "write a whole number from 1 to 87600"),
        ("boost --user alice", "Choose the request with --endpoint or --path, or choose policies"),
        ("boost --user alice --endpoint search --policy 0", "That policy does not apply to this request"),
        ("boost --user alice --endpoint search --policy {} --rates 70", "(example: 70/min)"),
        ("boost --user alice --endpoint search --policy {} --rates blocked", "run manage.py ratequota block"),
        ("boost --ip ::1 --path /admin/login/", "No policy applies to this request, so there is nothing to boost"),
        ("give-back --user alice --endpoint search --units 1", "Refund at most 0 to "),
        (
            "give-back --user alice --endpoint search --units 1",
            "Choose a limit with --limit, one of ['all endpoints: ",
        ),
        (
            "give-back --user alice --endpoint search --units 1 --limit day",
            "has no counter of 'day' there. Choose one",
        ),
        ("give-back --user alice --endpoint search --units all", "write a whole number from 1 to"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(alice: User, arguments: str, message: str) -> None:
    before = PolicyChange.objects.count()
    policy = RatePolicy.objects.get(rates="10/min").pk
    with pytest.raises(CommandError) as caught:
        run(*shlex.split(arguments.format(policy)))
    assert message in str(caught.value)
    assert PolicyChange.objects.count() == before
