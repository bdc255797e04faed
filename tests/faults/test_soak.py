"""The soak that ``make soak`` runs for ten minutes works, and finds nothing in its first rounds."""

from __future__ import annotations

from . import soak


def test_a_few_rounds() -> None:
    soak.main(0)
