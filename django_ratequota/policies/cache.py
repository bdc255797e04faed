"""This process's cache of all policies, and the protocol that keeps it current.

Plans, endpoints, lists and shared policies are one immutable ``Snapshot``. Each user's own policies and assignments,
and the assignments of each subject such as ``tenant:acme``, are a ``UserEntry``, see ``entries``. A reload reads the
PolicyChange rows that this process has not read yet, and the rows that they name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

from django.core.signals import setting_changed
from django.db import Error as DatabaseError

from ..changes.databases import in_transaction, policy_alias, read_from
from ..changes.publication import publication_pending
from ..conf import settings
from ..utils import forks
from ..utils.log import logger
from . import loading
from .change_feed import FEW, Change, ChangeCursor
from .entries import Entries
from .facts import SubjectKey, UserEntry
from .snapshot import Snapshot

Found = TypeVar("Found")

#: Unread changes are applied row by row up to ``FEW`` or a quarter of the rows held, but no more than this many,
#: because reading everything is faster then.
_MANY = 10_000
#: Seconds between two removals of policies that ended long ago.
TIDY_SECONDS = 3600

#: Called when this process has loaded policies or a newer revision of them, by the thread that did.
listeners: list[Callable[[], None]] = []


class PolicyCache:
    """The current snapshot, and the entries of recent users and subjects.

    A request takes ``current()``, then ``user(...)`` and ``entries(...)``; all are at least as new as the snapshot's
    revision. When Redis reports a newer revision, ``reload`` reads what has changed.
    """

    def __init__(self) -> None:
        self.forget()
        setting_changed.connect(self._forget_kinds)

    def forget(self) -> None:
        """Reset to the state of a new process, for tests."""
        self._lock = forks.lock()
        self._entries_lock = forks.lock()
        self._snapshot: Snapshot | None = None
        self._entries = Entries()
        #: Id of each endpoint where users have policies of their own (None = all endpoints) -> the counted_per of the
        #: enforced ones; None = not loaded.
        self.user_endpoints: Mapping[int | None, frozenset[str]] | None = None
        #: Kinds of subjects on plans and ``user``, in the order in which plans are looked for; () = no subject is on
        #: a plan, None = not loaded. For an hour it may hold kinds whose assignments are gone; that costs a lookup.
        self.assigned_kinds: tuple[str, ...] | None = None
        #: Whether an assignment names the day on which months begin; loaded with ``user_endpoints``.
        self.anchored = False
        # Incremented when entries are dropped. An entry whose read began before that is not kept.
        self._drops = 0
        self._cursor = ChangeCursor()
        self._polled = self._tidied = 0.0
        # The newest revision that a caller of reload() needs.
        self._wanted = 0
        # Most unread changes that are applied row by row.
        self._most = FEW
        # Whether the last attempt to read policies succeeded.
        self._readable = True
        #: Number of reloads that changed the snapshot, and the total seconds they took.
        self.reloads, self.reload_seconds = 0, 0.0

    def expire(self, **_: object) -> None:
        """Make the next request read everything, after changes that were not recorded; a receiver too."""
        with self._lock, self._entries_lock:
            self._snapshot, self._entries = None, Entries()
            self.user_endpoints = self.assigned_kinds = None
            self._drops += 1

    def _forget_kinds(self, *, setting: str, **_: object) -> None:
        """Because ``assigned_kinds`` depends on IDENTIFIERS and CALLER, which tests override."""
        if setting == "RATEQUOTA":
            self.assigned_kinds = None

    def current(self) -> Snapshot | None:
        """Return the current snapshot; None before the first ``reload``.

        Also None inside a transaction that has changed policies: its requests are checked by its own changes, which
        no other request may see yet.
        """
        return None if publication_pending() else self._snapshot

    def overdue(self) -> bool:
        """Whether POLL_SECONDS have passed since the last look for changes whose publication was lost."""
        return time.monotonic() - self._polled >= float(settings.poll_seconds)

    def reload(self, revision: int, instead_of: int | None = None) -> Snapshot:
        """Bring the snapshot to ``revision``, a number read from Redis before this call, and return it.

        ``instead_of`` is a greater revision that Redis has refused. One thread reads the database, the others wait.
        Raises ``django.db.Error`` if the database cannot be read; the last snapshot then stays current.
        """
        # One read serves all waiting threads, because each revision is published after its commit.
        self._wanted = max(self._wanted if instead_of is None else 0, revision)
        with self._lock:
            if publication_pending():
                return self._from_database(lambda: loading.load_snapshot(revision))
            snapshot = self._snapshot
            if snapshot is not None and snapshot.revision >= revision and snapshot.revision != instead_of:
                return snapshot
            # Inside the request's own transaction, the data read may be older than the revision that others wait for.
            return self._refresh(revision if in_transaction() else max(revision, self._wanted))

    def poll(self) -> Snapshot | None:
        """Apply unread changes without a new revision. Returns at once if another thread is reloading."""
        if not self._lock.acquire(blocking=False):
            return self._snapshot
        try:
            if self._snapshot is None or not self.overdue() or publication_pending():
                return self._snapshot
            return self._refresh(self._snapshot.revision)
        finally:
            self._lock.release()

    def user(self, key: str | SubjectKey, pending: bool | None = None) -> UserEntry | None:
        """Return the entry of a user or subject if known without a query; None inside a transaction with changes.

        ``pending`` is whether the current transaction has changed policies; None = find out.
        """
        if publication_pending() if pending is None else pending:
            return None
        entries = self._entries
        return entries.known.get(key, entries.missing)

    def load_user(self, user_id: str) -> UserEntry:
        """Return the user's entry as ``entries`` does."""
        return self.entries([user_id])[user_id]

    def entries(self, keys: Collection[str | SubjectKey]) -> dict[str | SubjectKey, UserEntry]:
        """Return the entries of users and subjects; raises ``django.db.Error``.

        Those that are not known are read in two queries for all users and one for all subjects, with the next part.
        """
        pending = publication_pending()
        found = {key: entry for key in keys if (entry := self.user(key, pending)) is not None}
        missing = [key for key in keys if key not in found]
        if not missing:
            return found
        if pending:
            return found | self._from_database(lambda: loading.load_entries(missing))
        held = self._entries
        part = self._read(lambda: held.read(missing), held.keep)
        return found | {key: part.entries[key] for key in missing}

    def load_all_entries(self) -> None:
        """Read the entries that are not held yet, unless they are too many. Raises ``django.db.Error``."""
        while not (held := self._entries).whole and not publication_pending():
            self._read(partial(held.read, []), held.keep)

    def plan_kinds(self) -> tuple[str, ...]:
        """Return ``assigned_kinds``, loaded if necessary (one query each); raises ``django.db.Error``."""
        known = self.assigned_kinds
        if known is not None and not publication_pending():
            return known
        if not settings.identifiers:
            self.assigned_kinds = ()
            return ()
        keep = partial(setattr, self, "assigned_kinds")
        return self._read(lambda: in_plan_order(loading.load_assigned_kinds()), keep)

    def load_user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        """Read ``user_endpoints`` from the database; raises ``django.db.Error``."""

        def read() -> Mapping[int | None, frozenset[str]]:
            found, self.anchored = loading.load_user_endpoints()
            return found

        return self._read(read, partial(setattr, self, "user_endpoints"))

    def _read(self, read: Callable[[], Found], keep: Callable[[Found], None]) -> Found:
        """Return what ``read`` returns, and keep it unless entries were dropped meanwhile."""
        drops = self._drops
        found = self._from_database(read)
        with self._entries_lock:
            if drops == self._drops and not publication_pending():
                keep(found)
        return found

    def _refresh(self, revision: int) -> Snapshot:
        self._polled = begun = time.monotonic()
        before = self._snapshot
        snapshot, entries, changes, cursor = self._from_database(lambda: self._changed(revision))
        everything = any(change.everything for change in changes)
        if snapshot is not before:
            self.reloads += 1
            self.reload_seconds += time.monotonic() - begun
        if begun - self._tidied >= TIDY_SECONDS:
            self._tidied = begun
            snapshot = loading.without_ended(snapshot)
            self.assigned_kinds = None
        if snapshot.revision != revision:
            snapshot = snapshot.copied(revision=revision)
        with self._entries_lock:
            users: set[Any] = {user for change in changes for user in change.users}
            subjects = {subject for change in changes for subject in change.subjects}
            if users or subjects or everything:
                self._drops += 1
                self.user_endpoints = None
            if entries is not None:
                self._entries = entries
            self._entries.drop(users | subjects)
            if everything or not {kind for kind, _value in subjects}.issubset(self.assigned_kinds or ()):
                self.assigned_kinds = None
        self._snapshot, self._cursor = snapshot, cursor
        if snapshot is not before:
            for listen in listeners:
                listen()
        return snapshot

    def _changed(self, revision: int) -> tuple[Snapshot, Entries | None, list[Change], ChangeCursor]:
        """Read (snapshot, entries, changes, cursor) as they are now; None = the entries that are held go on."""
        before, entries = self._snapshot, None
        # Changes are read before the rows that they name: one that commits in between is read twice, never missed.
        changes, cursor = self._cursor.read_unseen(self._most) if before is not None else ChangeCursor.from_history()
        if before is None or any(change.everything for change in changes):
            snapshot, entries = loading.load_snapshot(revision), Entries()
            entries.keep(entries.read([]))
            held = sum(1 for _ in loading.held_policies(snapshot)) + len(snapshot.members)
            self._most = min(_MANY, max(FEW, held // 4))
        else:
            snapshot = loading.update_snapshot(before, {change.row for change in changes if change.row})
        return snapshot, entries, changes, cursor

    def _from_database(self, read: Callable[[], Found]) -> Found:
        """Return what ``read`` returns; log once when reads begin to fail, and once when they succeed again."""
        try:
            found = read_from(policy_alias(), read)
        except DatabaseError as error:
            if self._readable:
                self._readable = False
                fallback = "" if self._snapshot is None else ", the last known ones go on"
                logger.error("the policies cannot be read%s: %s", fallback, error)
            raise
        if not self._readable:
            self._readable = True
            logger.warning("the policies can be read again")
        return found


def in_plan_order(kinds: Collection[str]) -> tuple[str, ...]:
    """Return ``assigned_kinds`` for the kinds of subjects on plans: CALLER's, the user, all other IDENTIFIERS."""
    order = dict.fromkeys((*settings.caller, "user", *settings.identifiers))
    return tuple(kind for kind in order if kind == "user" or kind in kinds) if kinds else ()


#: The policies of this process.
policies = PolicyCache()
