"""Which PolicyChange rows a process has read, and which users, subjects and rows the unread ones touch.

Rows are identified by id. Because ids are assigned before the commit, a row may appear below others that were read
long before.
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

from ..changes.writer import affects_requests
from .facts import SubjectKey, subject_key

#: Seconds during which a missing id below the newest may still appear.
_LATE_COMMIT_SECONDS = 3600
#: Most gaps (runs of missing ids) that are kept; the oldest are merged into one.
_MAX_GAPS = 100
#: Number of changes up to which they are always read one by one.
FEW = 2_000
#: The models of a snapshot's rows.
_HELD = ("plan", "endpoint", "ratepolicy", "subjectlist", "listmember")


@dataclass(frozen=True, slots=True)
class Change:
    """The users, the subjects and the row that one PolicyChange touches."""

    #: Users whose entries are out of date.
    users: frozenset[str] = frozenset()
    #: (model, primary key) of the snapshot's row that is out of date; None = none.
    row: tuple[str, int] | None = None
    #: Whether anything may be out of date.
    everything: bool = False
    #: Subjects whose plan assignments are out of date.
    subjects: frozenset[SubjectKey] = frozenset()

    @classmethod
    def read(cls, model: str, object_id: str, touched_user: str, before: Any, after: Any) -> Change:
        if not affects_requests(before, after):
            return cls()
        if touched_user and model != "listmember":  # the snapshot holds all members, users too
            return cls(frozenset([touched_user]))
        users = frozenset(str(state["user"]) for state in (before, after) if state and state.get("user") is not None)
        if model == "planassignment":
            named = (state.get("subject") for state in (before, after) if state)
            subjects = frozenset(subject_key(subject) for subject in named if subject)
            return cls(users, subjects=subjects) if users or subjects else EVERYTHING
        if model == "listmember":
            users = frozenset()
        if model in _HELD and object_id.isdecimal():
            return cls(users, (model, int(object_id)))
        return EVERYTHING


EVERYTHING = Change(everything=True)


@dataclass(frozen=True, slots=True)
class ChangeCursor:
    """The PolicyChange rows that were read: all up to ``newest``, except for ``gaps``."""

    newest: int = 0
    #: When the newest row was written. It differs if a backup has replaced the history.
    at: Any = None
    #: (id below, id above, when it was found by the monotonic clock) of each run of missing ids.
    gaps: tuple[tuple[int, int, float], ...] = ()

    @classmethod
    def from_history(cls) -> tuple[list[Change], ChangeCursor]:
        """Return a change of everything, and a cursor that has read all present rows.

        Its gaps are only those of rows young enough for a late commit.
        """
        rows = _rows()
        late = timezone.now() - timedelta(seconds=_LATE_COMMIT_SECONDS)
        before = rows.filter(at__lt=late).values_list("pk", "at").last() or (0, None)
        return [EVERYTHING], cls(*before).after(list(rows.filter(pk__gt=before[0]).values_list("pk", "at")))

    def read_unseen(self, most: int = FEW) -> tuple[list[Change], ChangeCursor]:
        """Read the unread rows; return their changes and the cursor behind them.

        More than ``most`` rows become one change of everything.
        """
        unseen = _rows().filter(self._unseen())
        columns = ("pk", "at", "model", "object_id", "touched_user", "before", "after")
        found = list(unseen.values_list(*columns)[: most + 1])
        ids = [row[:2] for row in found]
        # Of counters: no policy has changed.
        changes = [Change.read(*row[2:]) for row in found if row[0] != self.newest and row[2] != "counter"]
        if len(found) > most:
            ids, changes = list(unseen.values_list("pk", "at")), [EVERYTHING]
        if self.newest and (self.newest, self.at) not in ids:
            # The history is another one, restored from a backup for example.
            return ChangeCursor.from_history()
        return changes, self.after(ids)

    def _unseen(self) -> Q:
        """The unread rows, and the newest read one, which shows whether the history is the same."""
        condition = Q(pk__gte=self.newest)
        for low, high, since in self.gaps:
            if time.monotonic() - since < _LATE_COMMIT_SECONDS:
                condition |= Q(pk__gt=low, pk__lt=high)
        return condition

    def after(self, ids: list[tuple[int, Any]]) -> ChangeCursor:
        """Return the cursor with these rows, (id, at) in the order of ids, read as well."""
        newest, at = max([(self.newest, self.at), *ids[-1:]], key=lambda row: row[0])
        gaps = []
        for low, high, since in (*self.gaps, (self.newest, newest, time.monotonic())):
            inside = [pk for pk, _ in ids if low < pk < high]
            gaps += [(a, b, since) for a, b in pairwise([low, *inside, high]) if b - a > 1]
        gaps = sorted(gap for gap in gaps if time.monotonic() - gap[2] < _LATE_COMMIT_SECONDS)
        if len(gaps) > _MAX_GAPS:
            # Rows between the merged gaps are read again, which does no harm.
            oldest = gaps[: 1 - _MAX_GAPS]
            gaps[: 1 - _MAX_GAPS] = [(oldest[0][0], oldest[-1][1], max(since for _, _, since in oldest))]
        return ChangeCursor(newest, at, tuple(gaps))


def _rows() -> Any:
    return apps.get_model("django_ratequota", "PolicyChange").objects.order_by("pk")
