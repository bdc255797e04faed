"""What docs/redis.md and docs/security.md promise and no other module tests: the ACL, scopes, hostile names."""

from __future__ import annotations

import ast
import asyncio
import io
import re
import shlex
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import pytest
import redis
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client, RequestFactory

from django_ratequota import Bucket, Decision, Limiter, Rate, check_request
from django_ratequota.engine.rates import ALGORITHMS
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, Plan, PlanAssignment, PolicyChange, RatePolicy
from django_ratequota.monitoring.attempts import recorded_attempts
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.health import report
from django_ratequota.monitoring.records import DecisionRecord
from django_ratequota.monitoring.refusals import refusals
from django_ratequota.monitoring.timeline import timeline, top_callers
from django_ratequota.runtime import default_limiter
from django_ratequota.store.factory import store_from_url
from tests.conftest import Clock
from tests.faults.cluster import Cluster
from tests.faults.servers import Node
from tests.project import views
from tests.support.properties import thorough_after
from tests.support.snippets import ROOT

DOCS = (ROOT / "docs/redis.md").read_text()
database = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]


def with_database(test: Any) -> Any:
    for mark in database:
        test = mark(test)
    return test


# --- The Redis user that suffices. ---

ACL_LINE = re.search(r"^ACL SETUSER .*$", DOCS, re.MULTILINE)
assert ACL_LINE is not None
ACL = shlex.split(ACL_LINE[0])
COMMANDS = [word for word in ACL if word.startswith("+")]
LOGIN = {"username": "ratequota", "password": "PASSWORD"}


@pytest.fixture(scope="module")
def server() -> Iterator[Node]:
    """A server of this module's own, with the documented user."""
    with Node() as node:
        yield node


@pytest.fixture
def own(server: Node) -> Iterator[redis.Redis]:
    """Its administrator, who begins with the documented user, no key and no script."""
    with server.client() as client:
        client.flushall()
        client.script_flush()
        client.execute_command(*ACL)
        yield client


def limiter_at(server: Node, clock: Clock | None = None) -> Limiter:
    with server.client(**LOGIN) as client:
        return Limiter(client=client, clock=clock, timeout=5)


def use_every_verb(server: Node) -> None:
    """Everything that the package ever asks of Redis, the app's own commands and checks included."""
    clock = Clock()
    limiter = limiter_at(server, clock)
    buckets = [Bucket("user:1", Rate.parse(f"10/min {algorithm}")) for algorithm in ALGORITHMS]
    buckets.append(Bucket("tenant:acme", Rate.parse("100/month"), scope="search"))
    queue = Bucket("everyone", Rate.parse("10/s leaky_bucket"), scope="calls")
    try:
        for _ in range(3):
            assert limiter.check(buckets, cost=2).allowed
            clock.advance(25)
        assert limiter.peek(buckets).allowed
        assert limiter.charge(buckets, cost=3).allowed
        assert limiter.refund(buckets, cost=4).allowed
        assert limiter.refund(buckets, cost=100).allowed
        assert asyncio.run(limiter.acheck(buckets)).allowed
        assert limiter.acquire(queue, timeout=5).allowed
        assert limiter.reset(buckets) == len(buckets)
        assert limiter.publish() == limiter.stored_revision()
    finally:
        limiter.store.close()
    note = DecisionRecord(int(time.time()), "user:1", "", None, (), 1, (), False, ())
    collector.pending.append(note)
    collector.refusals.add(note, "", "", "GET", Decision(allowed=False))
    collector.flush()
    for read in (lambda: timeline("hour"), lambda: top_callers("day"), recorded_attempts, lambda: refusals(1)):
        read()
    out = io.StringIO()
    report()
    call_command("ratequota", "status", stdout=out)
    assert "breaker closed" in out.getvalue()
    call_command("check")
    default_limiter().store.close()


@pytest.fixture
def by_acl(server: Node, own: redis.Redis, settings: Any) -> None:
    """The app reaches the server as the documented user, under the default prefix."""
    url = f"redis://ratequota:PASSWORD@{server.host}:{server.port}/0"
    settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5, "STATISTICS_SECONDS": 0}


@with_database
def test_the_documented_user_may_do_all_that_is_needed(server: Node, by_acl: None) -> None:
    use_every_verb(server)


@with_database
@pytest.mark.parametrize("command", COMMANDS)
def test_each_documented_command_is_needed(server: Node, own: redis.Redis, by_acl: None, command: str) -> None:
    own.execute_command("ACL", "SETUSER", "ratequota", command.replace("+", "-"))
    with pytest.raises((StoreError, CommandError)) as caught:
        use_every_verb(server)
    assert command[1:] in str(caught.value).lower()


@with_database
@pytest.mark.parametrize("verb", ["purge --no-input", "export-subject --subject ip:203.0.113.7"])
def test_some_verbs_need_more(own: redis.Redis, by_acl: None, verb: str) -> None:
    own.set("rq:{user:1}:0:tb60", "x")
    [more] = re.findall(rf"`(?:ratequota )?{verb.split()[0]}` add `([^`]+)`", DOCS)
    for command in more.split():
        with pytest.raises(CommandError, match=f"(?i){command[1:]}"):
            call_command("ratequota", *verb.split())
        own.execute_command("ACL", "SETUSER", "ratequota", command)
    call_command("ratequota", *verb.split(), stdout=io.StringIO())


OTHER_KEYS = ("GET session:1", "SET session:1 x", "DEL session:1", "GET rqother:1", "KEYS *", "SCAN 0")
OTHER_COMMANDS = ("FLUSHALL", "CONFIG SET maxmemory 1", "ACL SETUSER ratequota +@all", "SCRIPT FLUSH", "SHUTDOWN")
SCRIPT = ["EVAL", "return redis.call('GET', KEYS[1])", "1", "session:1"]


@pytest.mark.parametrize("words", [*map(str.split, (*OTHER_KEYS, *OTHER_COMMANDS)), SCRIPT], ids=" ".join)
def test_other_commands_as_our_redis_user(server: Node, own: redis.Redis, words: list[str]) -> None:
    own.set("session:1", "secret")
    with (
        server.client(**LOGIN) as client,
        pytest.raises(redis.exceptions.ResponseError, match=r"(?i)permission|ACL failure"),
    ):
        client.execute_command(*words)
    assert own.get("session:1") == b"secret"


def test_on_a_cluster_two_more_suffice(settings: Any) -> None:
    more = re.search(r"On a Cluster add `([^`]+)`", DOCS)
    assert more is not None
    with Cluster() as cluster:
        for node in cluster.nodes:
            node.command(*ACL, *more[1].split())
        buckets = [Bucket(f"user:{number}", Rate.parse("10/min")) for number in range(30)]
        host, port = cluster.nodes[0].address
        url = f"redis://ratequota:PASSWORD@{host}:{port}/0"
        settings.RATEQUOTA = {"REDIS_URL": url, "CLUSTER": True, "TIMEOUT": 5}
        limiter = Limiter()
        try:
            assert limiter.check(buckets).allowed
            assert limiter.reset(buckets) == 30
            assert limiter.publish()
            limiter.store.info()
        finally:
            limiter.store.close()


def test_sentinels_need_one_command() -> None:
    line = re.search(r"`(\+sentinel\|[a-z-]+)`", DOCS)
    assert line is not None
    with (
        Node() as master,
        Node(f"sentinel monitor ratequota {master.host} {master.port} 1", sentinel=True) as watcher,
    ):
        master.command(*ACL)
        watcher.command("ACL", "SETUSER", "watcher", "reset", "on", ">watching", line[1])
        query = "sentinel_username=watcher&sentinel_password=watching"
        url = f"redis+sentinel://ratequota:PASSWORD@{watcher.host}:{watcher.port}/ratequota?{query}"
        store = store_from_url(url, 5)
        assert store.execute(("TIME",))
        store.close()


# --- Scopes come from code and the database. ---

NAMED = {"scope": "cheap", "throttle_scope": "cheap", "ratequota_scope": "cheap", "endpoint": "cheap"}
HEADERS = {f"HTTP_{name.upper()}": "cheap" for name in NAMED} | {
    f"HTTP_X_{name.upper()}": "cheap" for name in ("scope", "endpoint", "original_url", "rewrite_url")
}
REQUESTS: dict[str, Callable[[Client, str], Any]] = {
    "query": lambda client, path: client.get(path, NAMED),
    "headers": lambda client, path: client.get(path, **HEADERS),
    "form": lambda client, path: client.post(path, NAMED),
    "method override": lambda client, path: client.post(path, {"_method": "PUT"}, HTTP_X_HTTP_METHOD_OVERRIDE="PUT"),
    "script name": lambda client, path: client.get(path, SCRIPT_NAME="/cheap"),
}


def names(response: Any) -> set[str]:
    """The endpoints whose policies the response names."""
    return set(re.findall(r'"([^"/]+)/', response["RateLimit-Policy"]))


@with_database
@pytest.mark.parametrize("how", REQUESTS)
@pytest.mark.parametrize(
    ("path", "endpoint"),
    [("/search/", "search"), ("/decorated/", "search"), ("/plain/", "plain"), ("/v1/items/7/", "items")],
    ids=["attribute", "decorator", "URL name", "route"],
)
def test_a_scope_of_the_client_s_choice(settings: Any, how: str, path: str, endpoint: str) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    scope = views.Search.throttle_scope if path == "/search/" else None
    for name, routes in {
        "search": "",
        "plain": "plain",
        "items": "/v1/items/<int:pk>/",
        # What is written in the path or anywhere else matches nothing.
        "cheap": "cheap\n/cheap/*\n/cheap\n/v1/items/7/*\n*scope=cheap*",
    }.items():
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name=name, routes=routes), rates="1000/hour")
    expected = names(Client().get(path))
    client = Client()
    client.cookies.load(NAMED)
    assert names(REQUESTS[how](client, path)) == expected
    assert "cheap" not in expected
    if path != "/decorated/":
        assert expected == {scope or endpoint}


# --- Hostile names. ---

EVIL = """'"><rq-evil onrq="1">&lt;{{ 7|add:7 }}</textarea></script></title><rq-evil>\u202e"""
LONG = "L" * 10_000


class Tags(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names |= {tag, *(name for name, _ in attrs)}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def hostile() -> dict[str, Any]:
    """One of each kind of object, with hostile text wherever it fits."""
    root = User.objects.create_superuser(EVIL, password="root")
    plan = Plan.objects.create(name=EVIL, slug="evil", description=EVIL + LONG)
    endpoint = Endpoint.objects.create(name="evil", routes=EVIL + LONG, description=EVIL + LONG)
    # What the form would refuse, and raw SQL may have written.
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_endpoint SET name = %s", [EVIL])
        cursor.execute("UPDATE django_ratequota_plan SET slug = %s", [EVIL])
    override = RatePolicy.objects.create(user=root, endpoint=endpoint, rates="5/hour", reason=EVIL)
    subject = RatePolicy.objects.create(subject=f"tenant:{EVIL}", counted_per="tenant", rates="5/hour", reason=EVIL)
    policy = RatePolicy.objects.create(plan=plan, endpoint=endpoint, rates="5/hour", reason="R" * 200)
    assignment = PlanAssignment.objects.create(user=root, plan=plan, reason=EVIL)
    return {
        "root": root,
        "plan": plan,
        "endpoint": endpoint,
        "ratepolicy": override,
        "subject": subject,
        "policy": policy,
        "planassignment": assignment,
    }


def look(page: Any) -> str:
    assert page.status_code == 200
    text = page.content.decode()
    tags = Tags(text)
    assert not {name for name in tags.names if "rq-evil" in name or "onrq" in name}
    return text


@with_database
def test_names_with_markup(hostile: dict[str, Any], settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": {"tenant": "tests.project.views.api_key"}}
    client = Client()
    client.force_login(hostile["root"])
    base = "/admin/django_ratequota"
    reset = f"{base}/ratepolicy/counters/?user={hostile['root'].pk}&bucket={quote(EVIL)}/hour"
    confirm = client.post(reset, {"reason": EVIL})
    assert confirm.status_code == 302
    saves = PolicyChange.objects.order_by().values_list("change_id", flat=True).distinct()
    pages = ["/admin/", reset]
    for model in ("plan", "endpoint", "ratepolicy", "planassignment"):
        own = f"{base}/{model}/{hostile[model].pk}"
        pages += [f"{base}/{model}/", f"{own}/change/", f"{own}/delete/", f"{base}/{model}/add/"]
    pages += [f"{base}/policychange/"] + [f"{base}/policychange/save/{pk}/" for pk in saves]
    shown = [page for page in pages if "rq-evil" in look(client.get(page))]
    assert len(shown) >= len(pages) - 1, "it is on all of them, but for the operator's name on each"
    every = [policy.pk for policy in RatePolicy.objects.all()]
    deletion = {"action": "delete_selected", "_selected_action": every}
    assert "rq-evil" in look(client.post(f"{base}/ratepolicy/", deletion))
    look(client.get(f"{base}/endpoint/add/", {"name": EVIL + LONG}))
    look(client.get(f"{base}/ratepolicy/", {"q": EVIL}))
    look(client.get(f"{base}/ratepolicy/add/", {"subject": EVIL, "rates": EVIL, "reason": EVIL}))


@with_database
@pytest.mark.parametrize("searches", thorough_after(1, [True, False]), ids=["by autocomplete", "by id"])
def test_hostile_input_is_refused_as_text(hostile: dict[str, Any], searches: bool) -> None:
    """An autocomplete of a key that is none once failed the page, as Django's own does."""
    client = Client()
    client.force_login(hostile["root"])
    if not searches:
        staff = User.objects.create(username="staff", is_staff=True)
        theirs = Permission.objects.filter(content_type__app_label="django_ratequota")
        staff.user_permissions.set(theirs.exclude(codename__startswith="view_"))
        client.force_login(staff)
    base = "/admin/django_ratequota"
    for value in (EVIL, LONG, EVIL + LONG, "9" * 4000, "\x00"):
        form = dict.fromkeys(["user", "subject", "plan", "endpoint", "counted_per", "rates", "algorithm"], value)
        form |= dict.fromkeys(["mode", "on_error", "starts_at_0", "starts_at_1", "ends_at_0", "reason"], value)
        look(client.post(f"{base}/ratepolicy/add/", form))
        names = dict.fromkeys(["name", "slug", "description", "default_for", "routes", "methods", "cost"], value)
        tables = {"policies-TOTAL_FORMS": "1", "policies-INITIAL_FORMS": "0"}
        tables |= {f"policies-0-{name}": value for name in ("endpoint", "plan", "counted_per", "rates", "mode")}
        look(client.post(f"{base}/plan/add/", names | tables))
        look(client.post(f"{base}/endpoint/add/", names | tables))
        look(client.post(f"{base}/planassignment/add/", {"user": value, "plan": value, "starts_at_0": value}))
        reset = f"{base}/ratepolicy/counters/?user={hostile['root'].pk}&bucket={quote(EVIL)}/hour"
        assert client.post(reset, {"units": value, "reason": value}).status_code in (200, 302)
        filters = ["time", "audience", "mode__exact", "counted_per"]
        for query in [{"q": value}, *({name: value} for name in filters)]:
            assert client.get(f"{base}/ratepolicy/", query, follow=True).status_code == 200
    assert RatePolicy.objects.count() == 3


@with_database
def test_names_that_turn_the_text_around(hostile: dict[str, Any]) -> None:
    for model in ("plan", "endpoint", "ratepolicy", "subject", "policy", "planassignment"):
        assert "\u202e" not in str(hostile[model])
    assert r"\u202e" in str(hostile["ratepolicy"])
    assert not [change for change in PolicyChange.objects.all() if "\u202e" in str(change)]


@with_database
def test_a_reset_by_name_leaves_alone_what_callers_without_an_address_share(settings: Any) -> None:
    """It once reset their common counter as well, for want of an address of its own."""
    identifiers = {"login_name": "django_ratequota.identifiers.login_name"}
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": identifiers}
    login = Endpoint.objects.create(name="login", methods="POST")
    for counted_per in ("ip", "login_name"):
        RatePolicy.objects.create(endpoint=login, counted_per=counted_per, rates="5/hour")
    request = RequestFactory().post("/login/", {"username": "bob"}, REMOTE_ADDR="")
    assert [one.remaining for one in check_request(request, "login").statuses] == [4, 4]
    line = "reset --identifier login_name=bob --endpoint login --method POST"
    call_command("ratequota", *line.split(), stdout=io.StringIO())
    left = {one.bucket.counted_per: one.remaining for one in check_request(request, "login", 0, again=True).statuses}
    assert left == {"ip": 4, "login_name": 5}
    assert [change.object_text for change in PolicyChange.objects.filter(action="reset")] == ["login_name:bob"]


def test_each_attack_names_its_test() -> None:
    """Each row has a test of its own, named after what the row says before its colon."""
    table = (ROOT / "tests/security/README.md").read_text()
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if row.startswith("| ")][1:]
    places = [cell.strip("`").split("::") for *_, cell, _requirement in rows]
    for (attack, *_), (file, *classes, name) in zip(rows, places, strict=True):
        assert name == "test_" + "_".join(re.findall("[a-z0-9]+", attack.partition(":")[0].lower()))
        found: list[Any] = ast.parse((ROOT / "tests" / file).read_text()).body
        for outer in classes:
            [found] = [node.body for node in found if isinstance(node, ast.ClassDef) and node.name == outer]
        assert [node for node in found if getattr(node, "name", "") == name], f"{file} has no {name}"
    assert len({place[-1] for place in places}) == len(rows)
    own = {f"security/{path.name}" for path in (ROOT / "tests/security").glob("test_*.py")}
    assert own <= {place[0] for place in places}, "each module of this folder holds a row"
