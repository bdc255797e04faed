"""Templates: the page of a refusal, the tag with the remaining units, and a form that shows its own refusal."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.template import Context, Template
from django.test import AsyncClient, Client, RequestFactory
from django.urls import path

from django_ratequota import Bucket, Decision, Rate
from django_ratequota.engine.types import BucketStatus
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.responses import refusal_response
from django_ratequota.templatetags.ratequota import ratequota_usage
from django_ratequota.testing import Clock, Policy, override_policies
from tests.project.views import request_from

DOCS = (Path(__file__).parents[2] / "docs" / "howto" / "django.md").read_text()
#: 2025-11-21 05:20:00 UTC.
NOW = 1_763_702_400
DENIED = Decision(allowed=False, denied_by=("all/hour",), error="timeout")


def snippet(language: str, first: str) -> str:
    found = re.search(rf"```{language}\n{re.escape(first)}\n(.*?)```", DOCS, re.DOTALL)
    assert found, first
    return found[1]


def refused(seconds: float | None = 30, **given: Any) -> Decision:
    wait_us = None if seconds is None else round(seconds * 10**6)
    bucket = Bucket("user:1", Rate.parse("2/min"), scope="search")
    status = BucketStatus(
        bucket=bucket, allowed=False, remaining=0, retry_after_us=wait_us, reset_after_us=60 * 10**6, window_us=1
    )
    return Decision(allowed=False, statuses=(status,), **given)


def page(decision: Decision, **headers: str) -> HttpResponse:
    return refusal_response(RequestFactory().get("/", headers={"Accept": "text/html", **headers}), decision)


def words(response: HttpResponse) -> str:
    """The text of the page's body."""
    body = response.content.decode().partition("<body>")[2]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


class Page(HTMLParser):
    """The tags of a page, and its attributes by tag."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))


class TestPage:
    def test_a_long_wait_ends_at_a_time_of_day_never_too_early(self, time_machine: Any, settings: Any) -> None:
        time_machine.move_to(NOW + 1, tick=False)
        assert words(page(refused(119))).endswith("Try again in 119 seconds.")
        assert words(page(refused(120))).endswith("Try again after Nov. 21, 2025, 5:23 a.m. UTC .")
        response = page(refused(3600))
        assert words(response).endswith("Try again after Nov. 21, 2025, 6:21 a.m. UTC .")
        assert '<time datetime="2025-11-21T06:21:00+00:00">' in response.content.decode()
        settings.TIME_ZONE = "Europe/Berlin"
        assert words(page(refused(3600))).endswith("Try again after Nov. 21, 2025, 7:21 a.m. CET .")
        settings.USE_TZ = False
        assert words(page(refused(3600))).endswith("Try again after Nov. 21, 2025, 7:21 a.m. CET .")

    def test_no_time_where_waiting_cannot_help(self) -> None:
        assert words(page(refused(None))) == "Quota exceeded Too many requests."
        blocked = Decision(allowed=False, blocked_by=("search/blocked",))
        assert words(page(blocked)) == "Quota exceeded Requests are blocked."

    def test_is_allowed_by_a_strict_policy_and_readable_by_everybody(self) -> None:
        found = Page(page(refused(refusal_id="abcdefghij")).content.decode())
        tags = [tag for tag, _ in found.tags]
        assert {"style", "script", "link", "img", "iframe"}.isdisjoint(tags)
        assert not [name for _, attributes in found.tags for name in attributes if name.startswith(("style", "on"))]
        assert [tags.count(tag) for tag in ("html", "title", "main", "h1")] == [1, 1, 1, 1]
        metas = {attributes.get("name"): attributes.get("content") for tag, attributes in found.tags if tag == "meta"}
        assert metas["viewport"] == "width=device-width, initial-scale=1"
        assert metas["color-scheme"] == "light dark"

    def test_the_projects_own_goes_first_and_serves_both(self, settings: Any, tmp_path: Path) -> None:
        (tmp_path / "429.html").write_text(snippet("html", "{# templates/429.html #}"))
        settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
        with_reference = page(refused(refusal_id="abcdefghij")).content.decode()
        assert with_reference.startswith("<title>Quota exceeded</title>")
        assert "Tell our support this reference: abcdefghij" in with_reference
        assert "Please come back at " in with_reference
        denied = page(DENIED).content.decode()
        assert denied.startswith("<title>Temporarily reduced capacity</title>")
        assert "Requests cannot be counted right now." in denied

    @pytest.mark.parametrize("engine", [[], [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]])
    def test_without_templates_there_is_a_page_all_the_same(self, settings: Any, engine: list[Any]) -> None:
        settings.TEMPLATES = engine
        text = "Too many requests. Try again in 30 seconds."
        assert page(refused()).content.decode() == (
            f"<!doctype html>\n<title>Quota exceeded</title>\n<h1>Quota exceeded</h1>\n<p>{text}</p>\n"
        )

    @pytest.mark.django_db(transaction=True)
    def test_under_asgi_a_page_of_ones_own_may_read_the_database(self, settings: Any, tmp_path: Path) -> None:
        User.objects.create(username="alice")
        (tmp_path / "429.html").write_text("{% for user in users.all %}{{ user.username }}{% endfor %}")
        processors = [f"{__name__}.users"]
        options = {"context_processors": processors}
        settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path], "OPTIONS": options}]
        browser = {"Accept": "text/html"}
        with override_policies({"search": "blocked"}):
            assert async_to_sync(AsyncClient().get)("/adecorated/", headers=browser).content == b"alice"
            settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
        with override_policies({None: "blocked"}):
            assert async_to_sync(AsyncClient().get)("/aplain/", headers=browser).content == b"alice"


def users(request: Any) -> dict[str, Any]:
    """A context processor that reads the database when the template does."""
    return {"users": User.objects}


@pytest.fixture
def render() -> Callable[..., str]:
    template = Template(snippet("html", "{# templates/search.html #}"))

    def render(**context: Any) -> str:
        return " ".join(re.sub(r"<[^>]+>", " ", template.render(Context(context))).split())

    return render


class TestTag:
    def test_usage_shows_remaining_units_and_consumes_none(self, render: Any, time_machine: Any) -> None:
        time_machine.move_to(NOW, tick=False)
        with override_policies({"search": "3/min", None: "100/min"}):
            assert render(request=request_from()) == "3 of 3 searches left, all of them again at 05:20."
            for _ in range(3):
                Client().get("/decorated/", REMOTE_ADDR="203.0.113.7")
            for _ in range(2):
                text = "0 of 3 searches left, all of them again at 05:21. The next one at 05:20:20."
                assert render(request=request_from()) == text
            assert render(request=request_from(address="203.0.113.9")).startswith("3 of 3")
            assert render() == "", "without a request"

    def test_all_limits_the_tightest_first(self) -> None:
        shown = "{% for one in u.limits %}{{ one.title }} {{ one.used }}/{{ one.limit }} {% endfor %}"
        at, everywhere = (
            Template("{% load ratequota %}{% ratequota_usage " + scope + " as u %}" + shown)
            for scope in ('"search"', "")
        )
        policies = {"search": "5/min, 10/hour", None: Policy("3/min"), "other": "1/min"}
        with override_policies(policies):
            Client().get("/decorated/", REMOTE_ADDR="203.0.113.7")
            text, whole = (template.render(Context({"request": request_from()})) for template in (at, everywhere))
        assert text == "all endpoints: 3/min 1/3 search: 5/min 1/5 search: 10/hour 1/10 "
        assert whole == text + "other: 1/min 0/1 "

    def test_a_limit_is_described_as_in_the_usage_endpoint(self, time_machine: Any, settings: Any) -> None:
        time_machine.move_to(NOW, tick=False)
        settings.TIME_ZONE, settings.USE_TZ = "Europe/Berlin", False
        with override_policies({None: "9/month, 5 requests/min"}):
            usage = ratequota_usage({"request": request_from()})
            assert usage is not None
            minute, month = sorted(usage["limits"], key=lambda one: one["limit"])
            [told, _] = Client().get("/quota/usage/", REMOTE_ADDR="203.0.113.7").json()["limits"]
        assert [str(month[name]) for name in ("starts_at", "ends_at", "reset", "retry_at")] == [
            *("2025-11-01 00:00:00", "2025-12-01 00:00:00", "2025-12-01 00:00:00", "2025-11-21 06:20:00"),
        ], "the month ends, although nothing is used"
        assert (minute["unit"], minute["starts_at"], minute["ends_at"]) == ("requests", None, None)
        assert minute["reset"] == month["retry_at"]
        same = ("title", "scope", "period", "rate", "unit", "counted_per", "limit", "used", "remaining")
        assert {name: month[name] for name in same}.items() <= told.items()

    @pytest.mark.parametrize("policies", [{}, {"search": "unlimited"}, {"other": "1/min"}])
    def test_nothing_where_nothing_is_limited(self, render: Any, policies: Any) -> None:
        with override_policies(policies):
            assert render(request=request_from()) == ""

    def test_nothing_while_the_store_is_down_and_no_wait_for_it(
        self, render: Any, settings: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings.RATEQUOTA = {"REDIS_URL": "redis://127.0.0.1:1/0", "STATISTICS_SECONDS": 0}
        with override_policies({"search": "3/min"}):
            for _ in range(3):
                assert render(request=request_from()) == ""
            monkeypatch.setattr("django_ratequota.templatetags.ratequota.caller_limits", pytest.fail)
            assert render(request=request_from()) == "", "the breaker is open by now: nobody is asked"

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.usefixtures("fresh_policies")
    def test_no_query_on_warm_policies(self, render: Any, django_assert_num_queries: Any) -> None:
        RatePolicy.objects.create(endpoint=Endpoint.objects.create(name="search"), rates="3/min")
        assert render(request=request_from()).startswith("3 of 3")
        with django_assert_num_queries(0):
            assert render(request=request_from()).startswith("3 of 3")

    @pytest.mark.usefixtures("fresh_policies")
    def test_no_lookup_where_the_database_may_not_be_queried(self, render: Any) -> None:
        async def view() -> str:
            return str(render(request=request_from()))

        assert async_to_sync(view)() == ""


urlpatterns: list[Any] = []


class TestForm:
    @pytest.fixture(autouse=True)
    def _form(self, settings: Any, tmp_path: Path) -> Iterator[None]:
        module = types.ModuleType("contact")
        exec(snippet("python", "# mysite/contact.py"), vars(module))
        (tmp_path / "contact.html").write_text(snippet("html", "{# templates/contact.html #}"))
        settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
        settings.ROOT_URLCONF = __name__
        urlpatterns[:] = [path("contact/", module.contact)]
        yield
        urlpatterns.clear()

    def test_a_refusal_is_an_error_of_the_form(self) -> None:
        contact = Endpoint(name="contact", methods="POST")
        with override_policies({"contact": "1/hour"}, endpoints=[contact], clock=Clock(datetime.now(UTC))):
            send = Client().post
            for _ in range(3):
                assert Client().get("/contact/").status_code == 200
                assert send("/contact/", {"message": ""}).status_code == 422
            assert send("/contact/", {"message": "hello"}).status_code == 302
            refused = send("/contact/", {"message": "hello again"})
        assert refused.status_code == 429
        assert "Too many requests. Try again in 60 minutes." in refused.content.decode()
        assert "hello again" in refused.content.decode()
        assert refused["Retry-After"] == "3600"
