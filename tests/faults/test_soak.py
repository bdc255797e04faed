"""The soak that ``make soak`` runs for ten minutes works, and finds nothing in its first rounds."""

from __future__ import annotations

import pytest

from tests.support.properties import scaled

from . import soak


@pytest.mark.thorough
def test_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "ROUND_SECONDS", scaled(4))
    soak.main(0)
