"""Subject lists in the admin: pasting and removing members, search, sizes and permissions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client, RequestFactory
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.models import ListMember, PolicyChange, RatePolicy, SubjectList
from tests.support.operators import client_of, text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies", "tenants")]

BASE = "/admin/django_ratequota"
MEMBERS = f"{BASE}/listmember/"


@pytest.fixture
def bots() -> SubjectList:
    return SubjectList.objects.create(name="Bad bots")


def page(bots: SubjectList, verb: str = "add") -> str:
    return f"{BASE}/subjectlist/{bots.pk}/{verb}-members/"


def held() -> list[tuple[Any, ...]]:
    return list(ListMember.objects.order_by("pk").values_list("user__username", "subject", "reason"))


def blocked(address: str) -> bool:
    return not check_request(RequestFactory().get("/", REMOTE_ADDR=address)).allowed


def test_pasted_members_are_in_the_list_at_the_next_request(operator: Client, bots: SubjectList) -> None:
    alice = User.objects.create(username="alice")
    RatePolicy.objects.create(subject_list=bots, rates="blocked")
    assert not blocked("203.0.113.9")
    day = (timezone.localdate() + timedelta(days=30)).isoformat()
    text = f"# seen on Monday\n203.0.113.0/24\n\nip:198.51.100.7 until {day} # OPS-7\nuser:{alice.pk}\n"
    text += "tenant:a b\n203.0.113.0/24\nalice"
    reply = operator.post(page(bots), {"text": text, "change_reason": "OPS-1"}, follow=True)
    assert "Bad bots: 4 members were added. 2 were in the list already." in text_of(reply)
    assert held() == [
        (None, "ip:203.0.113.0/24", ""),
        (None, "ip:198.51.100.7", "OPS-7"),
        ("alice", None, ""),
        (None, "tenant:a b", ""),
    ]
    ends_at = ListMember.objects.get(subject="ip:198.51.100.7").ends_at
    assert timezone.localtime(ends_at) == timezone.make_aware(datetime.fromisoformat(day)) + timedelta(days=1)
    assert blocked("203.0.113.9")
    assert blocked("198.51.100.7")
    assert not blocked("198.51.100.8")
    changes = PolicyChange.objects.filter(model="listmember")
    assert {(c.actor.username, c.reason) for c in changes.order_by("pk")[:1]} == {("operator", "OPS-1")}
    assert changes.count() == 4


def test_all_bad_lines_are_listed_and_nothing_is_lost(operator: Client, bots: SubjectList) -> None:
    text = "203.0.113.7\nalice\nuser:nobody\n203.0.113.0/33\n10.0.0.1 until tomorrow\n10.0.0.2 until 2001-01-01"
    text += f"\na\u202eb\n10.0.0.3 until 2026-02-30\n10.0.0.4 # {'x' * 201}"
    content = text_of(operator.post(page(bots), {"text": text}))
    assert not ListMember.objects.exists()
    assert text in content, "the text is still there"
    for words in (
        "Line 2, “alice”: There is no such user.",
        "Line 3, “user:nobody”: There is no such user.",
        "Line 4, “203.0.113.0/33”: &#x27;203.0.113.0/33&#x27; does not appear to be",
        "Line 5, “10.0.0.1”: Enter the end as a day, such as until 2026-12-31",
        "Line 6, “10.0.0.2”: This end is in the past.",
        "Line 7, “a\\u202eb”: There is no such user.",
        "Line 8, “10.0.0.3”: Enter the end as a day",
        "Line 9, “10.0.0.4”: Ensure this value has at most 200 characters",
    ):
        assert words in content
    assert "Line 1" not in content


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bots.txt", b"203.0.113.7 # OPS-7\r\n198.51.100.0/24\r\n"),
        ("bots.CSV", b"member;end;reason\n203.0.113.7;;OPS-7\n198.51.100.0/24;;\n"),
        ("bots.csv", b'"203.0.113.7","","OPS-7"\n"198.51.100.0/24"\n'),
        ("bots.csv", "203.0.113.7\t\tOPS-7\r\n198.51.100.0/24\t\t".encode("utf-16")),
        ("bots.csv", b'Member;End;Reason\n203.0.113.7;;"OPS-7"\n198.51.100.0/24;\n'),
        ("bots.csv", b"203.0.113.7;;OPS-7\n198.51.100.0/24\n"),
    ],
)
def test_files_are_read(operator: Client, bots: SubjectList, name: str, content: bytes) -> None:
    reply = operator.post(page(bots), {"file": SimpleUploadedFile(name, content)}, follow=True)
    assert "2 members were added." in text_of(reply)
    assert held() == [(None, "ip:203.0.113.7", "OPS-7"), (None, "ip:198.51.100.0/24", "")]


def test_a_reason_in_a_file_may_have_quotes_delimiters_and_lines(operator: Client, bots: SubjectList) -> None:
    content = b'member;end;reason\n203.0.113.7;;"M\xc3\xbcller, ""Hans"";\r\nOPS-7"\n198.51.100.0/24;;a, b, c\n'
    reply = operator.post(page(bots), {"file": SimpleUploadedFile("bots.csv", content)}, follow=True)
    assert "2 members were added." in text_of(reply)
    assert held() == [(None, "ip:203.0.113.7", 'Müller, "Hans"; OPS-7'), (None, "ip:198.51.100.0/24", "a, b, c")]


@pytest.mark.parametrize("size", [10, 200_000])
def test_a_quote_that_is_never_closed_swallows_no_members(operator: Client, bots: SubjectList, size: int) -> None:
    content = b'member,end,reason\n203.0.113.7,,\n203.0.113.8,,"OPS-7\n' + b"198.51.100.0/24,,\n" * size
    reply = operator.post(page(bots), {"file": SimpleUploadedFile("bots.csv", content)})
    assert "Line 3 is not CSV: " in text_of(reply)
    assert held() == []


@pytest.mark.parametrize("end", ["9999-12-31", "9999-12-31 23:59:59"])
def test_an_end_that_means_never_is_refused_in_every_time_zone(operator: Client, bots: SubjectList, end: str) -> None:
    for zone in ("America/New_York", "Asia/Tokyo"):
        with timezone.override(zone):
            reply = operator.post(page(bots), {"text": f"203.0.113.7 until {end}"})
            assert "Leave the field empty for a time that never comes." in text_of(reply)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Paste at least one line or choose a file."),
        ({"text": "# only a comment"}, "Paste at least one line or choose a file."),
        ({"text": "10.0.0.1", "file": b"10.0.0.2"}, "Paste lines or choose a file, not both."),
        ({"file": b"\xff\xfa\x00"}, "this is not"),
        ({"file": b"10.0.0.1\n" * 25_001}, "There are more than 25,000 lines. Split them up or import a policy file"),
    ],
)
def test_a_form_without_lines_says_what_to_do(
    operator: Client, bots: SubjectList, data: dict[str, Any], message: str
) -> None:
    if "file" in data:
        data = {**data, "file": SimpleUploadedFile("bots.txt", data["file"])}
    assert message in text_of(operator.post(page(bots), data))


def test_members_keep_their_dates_unless_the_line_has_others(operator: Client, bots: SubjectList) -> None:
    soon, past = timezone.now() + timedelta(days=3), timezone.now() - timedelta(days=3)
    start = past - timedelta(days=1)
    for subject, ends_at in (("ip:10.0.0.1", soon), ("ip:10.0.0.2", past), ("ip:10.0.0.3", None)):
        dates = {"starts_at": start, "ends_at": ends_at}
        ListMember.objects.create(subject_list=bots, subject=subject, reason="old", **dates)
    ListMember.objects.create(subject_list=SubjectList.objects.create(name="Partners"), subject="ip:10.0.0.4")
    lines = "10.0.0.1\n10.0.0.2\n10.0.0.3 until 2999-12-31 # new\n10.0.0.4"
    support = client_of("add_listmember", name="support")
    content = text_of(support.post(page(bots), {"text": lines}))
    assert content.count("This entry is already in the list. You may not change its dates.") == 2
    reply = operator.post(page(bots), {"text": lines}, follow=True)
    words = "1 member was added. The dates of 2 members were changed. 1 was in the list already."
    assert words in text_of(reply)
    reply = operator.post(page(bots), {"text": "10.0.0.3 until 2999-12-31"}, follow=True)
    assert "1 was in the list already." in text_of(reply)
    rows = {row.subject: (row.starts_at, row.ends_at, row.reason) for row in bots.members.all()}
    assert rows == {
        "ip:10.0.0.1": (start, soon, "old"),
        "ip:10.0.0.2": (None, None, "old"),  # it had ended
        "ip:10.0.0.3": (start, datetime(3000, 1, 1, tzinfo=UTC), "new"),
        "ip:10.0.0.4": (None, None, ""),
    }


def test_members_are_removed_by_pasting(operator: Client, bots: SubjectList) -> None:
    others = SubjectList.objects.create(name="Partners")
    for subject_list in (bots, others):
        ListMember.objects.create(subject_list=subject_list, subject="ip:10.0.0.1")
    alice = User.objects.create(username="alice")
    ListMember.objects.create(subject_list=bots, user=alice)
    reply = operator.post(page(bots, "remove"), {"text": f"10.0.0.1\nuser:{alice.pk}\n10.0.0.2"}, follow=True)
    assert "2 members were removed. 1 was not in the list." in text_of(reply)
    assert [member.subject_list for member in ListMember.objects.all()] == [others]
    assert PolicyChange.objects.filter(model="listmember", action="delete").count() == 2


def test_the_search_for_an_address_finds_the_networks_around_it(operator: Client, bots: SubjectList) -> None:
    for subject in ("ip:203.0.113.0/24", "ip:203.0.113.7", "ip:203.0.113.7/32", "ip:203.0.113.8", "ip:2001:db8::/32"):
        ListMember.objects.create(subject_list=bots, subject=subject)

    def found(text: str) -> set[str]:
        listed = operator.get(MEMBERS, {"q": text}).context["cl"].result_list
        return {member.subject for member in listed}

    assert found("203.0.113.7") == {"ip:203.0.113.0/24", "ip:203.0.113.7", "ip:203.0.113.7/32"}
    assert found("203.0.113.0/25") == {"ip:203.0.113.0/24"}
    assert found("2001:db8::1") == {"ip:2001:db8::/32"}
    assert found("113.8") == {"ip:203.0.113.8"}
