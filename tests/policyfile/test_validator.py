"""Problems of a file: each with its line and field, and nothing is changed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User, UserManager
from django.core.management import CommandError

from django_ratequota.models import Endpoint, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from django_ratequota.policyfile.schema import file_value, model_value
from tests.policyfile.examples import EDITED, delete_all_rows, export, refused
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

BAD = {
    "version: 1\nplan: []": ["2: plan: a file has no such field; did you mean plans?"],
    "plans: []": ["1: : version is missing: write version: 1"],
    "version: 2": ["1: version: only version 1 is supported, not '2'"],
    "[]": ["1: : the file must begin with version: 1, not with a list"],
    "": ["1: : the file is empty"],
    "# only a comment\n": ["1: : the file is empty"],
    "version: 1\nplans:\n": [
        "2: plans: this must be a list, not nothing; write [] for none, "
        "or leave the section out to change nothing in it"
    ],
    "version: 1\nplans:\n  free: {}": [
        "2: plans: this must be a list, not a mapping; write [] for none, "
        "or leave the section out to change nothing in it"
    ],
    "version: 1\nplans:\n- free": ["3: plans[0]: a plan must be a mapping of fields to values, not text"],
    "version: 1\nplans:\n- slug: x": ["3: plans[0].name: is missing"],
    "version: 1\nplans:\n- name: x\n  slug:": ["4: plans[0].slug: is missing"],
    "version: 1\nplans:\n- name: yes\n  slug: x": [
        "3: plans[0].name: this must be text, but YAML reads 'yes' as true or false: put it in quotes"
    ],
    "version: 1\nplans:\n- name: 2026-01-01\n  slug: 1": [
        "3: plans[0].name: this must be text, but YAML reads '2026-01-01' as a date: put it in quotes",
        "4: plans[0].slug: this must be text, but YAML reads '1' as a number: put it in quotes",
    ],
    "version: 1\nplans:\n- name: [a]\n  slug: a b": [
        "3: plans[0].name: this must be text, not a list",
        "4: plans[0].slug: Enter a valid “slug” consisting of letters, numbers, underscores or hyphens.",
    ],
    "version: 1\nplans:\n- {slug: a, name: A}\n- {slug: b, name: A}": [
        "4: plans[1].name: 'A' is taken by the plan of line 3"
    ],
    "version: 1\nplans:\n- {slug: a, name: A}\n- {slug: a, name: B}": ["4: plans[1].slug: is already used at line 3"],
    "version: 1\nplans:\n- {slug: a, name: Pro}": [
        "3: plans[0].name: 'Pro' is taken by plan 'pro', which this file does not name"
    ],
    "version: 1\nplans:\n- {slug: a, name: A, default_for: authenticated}": [
        "3: plans[0].default_for: 'authenticated' is taken by plan 'free', which this file does not name"
    ],
    "version: 1\nplans:\n- {slug: a, name: A, default_for: anonymus}": [
        "3: plans[0].default_for: 'anonymus' must be one of authenticated, anonymous; did you mean anonymous?"
    ],
    "version: 1\nendpoints:\n- name: all\n  cost: 0": [
        "3: endpoints[0].name: 'all' stands for all endpoints together in headers; choose another name.",
        "4: endpoints[0].cost: Ensure this value is greater than or equal to 1.",
    ],
    "version: 1\nendpoints:\n- name: e\n  cost: 010": [
        "4: endpoints[0].cost: this must be a whole number, not '010'"
    ],
    "version: 1\nendpoints:\n- name: e\n  cost: " + "9" * 5000: [
        "4: endpoints[0].cost: this must be a whole number, not '999999999999999999999999999999999999999…"
    ],
    "version: 1\nendpoints:\n- name: e\n  routes: /a": [
        "4: endpoints[0].routes: this must be a list, such as [/a], not text"
    ],
    "version: 1\nendpoints:\n- name: e\n  methods:\n  - GET POST": [
        "5: endpoints[0].methods[0]: this must be one word without spaces, not 'GET POST'"
    ],
    "version: 1\nendpoints:\n- name: e\n  routes:\n  - [/a]": [
        "5: endpoints[0].routes[0]: this must be text, not a list"
    ],
    "version: 1\nendpoints:\n- name: e\n  methods:\n  - GET\n  - GTE": [
        "4: endpoints[0].methods: 'GTE' is not an HTTP method; choose from GET, POST, PUT, PATCH, DELETE, OPTIONS, "
        "TRACE, CONNECT."
    ],
    "version: 1\npolicies:\n- rates: 10/mn": [
        "3: policies[0].rates: expected a unit (s, min, hour, day, week or month) at character 4, not 'mn'; "
        "write for example 100/min"
    ],
    "version: 1\npolicies:\n- rats: 10/min\n- rates:": [
        "3: policies[0].rats: a policy has no such field; did you mean rates?",
        "4: policies[1].rates: is missing",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  plan: fre\n  endpoint: serch\n  user: bob": [
        "4: policies[0].plan: there is no plan 'fre', neither in this file nor in the database; did you mean free?",
        "5: policies[0].endpoint: there is no endpoint 'serch', neither in this file nor in the database; "
        "did you mean search?",
        "6: policies[0].user: no user has the name 'bob'",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  plan: free\n  user: alice": [
        "3: policies[0]: Choose one audience: user, subject, list or plan; leave the others empty."
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  mode: Logg\n  counted_per: us\n  subject: mail:x": [
        "4: policies[0].mode: 'Logg' must be one of enforce, log, off; did you mean log?",
        "5: policies[0].counted_per: Nothing is counted per 'us'; choose caller, ip, plan, everyone.",
        "6: policies[0].subject: Write kind:value, where kind is one of ip, such as ip:203.0.113.7.",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  subject: ip:192.0.2.1\n- rates: 2/s\n  subject: ip:::ffff:192.0.2.1": [
        "5: policies[1]: line 3 has a policy of the same audience, endpoint and counted_per, and neither has dates: "
        "merge them, or give one dates"
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  starts_at: 2026-02-01T00:00:00Z\n  ends_at: 2026-02-01T00:00:00Z": [
        "5: policies[0].ends_at: The end must lie after the start."
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  starts_at: 2026-02-01\n  ends_at: soon": [
        "4: policies[0].starts_at: '2026-02-01' has no time zone; write one such as 2026-01-31T12:00:00Z",
        "5: policies[0].ends_at: 'soon' is not a time; write one such as 2026-01-31T12:00:00Z",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  starts_at: 0001-01-01T00:00:00+14:00\n  ends_at: 7": [
        "4: policies[0].starts_at: '0001-01-01T00:00:00+14:00' is not a time; write one such as 2026-01-31T12:00:00Z",
        "5: policies[0].ends_at: this must be a time, not '7'; write one such as 2026-01-31T12:00:00Z",
    ],
    "version: 1\nassignments:\n- subject: tenant:acme": [
        "3: assignments[0].plan: is missing",
        "3: assignments[0].starts_at: is missing",
        "3: assignments[0].subject: RATEQUOTA['IDENTIFIERS'] is empty, so only users can be on a plan: choose a "
        "user.",
    ],
    "version: 1\nplans: []\nplans: []": ["3: plans: is already set at line 2"],
    "version: 1\npolicies:\n- rates: 1/s\n  rates: 2/s\n  cost: 1": [
        "4: policies[0].rates: is already set at line 3",
        "5: policies[0].cost: a policy has no such field; choose from endpoint, plan, subject_list, subject, user, "
        "counted_per, rates, algorithm, mode, on_error, durable, starts_at, ends_at, reason",
    ],
}


@pytest.mark.parametrize("text", BAD)
def test_problems_name_line_and_field(sample: None, text: str) -> None:
    assert refused(text) == BAD[text]


def test_all_problems_are_reported_and_nothing_is_changed(
    sample: None, file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file(
        EDITED.replace("rates: blocked", "rates: \x1b[31m").replace("\x1b", "é").replace("slug: pro", "slug: p")
    )
    before = export(), PolicyChange.objects.count()
    with pytest.raises(CommandError, match=f"3 problems in {re.escape(name)}; nothing was changed"):
        run("import", name, "--prune")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{name}:29", f"{name}:37", f"{name}:42"]
    assert (export(), PolicyChange.objects.count()) == before


def test_references_to_pruned_objects_are_refused(sample: None) -> None:
    text = "version: 1\nplans:\n- {slug: free, name: Free}\npolicies:\n- {plan: pro, rates: 1/s}"
    assert apply_file(text, dry_run=True).changes
    assert refused(text, prune=True) == [
        "5: policies[0].plan: the file does not have the plan 'pro', so it would be pruned"
    ]


def test_stored_values_are_not_validated_again(sample: None, settings: Any) -> None:
    plain = settings.RATEQUOTA
    settings.RATEQUOTA = {**plain, "IDENTIFIERS": {"tenant": "builtins.repr"}}
    RatePolicy.objects.create(subject="tenant:acme", counted_per="tenant", rates="5/s")
    Endpoint.objects.create(name="odd", routes=" /a \r\n\r\n/b", methods="get,post")
    text = export()
    settings.RATEQUOTA = plain
    assert not apply_file(text, prune=True).changes
    assert "Nothing is counted per 'tenant'" in refused(text.replace("rates: 5/s\n", "rates: 6/s\n"))[-1]


def test_users_are_named_by_username_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, "USERNAME_FIELD", "email")
    user = User.objects.create(username="x", email="Alice@Example.com")
    RatePolicy.objects.create(user=user, rates="5/s")
    text = export()
    assert "user: Alice@Example.com" in text
    delete_all_rows()
    apply_file(text)
    assert RatePolicy.objects.get().user == user
    User.objects.create(username="y", email="Alice@Example.com")
    assert "more than one user has the name 'Alice@Example.com'" in refused(text)[0]


def test_users_are_found_by_natural_key(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UserManager, "get_by_natural_key", lambda self, username: self.get(username__iexact=username))
    RatePolicy.objects.create(user=alice, rates="5/s")
    text = export()
    assert not apply_file(text.replace("alice", "ALICE"), prune=True).changes
    assert "no user has the name 'bob'" in refused(text.replace("alice", "bob"))[0]


def test_username_field_may_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    user = User.objects.create(username="x")
    monkeypatch.setattr(User, "USERNAME_FIELD", "id")
    monkeypatch.setattr(User, "__str__", lambda self: f"user number {self.pk}")
    RatePolicy.objects.create(user=user, rates="5/s")
    text = export()
    assert f"user: '{user.pk}'" in text
    assert not apply_file(text, prune=True).changes
    assert "no user has the name 'bob'" in refused(text.replace(f"'{user.pk}'", "bob"))[0]


def test_naive_times_are_in_the_settings_time_zone(settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    naive = datetime(2026, 7, 1, 12)
    aware = file_value("starts_at", naive)
    assert aware == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert model_value("starts_at", aware) == naive
