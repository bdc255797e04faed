"""Publishes policy changes after the commit of their transaction, and sends ``policies_changed`` once per save.

What waits for a commit is held by Django's list of the connection's ``on_commit`` hooks alone: a rollback, also of a
savepoint, drops the hooks of the changes that it undoes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from django.apps import apps
from django.db import transaction
from django.dispatch import Signal

from ..exceptions import StoreError
from ..utils.log import logger

#: 2020, as Unix time: a smaller revision is a counter and no time.
_PLAUSIBLE = 1_577_836_800
_DAY = 86_400

#: Sent in the process that made a change, once per save, after its commit and publication: ``change_id``, ``changes``
#: (the save's PolicyChange rows, a queryset that has read nothing), ``actor`` (a user or None), ``reason`` and
#: ``revision`` (the new one; None if Redis could not be reached: other processes then find the change within
#: POLL_SECONDS).
policies_changed = Signal()


class Save:
    """Changes that were made together; their rows in the history share ``change_id``.

    ``changed_by`` opens one for the changes made inside it. Else a save has the changes of one transaction.
    """

    def __init__(self, closed: bool = True, unpublished: Callable[[], None] | None = None) -> None:
        self.change_id = uuid4()
        #: The author and the reason of its first rows that have them.
        self.actor: Any = None
        self.reason = ""
        #: Whether rows were written; a rollback may have removed them.
        self.written = False
        #: Whether no transaction follows the one that commits.
        self.closed = closed
        #: Called if its last commit could not be published.
        self._unpublished = unpublished
        #: The alias and the revision of the last commit.
        self._committed: tuple[str, int | None] | None = None
        self._sent = False

    def on_committed(self, using: str, revision: int | None) -> None:
        """Send ``policies_changed``, or let ``close`` send it."""
        self._committed = (using, revision)
        if self.closed:
            self._send()

    def close(self) -> None:
        """Send ``policies_changed`` for what is committed already; what is not sends it on commit."""
        self.closed = True
        self._send()

    def _send(self) -> None:
        if self._sent or self._committed is None or not self.written:
            return
        self._sent = True
        using, revision = self._committed
        rows = apps.get_model("django_ratequota", "PolicyChange").objects.using(using)
        policies_changed.send_robust(
            sender=None,
            change_id=self.change_id,
            changes=rows.filter(change_id=self.change_id).order_by("pk"),
            actor=self.actor,
            reason=self.reason,
            revision=revision,
        )
        if revision is None and self._unpublished is not None:
            self._unpublished()


class _Transaction:
    """What the changes of one transaction share."""

    def __init__(self) -> None:
        #: The save of the changes made outside of ``changed_by``.
        self.own = Save()
        self.published = False
        self.revision: int | None = None

    def publish(self) -> int | None:
        """Publish a new revision, once. Never fails, because the changes are committed already."""
        if not self.published:
            # The app's config knows the limiter; this package imports nothing that decides.
            config: Any = apps.get_app_config("django_ratequota")
            self.published = True
            try:
                self.revision = config.publish()
            except Exception as error:
                logger.error(
                    "a policy change is saved but could not be published (%s); processes find it within POLL_SECONDS",
                    error,
                    exc_info=not isinstance(error, StoreError),
                )
        return self.revision


class _Pending:
    """A change that waits for its commit; ``run`` is its hook."""

    def __init__(self, using: str, publishes: bool, save: Save | None) -> None:
        self.using = using
        #: Whether requests depend on the change.
        self.publishes = publishes
        self.transaction = _current(using)
        self.save = save or self.transaction.own

    def run(self) -> None:
        if self.publishes:
            self.save.on_committed(self.using, self.transaction.publish())


class _Thread(threading.local):
    #: The connections of this thread that may hold hooks of ours; most threads change no policies.
    connections: frozenset[Any] = frozenset()


_thread = _Thread()


def join_save(using: str, publishes: bool = True, save: Save | None = None) -> Save:
    """Return the save of a change made now: ``save``, or else that of its transaction.

    With ``publishes`` the change is published after the commit, together with all others of its transaction. Call it
    inside that transaction.
    """
    # A hook for each change, because a savepoint's rollback drops its hooks, and tests run captured hooks.
    pending = _Pending(using, publishes, save)
    transaction.on_commit(pending.run, using=using, robust=True)
    _thread.connections |= {transaction.get_connection(using)}
    return pending.save


def publication_pending() -> bool:
    """Whether an open transaction of this thread holds policy changes, which only this thread sees yet."""
    if not _thread.connections:
        return False
    _thread.connections = frozenset(
        connection for connection in _thread.connections if any(one.publishes for one in _pending(connection))
    )
    return bool(_thread.connections)


def published_at(revision: int) -> datetime | None:
    """Return when the revision was published, read from its number; None where the number is no time."""
    seconds = revision / 10**6
    return datetime.fromtimestamp(seconds, UTC) if _PLAUSIBLE < seconds < time.time() + _DAY else None


def _current(using: str) -> _Transaction:
    """Return the open transaction's, as long as it is not published: tests run hooks without a commit."""
    last = next(_pending(transaction.get_connection(using)), None)
    return _Transaction() if last is None or last.transaction.published else last.transaction


def _pending(connection: Any) -> Iterator[_Pending]:
    """Yield what waits for the connection's commit, the newest first."""
    for _savepoints, hook, _robust in reversed(connection.run_on_commit):
        pending = getattr(hook, "__self__", None)
        if isinstance(pending, _Pending):
            yield pending
