"""The middleware, in Django's sync and async handlers: headers, and enforcing every view once."""

from __future__ import annotations

from typing import Any

import pytest
from asgiref.sync import iscoroutinefunction
from django.http import HttpResponse

from django_ratequota.middleware import RateQuotaMiddleware
from django_ratequota.models import Endpoint, RatePolicy
from tests.conftest import Get

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

EVERY_VIEW = ["/plain/", "/aplain/", "/bare/", "/class/", "/aclass/", "/search/", "/api/reports/", "/unthrottled/"]


def left(response: Any) -> list[str]:
    """``remaining`` of each policy in the RateLimit header."""
    return [item.partition("r=")[2].partition(";")[0] for item in response["RateLimit"].split(",")]


def test_it_is_awaited_where_what_follows_is() -> None:
    async def aview(request: Any) -> HttpResponse:
        return HttpResponse()

    assert RateQuotaMiddleware.sync_capable
    assert RateQuotaMiddleware.async_capable
    assert iscoroutinefunction(RateQuotaMiddleware(aview))
    assert not iscoroutinefunction(RateQuotaMiddleware(lambda request: HttpResponse()))


def test_by_default_it_enforces_nothing(get: Get) -> None:
    RatePolicy.objects.create(rates="1/hour")
    for path in ("/plain/", "/aplain/", "/unthrottled/"):
        for _ in range(2):
            response = get(path)
            assert response.status_code == 200
            assert "RateLimit" not in response


def test_it_adds_the_headers_of_what_a_view_checked(get: Get) -> None:
    RatePolicy.objects.create(rates="5/hour")
    response = get("/checking/")
    assert left(response) == ["4"]
    assert response["X-RateLimit-Remaining"] == "4"


@pytest.mark.usefixtures("enforce_all")
class TestEnforceAll:
    @pytest.mark.parametrize("path", EVERY_VIEW)
    def test_every_view_is_enforced_and_charged_once(self, get: Get, path: str) -> None:
        RatePolicy.objects.create(rates="2/hour")
        assert [left(get(path)), left(get(path))] == [["1"], ["0"]]
        refused = get(path)
        assert (refused.status_code, left(refused)) == (429, ["0"])
        assert 1700 < int(refused["Retry-After"]) <= 1800

    def test_a_view_that_checks_for_itself_is_charged_once(self, get: Get) -> None:
        search = Endpoint.objects.create(name="search")
        RatePolicy.objects.create(rates="9/hour")
        RatePolicy.objects.create(endpoint=search, rates="5/hour")
        response = get("/checking/")
        assert response.json() == {"allowed": True}
        assert left(response) == ["8", "4"]
        assert left(get("/thorough/")) == ["7", "3"]

    def test_decorated_and_drf_views_keep_scope_and_cost(self, get: Get) -> None:
        search = Endpoint.objects.create(name="search", cost=2)
        RatePolicy.objects.create(endpoint=search, rates="100/hour")
        assert left(get("/search/")) == ["98"]
        assert left(get("/decorated/")) == ["96"]
        assert left(get("/aclass/")) == ["94"]
        assert left(get("/costly/")) == ["91"]

    def test_an_action_that_throws_its_throttles_out_is_enforced_all_the_same(self, get: Get) -> None:
        RatePolicy.objects.create(rates="1/hour")
        assert [get("/api/reports/export/").status_code for _ in range(2)] == [200, 429]

    def test_what_no_view_answers_is_not_counted(self, get: Get) -> None:
        RatePolicy.objects.create(rates="1/hour")
        for _ in range(2):
            response = get("/nowhere/")
            assert response.status_code == 404
            assert "RateLimit" not in response
        assert get("/plain/").status_code == 200

    @pytest.mark.parametrize(("on_error", "status"), [("allow", 200), ("deny", 503)])
    def test_a_store_that_is_down_is_never_a_500(self, get: Get, settings: Any, on_error: str, status: int) -> None:
        RatePolicy.objects.create(rates="1/hour", on_error=on_error)
        settings.RATEQUOTA = {"ENFORCE_ALL": True, "REDIS_URL": "redis://127.0.0.1:1/0"}
        assert [get(path).status_code for path in EVERY_VIEW] == [status] * len(EVERY_VIEW)
