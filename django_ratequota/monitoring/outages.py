"""The outages of Redis as this process sees them: from a decision without Redis until the next one with it.

A process has one row in the database for each outage, and replaces all of it each time. So nothing depends on the
order in which processes write, and a write may be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from copy import deepcopy
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from django.apps import apps
from django.db import Error as DatabaseError
from django.utils import timezone

from ..changes.databases import committing
from ..conf import settings
from ..runtime import process
from ..utils import forks
from ..utils.problems import note_problem
from .health import process_name
from .workers import database_worker, is_kept

#: A decision by ``on_error`` after so long without one begins another outage.
GAP = timedelta(seconds=60)
#: Most policies that are counted apart in an outage, and most outages that wait for the database.
_MOST_POLICIES, _MOST_WAITING = 1_000, 100
#: What decides a request, of the ``on_error`` of its policies: the first that is among them.
_OUTCOMES = ("deny", "local", "allow")


class Outages(forks.Renewed):
    """What this process has seen, and not written yet."""

    def clear(self) -> None:
        """Begin with none: in a forked child they are the parent's."""
        self._lock = forks.lock()
        #: The row of the newest one, and until when it goes on (Unix time, s).
        self._last: Any = None
        self._goes_on = 0.0
        self._unwritten: dict[UUID, Any] = {}

    def note(self, reason: str, actions: Mapping[int | None, str]) -> None:
        """Count a request that was checked without Redis; ``actions`` has ``on_error`` of each enforced policy."""
        if not actions:
            return  # it has no limits
        database_worker.keep()
        outcome = next(one for one in _OUTCOMES if one in actions.values())
        with self._lock:
            now, row = timezone.now(), self._last
            if time.time() > self._goes_on:  # as before the first
                # Not imported above, because check_request can be imported before Django is set up.
                model: Any = apps.get_model("django_ratequota.Outage")
                zero = dict.fromkeys(_OUTCOMES, 0)
                row = self._last = model(id=uuid4(), worker=process_name(), began_at=now, policies={}, **zero)
            row.ended_at, row.reason = now, reason
            self._goes_on = time.time() + GAP.total_seconds()
            setattr(row, outcome, getattr(row, outcome) + 1)
            for policy, action in actions.items():
                if policy is not None and (policy in row.policies or len(row.policies) < _MOST_POLICIES):
                    counts = row.policies.setdefault(policy, {})
                    counts[action] = counts.get(action, 0) + 1
            self._unwritten[row.pk] = row
            if len(self._unwritten) > _MOST_WAITING:
                self._unwritten.pop(next(iter(self._unwritten)))

    def flush(self) -> None:
        """Write what has changed; while the database does not answer, the next flush does."""
        limiter = process.limiter()
        with self._lock:
            row = self._last
            # It goes on without requests: this process leaves the server alone.
            if row and time.time() <= self._goes_on and any(one.open for one in limiter.store.breakers):
                row.ended_at, self._unwritten[row.pk] = timezone.now(), row
                self._goes_on = time.time() + GAP.total_seconds()
            if not self._unwritten or not is_kept(limiter):
                return
            writing, self._unwritten = self._unwritten, {}
            rows = deepcopy(list(writing.values()))  # requests go on counting
        try:
            with committing(type(rows[0])) as alias:
                for row in rows:
                    row.save(using=alias)  # updates it, or inserts it where there is none
        except DatabaseError as error:
            note_problem("outages", f"an outage of Redis cannot be written, it is tried again: {error}")
            with self._lock:
                self._unwritten = writing | self._unwritten


#: This process's own.
outages = Outages()
database_worker.add("outages", lambda: settings.statistics_seconds, outages.flush, last=outages.flush)
