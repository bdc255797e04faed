"""What management commands print of stored names: text that a terminal shows, and does not obey."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import RequestFactory
from django.utils import timezone

from django_ratequota import check_request
from django_ratequota.changes.writer import changed_by
from django_ratequota.ledger.book import flush
from django_ratequota.models import (
    Endpoint,
    ListMember,
    Plan,
    PlanAssignment,
    PolicyChange,
    RatePolicy,
    SubjectList,
)
from django_ratequota.monitoring.collector import collector
from tests.project.settings import MIDDLEWARE

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh_policies", "recording", "checkpointing"),
]

#: A cleared screen, lines of its own, marks of direction, and a terminal code of one byte.
HOSTILE = "a\x1b[2J\nFORGED 0 of 100\u202e\u2028FORGED\x9b31m\rFORGED\x7f"
NAMED = ["--identifier", f"tenant={HOSTILE}"]
SUBJECT = ["--subject", f"tenant:{HOSTILE}"]
PLACE = ["--endpoint", HOSTILE]
#: The words of each verb; in braces what ``hostile`` returns.
VERBS = [
    ["explain", *NAMED, *PLACE],
    ["explain", "--user", "{user}", *PLACE],
    ["explain", "--user", HOSTILE],
    ["explain", "--id", "{refusal}"],
    ["near"],
    ["status"],
    ["usage", "--month", "{month}"],
    ["usage", "--month", "{month}", "--format", "csv"],
    ["usage", "--month", "{month}", "--format", "json"],
    ["usage", "--month", "2001-01", *SUBJECT],
    ["export", "--assignments"],
    ["export", "--assignments", "--format", "json"],
    ["import", "{file}"],
    ["export-subject", *SUBJECT],
    ["forget", *SUBJECT],
    ["give-back", *NAMED, "--units", "1"],
    ["reset", *NAMED],
    ["block", *SUBJECT],
    ["block", *SUBJECT],
    ["block", *SUBJECT, "--end"],
    ["boost", "--user", "{user}", *PLACE, "--reason", HOSTILE],
    ["undo", "{save}", "--dry-run"],
    # What a stranger may have asked an operator to paste.
    ["explain", "--user", f"nobody{HOSTILE}"],
    ["explain", "--id", HOSTILE],
    ["explain", *NAMED, "--plan", HOSTILE],
    ["reset", *NAMED, "--limit", HOSTILE],
    ["block", "--subject", f"user:{HOSTILE}"],
    ["import", HOSTILE],
]


def tenant(request: Any) -> str:
    return HOSTILE


def names(subjects: Any) -> dict[str, str]:
    return dict.fromkeys(subjects, HOSTILE)


@pytest.fixture
def hostile(settings: Any, tmp_path: Path) -> dict[str, str]:
    """One of each kind of object with such a name, and a refusal; returns what the verbs need to find them."""
    own = {"IDENTIFIERS": {"tenant": f"{__name__}.tenant"}, "SUBJECT_NAMES": f"{__name__}.names"}
    settings.RATEQUOTA = {**settings.RATEQUOTA, **own}
    user = User.objects.create(username=HOSTILE)
    with changed_by(user, HOSTILE):
        plan = Plan.objects.create(name=HOSTILE, slug="evil", description=HOSTILE, default_for="anonymous")
        friends = SubjectList.objects.create(name=HOSTILE)
        ListMember.objects.create(subject_list=friends, user=user, reason=HOSTILE)
        endpoint = Endpoint.objects.create(name=HOSTILE, routes=HOSTILE, charged_statuses="200")
        PlanAssignment.objects.create(subject=f"tenant:{HOSTILE}", plan=plan, reason=HOSTILE)
        RatePolicy.objects.create(plan=plan, rates="2/month", counted_per="tenant", reason=HOSTILE)
        RatePolicy.objects.create(user=user, endpoint=endpoint, rates="5/hour", reason=HOSTILE)
        RatePolicy.objects.create(subject_list=friends, rates="9/hour", reason=HOSTILE)
        unreadable = RatePolicy.objects.create(subject=f"tenant:{HOSTILE}", endpoint=endpoint, rates="5/hour")
    with connection.cursor() as cursor:  # as raw SQL or a newer version may have written it
        cursor.execute("UPDATE django_ratequota_ratepolicy SET rates = %s WHERE id = %s", [HOSTILE, unreadable.pk])
    file = tmp_path / f"{HOSTILE}.yaml"
    call_command("ratequota", "export", "--assignments", "--output", str(file))
    request = RequestFactory().generic(HOSTILE, "/", REMOTE_ADDR="203.0.113.7", HTTP_USER_AGENT=HOSTILE)
    refused = [check_request(request, again=True) for _ in range(3)][-1]
    request.close()
    collector.flush()
    flush()
    save = PolicyChange.objects.latest("pk").change_id
    found = {"user": user.pk, "refusal": refused.refusal_id, "save": save, "file": file}
    return {"month": f"{timezone.now():%Y-%m}", **{name: str(value) for name, value in found.items()}}


def test_names_with_terminal_codes(hostile: dict[str, str], settings: Any, capsys: Any) -> None:
    settings.MIDDLEWARE = [one for one in MIDDLEWARE if "ratequota" not in one]  # one more check names endpoints
    commands = [["ratequota", *(word.format(**hostile) for word in words)] for words in VERBS]
    for words in [*commands, ["check", "--database", "default"]]:
        refusal = ""
        try:
            call_command(*words)
        except CommandError as error:
            refusal = str(error)
        printed = capsys.readouterr()
        text = printed.out + printed.err + refusal
        assert "FORGED" in text, words
        for line in text.split("\n"):
            assert line.replace("\t", "").isprintable(), ascii(line)
            assert not line.lstrip().startswith("FORGED"), ascii(line)
