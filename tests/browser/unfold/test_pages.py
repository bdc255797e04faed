"""Every page under django-unfold: answered, readable, and at work."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from tests.browser.desk import Desk
from tests.browser.pages import PAGES
from tests.browser.scene import Scene

Desks = Callable[..., Desk]


@pytest.mark.parametrize("name", PAGES)
def test_every_page_is_there(desk: Desks, scene: Scene, name: str) -> None:
    own = desk()
    page = own.open(PAGES[name].path(scene))
    # unfold's own frame, and in it the page's own heading
    expect(page.locator("#nav-sidebar")).to_be_attached()
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=f"/tmp/hbrowser-shots/unfold-{name}.png", full_page=True)
    desk("nobody").open(PAGES[name].path(scene), 403)
