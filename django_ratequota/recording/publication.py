"""Publishes the policy changes of a transaction after its commit, and sends ``policies_changed`` once per save."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any
from uuid import UUID, uuid4
from weakref import WeakSet

from django.apps import apps
from django.db import transaction
from django.dispatch import Signal

from ..exceptions import StoreError
from ..runtime import default_limiter

logger = logging.getLogger("django_ratequota")

#: Sent in the process that made a change, once per save, after its commit and publication: ``change_id``, ``changes``
#: (the save's PolicyChange rows, a queryset that has read nothing), ``actor`` (a user or None), ``reason`` and
#: ``revision`` (the new one; None if Redis could not be reached: other processes then find the change within
#: POLL_SECONDS).
policies_changed = Signal()

_unpublished: ContextVar[Callable[[], None] | None] = ContextVar("ratequota_unpublished", default=None)


class Save:
    """Changes that were made together; their rows in the history share ``change_id``.

    ``collecting_save`` opens one for the changes made inside it. Else a save has the changes of one transaction.
    """

    __slots__ = ("_committed", "_sent", "actor", "change_id", "closed", "reason", "written")

    def __init__(self, closed: bool = True) -> None:
        self.change_id = uuid4()
        #: The author and the reason of its first rows that have them.
        self.actor: Any = None
        self.reason = ""
        #: Whether rows were written; a rollback may have removed them.
        self.written = False
        #: Whether no transaction follows the one that commits.
        self.closed = closed
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
        if self._sent or self._committed is None:
            return
        self._sent = True
        using, revision = self._committed
        rows = apps.get_model("django_ratequota", "PolicyChange").objects.using(using)
        changes = rows.filter(change_id=self.change_id).order_by("pk")
        policies_changed.send_robust(
            sender=None,
            change_id=self.change_id,
            changes=changes,
            actor=self.actor,
            reason=self.reason,
            revision=revision,
        )


_collecting: ContextVar[Save | None] = ContextVar("ratequota_save", default=None)


@contextmanager
def collecting_save() -> Iterator[None]:
    """Let all changes made inside be one save. Inside another, they join that one."""
    if _collecting.get() is not None:
        yield
        return
    save = Save(closed=False)
    token = _collecting.set(save)
    try:
        yield
    finally:
        _collecting.reset(token)
        save.close()


class _Thread(threading.local):
    """The publications of this thread's open transactions."""

    def __init__(self) -> None:
        # Weak, because Django holds the only reference until the commit or the rollback: so a publication lives as
        # long as its changes are pending.
        self.publications: WeakSet[_Publication] = WeakSet()


_thread = _Thread()


class _Publication:
    """The publication of one transaction's changes."""

    __slots__ = ("__weakref__", "_failed", "_revision", "loaded", "needed", "own", "published", "saves", "using")

    def __init__(self, using: str) -> None:
        self.using = using
        #: Whether requests depend on any of its changes.
        self.needed = False
        #: Whether it was published, or committed without need of that; tests that run its hooks do both.
        self.published = False
        #: The save of the changes made outside of ``collecting_save``.
        self.own = Save()
        #: All saves with changes that requests depend on.
        self.saves: dict[UUID, Save] = {}
        #: Ids of the PolicyChange rows that were written while a fixture was loaded.
        self.loaded: set[int] = set()
        self._revision: int | None = None
        self._failed: Callable[[], None] | None = None

    def need(self, save: Save) -> None:
        """Publish on commit, and send the signal for the save."""
        self.saves[save.change_id] = save
        if not self.needed:
            self.needed = True
            self._failed = _unpublished.get()

    def publish(self) -> None:
        """Publish a new revision. Never fails, because the changes are committed already."""
        if self.published:
            return
        self.published = True
        if not self.needed:
            return
        try:
            self._revision = default_limiter().publish()
        except Exception as error:
            logger.error(
                "a policy change is saved but could not be published (%s); processes find it within POLL_SECONDS",
                error,
                exc_info=not isinstance(error, StoreError),
            )
            if self._failed is not None:
                self._failed()

    def run(self, *saves: Save) -> None:
        """Publish, and send ``policies_changed`` for the saves."""
        self.publish()
        for save in saves:
            save.on_committed(self.using, self._revision)


def current_save(using: str) -> Save:
    """Return the save that changes made now on the alias belong to; call it inside a transaction."""
    return _collecting.get() or _publication(using).own


def publish_on_commit(using: str) -> None:
    """Publish once when the open transaction of the alias is committed, however many changes it holds."""
    publication = _publication(using)
    save = current_save(using)
    publication.need(save)

    def run() -> None:
        publication.run(save)

    # For each change, because tests run captured hooks, and a savepoint's rollback discards its hooks.
    transaction.on_commit(run, using=using, robust=True)


def _publication(using: str) -> _Publication:
    """Return the publication of the open transaction; a hook keeps a new one until the commit."""
    publication = _open_publication(using)
    if publication is None:
        _publish_at_commit(transaction.get_connection(using))
        publication = _Publication(using)
        _thread.publications.add(publication)
        transaction.on_commit(publication.publish, using=using, robust=True)
    return publication


def publication_pending() -> bool:
    """Whether an open transaction of this thread holds policy changes, which only this thread sees yet."""
    # Asked for every request, of which few have a publication.
    return len(_thread.publications) > 0 and any(one.needed for one in _thread.publications)


def loaded_ids(using: str) -> set[int]:
    """Return the set of ids written while a fixture is loaded in the open transaction; callers add to it."""
    publication = _open_publication(using)
    return set() if publication is None else publication.loaded


@contextmanager
def when_unpublished(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` if a change made inside is committed, but cannot be published."""
    token = _unpublished.set(call)
    try:
        yield
    finally:
        _unpublished.reset(token)


def _open_publication(using: str) -> _Publication | None:
    return next((one for one in _thread.publications if one.using == using and not one.published), None)


def _publish_at_commit(connection: Any) -> None:
    """Make the connection's ``commit`` publish.

    ``on_commit`` hooks do not run after an earlier one has raised, and never if AUTOCOMMIT is False.
    """
    if getattr(connection.commit, "publishes", False):
        return
    commit = connection.commit

    @wraps(commit)
    def commit_and_publish() -> None:
        commit()
        for publication in [one for one in _thread.publications if one.using == connection.alias]:
            _thread.publications.discard(publication)
            if connection.settings_dict["AUTOCOMMIT"]:
                publication.publish()
            else:
                publication.run(*publication.saves.values())

    commit_and_publish.publishes = True  # type: ignore[attr-defined]
    connection.commit = commit_and_publish
