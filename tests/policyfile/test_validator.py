"""Problems of a file: each with its line and field, and nothing is changed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError

from django_ratequota.models import Endpoint, PolicyChange, RatePolicy
from django_ratequota.policyfile import apply_file
from django_ratequota.policyfile.schema import file_value, model_value
from tests.policyfile.examples import EDITED, delete_all_rows, export, refused
from tests.support.commands import run

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

TIME = "is not a time with a time zone such as 2026-01-31T12:00:00Z"

#: A file with its problems: each is in a comment of its line, "path: message", with " & " between them; … = anything.
WRONG = f"""\
version: 1
plan: []  #! plan: there is no such field. Did you mean plans?
plans:
- free  #! plans[0]: this must be a mapping of fields to values, not text
- slug: x  #! plans[1].name: is missing
- name: x
  slug:  #! plans[2].slug: is missing
- name: yes
  slug: yes 1  #! plans[3].slug: Enter a valid “slug” consisting of letters, numbers, underscores or hyphens.
- name: [a]  #! plans[4].name: this must be text, not a list
  slug: a b  #! plans[4].slug: Enter a valid “slug” consisting of letters, numbers, underscores or hyphens.
- slug: a
  name: Pro  #! plans[5].name: is already used by plan 'pro', which this import does not…
- slug: a  #! plans[6].slug: is already used by plans[5] at line 12…
  name: A
  default_for: authenticated  #! plans[6].default_for: is already used by plan 'free', which this import does not…
- slug: b
  name: A  #! plans[7].name: is already used by plans[6] at line 14…
- slug: c
  name: C
  default_for: anonymus  #! plans[8].default_for: 'anonymus' must be one of authenticated, anonymous. Did you mean an…
endpoints:
- name: all  #! endpoints[0].name: Choose another name. In headers, 'all' means all endpoints together.
  cost: 0  #! endpoints[0].cost: Ensure this value is greater than or equal to 1.
- name: e
  cost: 010  #! endpoints[1].cost: this must be a whole number, not '010'
  exempt: true  #! endpoints[1].exempt: there is no such field. Choose from name, routes, methods, cost, charged_stat…
  limits: only  #! endpoints[1].limits: 'only' must be one of besides, own, none
  routes: [a/b]  #! endpoints[1].routes: 'a/b' has a / but does not begin with one. Begin routes with /, such as…
  methods: GTE  #! endpoints[1].methods: 'GTE' is not an HTTP method. Choose from GET, POST, PUT, PATCH, DELETE, O…
- name: f
  cost: {"9" * 5000}  #! endpoints[2].cost: this must be a whole number, not '{"9" * 39}…
  routes: [[/a]]  #! endpoints[2].routes: this must be text, not a list
  methods: {{}}  #! endpoints[2].methods: this must be text, not a mapping
subject_lists:
- name: Bad bots
members:
- subject_list: Bad bots  #! members[0]: Choose either a user or a subject.
- subject_list: Bad bots
  subject: ip:198.51.100.0/24
- subject_list: Bad bots  #! members[2].subject_list: is already used by members[1] at line 39…
  subject: 198.51.100.0/24
- subject_list: Bad bot  #! members[3].subject_list: no subject_list has the name 'Bad bot'. Did you mean Bad bots?
  subject: ip:198.51.100.1/24  #! members[3].subject: 198.51.100.1/24 has host bits set. Enter an address such as 203…
policies:
- rates: 10/mn  #! policies[0].rates: expected a unit (s, min, hour, day, week or month) at character 4, not 'mn' (e…
- rats: 10/min  #! policies[1].rats: there is no such field. Did you mean rates?
- rates:  #! policies[2].rates: is missing
- rates: 1/s
  rates: 2/s  #! policies[3].rates: is already set at line 49
  cost: 1  #! policies[3].cost: there is no such field. Choose from endpoint, user, subject, subject_list, plan, …
- rates: 1/s  #! policies[4]: Choose only one audience (user, subject, list or plan). Leave the others empty.
  plan: fre  #! policies[4].plan: no plan has the name 'fre'. Did you mean free?
  endpoint: serch  #! policies[4].endpoint: no endpoint has the name 'serch'. Did you mean search?
  user: bob  #! policies[4].user: no user has the name 'bob'
- rates: 1/s
  leads_headers: yes  #! policies[5].leads_headers: 'yes' must be one of true, false
  mode: Logg  #! policies[5].mode: 'Logg' must be one of enforce, log, off. Did you mean log?
  counted_per: us  #! policies[5].counted_per: 'us' is not a choice for “counted per”. Choose caller, ip, pl…
  subject: mail:x  #! policies[5].subject: Enter kind:value, such as ip:203.0.113.7. The kind is one of ip…
- {{rates: 1/s, subject: 192.0.2.1}}
- {{rates: 2/s, subject: "ip:::ffff:192.0.2.1"}}  #! policies[7]: this audience, endpoint and counted_per without dat…
- rates: 1/s
  starts_at: 2026-02-01T00:00:00Z
  ends_at: 2026-02-01T00:00:00Z  #! policies[8].ends_at: The end must be after the start.
- rates: 1/s
  starts_at: 2026-02-01  #! policies[9].starts_at: '2026-02-01' {TIME}
  ends_at: soon  #! policies[9].ends_at: 'soon' {TIME}
- rates: 1/s
  starts_at: 0001-01-01T00:00:00+14:00  #! policies[10].starts_at: '0001-01-01T00:00:00+14:00' {TIME}
  ends_at: [7]  #! policies[10].ends_at: this must be text, not a list
- rates: 60  #! policies[11].rates: expected '/' at character 3, but the text ends (example: 60/min)
- rates: [1/s]  #! policies[12].rates: this must be text, not a list
assignments:
- subject: acme  #! assignments[0].plan: is missing & assignments[0].starts_at: is missing & assignments[0].subject: …
- subject: user:7  #! assignments[1].subject: Choose the user instead of user:7.
  plan: free
  starts_at: 2026-01-01T00:00:00Z
  anchor: 15th  #! assignments[1].anchor: this must be a whole number, not '15th'
- plan: free  #! assignments[2]: Choose either a user or a subject.
  starts_at: 2026-01-01T00:00:00Z
  anchor: 32  #! assignments[2].anchor: Ensure this value is less than or equal to 31.
"""

LIST = "this must be a list, not {}. Enter [] for none or leave out the section to keep its objects."
VERSION = "1: version: enter version: 1, the only one there is"
OF_A_FILE = {
    "plans: []": [VERSION],
    "version: 2": [VERSION],
    "[]": ["1: : this must be a mapping of fields to values, not a list", VERSION],
    "": ["1: : the file is empty"],
    "# only a comment\n": ["1: : the file is empty"],
    "version: 1\nplans:\n": [f"2: plans: {LIST.format('nothing')}"],
    "version: 1\nplans:\n  free: {}": [f"2: plans: {LIST.format('a mapping')}"],
    "{version: 1, plans: [{slug: a, name: A}, {slug: a, name: A}]}": [
        "1: plans[1].slug: is already used by plans[0]…"
    ],
    "version: 1\nplans: []\nplans: []": ["3: plans: is already set at line 2"],
    "version: 1\nplans:\n- ? [a]\n  : b": [
        "3: plans[0].a list: there is no such field. Choose from slug, …",
    ],
}


def assert_refused(text: str, expected: list[str]) -> None:
    """Assert that the file has these problems; … stands for the rest of one."""
    found = refused(text)
    assert len(found) == len(expected), found
    for problem, wanted in zip(found, expected, strict=True):
        assert problem == wanted or (wanted.endswith("…") and problem.startswith(wanted[:-1]))


def test_problems_name_line_and_field(sample: None) -> None:
    lines = [line.partition("  #! ")[2] for line in WRONG.splitlines()]
    assert_refused(
        WRONG, [f"{at}: {text}" for at, found in enumerate(lines, 1) for text in found.split(" & ") if found]
    )


def test_problems_of_the_file_itself() -> None:
    for text, expected in OF_A_FILE.items():
        assert_refused(text, expected)


def test_all_problems_are_reported_and_nothing_is_changed(
    sample: None, file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file(
        EDITED.replace("rates: blocked", "rates: \x1b[31m").replace("\x1b", "é").replace("slug: pro", "slug: p")
    )
    before = export(), PolicyChange.objects.count()
    with pytest.raises(CommandError, match=f"3 problems in {re.escape(name)}. No changes were made."):
        run("import", name, "--prune")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{name}:29", f"{name}:37", f"{name}:42"]
    assert (export(), PolicyChange.objects.count()) == before


def test_references_to_pruned_objects_are_refused(sample: None) -> None:
    text = "version: 1\nplans:\n- {slug: free, name: Free}\npolicies:\n- {plan: pro, rates: 1/s}"
    assert apply_file(text, dry_run=True).changes
    assert refused(text, prune=True) == [
        "5: policies[0].plan: no plan has the name 'pro' in this file, and others would be pruned"
    ]


def test_stored_values_are_not_validated_again(sample: None, settings: Any) -> None:
    plain = settings.RATEQUOTA
    settings.RATEQUOTA = {**plain, "IDENTIFIERS": {"tenant": "builtins.repr"}}
    RatePolicy.objects.create(subject="tenant:acme", counted_per="tenant", rates="5/s")
    Endpoint.objects.create(name="odd", routes=" /a \r\n\r\n/b", methods="get,post")
    text = export()
    settings.RATEQUOTA = plain
    assert not apply_file(text, prune=True).changes
    assert "'tenant' is not a choice for “counted per”" in refused(text.replace("rates: 5/s\n", "rates: 6/s\n"))[-1]


def test_users_are_named_by_username_field(monkeypatch: pytest.MonkeyPatch) -> None:
    user = User.objects.create(username="x", email="Alice@Example.com")
    RatePolicy.objects.create(user=user, rates="5/s")
    monkeypatch.setattr(User, "__str__", lambda self: f"user number {self.pk}")
    for name, value in (("id", f"'{user.pk}'"), ("email", "Alice@Example.com")):
        monkeypatch.setattr(User, "USERNAME_FIELD", name)
        text = export()
        assert f"user: {value}\n" in text
        delete_all_rows()
        apply_file(text)
        assert RatePolicy.objects.get().user == user
        assert "no user has the name 'bob'" in refused(text.replace(value, "bob"))[0]
    User.objects.create(username="y", email="Alice@Example.com")
    assert "more than one user has the name 'Alice@Example.com'" in refused(text)[0]


def test_naive_times_are_in_the_settings_time_zone(settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    naive = datetime(2026, 7, 1, 12)
    aware = file_value("starts_at", naive)
    assert aware == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert model_value("starts_at", aware) == naive


def test_twenty_problems_are_printed_and_the_rest_counted(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CommandError, match="30 problems in ") as caught:
        run("import", file("version: 1\npolicies:\n" + "- {}\n" * 30))
    lines = capsys.readouterr().err.splitlines()
    assert (len(lines), lines[-1]) == (21, "and 10 more")
    assert str(caught.value.__cause__.__cause__).count(";") == 19
