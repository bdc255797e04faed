"""The admin's pages on a large installation: ``make scale`` seeds one, opens every page, and writes SCALE.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many rows there are of each kind."""

    users: int = 1_000_000
    #: Assignments to plans: half of them of users, half of subjects.
    assignments: int = 1_000_000
    #: One plan has a policy at each endpoint, the others at three endpoints in twenty.
    plans: int = 200
    endpoints: int = 500
    #: Those of plans and of everyone included; the rest are overrides.
    policies: int = 100_000
    #: Changes in the history.
    changes: int = 100_000
    #: What counters have used of the month that runs now; one in a hundred of their subjects has 24 months more.
    windows: int = 1_000_000
    #: Callers with requests in the last 48 hours: a hundred requests each.
    callers: int = 1_000


#: For the test suite.
SMALL = Size(
    users=1_000, assignments=1_000, plans=20, endpoints=50, policies=1_000, changes=1_000, windows=1_000, callers=20
)
