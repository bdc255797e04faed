"""The in-process picture of all policies at one revision, and the protocol that keeps it current.

A ``Snapshot`` is immutable: plans, endpoints, and the policies for subjects, plans and everyone. What belongs to
one user only is a ``UserEntry``, loaded on demand and kept in a bounded LRU. ``Policies`` holds both and reloads
what the PolicyChange rows it has not seen say has changed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db import Error as DatabaseError
from django.utils import timezone

from .changes import Seen
from .conf import settings
from .facts import (
    NOBODY,
    POLICY_COLUMNS,
    Assignment,
    PlanFacts,
    PolicyFacts,
    Snapshot,
    UserEntry,
    endpoint_facts,
    group_policies,
    policy_facts,
    to_us,
)
from .locks import ForkSafeLock
from .recording import publication_pending

logger = logging.getLogger("django_ratequota")


class Policies:
    """This process's policies: the current snapshot and the users in use.

    A request takes ``current()``, then ``user(...)``; both are at least as new as the snapshot's revision. When
    the store reports a newer revision, ``reload`` reads what has changed.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, as a fresh process does: for tests."""
        self._lock = ForkSafeLock()
        self._users_lock = ForkSafeLock()
        self._snapshot: Snapshot | None = None
        self._users: OrderedDict[str, UserEntry] = OrderedDict()
        #: Ids of the endpoints at which some user has a policy of their own (None = all endpoints); None = not known.
        self.user_endpoints: frozenset[int | None] | None = None
        # Grows whenever users are dropped: an entry read before that is used once and not kept.
        self._drops = 0
        self._seen = Seen()
        self._polled = 0.0
        # Whether the last attempt to read policies succeeded.
        self._readable = True
        #: How often all policies were read since the process began, and how many seconds that took together.
        self.reloads, self.reload_seconds = 0, 0.0

    def current(self) -> Snapshot | None:
        """The snapshot in force; None before the first ``reload``.

        None as well inside a transaction that has changed policies: it is judged by what it wrote, which is
        nobody else's business yet and may be rolled back.
        """
        return None if publication_pending() else self._snapshot

    def overdue(self) -> bool:
        """Whether it is time to look for changes whose publication was lost."""
        return time.monotonic() - self._polled >= float(settings.poll_seconds)

    def reload(self, revision: int) -> Snapshot:
        """Bring the snapshot to ``revision``, a number read from the store before this call.

        One thread reads the database, others wait for it. Raises ``django.db.Error`` when it cannot; the last
        snapshot stays in force.
        """
        with self._lock:
            if publication_pending():
                with self._reading():
                    return load_snapshot(revision)
            snapshot = self._snapshot
            if snapshot is not None and snapshot.revision >= revision:
                return snapshot
            return self._refresh(revision)

    def poll(self) -> Snapshot | None:
        """Look for unseen changes without a new revision; returns at once while another thread looks."""
        if not self._lock.acquire(blocking=False):
            return self._snapshot
        try:
            if self._snapshot is None or not self.overdue() or publication_pending():
                return self._snapshot
            return self._refresh(self._snapshot.revision)
        finally:
            self._lock.release()

    def user(self, user_id: str, pending: bool | None = None) -> UserEntry | None:
        """The user's entry if it is in memory, and the open transaction, if any, has changed no policy.

        ``pending`` says whether it has, where the caller knows.
        """
        if publication_pending() if pending is None else pending:
            return None
        with self._users_lock:
            entry = self._users.get(user_id)
            if entry is not None:
                self._users.move_to_end(user_id)
            return entry

    def load_user(self, user_id: str) -> UserEntry:
        """Read the user's entry from the database (two queries); raises ``django.db.Error``."""
        drops = self._drops
        with self._reading():
            entry = _load_user(user_id)
        with self._users_lock:
            if drops == self._drops and not publication_pending():
                self._users[user_id] = entry
                while len(self._users) > settings.user_cache_size:
                    self._users.popitem(last=False)
        return entry

    def load_user_endpoints(self) -> frozenset[int | None]:
        """Read ``user_endpoints`` from the database; raises ``django.db.Error``."""
        from .models import RatePolicy

        drops = self._drops
        with self._reading():
            own = RatePolicy.objects.filter(user__isnull=False).exclude(mode="off")
            found = frozenset(own.order_by().values_list("endpoint_id", flat=True).distinct())
        with self._users_lock:
            if drops == self._drops and not publication_pending():
                self.user_endpoints = found
        return found

    def _refresh(self, revision: int) -> Snapshot:
        self._polled = time.monotonic()
        snapshot = self._snapshot
        # Changes are read before the data they announce: one that commits in between is read twice, never missed.
        with self._reading():
            changes, seen = self._seen.look() if snapshot is not None else Seen.of_history()
            stale = snapshot is None or any(change.shared for change in changes)
            if snapshot is None or stale:
                begun = time.monotonic()
                snapshot = load_snapshot(revision)
                self.reloads += 1
                self.reload_seconds += time.monotonic() - begun
        if snapshot.revision != revision:
            snapshot = snapshot.at(revision)  # as of now, though nothing of it has changed
        with self._users_lock:
            if changes:
                self._drops += 1
                self.user_endpoints = None
            if any(change.everything for change in changes):
                self._users.clear()
            for change in changes:
                for user in change.users:
                    self._users.pop(user, None)
        self._snapshot, self._seen = snapshot, seen
        return snapshot

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Wraps reads of the database; logs once when they begin to fail, and once when they succeed again."""
        try:
            yield
        except DatabaseError as error:
            if self._readable:
                self._readable = False
                goes_on = "" if self._snapshot is None else ", the last known ones go on"
                logger.error("the policies cannot be read%s: %s", goes_on, error)
            raise
        if not self._readable:
            self._readable = True
            logger.warning("the policies can be read again")


def load_snapshot(revision: int) -> Snapshot:
    """Read all shared policies from the database (three queries); raises ``django.db.Error``."""
    from .models import Endpoint, Plan, RatePolicy

    plans = {plan.pk: plan for plan in Plan.objects.order_by()}
    return Snapshot(
        revision=revision,
        plans={pk: PlanFacts(id=pk, name=plan.name, slug=plan.slug) for pk, plan in plans.items()},
        defaults={plan.default_for: pk for pk, plan in plans.items() if plan.default_for},
        endpoints={endpoint.pk: endpoint_facts(endpoint) for endpoint in Endpoint.objects.order_by()},
        groups=group_policies(_active_facts(RatePolicy.objects.filter(user__isnull=True))),
    )


def _load_user(user_id: str) -> UserEntry:
    from .models import PlanAssignment, RatePolicy

    # A principal may be no row of the user model: a service account of a token, say.
    key = get_user_model()._meta.pk
    try:
        value = key.to_python(user_id)
        key.run_validators(value)  # a number beyond the column's range overflows in SQLite's driver
    except ValidationError:
        return NOBODY
    if str(value) != user_id:  # "010" reads as 10, and is not that user
        return NOBODY
    assignments = PlanAssignment.objects.filter(user_id=user_id).order_by()
    rows = assignments.values_list("plan_id", "starts_at", "ends_at")
    return UserEntry(
        policies=tuple(_active_facts(RatePolicy.objects.filter(user_id=user_id))),
        assignments=tuple(
            Assignment(plan_id=plan_id, starts_us=to_us(starts_at), ends_us=ends_at and to_us(ends_at))
            for plan_id, starts_at, ends_at in rows
        ),
    )


def _active_facts(policies: Any) -> Iterator[PolicyFacts]:
    # Ended ones are left out, with a day's margin: what has ended is decided by the store's clock, not this one.
    ended = timezone.now() - timedelta(days=1)
    rows = policies.exclude(ends_at__lt=ended).order_by()
    # Plain rows: to make model objects of thousands of policies would double what loading takes.
    for row in rows.values_list(*POLICY_COLUMNS, named=True):
        yield policy_facts(row)


#: The policies of this process.
policies = Policies()
