"""Subject lists and their members in files."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User

from django_ratequota.models import ListMember, RatePolicy, SubjectList
from django_ratequota.policyfile import apply_file
from tests.policyfile.examples import delete_all_rows, export, refused

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LISTS = """\
version: 1

subject_lists:
  - name: Bad bots
    description: Seen in the logs.

members:
  - subject_list: Bad bots
    subject: ip:198.51.100.0/24
    ends_at: 2999-02-01T00:00:00Z
    reason: OPS-8
  - subject_list: Bad bots
    user: alice

policies:
  - subject_list: Bad bots
    rates: blocked
"""


@pytest.mark.parametrize("form", ["yaml", "json"])
def test_lists_and_members_survive_export_and_import(alice: User, form: str) -> None:
    assert len(apply_file(LISTS).created) == 4
    text = export(form)
    delete_all_rows()
    assert [line.split(":")[0] for line in apply_file(text).lines()] == [
        "+ subject_list Bad bots",
        "+ member ip",
        "+ member user alice of list Bad bots",
        "+ policy list Bad bots × all endpoints",
    ]
    assert export(form) == text
    assert not apply_file(text, prune=True).changes
    assert RatePolicy.objects.get().subject_list == SubjectList.objects.get()
    assert list(ListMember.objects.order_by("pk").values_list("subject", "user__username", "reason")) == [
        ("ip:198.51.100.0/24", None, "OPS-8"),
        (None, "alice", ""),
    ]


def test_a_member_with_another_end_is_changed(alice: User) -> None:
    apply_file(LISTS)
    diff = apply_file(LISTS.replace("2999", "2998"), prune=True)
    assert (len(diff.changed), len(diff.changes)) == (1, 1)


def test_pruning_a_list_deletes_its_members_and_policies(alice: User) -> None:
    apply_file(LISTS)
    diff = apply_file("version: 1\nsubject_lists: []", prune=True)
    assert len(diff.deleted) == 4
    assert not any(model.objects.exists() for model in (SubjectList, ListMember, RatePolicy))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("    user: alice\n", ""), "12: members[1]: Choose a user, or write a subject: exactly one of them."),
        (("    user: alice\n", "    subject: 198.51.100.0/24\n"), "is already used at line 8"),
        (
            ("    rates: blocked", "    rates: blocked\n    user: alice"),
            "Choose one audience: user, subject",
        ),
        (("- subject_list: Bad bots\n    rates", "- subject_list: Bad bot\n    rates"), "did you mean Bad bots?"),
        (("ip:198.51.100.0/24", "ip:198.51.100.1/24"), "has host bits set"),
    ],
)
def test_bad_members_name_the_line(alice: User, edit: tuple[str, str], message: str) -> None:
    found = refused(LISTS.replace(*edit))
    assert len(found) == 1
    assert message in found[0]
