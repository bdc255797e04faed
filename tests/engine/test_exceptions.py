"""The errors of the package."""

from __future__ import annotations

import pickle

import pytest

from django_ratequota.exceptions import (
    FileProblem,
    InvalidCost,
    InvalidFile,
    InvalidRate,
    NewerRevision,
    NoSlot,
    OutOfTime,
    RateQuotaError,
    StoreError,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidCost("a cost"),
        InvalidRate("no %(name)s", name="rate"),
        InvalidFile([FileProblem(3, "policies[0]", "no rates")]),
        StoreError("timeout", "too late"),
        OutOfTime(0.1),
        NoSlot(30, 31.5),
        NewerRevision(7, instead_of=9),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_can_be_pickled(error: RateQuotaError) -> None:
    """One that could not broke the pool of processes that raised it."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
