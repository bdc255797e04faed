"""Which PolicyChange rows a process has seen, and what those it has not seen touch.

Rows are told by id. Ids are handed out before commits, so a row may turn up below others seen long before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

from django.apps import apps
from django.db.models import Q
from django.utils import timezone

from ..recording.recorder import affects_requests

#: Ids left out below the newest may still turn up, for this many seconds.
_LATE_COMMIT_SECONDS = 3600
#: So many runs of missing ids are told apart; older ones are taken together.
_MAX_GAPS = 100
#: Actions of entries about what was counted: nothing that a process holds has changed.
_COUNTED = ("reset", "grant")
#: Changes that are read one by one whatever a snapshot holds.
FEW = 2_000
#: Models whose rows a snapshot holds, and the one whose rows are one user's own.
PLAN, ENDPOINT, POLICY, _ASSIGNMENT = "plan", "endpoint", "ratepolicy", "planassignment"


@dataclass(frozen=True, slots=True)
class Change:
    """What one PolicyChange row touches."""

    #: Users whose entries it makes stale.
    users: frozenset[str] = frozenset()
    #: (model, primary key) of the row that it touches among what the snapshot holds.
    row: tuple[str, int] | None = None
    #: Whether it may touch anything at all.
    everything: bool = False

    @classmethod
    def read(cls, model: str, object_id: str, touched_user: str, before: Any, after: Any) -> Change:
        if not affects_requests(model, before, after):
            return cls()
        if touched_user:
            return cls(frozenset([touched_user]))
        users = frozenset(str(one["user"]) for one in (before, after) if one and one.get("user") is not None)
        if model == _ASSIGNMENT and users:
            return cls(users)
        if model in (PLAN, ENDPOINT, POLICY) and object_id.isdecimal():
            return cls(users, (model, int(object_id)))
        return EVERYTHING


EVERYTHING = Change(everything=True)


@dataclass(frozen=True, slots=True)
class ChangeCursor:
    """Which PolicyChange rows were seen: all up to the newest, but for gaps."""

    newest: int = 0
    #: When the newest row was written; tells it from one of another history, restored from a backup.
    at: Any = None
    #: Runs of ids that were not seen, as (id below, id above, since when by the monotonic clock).
    gaps: tuple[tuple[int, int, float], ...] = ()

    @classmethod
    def from_history(cls) -> tuple[list[Change], ChangeCursor]:
        """No change to heed, as everything is about to be read; and all rows seen that are there now.

        Its gaps are those of the time in which others may still commit late.
        """
        rows = _rows()
        late = timezone.now() - timedelta(seconds=_LATE_COMMIT_SECONDS)
        before = rows.filter(at__lt=late).values_list("pk", "at").last() or (0, None)
        return [], cls(*before).after(list(rows.filter(pk__gt=before[0]).values_list("pk", "at")))

    def read_unseen(self, most: int = FEW) -> tuple[list[Change], ChangeCursor]:
        """Read the rows that were not seen: what they touch, and what has been seen then.

        More than ``most`` are not read one by one: they may touch anything.
        """
        unseen = _rows().filter(self._unseen())
        columns = ("pk", "at", "action", "model", "object_id", "touched_user", "before", "after")
        found = list(unseen.values_list(*columns)[: most + 1])
        if len(found) > most:
            ids = list(unseen.values_list("pk", "at"))
            changes = [EVERYTHING]
        else:
            ids = [row[:2] for row in found]
            changes = [Change.read(*row[3:]) for row in found if row[0] != self.newest and row[2] not in _COUNTED]
        if self.newest and (self.newest, self.at) not in ids:
            # Another history than the one seen so far, from a backup say.
            return [EVERYTHING], ChangeCursor.from_history()[1]
        return changes, self.after(ids)

    def _unseen(self) -> Q:
        """The rows not seen, and the newest that was: it tells whether this is the same history."""
        condition = Q(pk__gte=self.newest)
        for low, high, since in self.gaps:
            if time.monotonic() - since < _LATE_COMMIT_SECONDS:
                condition |= Q(pk__gt=low, pk__lt=high)
        return condition

    def after(self, ids: list[tuple[int, Any]]) -> ChangeCursor:
        """With these rows (id, at) seen as well, in the order of their ids."""
        newest, at = max([(self.newest, self.at), *ids[-1:]], key=lambda row: row[0])
        gaps = []
        for low, high, since in (*self.gaps, (self.newest, newest, time.monotonic())):
            inside = [pk for pk, _ in ids if low < pk < high]
            gaps += [(a, b, since) for a, b in pairwise([low, *inside, high]) if b - a > 1]
        gaps = sorted(gap for gap in gaps if time.monotonic() - gap[2] < _LATE_COMMIT_SECONDS)
        if len(gaps) > _MAX_GAPS:
            # As one run, what lies between the oldest is read more than once, which is better than never.
            oldest = gaps[: 1 - _MAX_GAPS]
            gaps[: 1 - _MAX_GAPS] = [(oldest[0][0], oldest[-1][1], max(since for _, _, since in oldest))]
        return ChangeCursor(newest, at, tuple(gaps))


def _rows() -> Any:
    return apps.get_model("django_ratequota", "PolicyChange").objects.order_by("pk")
