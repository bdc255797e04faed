"""``GET usage/`` as a weapon: asked by anybody, as often as they like, of many endpoints, and while Redis hangs."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import redis
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from django_ratequota import Bucket, Rate
from django_ratequota.engine.decision import LimitRequest
from django_ratequota.engine.limiter import Limiter
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.operations.caller_limits import caller_limits
from django_ratequota.policies import resolver
from django_ratequota.policies.cache import policies
from django_ratequota.policies.requests.caller import Caller
from django_ratequota.runtime import default_limiter
from django_ratequota.store import breaker
from django_ratequota.store.pool import Pool
from tests.faults.servers import Node
from tests.faults.wire import Wire
from tests.project.views import request_from
from tests.support.properties import thorough_after
from tests.support.windows import counted

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

USAGE = "/quota/usage/"
NOW = datetime.now(UTC)
#: What counts an anonymous caller's looks where no policy does.
USAGE_BUCKET = Bucket("ip:127.0.0.1", Rate.parse("60/min"), scope="usage")


def limited_endpoints(count: int, **policy: Any) -> list[Endpoint]:
    """Create this number of endpoints, each with a limit, and return them by name."""
    endpoints = Endpoint.objects.bulk_create(Endpoint(name=f"e{number:05}") for number in range(count))
    RatePolicy.objects.bulk_create(RatePolicy(endpoint=one, rates="9/hour", **policy) for one in endpoints)
    return endpoints


class TestAFlood:
    """It was unlimited, whatever policies there were."""

    def test_a_flood_of_usage(self, client: Client) -> None:
        first = client.get(USAGE)
        assert (first.status_code, first["RateLimit-Policy"]) == (200, '"usage/min";q=60;w=60')
        default_limiter().charge([USAGE_BUCKET], cost=3600)  # an hour's worth
        refused = client.get(USAGE)
        assert (refused.status_code, refused["X-RateLimit-Remaining"]) == (429, "0")
        assert client.get(USAGE, REMOTE_ADDR="203.0.113.9").status_code == 200
        assert client.get("/search/").status_code == 200

    def test_the_usage_endpoints_own_policy_limits_it(self, client: Client) -> None:
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="usage"), rates="2/hour")
        assert [client.get(USAGE).status_code for _ in range(3)] == [200, 200, 429]
        RatePolicy.objects.update(rates="unlimited")
        assert "RateLimit" not in client.get(USAGE)

    def test_a_policy_that_only_logs_takes_no_limit_away(self, client: Client) -> None:
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="usage"), rates="2/hour", mode="log")
        assert client.get(USAGE)["RateLimit-Policy"] == '"usage/min";q=60;w=60'

    def test_policies_for_all_endpoints_neither_count_a_look_nor_refuse_it(self, client: Client) -> None:
        """A client that has used its quota up must be able to see that."""
        RatePolicy.objects.create(rates="2/hour")
        RatePolicy.objects.create(rates="blocked", counted_per="ip")
        assert client.get("/search/").status_code == 429
        found = client.get(USAGE)
        assert (found.status_code, found.json()["blocked_by"]) == (200, ["all/blocked"])
        assert found.json()["limits"][0]["remaining"] == 2

    def test_the_middleware_counts_it_once(self, client: Client, settings: Any, redis_client: redis.Redis) -> None:
        settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
        RatePolicy.objects.create(rates="2/hour")
        assert client.get(USAGE)["X-RateLimit-Remaining"] == "59"
        assert redis_client.keys("rqtest:{ip*") == [b"rqtest:{ip:127.0.0.1}:usage:tb60"]

    @pytest.mark.parametrize("policy", [{}, {"rates": "100/hour", "counted_per": "ip"}, {"usage": "unlimited"}])
    def test_guessing_keys_at_usage(self, client: Client, settings: Any, policy: dict[str, str]) -> None:
        """Policies for all endpoints spare it, so 130 of 130 guesses passed, under COUNT_UNCHECKED as well."""
        settings.RATEQUOTA = {**settings.RATEQUOTA, "COUNT_UNCHECKED": True}
        if rates := policy.pop("usage", ""):
            RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="usage"), rates=rates)
        elif policy:
            RatePolicy.objects.create(**policy)
        client.get("/search/")  # the process has read its policies
        User.objects.create_user("alice", password="right")
        right, wrong = (
            {"Authorization": f"Basic {b64encode(text).decode()}"} for text in (b"alice:right", b"alice:x")
        )
        assert [client.get(USAGE, headers=right).status_code for _ in range(3)] == [200] * 3
        default_limiter().reset([USAGE_BUCKET])
        assert client.get(USAGE, headers=right).status_code == 200
        assert default_limiter().peek([USAGE_BUCKET]).remaining == 60, "who is known has a limit of their own"
        assert client.get(USAGE, headers=wrong).status_code in (401, 403)
        assert default_limiter().peek([USAGE_BUCKET]).remaining == 59
        default_limiter().charge([USAGE_BUCKET], cost=3600)
        assert client.get(USAGE, headers=wrong).status_code == 429
        assert client.get(USAGE, headers=right).status_code == 429, "a right password is not found either"
        assert client.get(USAGE, headers=right, REMOTE_ADDR="203.0.113.9").status_code == 200

    def test_operators_see_and_reset_the_limit_that_is_built_in(self, client: Client, admin_client: Client) -> None:
        default_limiter().charge([USAGE_BUCKET], cost=3600)
        explain = "/admin/django_ratequota/ratepolicy/explain/"
        page = admin_client.get(explain, {"ip": "127.0.0.1", "path": USAGE}).content.decode()
        assert "usage/min" in page
        assert "<dd>usage (built-in limit)</dd>" in page
        assert "only policies for all endpoints apply" not in page, "none of these applies here"
        assert client.get(USAGE).status_code == 429
        call_command("ratequota", "reset", "--ip", "127.0.0.1", "--path", USAGE, stdout=io.StringIO())
        assert client.get(USAGE).status_code == 200


class TestManyEndpoints:
    @pytest.fixture
    def work(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
        """What a look makes the app do: groups of policies that are compared, buckets that Redis is asked about."""
        done = {"groups": 0, "buckets": 0}
        winners_of, steps = resolver.winners_of, Limiter.ask

        def compare(*args: Any) -> Any:
            done["groups"] += 1
            return winners_of(*args)

        def ask(self: Limiter, request: LimitRequest) -> Any:
            done["buckets"] += len(request.buckets)
            return steps(self, request)

        monkeypatch.setattr(resolver, "winners_of", compare)
        monkeypatch.setattr(Limiter, "ask", ask)
        return done

    @pytest.mark.parametrize("count", thorough_after(1, [199, 2_000]))
    def test_usage_of_many_endpoints(self, client: Client, work: dict[str, int], count: int) -> None:
        """It took 4.5 ms at 199 endpoints, and grew with them."""
        limited_endpoints(count)
        found = client.get(USAGE).json()
        assert found["truncated"] is True
        assert len(found["limits"]) == 50
        assert [limit["scope"] for limit in found["limits"][:2]] == ["e00000", "e00001"]
        assert work["groups"] <= 50
        assert work["buckets"] <= 50 + 1, "those, and that of the look itself"

    def test_so_it_is_where_nothing_applies(self, client: Client, work: dict[str, int]) -> None:
        """Policies that are not the caller's were compared all the same."""
        limited_endpoints(500, subject="tenant:acme")
        found = client.get(USAGE).json()
        assert (found["limits"], found["truncated"]) == ([], True)
        assert work["groups"] <= 50

    def test_a_users_own_limits_are_among_those_shown(self, client: Client) -> None:
        endpoints = limited_endpoints(60)
        alice = User.objects.create_user("alice")
        RatePolicy.objects.create(user=alice, endpoint=endpoints[-1], rates="7/hour")
        client.force_login(alice)
        found = client.get(USAGE).json()
        shown = [limit["scope"] for limit in found["limits"]]
        assert (len(shown), shown[-2:]) == (50, ["e00048", "e00059"])
        other = client.get(USAGE, {"scope": "e00055"}).json()
        assert (other["limits"][0]["scope"], other["truncated"]) == ("e00055", False)

    def test_what_is_remembered_of_looks_is_bounded(self) -> None:
        """Each user with a policy of their own makes another place of fifty endpoints."""
        endpoints = limited_endpoints(60)
        users = User.objects.bulk_create(User(username=f"u{number}") for number in range(40))
        RatePolicy.objects.bulk_create(RatePolicy(user=u, endpoint=endpoints[0], rates="7/hour") for u in users)
        for user in users:
            assert caller_limits(Caller(request_from(user))).limits[0][0].rate == Rate.parse("7/hour")
        snapshot = policies.current()
        assert snapshot is not None
        memo = snapshot.overview.snapshot.memo
        assert len(memo.policies) <= 16
        assert len(memo.resolutions) == 0


def test_asking_for_other_customers(client: Client) -> None:
    """With ``?user=``, a customer whose key a support person had made could query everybody."""
    alice = User.objects.create_user("alice")
    RatePolicy.objects.create(user=alice, rates="7/month")
    counted(subject=f"user:{alice.pk}", starts_at=NOW, ends_at=NOW, used=1, limit=7)
    found = []
    for user in (User.objects.create_superuser("support"), alice):
        client.force_login(user)
        limits = client.get(USAGE, {"user": "alice"}).json()["limits"]
        found.append((len(limits), len(client.get(f"{USAGE}history/", {"user": "alice"}).json()["results"])))
    assert found == [(0, 0), (1, 1)]


class TestRedisHangs:
    @pytest.fixture
    def asked(self, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
        """Commands sent to a server that is about to hang: it accepts connections, and never answers."""
        monkeypatch.setattr(breaker, "PROBE_SECONDS", 3600.0)
        sent: list[Any] = []
        send = Pool.send

        def counted(self: Pool, command: Any, *args: Any) -> Any:
            sent.append(command)
            return send(self, command, *args)

        with Node() as node, Wire(node) as proxy:
            settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": proxy.url, "TIMEOUT": 0.2}
            RatePolicy.objects.create(rates="9/hour")
            assert Client().get(USAGE).json()["available"] is True
            monkeypatch.setattr(Pool, "send", counted)
            proxy.freeze()
            yield sent
            default_limiter().store.close()

    def test_usage_while_redis_hangs(self, client: Client, asked: list[Any]) -> None:
        """Each request waited twice, even with an open breaker, and made other views wait in their worker's queue."""
        waits, breaker = [], default_limiter().store.breakers[0]
        while waits[-3:] != [0, 0, 0] and len(waits) < 50:
            before = len(asked)
            found = client.get(USAGE)
            assert (found.status_code, found.json()["available"]) == (200, False)
            assert found.json()["limits"][0]["limit"] == 9
            waits.append(len(asked) - before)
        assert waits == [1] * (len(waits) - 3) + [0] * 3
        assert len(waits) >= 6, "three failures open the breaker"
        assert breaker.open
