"""The Explain page: winners and reasons, live counters, refusals; it consumes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from urllib.parse import urlencode

import pytest
import redis
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.utils import timezone

from django_ratequota import Rate
from django_ratequota.exceptions import StoreError
from django_ratequota.models import Endpoint, ListMember, Plan, RatePolicy, SubjectList
from django_ratequota.monitoring import refusals
from django_ratequota.monitoring.refusals import CallerRefusals, Refusal, RefusedBucket
from django_ratequota.operations.explain import ExplainQuery, idle_policies
from tests.support.commands import run
from tests.support.operators import a_customer, client_of
from tests.support.requests import check_from

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

LIST = "/admin/django_ratequota/ratepolicy/"
PAGE = f"{LIST}explain/"
DOWN = "redis://127.0.0.1:1/0"
IDENTIFIERS = {"tenant": "tests.project.views.api_key"}
READERS = {name: getattr(refusals, name) for name in ("find_refusal", "caller_refusals")}
HOSTILE = "<script>alert(1)</script>\u202e" + "x" * 10_000


class RecordedRefusals:
    """The recorded refusals, as the readers return them in these tests."""

    def __init__(self) -> None:
        self.refusals: list[Refusal] = []
        self.since: datetime | None = None
        self.down = False
        self.searched_ids: list[str] = []

    def find(self, refusal_id: str) -> Refusal | None:
        self.searched_ids.append(refusal_id)
        if self.down:
            raise StoreError("connection", "no")
        return next((one for one in self.refusals if one.id == refusal_id.upper()), None)

    def of_caller(self, caller: str) -> CallerRefusals:
        if self.down:
            raise StoreError("connection", "no")
        return CallerRefusals(refusals=tuple(one for one in self.refusals if one.caller == caller), since=self.since)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> RecordedRefusals:
    recorded = RecordedRefusals()
    monkeypatch.setattr(refusals, "find_refusal", recorded.find)
    monkeypatch.setattr(refusals, "caller_refusals", recorded.of_caller)
    return recorded


@pytest.fixture
def operator() -> Client:
    return staff(None)


@pytest.fixture
def alice() -> User:
    return a_customer()


def staff(permissions: tuple[str, ...] | None) -> Client:
    """Log an operator in with these permissions; None = a superuser."""
    return client_of(*permissions or (), superuser=permissions is None, name="support")


def explain(client: Client, **query: Any) -> str:
    """Return the page's text with single spaces."""
    page = client.get(f"{PAGE}?{urlencode(query)}" if query else PAGE)
    assert page.status_code == 200
    return re.sub(r"\s+", " ", unescape(page.content.decode()))


def counters(text: str) -> list[str]:
    """Return the text of each counter's card."""
    cards = re.findall(r'<li class="ratequota-counter">(.*?)</li>', text)
    return [re.sub(r"\s+", " ", re.sub("<[^>]+>", "", card)).strip() for card in cards]


def lost(text: str) -> list[str]:
    """Return the text of each policy that does not apply."""
    items = "".join(re.findall(r'<ul class="ratequota-lost">(.*?)</ul>', text))
    return [re.sub("<[^>]+>", "", item).strip() for item in re.findall("<li>(.*?)</li>", items)]


def refused(user: User, **fields: Any) -> Refusal:
    """Return a refusal as it is recorded."""
    policy = RatePolicy.objects.filter(endpoint__name="search", plan__isnull=False).first()
    bucket = {
        "title": "search/min",
        "rate": Rate.parse("10/min"),
        "policy_id": policy and policy.pk,
        "subject": f"user:{user.pk}",
        "scope": "search",
        "counted_per": "caller",
        "refused": True,
        "limit": 10,
        "remaining": 0,
        "retry_after": 5.5,
        "reset_after": 60.0,
    }
    refusal_fields = {
        "id": "ABCDE12345",
        "at": datetime(2026, 11, 20, 10, 30, 15, tzinfo=UTC),
        "count": 17,
        "caller": f"user:{user.pk}",
        "ip": "ip:203.0.113.7",
        "plan_id": Plan.objects.get(slug="free").pk,
        "scope": "search",
        "route": "/search/",
        "method": "GET",
        "cost": 1,
        "violated": ("search/min",),
        "error": "",
        "buckets": (RefusedBucket(**bucket),),
        "revision": 1_763_702_400_000_000,
        "against": (bucket["policy_id"],),
    }
    return Refusal(**{**refusal_fields, **fields})


# --- What applies to a caller. ---


def test_the_page_shows_winners_losers_and_live_counters(operator: Client, alice: User) -> None:
    for _ in range(3):
        assert check_from(alice, scope="search").allowed
    text = explain(operator, user=alice.pk, endpoint="search")
    override = RatePolicy.objects.get(user=alice)
    beaten = RatePolicy.objects.get(plan__isnull=False, endpoint=None)
    why = f"lost: policy {override.pk} for the user is more specific"
    assert lost(text) == [f"plan Free × all endpoints: 100/min (policy {beaten.pk}): {why}"]
    assert f'<a href="{LIST}{override.pk}/change/">policy {override.pk}</a>' in text
    cards = counters(text)
    assert [re.findall(r"wins: (\w+ \w+)", card) for card in cards] == [["the user"], ["the plan"], ["everyone is"]]
    assert cards[0].startswith(
        "all endpoints: 1000/day user alice 3 of 1000 used, 997 left. All units are available again at "
    )
    assert cards[1].startswith("search: 10/min user alice 3 of 10 used, 7 left. All units are available again at ")
    assert re.search(r"\d\d:\d\d:\d\d UTC \(in 1[5-8] s\)\.", cards[1])
    assert cards[2].startswith("search: 10000/month for everyone together everyone 3 of 10000 used, 9997 left.")
    assert 'width="30" height="8"' in text
    assert "The next request (1 unit) would be admitted." in text
    assert re.search(r'<a href="/admin/django_ratequota/plan/\d+/change/">Free</a> \(assigned to the user\)', text)


def test_explaining_consumes_nothing(operator: Client, alice: User, redis_client: redis.Redis) -> None:
    for _ in range(11):
        check_from(alice, scope="search")

    def state() -> Any:
        return {key: redis_client.dump(key) for key in redis_client.scan_iter("rqtest:*")}

    before = state()
    for cost in ("", 1, 5000):
        assert "would be refused by" in explain(operator, user=alice.pk, endpoint="search", cost=cost)
    assert state() == before


def test_the_verdict_on_the_next_request(operator: Client, alice: User) -> None:
    for _ in range(10):
        check_from(alice, scope="search")
    text = explain(operator, user=alice.pk, endpoint="search")
    until = r"(\d\d/\d\d/\d{4} )?\d\d:\d\d:\d\d UTC"  # the date is there if that is tomorrow
    assert re.search(rf"\(1 unit\) would be refused by search: 10/min until {until} \(in [1-6] s\)\.", text)
    assert "ratequota-over" in text
    text = explain(operator, user=alice.pk, endpoint="search", cost=11)
    assert "(11 units) would be refused by search: 10/min. Waiting does not help." in text
    assert "The cost is higher than this limit can ever admit." in text
    RatePolicy.objects.filter(user=alice).update(rates="blocked")
    text = explain(operator, user=alice.pk, endpoint="search")
    assert "would be refused by all endpoints: blocked. Waiting does not help." in text
    assert "Blocked. Every request is refused." in text
    assert "10 of 10 used, 0 left." in text


def test_the_plan_of_a_plan_resolver_is_entered_in_the_form(operator: Client, alice: User, settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PLAN_RESOLVER": "builtins.repr"}
    Plan.objects.create(name="Pro", slug="pro")
    assert "Choose the plan that PLAN_RESOLVER would return for this customer." in explain(operator, user=alice.pk)
    assert "Pro</a> (from PLAN_RESOLVER)" in explain(operator, user=alice.pk, plan="pro")
    assert "Free</a> (assigned to the user)" in explain(operator, user=alice.pk, plan="(none)")
    assert "gold is not one of the available choices." in explain(operator, user=alice.pk, plan="gold")


def test_a_scope_in_code_without_an_endpoint_is_named(operator: Client) -> None:
    sentence = "The code specifies the scope “search”, but no endpoint has this name."
    assert sentence in explain(operator, ip="203.0.113.7", path="/decorated/")
    Endpoint.objects.create(name="search", methods="POST")
    assert sentence not in explain(operator, ip="203.0.113.7", path="/decorated/")


def test_a_route_is_found_by_its_url_name(operator: Client) -> None:
    endpoint = Endpoint.objects.create(name="items", routes="v1:*")
    RatePolicy.objects.create(endpoint=endpoint, counted_per="ip", rates="5/min")
    for path in ("/v1/items/7/", "/v1/items/<int:pk>/"):
        assert "items: 5/min per address" in explain(operator, ip="203.0.113.7", path=path)


@pytest.mark.parametrize(
    ("query", "subject"),
    [
        ({"ip": "203.0.113.7"}, "ip:203.0.113.7"),
        ({"ip": "::ffff:203.0.113.7"}, "ip:203.0.113.7"),
        ({"ip": "2001:db8::7"}, "ip:2001:db8::/64"),
        ({"ip": "2001:db8::/64"}, "ip:2001:db8::/64"),
        ({"ip": "unknown"}, "ip:unknown"),
        ({"identifier_tenant": "acme"}, "per tenant tenant:acme"),
    ],
)
def test_a_caller_is_explained_by_address_or_identifier(
    operator: Client, settings: Any, query: dict[str, str], subject: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    RatePolicy.objects.create(rates="5/min", counted_per="caller" if "ip" in query else "tenant")
    (card,) = counters(explain(operator, **query))
    assert card.startswith(f"all endpoints: 5/min {subject} 0 of 5 used")


def test_a_refusal_by_an_identifier_fills_in_its_value(
    operator: Client, alice: User, settings: Any, recorded: RecordedRefusals
) -> None:
    """Regression: for a customer locked out by a pair of name and address, the page showed no counter to reset."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    RatePolicy.objects.create(rates="5/min", counted_per="tenant")
    [own] = refused(alice).buckets
    others = (replace(own, refused=False), replace(own, subject="tenant:acme"), replace(own, subject="gone:x"))
    recorded.refusals = [refused(alice, buckets=others)]
    cards = counters(explain(operator, id="ABCDE12345"))
    assert any(card.startswith("all endpoints: 5/min per tenant tenant:acme 0 of 5") for card in cards), cards
    assert ExplainQuery.from_refusal(refused(alice, buckets=(replace(own, subject="tenant:"),))).identifiers == {
        "tenant": ""
    }


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ({"method": "GET"}, "Enter a user, an IP address or another identifier."),
        ({"user": "4711"}, "There is no such user. Choose a user or enter the id of one."),
        ({"user": "9" * 40}, "There is no such user. Choose a user or enter the id of one."),
        ({"ip": "300.1.1.1"}, "'300.1.1.1' does not appear to be an IPv4 or IPv6 address. Enter an address such as"),
        ({"ip": "a\x00b"}, "Null characters are not allowed."),
        ({"ip": "::1", "endpoint": "serach"}, "Select a valid choice. That choice is not one of the available"),
        ({"ip": "::1", "path": "/nowhere/"}, "No route matches '/nowhere/'. Enter a path such as /api/reports/"),
        ({"ip": "::1", "method": "BREW"}, "BREW is not one of the available choices."),
        ({"ip": "::1", "cost": "-1"}, "Ensure this value is greater than or equal to 0."),
        ({"identifier_tenant": "a\x00b"}, "Null characters are not allowed."),
        ({"identifier_planet": "mars"}, "Enter a user, an IP address or another identifier."),
        ({f"identifier_{HOSTILE}": "x"}, "Enter a user, an IP address or another identifier."),
        ({"ip": "::1", "endpoint": HOSTILE}, "is not one of the available choices."),
    ],
)
def test_invalid_input_is_explained_beside_its_field(
    operator: Client, alice: User, settings: Any, query: dict[str, str], error: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    page = operator.get(f"{PAGE}?{urlencode(query)}")
    assert page.status_code == 200
    text = page.content.decode()
    assert "<script>alert" not in text
    assert error in re.sub(r"\s+", " ", unescape(text))
    assert "Limits that apply now" not in text


# --- Permissions and queries. ---


@pytest.mark.parametrize(
    ("permissions", "status", "rows", "boost", "reset"),
    [
        (None, 200, 4, True, True),
        (("view_ratepolicy",), 200, 4, False, False),
        (("grant_override",), 200, 3, True, False),
        (("reset_usage",), 200, 3, False, True),
        ((), 403, 0, False, False),
    ],
)
def test_operators_see_what_their_permissions_allow(
    alice: User, permissions: tuple[str, ...] | None, status: int, rows: int, boost: bool, reset: bool
) -> None:
    client = staff(permissions)
    assert client.get(PAGE).status_code == status
    page = client.get(f"{PAGE}?user={alice.pk}&endpoint=search")
    assert page.status_code == status
    if status == 200:
        text = explain(client, user=alice.pk, endpoint="search")
        assert len(lost(text)) == rows - 3
        assert ("1 more policy did not apply." in text) is (rows == 3)
        assert (f"{LIST}boost/?" in text) is boost
        assert ("so it cannot be boosted or reset for one of them." in text) is (boost or reset)
        assert (f'formaction="{LIST}counters/"' in text) is reset
        assert re.findall(r'name="bucket" value="(.*?)"', text) == (["all/day", "search/min"] if reset else [])
        # A policy that they may not view is listed where it wins, without a link.
        plan_policy = RatePolicy.objects.get(plan__isnull=False, endpoint__isnull=False)
        assert (f"{LIST}{plan_policy.pk}/change/" in text) is (rows == 4)


def test_policies_for_other_callers_are_one_line_for_each_kind(operator: Client, alice: User) -> None:
    """Regression: 300 rows of other addresses hid the policy of the caller's own plan."""
    search = Endpoint.objects.get()
    rows = [RatePolicy(subject=f"ip:10.0.{n // 250}.{n % 250}", endpoint=search, rates="5/s") for n in range(300)]
    RatePolicy.objects.bulk_create(rows)
    RatePolicy.objects.create(plan=Plan.objects.create(name="Pro", slug="pro"), endpoint=search, rates="7/s")
    own = RatePolicy.objects.create(user=alice, endpoint=search, rates="9/s")
    text = explain(operator, user=alice.pk, endpoint="search")
    assert [one.partition("lost: ")[2] for one in lost(text) if "search" in one] == [
        f"policy {own.pk} for the user is more specific"
    ]
    assert "300 more policies are for other customers (ip)." in text
    assert "1 more policy is for other customers (plan)." in text


def test_a_callers_own_ended_policies_are_cut_short(operator: Client, alice: User) -> None:
    ended = {"starts_at": datetime(2020, 1, 1, tzinfo=UTC), "ends_at": timezone.now() + timedelta(days=1)}
    RatePolicy.objects.bulk_create([RatePolicy(user=alice, rates="5/s", **ended) for _ in range(300)])
    text = explain(operator, user=alice.pk, endpoint="search")
    assert len(lost(text)) == 197
    assert "104 more policies did not apply." in text


# --- While Redis fails. ---


@pytest.mark.parametrize(
    ("on_error", "verdict"),
    [("allow", "would be admitted, because “on error” applies"), ("deny", "would be refused by search: 10/min.")],
)
def test_winners_are_shown_while_redis_is_down(
    operator: Client, alice: User, recorded: RecordedRefusals, settings: Any, on_error: str, verdict: str
) -> None:
    RatePolicy.objects.filter(endpoint__name="search", plan__isnull=False).update(on_error=on_error)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    recorded.down = True
    text = explain(operator, user=alice.pk, endpoint="search")
    assert "Redis did not answer (connection). Usage cannot be shown" in text
    assert (len(lost(text)), len(counters(text))) == (1, 3)
    assert "Usage unknown, because Redis did not answer." in text
    assert "ratequota-bar" not in text
    assert f"The next request (1 unit) {verdict}" in text
    assert "Redis did not answer (connection). The refusal cannot be looked up." in explain(operator, id="ABCDE12345")


@pytest.mark.usefixtures("recording")
def test_a_refusal_is_looked_up_while_records_cannot_be_sent(
    operator: Client, alice: User, recorded: RecordedRefusals, settings: Any
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    check_from(alice, scope="search")
    recorded.down = True
    assert "Redis did not answer (connection). The refusal cannot be looked up." in explain(operator, id="ABCDE12345")


# --- Refusals. ---


@pytest.mark.parametrize(
    ("fields", "subject"),
    [
        ({"caller": "ip:2001:db8::/64", "ip": "ip:2001:db8::/64"}, "ip:2001:db8::/64"),
        ({"caller": "ip:unknown", "ip": ""}, "ip:unknown"),
        ({"caller": "tenant:acme", "ip": "ip:203.0.113.7"}, "ip:203.0.113.7"),
        ({"caller": "ip:203.0.113.7", "scope": "gone", "route": ""}, "ip:203.0.113.7"),
    ],
)
def test_the_form_is_filled_in_with_the_refused_caller(
    operator: Client, alice: User, recorded: RecordedRefusals, settings: Any, fields: dict[str, Any], subject: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    RatePolicy.objects.create(rates="77/min")
    recorded.refusals = [refused(alice, buckets=(), **fields)]
    text = explain(operator, id="ABCDE12345")
    assert "errornote" not in text
    assert counters(text)[0].startswith(f"all endpoints: 77/min {subject} 0 of 77 used")


def test_a_refusal_is_shown_after_its_caller_plan_and_policy_are_deleted(
    operator: Client, alice: User, recorded: RecordedRefusals
) -> None:
    gone = refused(
        alice, caller="user:4711", plan_id=4711, route="/gone/", scope="gone", method="BREW", error="timeout"
    )
    recorded.refusals = [gone]
    RatePolicy.objects.all().delete()
    text = explain(operator, id="ABCDE12345")
    assert "Refusal ABCDE12345" in text
    assert "There is no such user" in text
    assert "No route matches" not in text
    assert "Redis was unavailable (timeout), so the “on error” of each policy applied." in text


@pytest.mark.parametrize("pk", ["abc", "9" * 40])
def test_a_refusal_of_a_user_whom_no_key_names_is_shown(
    operator: Client, alice: User, recorded: RecordedRefusals, pk: str
) -> None:
    """Projects change their user model; policies that are not in force were looked up by that key."""
    recorded.refusals = [refused(alice, caller=f"user:{pk}")]
    explanation = ExplainQuery.from_refusal(recorded.refusals[0]).explain()
    assert idle_policies(explanation) == []
    assert "Refusal ABCDE12345" in explain(operator, id="ABCDE12345")


def test_an_unknown_refusal_id_is_reported(operator: Client, recorded: RecordedRefusals) -> None:
    for wanted in ("ABCDE12345", "nonsense!", "nobody@example.com", "a\x00b"):
        text = explain(operator, id=wanted)
        assert (
            f"There is no refusal with the id {wanted} and no user, other subject or endpoint with this name." in text
        )
    assert set(recorded.searched_ids) == {"ABCDE12345"}
    page = operator.get(f"{PAGE}?{urlencode({'id': HOSTILE})}").content.decode()
    assert "<script>alert" not in page
    assert "\u202e" not in page


def refused_rows(text: str) -> list[list[str]]:
    """Return the table of a caller's refusals, cell by cell."""
    (section,) = re.findall(r'<section[^>]*aria-labelledby="ratequota-recent".*?</section>', text)
    rows = re.findall(r"<tr.*?</tr>", section)[1:]
    return [
        [" ".join(re.sub("<[^>]+>", " ", cell).split()) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in rows
    ]


def test_a_customers_refusals_come_first_grouped_by_endpoint(
    operator: Client, alice: User, recorded: RecordedRefusals
) -> None:
    day = datetime(2026, 11, 20, tzinfo=UTC)
    recorded.refusals = [
        refused(alice, id="NEWEST0001", at=day.replace(hour=12), violated=("search/min", "all/day"), count=2),
        refused(alice, id="REPORTS001", at=day.replace(hour=11), scope="", route="/reports/", violated=("all/day",)),
        refused(alice, at=day.replace(hour=10)),
        refused(alice, id="ZZZZZ99999", caller="user:4711"),
    ]
    text = explain(operator, user=alice.pk)
    assert refused_rows(text) == [
        [
            "GET search",
            "19",
            "search: 10/min, all/day",
            "11/20/2026 12:00:00 UTC"
            " 11/20/2026 12:00:00 UTC · 2× · search: 10/min, all/day"
            " 11/20/2026 10:00:00 UTC · 17× · search: 10/min",
        ],
        ["GET /reports/", "17", "all/day", "11/20/2026 11:00:00 UTC"],
    ]
    assert f'<a href="{PAGE}?id=NEWEST0001">GET search</a>' in text
    assert f'<a href="{PAGE}?id=ABCDE12345">11/20/2026 10:00:00 UTC</a>' in text
    assert text.index("Refusals in the last 24 hours") < text.index("Customer and request")
    assert "were searched" not in text
    at_endpoint = explain(operator, user=alice.pk, endpoint="search")
    assert at_endpoint.index("Refusals in the last 24 hours") > at_endpoint.index("Limits that apply now")
    recorded.since = day.replace(hour=9)
    text = explain(operator, user=alice.pk).replace("2,000", "2000")
    since = "11/20/2026 09:00:00 UTC"
    assert f"Only the latest 2000 refusals of all customers were searched (since {since})." in text


@pytest.mark.parametrize("at", [{}, {"endpoint": "search"}], ids=["everywhere", "one endpoint"])
def test_policies_that_are_off_scheduled_or_ended_are_named(
    operator: Client, alice: User, at: dict[str, str]
) -> None:
    now, search = timezone.now(), Endpoint.objects.get(name="search")
    bots = SubjectList.objects.create(name="Bots")
    ListMember.objects.create(subject_list=bots, user=alice)
    other = User.objects.create(username="bob")
    make = RatePolicy.objects.create
    make(subject_list=bots, rates="blocked", mode="off")
    make(user=alice, endpoint=search, rates="1/min", mode="off")
    make(user=alice, rates="2/min", starts_at=now + timedelta(days=1))
    make(
        user=alice, endpoint=search, rates="3/min", ends_at=now - timedelta(days=1), starts_at=now - timedelta(days=2)
    )
    make(user=alice, rates="4/min", ends_at=now - timedelta(days=31), starts_at=now - timedelta(days=32))
    make(user=other, rates="5/min", mode="off")
    make(user=alice, endpoint=Endpoint.objects.create(name="reports"), rates="6/min", mode="off")
    text = explain(operator, user=alice.pk, **at)
    (listed,) = re.findall(r'<ul class="ratequota-lost">(.*?)</ul>', text)
    found = [
        re.sub(r"\(.*?\)", "", re.sub("<[^>]+>", "", item)).split() for item in re.findall("<li>(.*?)</li>", listed)
    ]
    expected = {
        "list Bots × all endpoints: blocked : it is switched off",
        "user alice × search: 1/min : it is switched off",
        "user alice × all endpoints: 2/min : it has not started yet",
        "user alice × search: 3/min : it has ended",
    }
    if not at:
        expected.add("user alice × reports: 6/min : it is switched off")
    options = ["--endpoint", "search"] if at else []
    assert re.search("blocked.*it is switched off", run("explain", "--user", "alice", *options))
    assert {
        " ".join(words).replace(": lost:", ":") for words in found if "alice" in words or "Bots" in words
    } == expected


def test_without_an_endpoint_all_limits_are_listed_the_fullest_first(
    operator: Client, alice: User, django_assert_max_num_queries: Any
) -> None:
    """Regression: the customer was refused at search, and the page said that the next request would be admitted."""
    reports, unused = (Endpoint.objects.create(name=name) for name in ("reports", "unused"))
    RatePolicy.objects.create(plan=Plan.objects.get(), endpoint=reports, rates="5/hour")
    RatePolicy.objects.create(user=alice, endpoint=unused, rates="7/hour")
    for scope, times in (("search", 3), ("reports", 4)):
        for _ in range(times):
            assert check_from(alice, scope=scope).allowed
    with django_assert_max_num_queries(24):
        text = explain(operator, user=alice.pk)
    assert re.findall(r"<b>(\S.*?)</b>", " ".join(re.findall(r'<li class="ratequota-counter">.*?</li>', text))) == [
        "reports: 5/hour",
        "search: 10/min",
        "all endpoints: 1000/day",
        "search: 10000/month for everyone together",
        "unused: 7/hour",
    ]
    assert f'<a href="{PAGE}?user={alice.pk}&endpoint=reports">Explain</a>' in text
    assert "This customer has room in every limit." in text
    assert "would be admitted" not in text
    assert not lost(text)
    assert "wins:" not in text
    for scope in ("search", "reports"):
        while check_from(alice, scope=scope).allowed:
            pass
    assert "Refused now by reports: 5/hour, search: 10/min." in explain(operator, user=alice.pk)
    assert "would be refused by" in explain(operator, user=alice.pk, path="/search/", endpoint="search")
    RatePolicy.objects.filter(user=alice, endpoint=None).update(rates="blocked")
    assert "Refused now by all endpoints: blocked." in explain(operator, user=alice.pk)


def test_counters_of_several_endpoints_are_given_back_and_boosted_together(operator: Client, alice: User) -> None:
    for _ in range(3):
        check_from(alice, scope="search")
    text = explain(operator, user=alice.pk)
    assert re.findall(r'name="bucket" value="(.*?)"', text) == ["search/min", "all/day"]
    operator.post(f"{LIST}counters/?user={alice.pk}&bucket=search/min&bucket=all/day", {"units": "2"})
    cards = counters(explain(operator, user=alice.pk))
    assert [re.findall(r"(\d+) of", card)[0] for card in cards[:2]] == ["1", "1"]
    links = [link for link in re.findall(rf'href="({LIST}boost/[^"]*)"', text) if "policy=" in link]
    assert len(links) == 2
    assert all(operator.get(link).status_code == 200 for link in links)


def test_the_counter_of_an_enforced_limit_is_refunded_beside_one_on_trial(operator: Client, alice: User) -> None:
    """Both checkboxes had one value, so the refund was refused: no more than the trial's one unit was used."""
    for _ in range(3):
        check_from(alice, scope="search")
    RatePolicy.objects.create(endpoint=Endpoint.objects.get(name="search"), user=alice, rates="2/min", mode="log")
    check_from(alice, scope="search")
    values = re.findall(r'name="bucket" value="(search.*?)"', explain(operator, user=alice.pk, endpoint="search"))
    assert sorted(values) == ["search/min", "search/min (log only)"]
    url = f"{LIST}counters/?{urlencode({'user': alice.pk, 'endpoint': 'search'})}"
    page = operator.get(f"{url}&{urlencode({'bucket': values}, doseq=True)}").content.decode()
    assert (page.count("search: 10/min"), page.count("search: 2/min (log only)")) == (1, 1)
    operator.post(f"{url}&bucket=search/min", {"units": "3"})
    cards = counters(explain(operator, user=alice.pk, endpoint="search"))
    used = [re.findall(r"\d+ of \d+", card)[0] for card in cards if "/min" in card]
    assert sorted(used) == ["1 of 10", "1 of 2"]


def test_a_refusal_is_by_the_enforced_limit_beside_one_on_trial(operator: Client, alice: User) -> None:
    RatePolicy.objects.create(endpoint=Endpoint.objects.get(name="search"), user=alice, rates="2/min", mode="log")
    while check_from(alice, scope="search").allowed:
        pass
    assert "Refused now by search: 10/min." in explain(operator, user=alice.pk)


def test_without_an_endpoint_no_room_is_claimed_while_redis_is_down(
    operator: Client, alice: User, settings: Any
) -> None:
    """Regression: the page said that policies had room, below counters whose usage was unknown."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": DOWN}
    for query in ({}, {"path": "/search/"}):
        text = explain(operator, user=alice.pk, **query)
        assert "room" not in text
        assert "would be admitted, because “on error” applies while Redis does not answer." in text


@pytest.mark.parametrize(
    ("wanted", "query"),
    [
        ("alice", "user={alice}"),
        ("alice@example.com", "user={alice}"),
        ("alexanders", "user={other}"),
        ("203.0.113.7", "ip=203.0.113.7"),
        ("ip:203.0.113.7", "ip=203.0.113.7"),
        ("tenant:acme", "identifier_tenant=acme"),
        ("203.0.113.0/24", "ip=203.0.113.0%2F24"),
        ("203.0.113.9/24", "ip=203.0.113.0%2F24"),
    ],
)
def test_a_customer_is_found_by_name_mail_or_address(
    operator: Client, alice: User, settings: Any, wanted: str, query: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    User.objects.filter(pk=alice.pk).update(email="alice@example.com")
    other = User.objects.create(username="alexanders", email="shared@example.com")
    User.objects.create(username="twin", email="shared@example.com")
    page = operator.get(PAGE, {"id": wanted})
    assert page["Location"] == f"{PAGE}?{query.format(alice=alice.pk, other=other.pk)}"
    assert operator.get(PAGE, {"id": "shared@example.com"}).status_code == 200, "of two, neither is chosen"


def test_a_network_leads_to_its_block_its_policies_and_its_refusals(
    operator: Client, alice: User, recorded: RecordedRefusals
) -> None:
    for subject in ("ip:203.0.113.0/25", "ip:203.0.0.0/16", "ip:203.0.113.7", "ip:203.0.112.7", "ip:203.0.11.0/24"):
        RatePolicy.objects.create(subject=subject, rates="1/s")
    recorded.refusals = [refused(alice, caller="ip:203.0.113.0/24")]
    text = explain(operator, ip="203.0.113.0/24")
    assert re.findall(r">(ip:\S+) × all endpoints: 1/s</a>", text) == [
        "ip:203.0.0.0/16",
        "ip:203.0.113.0/25",
        "ip:203.0.113.7",
    ]
    assert "GET search" in text
    [link] = re.findall(rf'href="({LIST}block/[^"]*)"[^>]*>Block…</a>', text)
    form = {"target": "ip:203.0.113.0/24", "until": "hour", "reason": "R", "post": "yes"}
    assert operator.post(link, form, follow=True).redirect_chain == [(link, 302)]
    assert not check_from(address="203.0.113.99").allowed


def test_an_endpoint_is_found_by_its_name(operator: Client, alice: User) -> None:
    page = operator.get(PAGE, {"id": "search"})
    assert page["Location"] == f"/admin/django_ratequota/endpoint/{Endpoint.objects.get().pk}/change/"
    viewer = client_of("view_ratepolicy", name="viewer")
    assert "There is no refusal with the id search" in explain(viewer, id="search")


def test_a_refusal_whose_route_this_process_does_not_have_is_explained_by_its_scope(
    operator: Client, alice: User, recorded: RecordedRefusals
) -> None:
    """Regression: the page asked to correct an error in a form that nobody had filled in, and explained nothing."""
    recorded.refusals = [refused(alice, route="/only/in/the/api/")]
    text = explain(operator, id="ABCDE12345")
    assert "errornote" not in text
    assert "This worker does not have the route /only/in/the/api/." in text
    assert counters(text)[2].startswith("search: 10/min user alice")
    [link] = re.findall(rf'href="({LIST}boost/[^"]*)">Boost all', text)
    assert 'value="20/min"' in operator.get(link).content.decode()


def test_a_refusal_begins_with_what_to_tell_the_customer(
    operator: Client, alice: User, recorded: RecordedRefusals
) -> None:
    recorded.refusals = [refused(alice)]
    tell = "Your plan Free allows 10 requests per minute for search. You had used 10. The next request is possible at"
    assert tell in explain(operator, id="ABCDE12345")
    assert f"tell         {tell}" in run("explain", "--id", "abcde12345")


def test_the_command_shows_the_same(alice: User, recorded: RecordedRefusals) -> None:
    recorded.refusals = [refused(alice)]
    text = run("explain", "--id", "abcde12345")
    assert "refused      2026-11-20 10:30:15 UTC, 17 times in that minute" in text
    assert f"customer     user:{alice.pk} from ip:203.0.113.7" in text
    assert "request      GET /search/ search, cost 1" in text
    assert f"search: 10/min of user:{alice.pk}: 0 of 10 left, refused" in text
    assert "plan         Free (assigned to the user)" in text
    assert f"search: 10/min of user:{alice.pk}: 10 of 10 left" in text
    with pytest.raises(CommandError, match=r"No refusal 'ZZZZZ99999' is recorded\. Refusals are kept for 48 hours"):
        run("explain", "--id", "ZZZZZ99999")


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("blocked", [False, True])
def test_the_id_of_a_refused_response_finds_its_decision(
    operator: Client, alice: User, monkeypatch: pytest.MonkeyPatch, blocked: bool
) -> None:
    """End to end: the id of a real response finds a real refusal, although this worker has not sent it yet."""
    for name, reader in READERS.items():
        monkeypatch.setattr(refusals, name, reader)
    RatePolicy.objects.filter(endpoint__name="search", plan__isnull=False).update(rates="2/hour")
    if blocked:
        RatePolicy.objects.filter(user=alice).update(rates="blocked")
    client = Client()
    client.force_login(alice)
    answers = [client.get("/decorated/", REMOTE_ADDR="2001:db8::7") for _ in range(5)]
    assert answers[-1].status_code == 429
    refusal_id = answers[-1].json()["refusal_id"]
    text = explain(operator, id=refusal_id.upper())
    assert f"Refusal {refusal_id}" in text
    assert f"Refused {5 if blocked else 3} times in that minute." in text
    for part in ("user alice", "ip:2001:db8::/64", "GET /decorated/ search", "Free"):
        assert f"<dd>{part}</dd>" in text
    if blocked:
        assert "Refused by all endpoints: blocked (" in text
    else:
        then = next(card for card in counters(text) if "Refused." in card)
        assert then.startswith("search: 2/hour user alice 2 of 2 used, 0 left. Refused. Available again at ")
        # The links of the actions lead back to the refusal.
        assert f'name="id" value="{refusal_id}"' in text
        assert f"id={refusal_id}" in re.findall(rf'href="({LIST}boost/[^"]*)"', text)[0]
    assert f'<option value="{alice.pk}" selected>alice</option>' in text
    assert '<option value="search" selected>search</option>' in text
    assert "errornote" not in text
    assert re.search(
        rf"\(1 unit\) would be refused by {'all endpoints: blocked' if blocked else 'search: 2/hour'}(\.| until) ",
        text,
    )
    assert f'<a href="{PAGE}?id={refusal_id}">GET search</a>' in explain(operator, user=alice.pk)
    assert "request      GET /decorated/ search, cost 1" in run("explain", "--id", refusal_id)
