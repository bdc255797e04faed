"""The live usage page: what it shows, permissions, and the page while Redis is down."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client, RequestFactory

from django_ratequota import check_request
from django_ratequota.admin.formatting import moment
from django_ratequota.admin.usage.counts import Selection
from django_ratequota.admin.usage.workers import server
from django_ratequota.changes.publication import published_at
from django_ratequota.models import Endpoint, Plan, RatePolicy
from django_ratequota.monitoring import health, refusals, timeline
from django_ratequota.monitoring.collector import collector
from django_ratequota.monitoring.health import Health, state_of
from django_ratequota.monitoring.packing import OUTCOMES
from django_ratequota.monitoring.refusals import Refusal, RefusedBucket
from django_ratequota.monitoring.timeline import Counts, Timeline, TopCaller
from django_ratequota.runtime import default_limiter
from django_ratequota.utils.histogram import BOUNDS
from tests.admin.test_permissions import client_of
from tests.support.operators import text_of

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/ratepolicy/"
PAGE = f"{LIST}usage/"
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 10_000
START = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
#: A minute, in revisions.
BEHIND = 60 * 10**6
#: The second column of the tables of callers.
LIMIT = "Tightest limit now"


class Scene:
    """Invented counts and refusals in place of the recorded ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total: list[Counts] = [Counts(8, 2, 1), Counts(0, 0, 0)]
        self.complete = True
        self.endpoints: dict[int, Counts] = {}
        self.policies: dict[int, Counts] = {}
        self.tops: list[TopCaller] = []
        self.refused: list[Refusal] = []
        self.queried: list[Any] = []
        monkeypatch.setattr(timeline, "timeline", self.timeline)
        monkeypatch.setattr(timeline, "top_callers", self.top_callers)
        monkeypatch.setattr(refusals, "refusals", lambda most=50, caller="": tuple(self.refused[:most]))

    def timeline(self, span: Any, *, endpoint_id: int | None, policy_id: int | None) -> Timeline:
        self.queried.append(span)
        total = self.total
        if policy_id is not None:
            total = [self.policies.get(policy_id, Counts()), Counts()]
        elif endpoint_id is not None:
            total = [self.endpoints.get(endpoint_id, Counts()), Counts()]
        return Timeline(
            starts=(START, START + timedelta(minutes=1)),
            total=tuple(total),
            endpoints=self.endpoints,
            policies=self.policies,
            complete=self.complete,
        )

    def top_callers(self, span: Any, **kwargs: Any) -> dict[str, tuple[TopCaller, ...]]:
        self.queried.append((span, kwargs))
        tops = {by: [top for top in self.tops if getattr(top.counts, by)] for by in OUTCOMES}
        return {by: tuple(sorted(found, key=lambda top: -getattr(top.counts, by))) for by, found in tops.items()}


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def refusal(number: int = 1, **fields: Any) -> Refusal:
    one = Refusal(
        id=f"refused{number:03d}",
        at=START,
        count=3,
        caller="ip:203.0.113.7",
        ip="ip:203.0.113.7",
        plan_id=None,
        scope="search",
        route="/search/",
        method="GET",
        cost=1,
        violated=("search/min",),
        error="",
        buckets=(),
        revision=1,
    )
    return replace(one, **fields)


def bucket(policy_id: int | None, refused: bool = True) -> RefusedBucket:
    return RefusedBucket(
        title="search/min",
        scope="search",
        rate="5/min",
        policy_id=policy_id,
        subject="ip:203.0.113.7",
        refused=refused,
        limit=5,
        remaining=0,
        retry_after=3.0,
        reset_after=60.0,
    )


def worker(name: str, revision: int, *, age: float = 1.0, loaded: float = 60.0, **fields: Any) -> Health:
    now = time.time()
    latency = [0] * (len(BOUNDS) + 1)
    one = Health(
        process=name,
        at=now - age,
        revision=revision,
        policies_age=loaded - age,
        degraded={},
        down={},
        latency=latency,
    )
    return replace(one, **fields)


def section(page: Any, name: str) -> str:
    """Return one section of the page."""
    found = re.search(rf'<section aria-labelledby="ratequota-{name}">.*?</section>', text_of(page), re.S)
    assert found is not None
    return found[0]


def rows(markup: str) -> list[list[str]]:
    """Return the rows of the tables, as text of each cell."""
    found = re.findall(r"<tr>\s*(<th scope=\"row\">.*?)</tr>", markup, re.S)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in found]
    texts = [[html.unescape(re.sub(r"<[^>]*>", "", one)).strip() for one in row] for row in cells]
    return [[text.removesuffix(" Block…") for text in row] for row in texts]


def warnings(page: Any) -> list[str]:
    return [str(message) for message in page.context["messages"]]


# --- Requests over time. ---


def test_the_chart_and_the_totals_of_requests(operator: Client, scene: Scene) -> None:
    scene.total = [Counts(1500, 500, 100), Counts(0, 0, 0)]
    page = operator.get(PAGE)
    text = text_of(page)
    assert "Live usage: last hour" in text
    data = re.search(r"<details.*?</details>", text, re.S)
    assert data is not None
    # Admitted ones that log mode would refuse are a part of their own in each bar.
    assert rows(data[0]) == [["12:00", "1,400", "100", "500"], ["12:01", "0", "0", "0"]]
    numbers = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", text)[:4]
    assert [(name, re.sub("<.*?>", "", number)) for name, number in numbers] == [
        ("Requests", "2,000"),
        ("Admitted", "1,500 (75.0 %)"),
        ("Of these, would be refused (log mode)", "100 (5.0 %)"),
        ("Refused", "500 (25.0 %)"),
    ]


def test_select_an_endpoint(operator: Client, scene: Scene, search: Endpoint) -> None:
    scene.endpoints = {search.pk: Counts(3, 1, 0), 0: Counts(5, 1, 1)}
    scene.tops = [TopCaller(caller="ip:203.0.113.7", counts=Counts(3, 1, 0))]
    page = operator.get(PAGE, {"endpoint": search.pk})
    assert "Live usage: last hour, endpoint search" in text_of(page)
    assert page.context["totals"][0]["number"] == "4"
    place = {"endpoint_id": search.pk, "policy_id": None, "most": 10}
    assert scene.queried[1:] == [("hour", place)]
    assert 'href="/admin/django_ratequota/ratepolicy/explain/?ip=203.0.113.7&amp;endpoint=search"' in text_of(page)
    page = operator.get(PAGE, {"endpoint": "0"})
    assert "Live usage: last hour, no endpoint" in text_of(page)
    assert page.context["totals"][0]["number"] == "6"


def test_callers_of_a_policy_have_no_admitted_count_and_no_share(operator: Client, scene: Scene) -> None:
    """Each was listed with 0 admitted requests and a share of 100 % refused."""
    policy = RatePolicy.objects.create(rates="5/min")
    scene.tops = [TopCaller(caller="ip:203.0.113.7", counts=Counts(0, 2, 1))]
    callers = section(operator.get(PAGE, {"policy": policy.pk}), "callers")
    assert "requests are counted by caller only where it refused them" in callers
    assert re.findall("<h3>(.*?)</h3>", callers) == [
        "Most requests refused",
        "Most requests that log mode would have refused",
    ]
    assert re.findall('<th scope="col">(.*?)</th>', callers) == ["Caller", LIMIT, "Would be refused", "Refused"] * 2
    assert rows(callers) == [["ip:203.0.113.7", "0 of 5 used all endpoints: 5/min", "1", "2"]] * 2


def test_endpoint_and_policy_together_select_the_policy(operator: Client, scene: Scene, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(rates="5/min")
    page = operator.get(PAGE, {"policy": policy.pk, "endpoint": search.pk})
    assert len(warnings(page)) == 1
    assert warnings(page)[0].startswith("The endpoint was ignored: requests are counted by endpoint or by policy")
    assert page.context["selection"] == Selection(policy_id=policy.pk)


def test_unknown_parameters_are_ignored_with_a_warning(operator: Client, scene: Scene) -> None:
    for name, value in (
        *(("span", "year"), ("span", HOSTILE), ("endpoint", "-1"), ("endpoint", "1_0"), ("endpoint", "١")),
        *(("policy", "9" * 40), ("policy", "1; DROP TABLE"), ("endpoint", HOSTILE), ("policy", "\x00")),
    ):
        page = operator.get(PAGE, {name: value})
        (warning,) = warnings(page)
        assert f"{name}=" in warning
        assert "was ignored: unknown value." in warning
        assert len(warning) < 200
        assert page.context["selection"] == Selection()
        assert "<script>alert" not in text_of(page)


def test_links_keep_the_selection(operator: Client, scene: Scene, search: Endpoint) -> None:
    scene.endpoints = {search.pk: Counts(1, 0, 0)}
    page = operator.get(PAGE, {"span": "day", "refresh": "1"})
    assert f'href="?span=day&amp;endpoint={search.pk}&amp;refresh=1"' in section(page, "endpoints")
    assert 'value="1" checked' in text_of(page)
    assert 'value="1" checked' not in text_of(operator.get(PAGE))


# --- Endpoints and policies. ---


def test_endpoints_are_ordered_by_refusals_then_admissions(operator: Client, scene: Scene, search: Endpoint) -> None:
    other = Endpoint.objects.create(name="other")
    scene.endpoints = {
        0: Counts(1000, 0, 0),
        search.pk: Counts(10, 5, 2),
        other.pk: Counts(2000, 0, 0),
        999: Counts(1),
    }
    found = section(operator.get(PAGE), "endpoints")
    assert rows(found) == [
        ["search open", "10", "2", "5", "33.3 %"],
        ["other open", "2,000", "0", "0", "0.0 %"],
        ["no endpoint", "1,000", "0", "0", "0.0 %"],
        ["deleted (id 999)", "1", "0", "0", "0.0 %"],
    ]
    assert f'href="/admin/django_ratequota/endpoint/{search.pk}/change/"' in found
    assert 'href="/admin/django_ratequota/endpoint/999' not in found


# --- Callers and refusals. ---


def test_callers_have_names_and_link_to_explain(operator: Client, scene: Scene) -> None:
    alice = User.objects.create(username="alice")
    scene.tops = [
        TopCaller(caller=f"user:{alice.pk}", counts=Counts(90, 10, 0)),
        TopCaller(caller="ip:2001:db8::/64", counts=Counts(5, 0, 5)),
        TopCaller(caller="tenant:a&b", counts=Counts(1, 1, 0)),
        TopCaller(caller="user:10000000000000000000000", counts=Counts(1, 0, 0)),
        TopCaller(caller="", counts=Counts(1, 0, 0)),
    ]
    found = section(operator.get(PAGE), "callers")
    most, refused, would = re.split("<h3>", found)[1:]
    assert rows(most)[:2] == [
        ["user alice", "–", "90", "0", "10", "10.0 %"],
        ["ip:2001:db8::/64", "–", "5", "5", "0", "0.0 %"],
    ]
    assert [row[0] for row in rows(most)[2:]] == ["tenant:a&b", "user:10000000000000000000000", "unknown"]
    assert [row[0] for row in rows(refused)] == ["user alice", "tenant:a&b"]
    assert [row[0] for row in rows(would)] == ["ip:2001:db8::/64"]
    links = re.findall(r'explain/\?([^"]*)"', most)
    assert links[:3] == [f"user={alice.pk}", "ip=2001%3Adb8%3A%3A%2F64", "caller=tenant%3Aa%26b"]


def test_refusals_name_caller_request_and_policy(operator: Client, scene: Scene, search: Endpoint) -> None:
    alice = User.objects.create(username="alice")
    policy = RatePolicy.objects.create(endpoint=search, rates="5/min")
    other = RatePolicy.objects.create(rates="50/min")
    buckets = (bucket(policy.pk), bucket(other.pk, refused=False), bucket(12345), bucket(None))
    scene.refused = [
        refusal(1, caller=f"user:{alice.pk}", buckets=buckets),
        refusal(2, scope="", error="timeout", violated=()),
    ]
    found = section(operator.get(PAGE), "refusals")
    first, second = rows(found)
    assert first[:5] == ["refused001", "11/21/2026 12:00:00 UTC", "3", "user alice", "GET search"]
    assert first[5] == "search: 5/mineveryone × search: 5/mindeleted (id 12345)"
    assert second[4:] == ["GET /search/", "on_error, because Redis gave no decision (timeout)"]
    assert 'explain/?id=refused001"' in found
    assert f'href="{LIST}{policy.pk}/change/"' in found
    assert "50/min" not in found


def test_refusals_of_the_selection(operator: Client, scene: Scene, search: Endpoint) -> None:
    policy = RatePolicy.objects.create(endpoint=search, rates="5/min")
    reports = Endpoint.objects.create(name="reports", routes="/api/reports/*\nplain")
    scene.refused = [
        refusal(1, buckets=(bucket(policy.pk),)),
        refusal(2, buckets=(bucket(policy.pk, refused=False),)),
        refusal(3, scope="", route="/api/reports/7/"),
        refusal(4, scope="", route="/plain/"),
        refusal(5, scope="", route=""),
    ]

    def shown(**query: Any) -> list[str]:
        return [row[0][-1] for row in rows(section(operator.get(PAGE, query), "refusals"))]

    assert shown() == ["1", "2", "3", "4", "5"]
    assert shown(policy=policy.pk) == ["1"]
    assert shown(endpoint=search.pk) == ["1", "2"]
    assert shown(endpoint=reports.pk) == ["3", "4"]
    assert shown(endpoint=0) == ["5"]


# --- The store and the proof. ---


def test_redis_servers_are_listed(operator: Client, scene: Scene) -> None:
    found = section(operator.get(PAGE), "store")
    ((name, state, version, up, memory, policy, evicted),) = rows(found)
    assert re.fullmatch(r"127\.0\.0\.1:\d+|/.*|localhost:\d+", name)
    assert state == "up"
    assert re.fullmatch(r"(valkey|redis) \d+\.\d+.*", version)
    assert re.fullmatch(r"\d+ (s|min|h|days?)", up)
    assert re.search(r"[KM]B \(", memory)
    assert policy
    assert evicted == "0"


def test_evictions_are_a_warning() -> None:
    info = {"redis_version": "7.4.0", "evicted_keys": "1234", "maxmemory": "1048576", "used_memory": "2048"}
    row = server("cache:6379", info)
    assert row["loses"]
    assert row["cells"] == ["up", "redis 7.4.0", "–", "2.0\xa0KB (1.0\xa0MB)", "–", "1,234"]
    row = server("cache:6379", {"redis_version": "7.4.0"})
    assert not row["loses"]
    assert row["cells"] == ["up", "redis 7.4.0", "–", "– (no limit)", "–", "–"]


Reported = Callable[..., Any]


@pytest.fixture
def reported(operator: Client, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Reported:
    """Opens the page after these reports of workers; ``revision`` is the stored one."""

    def show(*found: Health, revision: int | None = None) -> Any:
        monkeypatch.setattr(health, "reports", lambda: found)
        if revision is not None:
            monkeypatch.setattr(type(default_limiter()), "stored_revision", lambda self: revision)
        return operator.get(PAGE)

    return show


@pytest.mark.parametrize(
    ("revisions", "proof", "complaints"),
    [
        ([0, 0], "is live on 2 of 2 workers since", []),
        ([0, -BEHIND], "is live on 1 of 2 workers since", ["1 worker is behind"]),
        ([-BEHIND, -2 * BEHIND], "is live on 0 of 2 workers.", ["2 workers are behind"]),
        ([0, None], "is live on 1 of 2 workers since", ["1 worker has loaded no policies yet"]),
        ([1, 0], "is live on 2 of 2 workers since", []),
    ],
)
def test_the_page_shows_how_many_workers_have_the_revision(
    reported: Reported, revisions: list[int | None], proof: str, complaints: list[str]
) -> None:
    # Published a minute ago: the workers have decided since.
    published = default_limiter().publish() - BEHIND
    loaded = [0 if behind is None else published + behind for behind in revisions]
    page = reported(*(worker(f"web-1:{at}", one, idle=0.5) for at, one in enumerate(loaded)), revision=published)
    text = section(page, "proof")
    assert f"Revision {moment(datetime.fromtimestamp(published / 10**6, UTC), seconds=True)} {proof}" in text
    assert f"<code>{published}</code></p>" in text, "to be copied"
    shown = re.findall('<p class="ratequota-usage-complaint">(.*?)</p>', text)
    assert len(shown) == len(complaints)
    assert all(one.startswith(expected) for one, expected in zip(shown, complaints, strict=True))
    assert ("ratequota-usage-complete" in text) is (not complaints)
    assert len(rows(text)) == len(revisions)


@pytest.mark.parametrize(
    ("idle", "state"),
    [(None, "idle"), (58.0, "idle"), (30.0, "behind")],
)
def test_an_idle_worker_is_not_behind(reported: Reported, idle: float | None, state: str) -> None:
    """After each edit, workers without requests stood there as behind."""
    published = default_limiter().publish() - BEHIND
    found = (worker("a:1", published, idle=0.5), worker("b:2", published - 1, idle=idle))
    text = section(reported(*found, revision=published), "proof")
    assert sorted(row[1] for row in rows(text)) == sorted([state, "up to date"])
    note = "1 worker is idle: it has made no decision since, and loads the newest policies before its next one."
    assert (note in text) is (state != "behind")
    assert ("ratequota-usage-complete" in text) is (state != "behind")
    assert ("ratequota-usage-complaint" in text) is (state == "behind")


def test_the_revision_is_live_since_the_last_worker_loaded_it(reported: Reported) -> None:
    published = default_limiter().publish()
    later = [worker("a:1", published, loaded=-100), worker("b:2", published, loaded=-500)]
    since = datetime.fromtimestamp(later[1].at - later[1].policies_age, UTC)
    assert f"since {since:%m/%d/%Y %H:%M:%S} UTC." in section(reported(*later), "proof")
    # A worker's clock that lags cannot make a revision live before it was published.
    at = datetime.fromtimestamp(published / 10**6, UTC)
    text = section(reported(worker("a:1", published, loaded=5000)), "proof")
    assert f"since {at:%m/%d/%Y %H:%M:%S} UTC." in text


def test_a_worker_that_stops_reporting_is_a_warning(reported: Reported) -> None:
    published = default_limiter().publish()
    text = section(reported(worker("web-1:1", published), worker("web-2:7", published, age=45)), "proof")
    assert "is live on 1 of 2 workers" in text
    assert "1 worker does not report: it has ended, hangs, or cannot reach Redis." in text
    assert rows(text)[0][:2] == ["web-2:7", "not reporting"], "trouble comes first"
    assert rows(text)[0][3] == "45 s ago"


def test_an_open_breaker_and_decisions_without_redis_are_shown(reported: Reported) -> None:
    published = default_limiter().publish()
    latency = [0] * (len(BOUNDS) + 1)
    latency[10], latency[-1] = 990, 10
    page = reported(
        worker("a:1", published, down={"cache:6379": "timeout"}, degraded={"timeout": 7}, latency=latency),
        worker("b:2", published, degraded={"timeout": 3, "oom": 1}, latency=latency),
    )
    assert [row[-2:] for row in rows(section(page, "proof"))] == [
        ["1,000", "open: cache:6379 (timeout)"],
        ["1,000", "closed"],
    ]
    numbers = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", section(page, "store")))
    assert numbers["Decisions in the last minute"] == "2,000"
    assert numbers["Median duration"] == f"{BOUNDS[10] * 1000:.2f} ms"
    assert numbers["99th percentile of the duration"] == f"{BOUNDS[10] * 1000:.2f} ms"
    assert numbers["Decided without Redis since the workers started"] == "timeout 10, oom 1"


def test_late_checkpoints_are_a_warning(reported: Reported) -> None:
    published = default_limiter().publish()
    ages = {"a:1": 14.0, "b:2": 12.0, "c:3": 299.0}  # by default they are written each second
    found = [worker(name, published, written_until=time.time() - 1 - age) for name, age in ages.items()]
    late = "2 workers have not saved their counts of quotas to the database for up to 5 min. If one is killed"
    assert late in section(reported(*found), "proof")
    assert "counts of quotas" not in section(reported(found[1]), "proof")


def test_errors_that_open_no_breaker_are_shown(reported: Reported) -> None:
    """Every decision was an error of the script, while the page showed closed breakers and a server that is up."""
    published = default_limiter().publish()
    page = reported(
        worker("a:1", published, errors={"wrongtype": "WRONGTYPE <Operation>", "response": "at driver.lua:7"}),
        worker("b:2", published, errors={"wrongtype": "WRONGTYPE <Operation>"}, down={"cache:6379": "oom"}),
        worker("c:3", published),
    )
    assert [row[-1] for row in rows(section(page, "proof"))] == [
        "closed; errors: wrongtype, response",
        "open: cache:6379 (oom); errors: wrongtype",
        "closed",
    ]
    text = section(page, "store")
    message = "In the last minute, on_error decided requests on"
    assert f"{message} 2 workers (wrongtype): WRONGTYPE &lt;Operation&gt;</p>" in text
    assert f"{message} 1 worker (response): at driver.lua:7</p>" in text


def test_without_reports_the_live_revision_is_unknown(operator: Client, scene: Scene, settings: Any) -> None:
    assert "Workers do not report, because STATISTICS_SECONDS is 0." in section(operator.get(PAGE), "proof")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 1}
    assert "No worker has reported in the last minute." in section(operator.get(PAGE), "proof")


def test_the_state_of_a_worker_follows_from_its_revision_and_its_last_decision() -> None:
    decided = [1, *[0] * len(BOUNDS)]
    assert state_of(worker("a:1", 6, idle=30.0, latency=decided), 7) == "behind", "no time of publication"
    assert state_of(worker("a:1", 6, idle=90.0), 7) == "idle"
    assert state_of(worker("a:1", 8), 7) == "live"
    assert [published_at(revision) for revision in (7, 2**62)] == [None, None]
    assert published_at(int(START.timestamp() * 10**6)) == START


def test_a_change_of_one_user_resets_the_age_of_the_policies() -> None:
    """Otherwise a worker would seem to have loaded the revision before it was published."""
    RatePolicy.objects.create(rates="5/hour")
    check_request(RequestFactory().get("/"))
    before = health.health()
    RatePolicy.objects.create(user=User.objects.create(username="alice"), rates="9/hour")
    check_request(RequestFactory().get("/"))
    after = health.health()
    assert after.revision > before.revision
    assert after.at - after.policies_age > before.at - before.policies_age + 1e-3


# --- Permissions. ---


def test_operators_who_see_overrides_only_see_no_other_policy(scene: Scene) -> None:
    plan = Plan.objects.create(name="Free", slug="free")
    policy = RatePolicy.objects.create(plan=plan, rates="77/min")
    override = RatePolicy.objects.create(subject="ip:203.0.113.7", rates="9/min")
    scene.policies = {policy.pk: Counts(8, 2, 0), override.pk: Counts(1, 1, 0), 999: Counts(1)}
    scene.refused = [refusal(1, buckets=(bucket(policy.pk), bucket(override.pk)))]
    granter = client_of("granter")
    page = granter.get(PAGE)
    assert [row[0] for row in rows(section(page, "policies"))] == ["ip:203.0.113.7 × all endpoints: 9/min open"]
    refused = section(page, "refusals")
    assert "9/min" in refused
    assert "77/min" not in refused
    assert f"deleted (id {policy.pk})" not in text_of(page)
    assert page.context["totals"][0]["number"] == "10"
    page = granter.get(PAGE, {"policy": policy.pk})
    assert "was ignored: unknown value" in warnings(page)[0]
    assert page.context["selection"].policy_id is None
    assert granter.get(PAGE, {"policy": override.pk}).context["selection"].policy_id == override.pk


def test_endpoints_have_no_link_without_permission_to_view_them(scene: Scene, search: Endpoint) -> None:
    scene.endpoints = {search.pk: Counts(1, 0, 0)}
    viewer = client_of("viewer")
    page = f"/admin/django_ratequota/endpoint/{search.pk}/change/"
    assert page not in section(viewer.get(PAGE), "endpoints")
    User.objects.get(username="viewer").user_permissions.add(Permission.objects.get(codename="view_endpoint"))
    assert page in section(viewer.get(PAGE), "endpoints")


# --- Hostile names, costs, outages. ---


def test_the_page_takes_four_commands_however_many_rows_it_has(
    operator: Client, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, commands = type(default_limiter().store), []
    execute, info = store.execute, store.info
    monkeypatch.setattr(store, "execute", lambda self, c: (commands.append(c), execute(self, c))[1])
    monkeypatch.setattr(store, "info", lambda self: (commands.append("INFO"), info(self))[1])
    for number in range(60):
        user = User.objects.create(username=f"u{number}")
        scene.tops.append(TopCaller(caller=f"user:{user.pk}", counts=Counts(9, 1, 1)))
        RatePolicy.objects.create(user=user, rates="5/s")
    for _ in range(2):  # at the first look, the server learns the script, and this process the policies
        commands.clear()
        text_of(operator.get(PAGE))
    assert len(commands) == 4, "the revision twice, workers and INFO"


def test_each_section_reports_that_redis_is_down(operator: Client, settings: Any) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="5/min")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "redis://127.0.0.1:1/0"}
    text = text_of(operator.get(PAGE))
    sentences = [
        "The counts cannot be shown",
        "Which revision is live is unknown",
        "It is down, or cannot be reached from here",
        "The busiest callers cannot be shown",
        "Refusals cannot be shown",
    ]
    for sentence in sentences:
        assert re.search(rf"Redis did not answer \(connection\)\. {sentence}", text), sentence
    assert "Last change" in text
    assert re.search(r'<option value="\d+">search</option>', text)
    assert len(rows(text)) == 1, "this worker, as it knows itself"
    assert "These are the decisions of the worker that made this page." in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"REDIS_URL": "memory://"}, "This needs Redis, and each worker counts in memory (memory://)."),
        ({"ENABLED": False}, "This needs Redis, which is not used while nothing is enforced."),
    ],
)
def test_without_a_redis_the_page_says_why_and_makes_no_claims(
    operator: Client, settings: Any, change: dict[str, Any], why: str
) -> None:
    """Regression: a worker that counts in memory had "no policies loaded yet", and nothing said why counts lack."""
    RatePolicy.objects.create(rates="5/min")
    settings.RATEQUOTA = {**settings.RATEQUOTA, **change}
    text = text_of(operator.get(PAGE))
    assert f"<p>{why}</p>" in text
    assert "Last change" in text
    assert rows(text) == []
    for claim in ("no policies loaded yet", "closed", "Decided without Redis", "did not answer"):
        assert claim not in text


# --- With real decisions. ---


@pytest.mark.usefixtures("recording")
def test_decisions_appear_on_the_page(operator: Client, search: Endpoint) -> None:
    alice = User.objects.create(username="alice")
    limit = RatePolicy.objects.create(endpoint=search, rates="3/hour")
    RatePolicy.objects.create(rates="1/hour", mode="log")
    request = RequestFactory().get("/")
    request.user = alice
    outcomes = []
    for _ in range(5):
        request = RequestFactory().get("/")
        request.user = alice
        outcomes.append(check_request(request, scope="search").allowed)
    assert outcomes == [True, True, True, False, False]
    collector.flush()
    health.report()
    for query in ({}, {"span": "day"}, {"span": "week"}, {"endpoint": search.pk}):
        page = operator.get(PAGE, query)
        assert [total["number"] for total in page.context["totals"]] == ["5", "3", "2", "2"]
    page = operator.get(PAGE)
    assert rows(section(page, "endpoints")) == [["search open", "3", "2", "2", "40.0 %"]]
    assert rows(section(page, "policies"))[0] == ["everyone × search: 3/hour open", "3", "0", "2", "40.0 %"]
    callers = [rows(part) for part in section(page, "callers").split("<h3>")[1:]]
    assert callers == [[["user alice", "3 of 3 used search: 3/hour", "3", "2", "2", "40.0 %"]]] * 3
    ((_, _, count, caller, what, by),) = rows(section(page, "refusals"))
    assert (count, caller, what) == ("2", "user alice", "GET search")
    assert by == "search: 3/houreveryone × search: 3/hour"
    assert "is live on 1 of 1 worker since" in section(page, "proof")
    assert rows(section(page, "proof"))[0][1] == "up to date"
    # After the next edit this worker has an older revision until it decides again; then it is proven live at once,
    # although its last report names the older one.
    limit.rates = "4/hour"
    limit.save()
    page = operator.get(PAGE)
    assert "is live on 0 of 1 worker." in section(page, "proof")
    assert rows(section(page, "proof"))[0][1] == "idle"
    check_request(request, scope="search")
    assert "is live on 1 of 1 worker since" in section(operator.get(PAGE), "proof")
