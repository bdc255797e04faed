"""``manage.py ratequota export-subject`` and ``forget``, and what stays of a deleted user."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import redis
from django.apps import apps
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client

from django_ratequota import check_request
from django_ratequota.engine.keys import beginning
from django_ratequota.ledger.book import flush
from django_ratequota.models import (
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    QuotaDay,
    QuotaWindow,
    RatePolicy,
    SubjectList,
)
from django_ratequota.monitoring import health
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.packing import unpack_attempts
from django_ratequota.operations.overrides import propose_block
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.operators import text_of

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "recording", "checkpointing"),
]

#: Keys of users, in no other text. A bystander's number begins with the person's.
VALUE, OTHER = (str(User._meta.pk.to_python(number)) for number in (471147, 4711479))


@pytest.fixture(autouse=True)
def _tenants(settings: Any, recording: None) -> None:
    callers = {"IDENTIFIERS": {"tenant": "tests.project.views.tenant"}, "CALLER": ["tenant", "user", "ip"]}
    settings.RATEQUOTA = {**settings.RATEQUOTA, **callers}


def owner(subject: str) -> dict[str, Any]:
    """Return the fields of what is for the subject, whose user is created."""
    kind, value = subject.split(":")
    if kind != "user":
        return {"subject": subject}
    return {"user": User.objects.get_or_create(pk=value, defaults={"username": f"name{value}"})[0]}


def ask(subject: str, cost: int = 1, **attributes: Any) -> Any:
    kind, value = subject.split(":")
    attributes |= {"tenant": value} if kind == "tenant" else {"tenant": None, **owner(subject)}
    return check_request(request_from(**attributes), cost=cost)


def live(subject: str, free: Plan, bots: SubjectList) -> None:
    """Have the subject edited, counted, refused and reset."""
    own = owner(subject)
    policy = RatePolicy.objects.create(**own, rates="100/month, 2 requests/min sliding_window_log", reason="contract")
    RatePolicy.objects.filter(pk=policy.pk).update(rates="90/month, 2 requests/min sliding_window_log")
    PlanAssignment.objects.create(**own, plan=free)
    ListMember.objects.create(**own, subject_list=bots)
    assert [ask(subject, 5).allowed for _ in range(3)] == [True, True, False]
    write()


def write() -> None:
    flush()
    collector.flush()


def rows_with(pattern: str) -> list[str]:
    """Return the rows of our tables with a text that matches."""
    models: Any = apps.get_app_config("django_ratequota").get_models()
    rows = [(model.__name__, json.dumps(row, default=str)) for model in models for row in model.objects.values()]
    return [f"{name} {row}" for name, row in rows if re.search(pattern, row)]


def keys_with(client: redis.Redis, subject: str) -> list[str]:
    """Return the keys in Redis whose name or value has the subject."""
    found = []
    for key in client.scan_iter("rqtest:*"):
        kind, value = client.type(key), None
        if kind == b"hash":
            value = client.hgetall(key)
        elif kind == b"zset":
            value = client.zrange(key, 0, -1)
        elif b":usage:" in key:
            value = [unpack_attempts(chunk) for chunk in client.lrange(key, 0, -1)]
        if beginning(subject) in key.decode() or re.search(rf"{subject}\b", str(value)):
            found.append(key.decode())
    return sorted(found)


def used() -> list[tuple[str, int, int]]:
    """Return (subject, used, used by the days) of each window."""
    return [
        (
            row.subject,
            row.used,
            sum(day.charged - day.refunded for day in QuotaDay.objects.filter(counter=row.counter)),
        )
        for row in QuotaWindow.objects.order_by("subject", "first_day")
    ]


def test_a_deleted_user_s_name_is_in_no_row(free: Plan) -> None:
    """The history named the users of policies, assignments, list members and resets."""
    user, other = (User.objects.create(username=name, email=f"{name}@example.com") for name in ("zaphod", "ford"))
    policy = RatePolicy.objects.create(user=user, rates="100/month")
    for changes in ({"rates": "5/month"}, {"user": other}, {"user": user}):
        RatePolicy.objects.filter(pk=policy.pk).update(**changes)
    run("undo", str(PolicyChange.objects.all()[2].change_id))
    PlanAssignment.objects.create(user=user, plan=free)
    ListMember.objects.create(user=user, subject_list=SubjectList.objects.create(name="Bots"))
    ask(f"user:{user.pk}")
    write()
    run("reset", "--user", "zaphod")
    propose_block(f"user:{user.pk}").save()
    user.delete()
    assert PolicyChange.objects.count() > 12
    assert rows_with("(?i)zaphod") == []


@pytest.mark.parametrize("kind", ["user", "tenant"])
def test_a_person_is_exported_and_forgotten(
    kind: str, free: Plan, operator: Client, redis_client: redis.Redis, published: list[Any]
) -> None:
    subject, other = f"{kind}:{VALUE}", f"{kind}:{OTHER}"
    bots = SubjectList.objects.create(name="Bots")
    for one in (subject, other):
        live(one, free, bots)
    command = ["--user", f"name{VALUE}"] if kind == "user" else ["--subject", subject]

    exported: dict[str, list[Any]] = {}
    for line in run("export-subject", *command).splitlines():
        values = json.loads(line)
        exported.setdefault(values["kind"], []).append(values)
    attempts = exported["attempts"]  # of one second or two
    assert {kind: len(found) for kind, found in exported.items()} == {
        **{"RatePolicy": 1, "PlanAssignment": 1, "ListMember": 1, "PolicyChange": 4, "QuotaWindow": 1, "QuotaDay": 1},
        **{"counter": 2, "refusals": 1, "requests": 5, "attempts": len(attempts)},
    }
    assert not re.search(OTHER, json.dumps(exported))
    [window], [refusal] = exported["QuotaWindow"], exported["refusals"]
    assert (window["subject"], window["used"], window["rate"]) == (subject, 10, "90/month")
    assert (refusal["caller"], refusal["count"]) == (subject, 1)
    assert [sum(attempt[name] for attempt in attempts) for name in ("admitted", "refused")] == [2, 1]
    assert [10.0, 0.0] in [counter["holds"] for counter in exported["counter"]]

    published.clear()
    before = PolicyChange.objects.count()
    last = run("forget", *command).splitlines()[-1]
    assert (last, PolicyChange.objects.count()) == ("No changes were made yet. Add --yes to delete the data.", before)
    assert run("forget", *command, "--yes").splitlines() == [
        "No worker has reported in the last minute, so there are no counters to write",
        f"{subject}: RatePolicy 1, PlanAssignment 1, ListMember 1, PolicyChange 4, QuotaWindow 1, QuotaDay 1, "
        f"counter 2, refusals 1, requests 5, attempts {len(attempts)}",
        "Deleted. Its usage figures stay in the ledger without the name.",
    ]
    assert rows_with(rf"\b{VALUE}\b") == []
    assert keys_with(redis_client, subject) == []
    gone = QuotaWindow.objects.get(subject__startswith="gone:").subject
    assert used() == [(gone, 10, 10), (other, 10, 10)]
    assert PolicyChange.objects.count() == before + 4, "three deletions, and a publication"
    assert len(rows_with(gone)) == 4 + 3 + 1
    assert len(published) == 1
    assert len(keys_with(redis_client, other)) > 5
    assert {attempts.caller for attempts in recorded_attempts().attempts} == {other}
    assert gone in text_of(operator.get("/admin/django_ratequota/policychange/"))
    undone = run("undo", str(PolicyChange.objects.all()[0].change_id), "--dry-run")
    assert "is no longer valid" in undone or "Enter kind:value" in undone

    assert run("forget", *command, "--yes").splitlines()[-1] == f"{subject}: no data"
    RatePolicy.objects.create(rates="1000/month")
    assert ask(subject).statuses[0].used == 1
    flush()
    assert used() == [(gone, 10, 10), *sorted([(subject, 1, 1), (other, 10, 10)])]


def test_what_a_process_has_not_written_is_waited_for(free: Plan) -> None:
    live(f"user:{VALUE}", free, SubjectList.objects.create(name="Bots"))
    RatePolicy.objects.create(rates="1000/month")
    ask("tenant:acme")
    health.report()
    with pytest.raises(CommandError, match="1 of 1 workers have not written their counters within 1 s"):
        run("forget", "--subject", f"user:{VALUE}", "--yes", "--timeout", "1")
    assert used() == [(f"user:{VALUE}", 10, 10)]


def test_where_processes_do_not_report_they_are_stopped_first(settings: Any) -> None:
    """The command went on, and what processes wrote afterwards had the name again."""
    verb = "forget --subject user:7 --yes"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0}
    with pytest.raises(CommandError, match=re.escape("Each writes its counters when it stops. Then add --no-wait.")):
        run(*verb.split())
    assert run(*verb.split(), "--no-wait").splitlines()[0] == "Did not wait for workers"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("export-subject --user nobody", "There is no user 'nobody'. For a deleted user, enter --subject user:KEY."),
        ("forget --subject acme --yes", "Enter kind:value, such as tenant:acme or user:7, not 'acme'"),
    ],
)
def test_a_typo_is_refused(arguments: str, error: str) -> None:
    with pytest.raises(CommandError, match=re.escape(error)):
        run(*arguments.split())


def test_a_subject_of_nobody_has_nothing(free: Plan) -> None:
    """A user's key that cannot be one must not stand for what has no user."""
    RatePolicy.objects.create(plan=free, rates="1/s")
    for subject in ("user:nobody", "ip:203.0.113.7", "tenant:acme"):
        assert run("forget", "--subject", subject, "--yes").splitlines()[-1] == f"{subject}: no data"
    assert not PolicyChange.objects.filter(model__in=["*", "counter"]).exists()


def test_the_next_owner_of_a_policy_stays_in_its_history() -> None:
    policy = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="1/s")
    RatePolicy.objects.filter(pk=policy.pk).update(subject="ip:203.0.113.8")
    run("forget", "--subject", "ip:203.0.113.7", "--yes")
    moved = PolicyChange.objects.get(model="ratepolicy", action="update")
    assert moved.before["subject"].startswith("gone:")
    assert moved.after["subject"] == "ip:203.0.113.8"
