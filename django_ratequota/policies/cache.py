"""The in-process picture of all policies at one revision, and the protocol that keeps it current.

A ``Snapshot`` is immutable: plans, endpoints, and the policies for subjects, plans and everyone. What belongs to
one user only is a ``UserEntry``, loaded on demand and kept in a bounded LRU. ``PolicyCache`` holds both and reloads
what the PolicyChange rows it has not seen say has changed.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from django.db import Error as DatabaseError

from ..conf import settings
from ..recording.databases import in_transaction, reading_policies
from ..recording.publication import publication_pending
from ..runtime import process
from ..utils.locks import ForkSafeLock
from .change_feed import FEW, ChangeCursor
from .facts import UserEntry
from .loading import held_policies, load_snapshot, load_user, not_ended, update_snapshot, without_ended
from .snapshot import Snapshot

logger = logging.getLogger("django_ratequota")

#: Unseen changes are applied row by row up to ``FEW``, or a quarter of the policies held, and to this number at most:
#: reading everything takes less than more of them.
_MANY = 10_000
#: Seconds between two looks for policies that ended long ago.
_TIDY_SECONDS = 3600


class PolicyCache:
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
        #: Ids of the endpoints at which some user has a policy of their own (None = all endpoints), each with what
        #: these policies are counted per; None = not known.
        self.user_endpoints: Mapping[int | None, frozenset[str]] | None = None
        # Grows whenever users are dropped: an entry read before that is used once and not kept.
        self._drops = 0
        self._seen = ChangeCursor()
        self._polled = self._tidied = 0.0
        # The newest revision that anybody has asked for.
        self._wanted = 0
        # How many unseen changes are applied row by row.
        self._most = FEW
        # Whether the last attempt to read policies succeeded.
        self._readable = True
        #: How often policies were read because some had changed, and how many seconds that took together.
        self.reloads, self.reload_seconds = 0, 0.0

    def expire(self) -> None:
        """Let the next request read everything again, after changes that were not recorded."""
        with self._lock, self._users_lock:
            self._snapshot = None
            self._users.clear()
            self.user_endpoints = None
            self._drops += 1

    def current(self) -> Snapshot | None:
        """The snapshot in force; None before the first ``reload``.

        None as well inside a transaction that has changed policies: it is judged by what it wrote, which is
        nobody else's business yet and may be rolled back.
        """
        return None if publication_pending() else self._snapshot

    def overdue(self) -> bool:
        """Whether it is time to look for changes whose publication was lost."""
        return time.monotonic() - self._polled >= float(settings.poll_seconds)

    def reload(self, revision: int, instead_of: int | None = None) -> Snapshot:
        """Bring the snapshot to ``revision``, a number read from the store before this call.

        ``instead_of`` is a greater one that the store has refused. One thread reads the database, others wait for it.
        Raises ``django.db.Error`` when it cannot; the last snapshot stays in force.
        """
        # All that wait for one thread's look are served by it: each revision is published after its commit.
        self._wanted = max(self._wanted if instead_of is None else 0, revision)
        with self._lock:
            if publication_pending():
                with self._reading():
                    return load_snapshot(revision)
            snapshot = self._snapshot
            if snapshot is not None and snapshot.revision >= revision and snapshot.revision != instead_of:
                return snapshot
            # What a transaction of the request's own sees may be older than what others wait for.
            alone = in_transaction()
            return self._refresh(revision if alone else max(revision, self._wanted))

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
            entry = load_user(user_id)
        with self._users_lock:
            if drops == self._drops and not publication_pending():
                self._users[user_id] = entry
                while len(self._users) > settings.user_cache_size:
                    self._users.popitem(last=False)
        return entry

    def load_user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        """Read ``user_endpoints`` from the database; raises ``django.db.Error``."""
        from ..models import RatePolicy

        drops = self._drops
        with self._reading():
            own = not_ended(RatePolicy.objects.filter(user__isnull=False).exclude(mode="off"))
            found: dict[int | None, frozenset[str]] = {}
            for endpoint_id, counted_per in own.order_by().values_list("endpoint_id", "counted_per").distinct():
                found[endpoint_id] = found.get(endpoint_id, frozenset()) | {counted_per}
        with self._users_lock:
            if drops == self._drops and not publication_pending():
                self.user_endpoints = found
        return found

    def _refresh(self, revision: int) -> Snapshot:
        self._polled = begun = time.monotonic()
        before = self._snapshot
        # Changes are read before the data they announce: one that commits in between is read twice, never missed.
        with self._reading():
            changes, seen = self._seen.read_unseen(self._most) if before is not None else ChangeCursor.from_history()
            if before is None or any(change.everything for change in changes):
                snapshot = load_snapshot(revision, before)
                self._most = min(_MANY, max(FEW, sum(1 for _ in held_policies(snapshot)) // 4))
            else:
                snapshot = update_snapshot(before, {change.row for change in changes if change.row})
        if snapshot is not before:
            self.reloads += 1
            self.reload_seconds += time.monotonic() - begun
        if begun - self._tidied >= _TIDY_SECONDS:
            self._tidied = begun
            snapshot = without_ended(snapshot)
        if snapshot.revision != revision:
            snapshot = snapshot.at(revision)
        with self._users_lock:
            users = {user for change in changes for user in change.users}
            everything = any(change.everything for change in changes)
            if users or everything:
                self._drops += 1
                self.user_endpoints = None
            if everything:
                self._users.clear()
            for user in users:
                self._users.pop(user, None)
        self._snapshot, self._seen = snapshot, seen
        return snapshot

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Wraps reads of the database; logs once when they begin to fail, and once when they succeed again."""
        try:
            with reading_policies():
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


#: The policies of this process.
policies = process.policies = PolicyCache()
