"""Policies as code: what is exported, what an import changes, and that a bad file changes nothing."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.contrib.auth.models import User, UserManager
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.db.models.signals import pre_save
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from django_ratequota import check_request
from django_ratequota.exceptions import InvalidFile
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.policyfile import MAX_BYTES, bring, decode, export
from django_ratequota.policyfile import schema as sections
from django_ratequota.policyfile.document import read, write_json, write_yaml
from django_ratequota.policyfile.schema import ASSIGNMENTS, held
from django_ratequota.runtime import default_limiter
from django_ratequota.signals import policies_changed

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

DOCS = (Path(__file__).parents[2] / "docs" / "policies-as-code.md").read_text()
JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
#: Text that YAML takes for something else, or that does not survive careless writing.
HOSTILE = (
    *"yes no on null ~ 1e3 1_000 0x10 0o17 010 1:30 2026-01-01 .inf = << y".split(" "),
    *"- a|a: b|a #b|#|'|\"|\\|{a}|[a|*a|&a|!a|>|%a|@|`|---|...|- |:|?|,|: ".split("|"),
    *"|||a|a |a^|^a|a^^ b| a^b|a ^b|a\r^b|\t|a\tb^|^|^^| ^ |^ a|a\x85b|^\t^".replace("^", "\n").split("|"),
    *"🙂 👨\u200d👩 é e\u0301 \u202eabc \u2028 \xa0 \ufeff \x1b[31m \x7f \ufffe \U0010ffff".split(" "),
    "|",
    "x" * 10_240,
    "x y\n" * 2_560,
)


def run(*args: str) -> str:
    out = io.StringIO()
    call_command("ratequota", *args, stdout=out)
    return out.getvalue()


def refused(text: str, **options: Any) -> list[str]:
    """The problems of a file that must not be imported, as ``LINE: path: message``."""
    before = export(assignments=True), PolicyChange.objects.count()
    with pytest.raises(InvalidFile) as caught:
        bring(text, **options)
    assert (export(assignments=True), PolicyChange.objects.count()) == before
    return [f"{line}: {path}: {message}" for line, path, message in caught.value.problems]


def wiped() -> None:
    """No plan, endpoint, policy, assignment or change left; nothing recorded."""
    for model in (PolicyChange, PlanAssignment, RatePolicy, Endpoint, Plan):
        models.QuerySet(model)._raw_delete("default")


@pytest.fixture
def alice() -> User:
    return User.objects.create(username="alice")


@pytest.fixture
def some(alice: User) -> None:
    """Two plans, two endpoints, five policies, one assignment."""
    pro = Plan.objects.create(name="Pro", slug="pro", description="Paying.\nPromptly.")
    free = Plan.objects.create(name="Free", slug="free", default_for="authenticated")
    search = Endpoint.objects.create(name="search", cost=2)
    reports = Endpoint.objects.create(name="reports", routes="reports:*\n/api/reports/*", methods="GET POST")
    RatePolicy.objects.create(plan=pro, endpoint=search, rates="50/min", algorithm="gcra", on_error="deny")
    RatePolicy.objects.create(plan=free, endpoint=search, rates="10/min")
    RatePolicy.objects.create(rates="5/s", counted_per="ip", mode="log")
    RatePolicy.objects.create(subject="ip:203.0.113.0/24", endpoint=reports, rates="blocked")
    RatePolicy.objects.create(
        user=alice,
        rates="1000/min",
        starts_at=JANUARY,
        ends_at=JANUARY + timedelta(days=31, microseconds=5),
        reason="OPS-7: #1",
    )
    PlanAssignment.objects.create(user=alice, plan=pro, starts_at=JANUARY, reason="contract")


SOME = """\
version: 1

plans:
  - slug: free
    name: Free
    default_for: authenticated
  - slug: pro
    name: Pro
    description: |-
      Paying.
      Promptly.

endpoints:
  - name: reports
    routes:
      - reports:*
      - /api/reports/*
    methods:
      - GET
      - POST
  - name: search
    cost: 2

policies:
  - counted_per: ip
    rates: 5/s
    mode: log
  - user: alice
    rates: 1000/min
    starts_at: 2026-01-01T00:00:00Z
    ends_at: 2026-02-01T00:00:00.000005Z
    reason: 'OPS-7: #1'
  - endpoint: reports
    subject: ip:203.0.113.0/24
    rates: blocked
  - endpoint: search
    plan: free
    rates: 10/min
  - endpoint: search
    plan: pro
    rates: 50/min
    algorithm: gcra
    on_error: deny
"""
ASSIGNED = """
assignments:
  - user: alice
    plan: pro
    starts_at: 2026-01-01T00:00:00Z
    reason: contract
"""


# --- Export. ---


def test_export_is_pleasant_to_read(some: None) -> None:
    assert run("export") == SOME
    assert run("export", "--assignments") == SOME + ASSIGNED


def test_export_of_nothing_says_so() -> None:
    assert run("export") == "version: 1\n\nplans: []\n\nendpoints: []\n\npolicies: []\n"


def test_json_says_the_same_as_yaml(some: None) -> None:
    document = json.loads(run("export", "--assignments", "--format", "json"))
    assert document == json.loads(write_json(yaml.safe_load(SOME + ASSIGNED)))


def test_export_to_a_file(some: None, tmp_path: Path) -> None:
    assert run("export", "--output", str(tmp_path / "a.yaml")) == ""
    assert (tmp_path / "a.yaml").read_bytes() == SOME.encode()
    with pytest.raises(CommandError, match="cannot be written: No such file or directory"):
        run("export", "--output", str(tmp_path / "missing" / "a.yaml"))


def test_export_does_not_depend_on_ids(some: None, alice: User) -> None:
    rows = {model: list(models.QuerySet(model)) for model in (Plan, Endpoint, RatePolicy, PlanAssignment)}
    wiped()
    for model, found in rows.items():
        for number, row in enumerate(found):
            row.pk = 1000 - number if model in (RatePolicy, PlanAssignment) else row.pk
        models.QuerySet(model).bulk_create(reversed(found))
    assert export(assignments=True) == SOME + ASSIGNED


def test_policies_of_one_rank_keep_the_order_in_which_they_win() -> None:
    for rates in ("3/min", "1/min", "2/min"):
        RatePolicy.objects.create(rates=rates, starts_at=JANUARY)
    text = export()
    assert re.findall(r"rates: (\S+)", text) == ["3/min", "1/min", "2/min"]
    wiped()
    bring(text)
    assert list(RatePolicy.objects.order_by("pk").values_list("rates", flat=True)) == ["3/min", "1/min", "2/min"]


def test_what_is_deleted_while_it_is_read_is_left_out(some: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(model: Any, *args: Any) -> list[Any]:
        if model is Endpoint:
            Endpoint.objects.filter(name="search").delete()
        return read_rows(model, *args)

    read_rows = sections._rows
    monkeypatch.setattr(sections, "_rows", rows)
    text = export()
    assert "search" not in text
    assert text == export()


def test_every_field_of_the_models_is_in_the_file() -> None:
    for section in sections.SECTIONS:
        fields = {field.name for field in section.model._meta.concrete_fields}
        assert set(section.fields) == fields - {"id", "created_by", "created_at"}


@pytest.mark.parametrize("more", [0, 20])
def test_queries_do_not_grow_with_rows(some: None, more: int, django_assert_num_queries: Any) -> None:
    for number in range(more):
        user = User.objects.create(username=f"u{number}")
        plan = Plan.objects.create(name=f"n{number}", slug=f"s{number}")
        endpoint = Endpoint.objects.create(name=f"e{number}")
        RatePolicy.objects.create(user=user, endpoint=endpoint, rates="1/s")
        RatePolicy.objects.create(plan=plan, endpoint=endpoint, rates="1/s")
        PlanAssignment.objects.create(user=user, plan=plan)
    with django_assert_num_queries(3):
        export()
    with django_assert_num_queries(4):
        text = export(assignments=True)
    with django_assert_num_queries(5):
        assert not bring(text, prune=True, dry_run=True).changes


# --- Round trips. ---

texts = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
)
names = texts.filter(lambda text: 0 < len(text) <= 100)
slugs = st.one_of(
    st.sampled_from(["yes", "null", "1e3", "0x10", "2026-01-01", "-", "_", "0", "1_000", "y", "A", "a"]),
    st.from_regex(r"[a-zA-Z0-9_-]{1,9}", fullmatch=True),
).filter(lambda slug: slug != "all")
moments = st.one_of(
    st.none(),
    st.sampled_from([JANUARY, JANUARY + timedelta(days=1)]),
    st.datetimes(datetime(1000, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),
)
routes = st.lists(
    st.sampled_from(["/", "reports:*", "/a/<int:pk>/", "yes", "1e3", "#", "-", "/é/*", "*"]), max_size=3
)


@st.composite
def contents(draw: Any) -> dict[type[models.Model], list[dict[str, Any]]]:
    """Rows of valid objects; references by number."""
    plans = draw(st.lists(st.tuples(slugs, names), max_size=4, unique_by=(lambda p: p[0], lambda p: p[1])))
    defaults = draw(st.permutations(["authenticated", "anonymous", "", ""]))
    endpoints = draw(st.lists(slugs, max_size=4, unique=True))
    users = draw(st.lists(names, min_size=1, max_size=3, unique=True))

    def policy() -> dict[str, Any]:
        audience = draw(st.sampled_from(["", "plan", "user", "subject"]))
        starts, ends = draw(moments), draw(moments)
        if starts and ends and ends <= starts:
            ends = None
        return {
            "endpoint": draw(st.sampled_from([None, *range(len(endpoints))])),
            "plan": draw(st.sampled_from([*range(len(plans)), None])) if audience == "plan" else None,
            "user": draw(st.sampled_from(range(len(users)))) if audience == "user" else None,
            "subject": draw(st.sampled_from(["ip:203.0.113.7", "ip:2001:db8::/64"])) if audience == "subject" else "",
            "counted_per": draw(st.sampled_from(["caller", "ip", "plan", "everyone"])),
            "rates": draw(st.sampled_from(["10/min", "1/s, 2/month", "unlimited", "blocked", "5/30s", "7/day gcra"])),
            "algorithm": draw(st.sampled_from(["token_bucket", "leaky_bucket", "gcra"])),
            "mode": draw(st.sampled_from(["enforce", "log", "off"])),
            "on_error": draw(st.sampled_from(["", "allow", "deny", "local"])),
            "starts_at": starts,
            "ends_at": ends,
            "reason": draw(texts)[:200],
        }

    def assignment() -> dict[str, Any]:
        starts = draw(moments) or JANUARY
        ends = draw(moments)
        return {
            "user": draw(st.sampled_from(range(len(users)))),
            "plan": draw(st.sampled_from(range(len(plans)))),
            "starts_at": starts,
            "ends_at": ends if ends and ends > starts else None,
            "reason": draw(texts)[:200],
        }

    policies: dict[Any, dict[str, Any]] = {}
    for number in range(draw(st.integers(0, 8))):
        row = policy()
        place = tuple(row[name] for name in ("endpoint", "plan", "user", "subject", "counted_per"))
        policies[number if row["starts_at"] or row["ends_at"] else place] = row
    return {
        User: [{"username": name} for name in users],
        Plan: [
            {"slug": slug, "name": name, "default_for": default, "description": draw(texts)}
            for (slug, name), default in zip(plans, defaults, strict=False)
        ],
        Endpoint: [
            {
                "name": name,
                "routes": "\n".join(draw(routes)),
                "methods": " ".join(draw(st.permutations(["GET", "POST", "PUT"]))[: draw(st.integers(0, 3))]),
                "cost": draw(st.sampled_from([1, 2, 10**12])),
                "charged_statuses": draw(st.sampled_from(["", "401, 5xx"])),
                "description": draw(texts),
            }
            for name in endpoints
        ],
        RatePolicy: list(policies.values()),
        PlanAssignment: [assignment() for _ in range(draw(st.integers(0, 4)) if plans else 0)],
    }


def fill(content: dict[type[models.Model], list[dict[str, Any]]]) -> None:
    """The database with these rows and no others."""
    wiped()
    models.QuerySet(User)._raw_delete("default")
    made: dict[str, list[Any]] = {}
    for model, rows in content.items():
        made[str(model._meta.model_name)] = [
            model(
                **{
                    name: made[name][value] if name in ("user", "plan", "endpoint") and value is not None else value
                    for name, value in row.items()
                }
            )
            for row in rows
        ]
        models.QuerySet(model).bulk_create(made[str(model._meta.model_name)])


def rank(row: dict[str, Any]) -> str:
    """What decides which of the policies wins, but for the id."""
    dated = row["starts_at"] is not None or row["ends_at"] is not None
    names = ("endpoint__name", "plan__slug", "user__username", "subject", "counted_per", "starts_at")
    return str(([row[name] for name in names], dated))


def fields() -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the database holds, without ids and without who did it when; in the order of ids."""
    policy = [f.name for f in RatePolicy._meta.concrete_fields if f.name not in ("id", "endpoint", "plan", "user")]
    named = ("endpoint__name", "plan__slug", "user__username")
    return {
        "plans": sorted(models.QuerySet(Plan).values_list("slug", "name", "default_for", "description")),
        "endpoints": sorted(
            models.QuerySet(Endpoint).values_list(
                "name", "routes", "methods", "cost", "charged_statuses", "description"
            )
        ),
        "policies": sorted(
            models.QuerySet(RatePolicy).order_by("pk").values_list(*named, *policy),
            key=lambda row: rank(dict(zip((*named, *policy), row, strict=True))),
        ),
        "assignments": sorted(
            models.QuerySet(PlanAssignment).values_list(
                "user__username", "plan__slug", "starts_at", "ends_at", "reason"
            ),
            key=str,
        ),
    }


EXAMPLES = 60


@given(contents(), st.sampled_from(["yaml", "json"]))
@hypothesis_settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
def test_nothing_is_lost(content: dict[type[models.Model], list[dict[str, Any]]], form: str) -> None:
    fill(content)
    before, text = fields(), export(form, assignments=True)
    assert not bring(text, prune=True).changes
    assert not PolicyChange.objects.exists()
    wiped()
    comparison = bring(text)
    assert len(comparison.created) == len(comparison.changes) == sum(map(len, before.values()))
    assert fields() == before
    assert export(form, assignments=True) == text
    for model in (Plan, Endpoint, RatePolicy, PlanAssignment):
        for row in model.objects.all():
            row.full_clean()


@given(contents(), contents())
@hypothesis_settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
def test_any_content_can_be_brought_to_any_other(one: Any, other: Any) -> None:
    other[User] = one[User] = [{"username": name} for name in ("a", "b", "c")]
    fill(other)
    wanted, text = fields(), export(assignments=True)
    fill(one)
    bring(text, prune=True)
    assert {name: sorted(map(str, rows)) for name, rows in fields().items()} == {
        name: sorted(map(str, rows)) for name, rows in wanted.items()
    }
    assert not bring(text, prune=True).changes


@given(st.lists(st.dictionaries(slugs, texts, max_size=3), max_size=3))
@hypothesis_settings(max_examples=400, derandomize=True, database=None, deadline=None)
@example([{f"k{number}": text for number, text in enumerate(HOSTILE)}])
def test_text_survives_both_forms(rows: list[dict[str, str]]) -> None:
    for write in (write_yaml, write_json):
        text = write({"rows": rows})
        root, problems = read(text)
        assert not problems
        found = [{key: child.text for key, child in item.entries.items()} for item in root.entries["rows"].items]
        assert found == rows
        assert {child.kind for item in root.entries["rows"].items for child in item.entries.values()} <= {"text"}
        assert text.replace("\n", "").isprintable()
    # Other readers understand it the same way.
    assert yaml.safe_load(write_yaml({"rows": rows})) == {"rows": rows}


@pytest.mark.parametrize("text", ["1e3", "1_000", "0x10", "0o17", "010", "y", "No", "null", "2026-01-01", "1:30"])
def test_text_that_other_readers_of_yaml_take_for_something_else_is_quoted(text: str) -> None:
    assert write_yaml({"a": text}) == f"a: '{text}'\n"


def test_the_example_of_the_docs_is_what_export_writes(alice: User) -> None:
    found = re.search(r"```yaml\n(.*?)```", DOCS, re.DOTALL)
    assert found
    assert len(bring(found[1]).created) == 11
    assert export(assignments=True) == found[1]
    bad = found[1].replace("- plan: free\n    rates: 100/min", "- plan: free\n    rates: 100/mn")
    assert f"ratequota.yaml:{refused(bad)[0]}" in DOCS
    diff = list(bring(found[1].replace("rates: 10/min", "rates: 20/min")).lines())
    assert f"    {diff[0]}\n    0 created, 1 changed, 0 deleted\n" in DOCS
    assert len(diff) == 1


# --- What an import changes. ---


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    """A file with this text."""

    def write(text: str) -> str:
        path = tmp_path / "limits.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


EDITED = (
    SOME.replace("rates: 10/min", "rates: 20 / 60sec")
    .replace("cost: 2", "description: new")
    .replace("    default_for: authenticated\n", "")
    .replace("  - counted_per: ip\n    rates: 5/s\n    mode: log\n", "  - rates: 1/s\n    plan: pro\n")
)
DIFF = """\
~ plan free: default_for authenticated -> none
~ endpoint search: cost 2 -> 1
~ endpoint search: description none -> new
~ policy free × search: rates 10/min -> 20/min
+ policy pro × all endpoints: rates 1/s
"""
LEFT = "Left alone, as the file does not name them: 1 policy; --prune deletes them\n"


def test_the_dry_run_says_what_the_import_does(some: None, file: Any) -> None:
    history, revision, before = PolicyChange.objects.count(), default_limiter().stored_revision(), export()
    assert run("import", file(EDITED), "--dry-run") == (
        f"{DIFF}Dry run: 1 to create, 3 to change, 0 to delete; nothing was changed\n{LEFT}"
    )
    assert (history, revision, before) == (
        PolicyChange.objects.count(),
        default_limiter().stored_revision(),
        export(),
    )
    assert run("import", file(EDITED), "--reason", "OPS-9") == f"{DIFF}1 created, 3 changed, 0 deleted\n{LEFT}"
    written = PolicyChange.objects.order_by("pk")[history:]
    assert [(change.model, change.action, change.reason, change.actor) for change in written] == [
        ("plan", "update", "OPS-9", None),
        ("endpoint", "update", "OPS-9", None),
        ("ratepolicy", "update", "OPS-9", None),
        ("ratepolicy", "create", "OPS-9", None),
    ]
    assert written[2].before["rates"] == "10/min"
    assert written[2].after["rates"] == "20/min"
    assert default_limiter().stored_revision() > revision


def test_an_import_is_one_publication_and_counts_at_once(some: None, alice: User) -> None:
    def allowed() -> bool:
        request = RequestFactory().get("/")
        request.user = alice
        return check_request(request, scope="search").allowed

    assert allowed()
    revisions = []

    def heard(revision: int, **_: Any) -> None:
        revisions.append(revision)

    policies_changed.connect(heard)
    try:
        bring(SOME.replace("rates: 50/min", "rates: blocked").replace("rates: 10/min", "rates: blocked"))
    finally:
        policies_changed.disconnect(heard)
    assert revisions == [default_limiter().stored_revision()]
    assert not allowed()


def test_an_import_needs_no_redis(some: None, settings: Any, file: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "TIMEOUT": 5.0, "REPORT_SECONDS": 0}
    assert "0 created, 1 changed, 0 deleted" in run("import", file(SOME.replace("10/min", "20/min")))
    assert "a policy change is saved but could not be published" in caplog.text
    assert export() == SOME.replace("10/min", "20/min")


def test_nothing_to_do_is_said_and_nothing_done(some: None, file: Any) -> None:
    history, revision = PolicyChange.objects.count(), default_limiter().stored_revision()
    name = file(SOME + ASSIGNED)
    assert run("import", name, "--prune") == f"Nothing to do: the database says what {name} says\n"
    assert (history, revision) == (PolicyChange.objects.count(), default_limiter().stored_revision())


def test_prune_deletes_what_the_file_does_not_name_in_its_sections(some: None, file: Any) -> None:
    assert run("import", file("version: 1\npolicies: []\n"), "--prune").splitlines() == [
        "- policy everyone × all endpoints per ip: rates 5/s, mode log",
        "- policy user alice × all endpoints from 2026-01-01T00:00:00Z until 2026-02-01T00:00:00.000005Z: "
        "rates 1000/min, reason OPS-7: #1",
        "- policy ip:203.0.113.0/24 × reports: rates blocked",
        "- policy free × search: rates 10/min",
        "- policy pro × search: rates 50/min, algorithm gcra, on_error deny",
        "0 created, 0 changed, 5 deleted",
    ]
    assert (Plan.objects.count(), Endpoint.objects.count(), PlanAssignment.objects.count()) == (2, 2, 1)
    bring("version: 1\nassignments: []\n", prune=True)
    assert not PlanAssignment.objects.exists()
    bring("version: 1\n", prune=True)
    assert (Plan.objects.count(), Endpoint.objects.count()) == (2, 2)
    bring("version: 1\nendpoints: []\nplans: []", prune=True)
    assert not Plan.objects.exists()
    assert not Endpoint.objects.exists()


def test_what_goes_with_a_plan_or_an_endpoint_is_shown(some: None) -> None:
    text = "version: 1\nplans:\n- {slug: free, name: Free, default_for: authenticated}\n"
    text += "endpoints:\n- name: search\n  cost: 2"
    history = PolicyChange.objects.count()
    comparison = bring(text, prune=True)
    assert list(comparison.lines()) == [
        "- plan pro: name Pro, description Paying.\\nPromptly.",
        "- endpoint reports: routes reports:* /api/reports/*, methods GET POST",
        "- policy ip:203.0.113.0/24 × reports: rates blocked",
        "- policy pro × search: rates 50/min, algorithm gcra, on_error deny",
        "- assignment alice × pro from 2026-01-01T00:00:00Z: reason contract",
    ]
    assert PolicyChange.objects.count() - history == len(comparison.deleted) == 5
    assert (RatePolicy.objects.count(), PlanAssignment.objects.count()) == (3, 0)


@pytest.mark.parametrize("names", ["abc", "bac", "bca", "cab", "cba"])
@pytest.mark.parametrize("defaults", [("authenticated", "anonymous", ""), ("", "authenticated", "anonymous")])
def test_plans_swap_names_and_defaults(names: str, defaults: tuple[str, str, str]) -> None:
    for slug, default in zip("xyz", ("anonymous", "", "authenticated"), strict=True):
        Plan.objects.create(slug=slug, name="abc"["xyz".index(slug)], default_for=default)
    before = {plan.slug: (plan.name, plan.default_for) for plan in Plan.objects.all()}
    wanted = {slug: (name, default) for slug, name, default in zip("xyz", names, defaults, strict=True)}
    plans = [{"slug": slug, "name": name, "default_for": default} for slug, (name, default) in wanted.items()]
    history = PolicyChange.objects.count()
    bring(json.dumps({"version": 1, "plans": plans}))
    assert {plan.slug: (plan.name, plan.default_for) for plan in Plan.objects.all()} == wanted
    told = {
        change.after["slug"]: tuple((state["name"], state["default_for"]) for state in (change.before, change.after))
        for change in PolicyChange.objects.order_by("pk")[history:]
    }
    assert told == {slug: (before[slug], wanted[slug]) for slug in before if before[slug] != wanted[slug]}
    assert PolicyChange.objects.count() - history == len(told)


def test_a_new_plan_takes_over_what_a_pruned_or_changed_one_had(some: None) -> None:
    plans = (
        "- {slug: gold, name: Free, default_for: authenticated}\n- {slug: pro, name: Best}\n- {slug: new, name: Pro}"
    )
    bring(f"version: 1\nplans:\n{plans}", prune=True)
    assert set(Plan.objects.values_list("slug", "name", "default_for")) == {
        ("gold", "Free", "authenticated"),
        ("pro", "Best", ""),
        ("new", "Pro", ""),
    }


def test_undated_policies_trade_places(some: None) -> None:
    swapped = SOME.replace("plan: free\n    rates: 10", "plan: PRO\n    rates: 10").replace("plan: pro", "plan: free")
    comparison = bring(swapped.replace("PRO", "pro"), prune=True)
    assert (len(comparison.changed), len(comparison.changes)) == (2, 2)
    assert set(RatePolicy.objects.filter(plan__isnull=False).values_list("plan__slug", "rates")) == {
        ("free", "50/min"),
        ("pro", "10/min"),
    }
    comparison = bring(SOME.replace("counted_per: ip", "counted_per: everyone"), prune=True)
    assert [len(found) for found in (comparison.created, comparison.changed, comparison.deleted)] == [1, 2, 1]


def entries(*rates: str) -> str:
    rows = [{"rates": one, "starts_at": "2026-01-01T00:00:00Z"} for one in rates]
    return json.dumps({"version": 1, "policies": rows})


def test_equal_dated_policies_are_told_apart() -> None:
    bring(entries("1/s", "1/s", "2/s"))
    first, second, third = RatePolicy.objects.order_by("pk")
    assert not bring(entries("1/s", "1/s", "2/s"), prune=True).changes
    # One less: the others stay who they are.
    comparison = bring(entries("1/s", "2/s"), prune=True)
    assert (len(comparison.deleted), len(comparison.changes)) == (1, 1)
    assert set(RatePolicy.objects.all()) in ({first, third}, {second, third})
    # The last one wins, so a change of order is a change.
    assert len(bring(entries("2/s", "1/s")).changed) == 2
    assert not bring(entries("2/s", "1/s")).changes
    comparison = bring(entries("2/s", "1/s", "3/s"))
    assert (len(comparison.created), len(comparison.changes)) == (1, 1)


def test_assignments_end_and_are_told_apart(some: None, alice: User) -> None:
    ended = ASSIGNED.replace("    reason", "    ends_at: 2026-03-01T00:00:00+01:00\n    reason")
    assert list(bring(f"version: 1\n{ended}", prune=True).lines()) == [
        "~ assignment alice × pro from 2026-01-01T00:00:00Z: ends_at none -> 2026-02-28T23:00:00Z"
    ]
    assert not bring(f"version: 1\n{ended}", prune=True).changes


def test_the_order_of_assignments_means_nothing(some: None) -> None:
    rows = [
        {
            "user": "alice",
            "plan": "pro",
            "starts_at": "2026-01-01T00:00:00Z",
            "ends_at": f"2026-0{month}-01T00:00:00Z",
        }
        for month in (3, 2, 4)
    ]
    text = json.dumps({"version": 1, "assignments": rows})
    assert len(bring(text, prune=True).created) == 2
    assert not bring(text, prune=True).changes


def test_long_text_is_shown_from_where_it_differs() -> None:
    Endpoint.objects.create(name="e", description="x" * 10_000 + "y" + "z" * 100)
    text = export().replace("xy", "x\u202ew")
    assert list(bring(text).lines()) == [
        f"~ endpoint e: description …{'x' * 15}y{'z' * 44}… -> …{'x' * 15}\\u202ew{'z' * 38}…"
    ]


def test_what_is_stored_already_needs_no_other_validity(some: None, settings: Any) -> None:
    plain = settings.RATEQUOTA
    settings.RATEQUOTA = {**plain, "IDENTIFIERS": {"tenant": "builtins.repr"}}
    RatePolicy.objects.create(subject="tenant:acme", counted_per="tenant", rates="5/s")
    Endpoint.objects.create(name="odd", routes=" /a \r\n\r\n/b", methods="get,post")
    text = export()
    settings.RATEQUOTA = plain
    assert not bring(text, prune=True).changes
    assert "Nothing is counted per 'tenant'" in refused(text.replace("rates: 5/s\n", "rates: 6/s\n"))[-1]


def test_users_are_named_as_they_log_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(User, "USERNAME_FIELD", "email")
    user = User.objects.create(username="x", email="Alice@Example.com")
    RatePolicy.objects.create(user=user, rates="5/s")
    text = export()
    assert "user: Alice@Example.com" in text
    wiped()
    bring(text)
    assert RatePolicy.objects.get().user == user
    User.objects.create(username="y", email="Alice@Example.com")
    assert "more than one user has the name 'Alice@Example.com'" in refused(text)[0]


def test_users_are_found_as_their_manager_finds_them(alice: User, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UserManager, "get_by_natural_key", lambda self, username: self.get(username__iexact=username))
    RatePolicy.objects.create(user=alice, rates="5/s")
    text = export()
    assert not bring(text.replace("alice", "ALICE"), prune=True).changes
    assert "no user has the name 'bob'" in refused(text.replace("alice", "bob"))[0]


def test_users_may_log_in_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    user = User.objects.create(username="x")
    monkeypatch.setattr(User, "USERNAME_FIELD", "id")
    monkeypatch.setattr(User, "__str__", lambda self: f"user number {self.pk}")
    RatePolicy.objects.create(user=user, rates="5/s")
    text = export()
    assert f"user: '{user.pk}'" in text
    assert not bring(text, prune=True).changes
    assert "no user has the name 'bob'" in refused(text.replace(f"'{user.pk}'", "bob"))[0]


def test_times_without_zones_are_those_of_the_settings(alice: User, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    naive = datetime(2026, 7, 1, 12)
    entry = ASSIGNMENTS.entry(PlanAssignment(user=alice, plan=Plan(slug="p"), starts_at=naive))
    assert entry["starts_at"] == datetime(2026, 7, 1, 10, tzinfo=UTC)
    assert held("starts_at", entry["starts_at"]) == naive


def test_rows_are_locked_while_they_are_compared(some: None) -> None:
    with CaptureQueriesContext(
        connection,
    ) as queries:
        bring(SOME)
    locked = [query["sql"] for query in queries if "FOR UPDATE" in query["sql"]]
    assert len(locked) == (3 if connection.features.has_select_for_update else 0)


def test_an_edit_that_comes_between_loses_nothing(some: None, file: Any) -> None:
    def meanwhile(sender: Any, instance: Any, **_: Any) -> None:
        models.QuerySet(Plan).bulk_create([Plan(slug="late", name="New")])

    name = file("version: 1\nplans:\n- {slug: free, name: F}\n- {slug: new, name: New}\n")
    pre_save.connect(meanwhile, sender=Plan)
    before = export()
    try:
        with pytest.raises(CommandError, match="Others made changes meanwhile that this file contradicts"):
            run("import", name)
    finally:
        pre_save.disconnect(meanwhile, sender=Plan)
    assert export() == before


# --- Files that are refused. ---

BAD = {
    "version: 1\nplan: []": ["2: plan: a file has no such field; did you mean plans?"],
    "plans: []": ["1: : version is missing: write version: 1"],
    "version: 2": ["1: version: version 1 is all that can be read, not '2'"],
    "[]": ["1: : the file begins with version: 1, not with a list"],
    "": ["1: : the file is empty"],
    "# only a comment\n": ["1: : the file is empty"],
    "version: 1\nplans:\n": [
        "2: plans: a list is wanted, not nothing; write [] for none, or leave the section out to leave all as it is"
    ],
    "version: 1\nplans:\n  free: {}": [
        "2: plans: a list is wanted, not a mapping; write [] for none, or leave the section out to leave all as it is"
    ],
    "version: 1\nplans:\n- free": ["3: plans[0]: a plan is a mapping of fields to values, not text"],
    "version: 1\nplans:\n- slug: x": ["3: plans[0].name: is missing"],
    "version: 1\nplans:\n- name: x\n  slug:": ["4: plans[0].slug: is missing"],
    "version: 1\nplans:\n- name: yes\n  slug: x": [
        "3: plans[0].name: text is wanted, and YAML takes 'yes' for true or false: put it in quotes"
    ],
    "version: 1\nplans:\n- name: 2026-01-01\n  slug: 1": [
        "3: plans[0].name: text is wanted, and YAML takes '2026-01-01' for a date: put it in quotes",
        "4: plans[0].slug: text is wanted, and YAML takes '1' for a number: put it in quotes",
    ],
    "version: 1\nplans:\n- name: [a]\n  slug: a b": [
        "3: plans[0].name: text is wanted, not a list",
        "4: plans[0].slug: Enter a valid “slug” consisting of letters, numbers, underscores or hyphens.",
    ],
    "version: 1\nplans:\n- {slug: a, name: A}\n- {slug: b, name: A}": [
        "4: plans[1].name: 'A' is taken by the plan of line 3"
    ],
    "version: 1\nplans:\n- {slug: a, name: A}\n- {slug: a, name: B}": [
        "4: plans[1].slug: is the one of line 3 already"
    ],
    "version: 1\nplans:\n- {slug: a, name: Pro}": [
        "3: plans[0].name: 'Pro' is taken by plan 'pro', which this file does not name"
    ],
    "version: 1\nplans:\n- {slug: a, name: A, default_for: authenticated}": [
        "3: plans[0].default_for: 'authenticated' is taken by plan 'free', which this file does not name"
    ],
    "version: 1\nplans:\n- {slug: a, name: A, default_for: anonymus}": [
        "3: plans[0].default_for: 'anonymus' is none of authenticated, anonymous; did you mean anonymous?"
    ],
    "version: 1\nendpoints:\n- name: all\n  cost: 0": [
        "3: endpoints[0].name: 'all' stands for all endpoints together in headers; choose another name.",
        "4: endpoints[0].cost: Ensure this value is greater than or equal to 1.",
    ],
    "version: 1\nendpoints:\n- name: e\n  cost: 010": ["4: endpoints[0].cost: a whole number is wanted, not '010'"],
    "version: 1\nendpoints:\n- name: e\n  cost: " + "9" * 5000: [
        "4: endpoints[0].cost: a whole number is wanted, not '999999999999999999999999999999999999999…"
    ],
    "version: 1\nendpoints:\n- name: e\n  routes: /a": [
        "4: endpoints[0].routes: a list is wanted, such as [/a], not text"
    ],
    "version: 1\nendpoints:\n- name: e\n  methods:\n  - GET POST": [
        "5: endpoints[0].methods[0]: one word is wanted, without spaces, not 'GET POST'"
    ],
    "version: 1\nendpoints:\n- name: e\n  routes:\n  - [/a]": [
        "5: endpoints[0].routes[0]: text is wanted, not a list"
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
        "4: policies[0].plan: there is no plan 'fre', neither in this file nor elsewhere; did you mean free?",
        "5: policies[0].endpoint: there is no endpoint 'serch', neither in this file nor elsewhere; "
        "did you mean search?",
        "6: policies[0].user: no user has the name 'bob'",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  plan: free\n  user: alice": [
        "3: policies[0]: Choose one audience: user, subject or plan; leave the other two empty."
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  mode: Logg\n  counted_per: us\n  subject: mail:x": [
        "4: policies[0].mode: 'Logg' is none of enforce, log, off; did you mean log?",
        "5: policies[0].counted_per: Nothing is counted per 'us'; choose caller, ip, plan, everyone.",
        "6: policies[0].subject: Write kind:value, where kind is one of ip, such as ip:203.0.113.7.",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  subject: ip:192.0.2.1\n- rates: 2/s\n  subject: ip:::ffff:192.0.2.1": [
        "5: policies[1]: line 3 has a policy of the same audience, endpoint and counted_per, and neither has dates: "
        "make them one, or give one dates"
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  starts_at: 2026-02-01T00:00:00Z\n  ends_at: 2026-02-01T00:00:00Z": [
        "5: policies[0].ends_at: The end must lie after the start."
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  starts_at: 2026-02-01\n  ends_at: soon": [
        "4: policies[0].starts_at: '2026-02-01' may be many times; "
        "write one with its zone, such as 2026-01-31T12:00:00Z",
        "5: policies[0].ends_at: 'soon' is no time; write one with its zone, such as 2026-01-31T12:00:00Z",
    ],
    "version: 1\npolicies:\n- rates: 1/s\n  starts_at: 0001-01-01T00:00:00+14:00\n  ends_at: 7": [
        "4: policies[0].starts_at: '0001-01-01T00:00:00+14:00' is no time; "
        "write one with its zone, such as 2026-01-31T12:00:00Z",
        "5: policies[0].ends_at: a time is wanted, not '7'; write one with its zone, such as 2026-01-31T12:00:00Z",
    ],
    "version: 1\nassignments:\n- user: alice": [
        "3: assignments[0].plan: is missing",
        "3: assignments[0].starts_at: is missing",
    ],
    "version: 1\nplans: []\nplans: []": ["3: plans: is said already at line 2"],
    "version: 1\npolicies:\n- rates: 1/s\n  rates: 2/s\n  cost: 1": [
        "4: policies[0].rates: is said already at line 3",
        "5: policies[0].cost: a policy has no such field; there are endpoint, plan, subject, user, counted_per, "
        "rates, algorithm, mode, on_error, starts_at, ends_at, reason",
    ],
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_names_line_and_field(some: None, text: str) -> None:
    assert refused(text) == BAD[text]


UNREADABLE = {
    "version: 1\nplans: &a []\nendpoints: *a": "2: : anchors and aliases (& and *) are not read: write it out",
    "version: 1\nplans: *a": "2: : anchors and aliases (& and *) are not read: write it out",
    "version: 1\nplans: !!python/object/apply:os.system [id]": (
        "2: : tags such as tag:yaml.org,2002:python/objec are not read: leave it out"
    ),
    "version: 1\nplans:\n- ? [a]\n  : b": "3: plans[0]: a key is a word, not a list",
    "{version: 1,\tplans: [}": "1: : this is no YAML: ",
    "version: 1\n---\nversion: 1": "2: : a second document begins here: one file is one document",
    "version: 1\nplans: " + "[" * 5000: "2: : this is nested too deeply",
    "version: 1\nplans:\n\t- a": "3: : this is no YAML: while scanning for the next token found character '\\t' that "
    "cannot start any token",
    "version: 1\nplans: [": "2: : this is no YAML: while parsing a flow node expected the node content, but found "
    "'<stream end>'",
    'version: 1\nplans: "\\UFFFFFFFF"': "2: : this is no YAML: ",
    'version: 1\nplans: "\\0"': "2: : text has no NUL characters",
    'version: 1\nplans: "\\ud83d"': "2: : half a character (a surrogate) stands alone here",
    "version: 1\nplans: '\x00'": "2: : write the character U+0000 as an escape",
    "%YAML " + "1" * 5000 + ".1\n---\nversion: 1": "1: : this is no YAML: ",
}


@pytest.mark.parametrize("text", UNREADABLE)
def test_what_is_no_plain_yaml_is_refused(text: str) -> None:
    [problem] = refused(text)
    assert problem.startswith(UNREADABLE[text])


def test_an_alias_bomb_is_refused_at_its_first_line() -> None:
    bomb = "version: 1\na: &a [x, x]\n" + "".join(f"{c}: &{c} [{', '.join(['*a'] * 9)}]\n" for c in "bcdefghij")
    assert refused(bomb) == ["2: : anchors and aliases (& and *) are not read: write it out"]


def test_all_problems_are_told_and_nothing_is_changed(
    some: None, file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file(
        EDITED.replace("rates: blocked", "rates: \x1b[31m").replace("\x1b", "é").replace("slug: pro", "slug: p")
    )
    before = export(), PolicyChange.objects.count()
    with pytest.raises(CommandError, match=f"3 problems in {re.escape(name)}; nothing was changed"):
        run("import", name, "--prune")
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"{name}:25", f"{name}:33", f"{name}:38"]
    assert (export(), PolicyChange.objects.count()) == before


def test_messages_disturb_no_terminal(some: None) -> None:
    key = "\x1b[2J\u202e" + "k" * 10_000
    problems = refused(write_yaml({"version": 1, "plans": [{"slug": "a\x1b]0;", "name": "A", key: "x"}]}))
    assert all(problem.isprintable() and len(problem) < 200 for problem in problems)
    assert "plans[0].\\x1b[2J\\u202ekkk" in "".join(problems)


def test_prune_knows_that_what_it_deletes_cannot_be_named(some: None) -> None:
    text = "version: 1\nplans:\n- {slug: free, name: Free}\npolicies:\n- {plan: pro, rates: 1/s}"
    assert bring(text, dry_run=True).changes
    assert refused(text, prune=True) == [
        "5: policies[0].plan: the file does not have the plan 'pro', so it would be pruned"
    ]


# --- Bytes. ---


def test_files_of_windows_are_read(some: None, tmp_path: Path) -> None:
    for number, raw in enumerate((SOME.replace("\n", "\r\n").encode("utf-8-sig"), SOME.encode("utf-16"))):
        path = tmp_path / f"{number}.yaml"
        path.write_bytes(raw)
        assert "Nothing to do" in run("import", str(path), "--prune")


def test_json_may_be_indented_with_tabs(some: None) -> None:
    document = json.loads(export("json"))
    assert not bring(json.dumps(document, indent="\t"), prune=True).changes
    assert not bring(json.dumps(document, separators=(",", ":")), prune=True).changes


def test_standard_input(some: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SOME.encode())))
    assert run("import", "-") == "Nothing to do: the database says what <stdin> says\n"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"version: 1\n# \xff", "2: : this is no UTF-8 text"),
        (b"\xff\xfea", "1: : this is no UTF-16-LE text"),
        (b" " * (MAX_BYTES + 1), "1: : the file has more than 20 MB"),
    ],
)
def test_bytes_that_are_no_text_are_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(raw)
    assert [f"{line}: {path}: {message}" for line, path, message in caught.value.problems] == [problem]


def test_a_missing_file_is_an_error_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"none\.yaml cannot be read: No such file or directory"):
        run("import", str(tmp_path / "none.yaml"))
