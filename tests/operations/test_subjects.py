"""Subjects as operators find and read them: display names, and the known subjects that a text begins."""

from __future__ import annotations

import re
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.test import Client
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.models import ListMember, Plan, PlanAssignment, RatePolicy, SubjectList
from django_ratequota.monitoring.collector import collector
from django_ratequota.operations.subjects import (
    MAX_NAME,
    MAX_OFFERED,
    identified_subjects,
    known_subjects,
    subject_names,
    subjects_named,
)
from django_ratequota.utils import problems
from tests.admin.test_explain import DOWN, LIST, PAGE, staff
from tests.project.views import request_from
from tests.support.commands import run
from tests.support.operators import text_of
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

MEMBERS = "/admin/django_ratequota/listmember/"
IDENTIFIERS = {"tenant": "tests.project.views.api_key", "api_key": "tests.project.views.api_key"}
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m\n"
#: What ``names_of`` was asked about, and what it returns or does.
asked: list[list[str]] = []
answer: Any = None


def names_of(subjects: list[str]) -> Any:
    asked.append(subjects)
    return answer() if callable(answer) else answer


names_of.ratequota_search = lambda text: iter(["tenant:acme", "user:7"] if text.lower() in "acme gmbh" else [])  # type: ignore[attr-defined]


async def anames_of(subjects: list[str]) -> Any:
    return {}


@pytest.fixture(autouse=True)
def named(settings: Any) -> None:
    global answer
    asked.clear()
    problems.forget()
    answer = {"tenant:acme": "Acme GmbH"}
    settings.RATEQUOTA = {
        **settings.RATEQUOTA,
        "IDENTIFIERS": IDENTIFIERS,
        "SUBJECT_NAMES": "tests.operations.test_subjects.names_of",
    }


def answers(value: Any) -> None:
    global answer
    answer = value


def test_only_subjects_of_identifiers_are_asked_about_in_one_call() -> None:
    subjects = [
        "tenant:acme",
        "tenant:acme",
        "tenant:b",
        "tenant:",
        "user:7",
        "ip:203.0.113.7",
        "plan:3",
        "gone:x",
        "",
    ]
    assert subject_names(subjects) == {"tenant:acme": "Acme GmbH"}
    assert asked == [["tenant:acme", "tenant:b"]]
    asked.clear()
    assert subject_names(["user:7"]) == {}
    assert asked == []


def test_without_the_setting_nobody_is_asked(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "SUBJECT_NAMES": ""}
    assert subject_names(["tenant:acme"]) == {}
    assert asked == []


def test_subjects_are_found_by_their_names(alice: User) -> None:
    assert subjects_named("LIC") == [f"user:{alice.pk}"]
    assert subjects_named("gmbh") == identified_subjects("gmbh") == ["tenant:acme"], "users are not the project's"
    assert known_subjects("gmbh", [], seen=True) == ["tenant:acme"]
    assert known_subjects("gmbh", [], seen=False) == identified_subjects("") == identified_subjects("globex") == []


def failing() -> Any:
    raise RuntimeError("no directory today")


@pytest.mark.parametrize("value", [None, {}, {"tenant:acme": None}, {"tenant:acme": ""}, {"tenant:other": "Other"}])
def test_a_subject_without_a_name_keeps_its_own(value: Any) -> None:
    answers(value)
    assert subject_names(["tenant:acme"]) == {}
    assert problems.recent() == {}


@pytest.mark.parametrize("value", [failing, ["Acme"], "Acme", 7])
def test_an_error_is_logged_and_no_subject_has_a_name(value: Any) -> None:
    answers(value)
    assert subject_names(["tenant:acme"]) == {}
    assert list(problems.recent()) == ["tests.operations.test_subjects.names_of"]


def test_an_error_in_a_query_leaves_the_transaction_of_the_page_alone() -> None:
    def write_then_fail() -> Any:
        User.objects.create(username="half written")
        with connection.cursor() as cursor:
            cursor.execute("SELECT * FROM no_such_table")

    answers(write_then_fail)
    with transaction.atomic():
        assert subject_names(["tenant:acme"]) == {}
        assert not User.objects.filter(username="half written").exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (HOSTILE, "<script>alert(1)</script>\\u202e [31m"),
        ("x" * 500, "x" * (MAX_NAME - 1) + "…"),
        (4711, "4711"),
        ("  Acme\r\nGmbH ", "Acme GmbH"),
    ],
)
def test_names_are_cut_and_harmless(value: Any, name: str) -> None:
    answers({"tenant:acme": value})
    assert subject_names(["tenant:acme"]) == {"tenant:acme": name}


def everywhere() -> None:
    """Write acme's subject wherever operators may find it."""
    plan = Plan.objects.create(name="Pro", slug="pro")
    PlanAssignment.objects.create(subject="tenant:assigned", plan=plan)
    RatePolicy.objects.create(subject="tenant:policy", rates="5/min")
    ListMember.objects.create(subject_list=SubjectList.objects.create(name="L"), subject="tenant:member")
    windows = {"tenant:seen": 1, "tenant:long_ago": 72}
    for subject, hours in windows.items():
        ends_at = timezone.now() - timedelta(hours=hours)
        starts_at = ends_at - timedelta(days=1)
        span = {"starts_at": starts_at, "ends_at": ends_at, "written_at": ends_at}
        counted(subject=subject, period="day", used=1, limit=5, **span)


def all_tables() -> list[Any]:
    return [RatePolicy.objects.all(), PlanAssignment.objects.all(), ListMember.objects.all()]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("tenant:", ["assigned", "member", "policy", "seen"]),
        ("", ["assigned", "member", "policy", "seen"]),
        ("ten", ["assigned", "member", "policy", "seen"]),
        ("tenant:se", ["seen"]),
        ("se", ["seen"]),
        ("tenant:Se", []),
        ("tenant:%", []),
        ("tenant:_", []),
        ("tenant:x\x00", []),
        ("api_key:", []),
        ("x" * 10_000, []),
    ],
)
def test_known_subjects_are_found_by_how_they_begin(text: str, found: list[str]) -> None:
    everywhere()
    assert known_subjects(text, all_tables(), seen=True) == [f"tenant:{value}" for value in found]


def test_callers_of_the_last_days_are_found(settings: Any, recording: None) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "user", "ip"]}
    RatePolicy.objects.create(rates="1/hour")
    beta = ("beta", "beta\\z")
    for key in ("acme", "acme", *beta, "\u00e9"):
        check_key(key)
    collector.flush()
    assert known_subjects("tenant:", [], seen=True) == [f"tenant:{key}" for key in ("acme", *beta, "\u00e9")]
    assert known_subjects("tenant:b", [], seen=True) == [f"tenant:{key}" for key in beta]
    assert known_subjects("tenant:b", [], seen=False) == []


def check_key(key: str) -> None:
    check_request(request_from(headers={"X-Api-Key": key}))


@pytest.mark.parametrize("redis", [{"REDIS_URL": DOWN}, {"REDIS_URL": "memory://"}, {"ENABLED": False}], ids=str)
def test_without_redis_the_database_still_knows_some(settings: Any, redis: dict[str, Any]) -> None:
    everywhere()
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "ip"], **redis}
    assert known_subjects("tenant:se", all_tables(), seen=True) == ["tenant:seen"]


def test_however_many_subjects_there_are_a_few_are_offered_in_order() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    for number in range(MAX_OFFERED + 5):
        PlanAssignment.objects.create(subject=f"tenant:{number:03}", plan=plan)
    assert known_subjects("tenant:", all_tables(), seen=True) == [f"tenant:{n:03}" for n in range(MAX_OFFERED)]


SUBJECTS = f"{LIST}subjects/"


@pytest.mark.parametrize(
    ("permissions", "found"),
    [
        (None, ["assigned", "member", "policy", "seen"]),
        (("view_ratepolicy",), ["policy", "seen"]),
        (("grant_override",), ["policy", "seen"]),
        (("block_callers",), ["policy", "seen"]),
        (("view_planassignment",), ["assigned"]),
        (("add_listmember",), ["member"]),
        (("view_plan", "view_endpoint"), None),
        ((), None),
    ],
)
def test_operators_are_offered_what_they_may_see(
    permissions: tuple[str, ...] | None, found: list[str] | None
) -> None:
    everywhere()
    page = staff(permissions).get(SUBJECTS, {"q": "tenant:"})
    assert page.status_code == (403 if found is None else 200)
    if found is not None:
        assert page.json() == {"subjects": [[f"tenant:{value}", ""] for value in found]}


@pytest.mark.parametrize(
    "path",
    [f"{LIST}add/", f"{MEMBERS}add/", PAGE, "/admin/django_ratequota/"],
    ids=["policy", "member", "explain", "home"],
)
def test_fields_for_subjects_complete_them(path: str) -> None:
    page = text_of(staff(None).get(path))
    assert f'data-ratequota-subjects="{SUBJECTS}"' in page
    assert "django_ratequota/subjects.js" in page


def test_the_fields_of_explain_complete_the_values_of_their_identifiers() -> None:
    page = text_of(staff(None).get(PAGE))
    for kind in IDENTIFIERS:
        assert re.search(rf'name="identifier_{kind}"[^>]*data-ratequota-kind="{kind}"', page)


SHOWN = "Acme GmbH (tenant:acme)"


def acme() -> Client:
    """Write a policy for acme, counted per tenant, and log an operator in."""
    RatePolicy.objects.create(subject="tenant:acme", counted_per="tenant", rates="5/hour")
    return staff(None)


@pytest.mark.parametrize(
    "page",
    [
        "",
        "explain/?identifier_tenant=acme",
        "block/?caller=tenant:acme",
        "counters/?identifier_tenant=acme&bucket=all/hour+per+tenant",
        "boost/?identifier_tenant=acme&policy={pk}",
    ],
)
def test_pages_show_an_organisation_with_its_name(page: str) -> None:
    operator = acme()
    address = LIST + page.format(pk=RatePolicy.objects.get().pk)
    assert SHOWN in unescape(text_of(operator.get(address)))
    assert len(asked) == 1
    answers(failing)
    assert "tenant:acme" in unescape(text_of(operator.get(address)))
    assert "no directory today" in problems.recent()["tests.operations.test_subjects.names_of"]


def test_traffic_and_the_home_show_names(settings: Any, recording: None) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["tenant", "ip"]}
    operator = acme()
    for _ in range(6):
        check_key("acme")
    collector.flush()
    assert SHOWN in text_of(operator.get(f"{LIST}traffic/"))
    assert len(asked) == 1
    assert SHOWN in text_of(operator.get("/admin/django_ratequota/"))
    assert len(asked) == 2


@pytest.mark.parametrize("verb", ["explain", "reset"])
def test_commands_show_names(verb: str) -> None:
    RatePolicy.objects.create(subject="tenant:acme", counted_per="tenant", rates="5/hour")
    check_key("acme")
    assert f"all endpoints: 5/hour per tenant of {SHOWN}:" in run(verb, "--identifier", "tenant=acme")
    assert len(asked) == 1


def test_a_subject_is_found_by_its_value_alone() -> None:
    operator = acme()
    page = operator.get(PAGE, {"id": "acme"})
    assert (page.status_code, page["Location"]) == (302, f"{PAGE}?identifier_tenant=acme")
    RatePolicy.objects.bulk_create(RatePolicy(subject=f"api_key:acme{n or ''}", rates="5/hour") for n in range(300))
    user = User.objects.create(username="acme")
    several = f"3 accounts match: user:{user.pk} (acme), tenant:acme, api_key:acme."
    assert several in text_of(operator.get(PAGE, {"id": "acme"}))
