"""Publishes the policy changes of a transaction after its commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any
from weakref import WeakSet

from django.db import transaction
from django.dispatch import Signal

from ..exceptions import StoreError
from ..runtime import default_limiter

logger = logging.getLogger("django_ratequota")

#: Sent in the process that made a change, after its commit and publication. ``revision`` is the new revision; None if
#: Redis could not be reached: other processes then find the change within POLL_SECONDS.
policies_changed = Signal()

_unpublished: ContextVar[Callable[[], None] | None] = ContextVar("ratequota_unpublished", default=None)


class _Thread(threading.local):
    """The publications of this thread's open transactions."""

    def __init__(self) -> None:
        # Weak, because Django holds the only reference until the commit or the rollback: so a publication lives as
        # long as its changes are pending.
        self.publications: WeakSet[_Publication] = WeakSet()


_thread = _Thread()


class _Publication:
    """The publication of one transaction's changes."""

    __slots__ = ("__weakref__", "_failed", "_revision", "_sent", "loaded", "published", "using")

    def __init__(self, using: str) -> None:
        self.using = using
        #: Whether it was published, by a commit or by a test that runs its hooks.
        self.published = False
        #: Ids of the PolicyChange rows that were written while a fixture was loaded.
        self.loaded: set[int] = set()
        self._revision: int | None = None
        self._sent = False
        self._failed = _unpublished.get()

    def publish(self) -> None:
        """Publish a new revision. Never fails, because the changes are committed already."""
        if self.published:
            return
        self.published = True
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

    def run(self) -> None:
        """Publish, and send ``policies_changed``; the ``on_commit`` hook of each change."""
        self.publish()
        if not self._sent:
            self._sent = True
            policies_changed.send_robust(sender=None, revision=self._revision)


def publish_on_commit(using: str) -> None:
    """Publish once when the open transaction of the alias is committed, however many changes it holds."""
    publication = _open_publication(using)
    if publication is None:
        _publish_at_commit(transaction.get_connection(using))
        publication = _Publication(using)
    # For each change, because tests run captured hooks, and a savepoint's rollback discards its hooks.
    transaction.on_commit(publication.run, using=using, robust=True)
    _thread.publications.add(publication)


def publication_pending() -> bool:
    """Whether an open transaction of this thread holds policy changes, which only this thread sees yet."""
    return len(_thread.publications) > 0


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
                publication.run()

    commit_and_publish.publishes = True  # type: ignore[attr-defined]
    connection.commit = commit_and_publish
