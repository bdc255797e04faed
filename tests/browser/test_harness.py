"""The browser tests notice what they are there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .desk import Desk, Desks

#: A page with one of each fault.
BAD = """
() => {
  document.body.innerHTML = `<img src="/nowhere.png"><p style="color: red">styled</p><p id="wide">wide</p><input>`;
  document.getElementById("wide").style.width = "3000px";
  const script = document.createElement("script");
  script.text = "0";
  document.body.append(script);
  setTimeout(() => { throw new Error("uncaught here"); });
  console.error("said so");
}
"""


@pytest.fixture
def complaints(desk: Desks) -> Callable[[Desk], list[str]]:
    """Closes a desk that is expected to have complained."""

    def close(own: Desk) -> list[str]:
        told = own.close()
        own.close = list  # type: ignore[method-assign,assignment]
        return told

    return close


def test_each_kind_of_fault_is_noticed(desk: Desks, complaints: Callable[[Desk], list[str]]) -> None:
    own = desk("nobody")
    page = own.open("/plain/")
    page.evaluate(BAD)
    with pytest.raises(AssertionError) as found:
        own.look()
    for fault in ("1280 px, light: label", "390 px, light: label", "1280 px, too wide: 30", "390 px, too wide: 30"):
        assert fault in str(found.value)
    told = "\n".join(complaints(own))
    for fault in ("CSP: style-src-attr inline", "CSP: script-src-elem inline", "uncaught here", "404: ", "said so"):
        assert fault in told, told


def test_an_unexpected_answer_fails(desk: Desks, complaints: Callable[[Desk], list[str]]) -> None:
    own = desk("nobody")
    with pytest.raises(AssertionError, match="403"):
        own.open("/admin/django_ratequota/ratepolicy/")
    assert any(line.startswith("403: ") for line in complaints(own))


def test_actions_of_a_task_are_counted(desk: Desks) -> None:
    own = desk()
    page = own.open("/admin/")
    page.get_by_role("link", name="Rate policies").first.click()

    def work() -> None:
        field = page.locator("#searchbar")
        field.click()
        field.press_sequentially("free")
        field.press("Enter")
        page.wait_for_url("**/?q=free")
        page.locator("select[name$=-mode]").first.select_option("log")
        page.get_by_role("link", name="Health").click()
        page.wait_for_url("**/health/")

    with pytest.raises(AssertionError, match="4 actions, 3 asked"), own.task(actions=3):
        work()
    with pytest.raises(AssertionError, match="1 actions, 0 asked"), own.task(actions=0):
        page.get_by_role("link", name="Traffic").click()
