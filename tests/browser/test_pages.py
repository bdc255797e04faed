"""Every page, by every kind of operator: answered, accessible, no wider than the window, nothing complained about."""

from __future__ import annotations

import pytest

from .desk import Desks
from .pages import PAGES
from .scene import Scene


@pytest.mark.parametrize("name", PAGES)
def test_superusers_see_every_page(desk: Desks, scene: Scene, name: str) -> None:
    own = desk("superuser")
    own.open(PAGES[name].path(scene))
    own.look()


@pytest.mark.parametrize("name", PAGES)
def test_others_see_what_they_may(desk: Desks, scene: Scene, name: str) -> None:
    viewers = desk("viewer")
    viewers.open(PAGES[name].path(scene), PAGES[name].viewer)
    if PAGES[name].viewer == 200:
        viewers.look(once=True)
