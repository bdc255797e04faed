"""What operators do binds the very next request of the API: the same server answers both, over HTTP."""

from __future__ import annotations

from playwright.sync_api import APIResponse, Page, expect

from django_ratequota.models import RatePolicy

from .desk import Desks
from .pages import PAGES
from .scene import Scene


def ask(page: Page, who: str = "alice") -> APIResponse:
    """One request of the API, by an HTTP client beside the browser."""
    return page.request.get("/search/", headers={"Authorization": f"Name {who}"})


def test_an_edit_binds_the_next_request(desk: Desks, scene: Scene) -> None:
    RatePolicy.objects.exclude(pk=scene.free_search.pk).delete()
    own = desk()
    page = own.open(PAGES["policy"].path(scene))

    def save(rates: str) -> None:
        page.get_by_label("Rates").fill(rates)
        page.get_by_role("button", name="Save and continue editing").click()
        expect(page.get_by_text("was changed successfully")).to_be_visible()

    save("10/hour")  # two requests of five units
    seen = [ask(page, "carol") for _ in range(3)]
    assert [answer.status for answer in seen] == [200, 200, 429]
    assert 0 < int(seen[-1].headers["retry-after"]) <= 1800
    assert '"search/hour"' in seen[-1].headers["ratelimit"]
    save("15/hour")
    assert [ask(page, "carol").status for _ in range(2)] == [200, 429]
    save("blocked")
    assert ask(page, "carol").status == 429
    save("unlimited")
    assert {ask(page, "carol").status for _ in range(4)} == {200}


def test_a_page_itself_is_refused(desk: Desks, scene: Scene) -> None:
    """A script of the project's own front end, under the same policy of contents, reads the refusal."""
    scene.free_search.rates = "5/hour"
    scene.free_search.save()
    own = desk("nobody")
    page = own.open("/plain/")
    own.expect_status("/search/", 429)
    answers = page.evaluate(
        """async () => {
          const ask = () => fetch("/search/", {headers: {Authorization: "Name carol"}});
          const [first, second] = [await ask(), await ask()];
          return [first.status, second.status, second.headers.get("Retry-After"), await second.json()];
        }"""
    )
    assert answers[:2] == [200, 429]
    assert int(answers[2]) == 3600
    assert answers[3]["detail"].startswith("Too many requests. Try again in 60 minutes.")
