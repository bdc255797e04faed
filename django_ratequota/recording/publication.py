"""Publishes a transaction's policy changes once it has been committed."""

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

#: Sent after a change was committed and published, in the process that made it. ``revision`` is the new
#: revision, or None when Redis could not be reached: then processes find the change by themselves.
policies_changed = Signal()

_unpublished: ContextVar[Callable[[], None] | None] = ContextVar("ratequota_unpublished", default=None)


class _Thread(threading.local):
    """What this thread's open transactions have to publish."""

    def __init__(self) -> None:
        # Weak: Django alone holds a publication, until the commit or the rollback. So each lives for as long as
        # its changes are pending.
        self.publications: WeakSet[_Publication] = WeakSet()


_mine = _Thread()


class _Publication:
    """The publication of one transaction's changes."""

    __slots__ = ("__weakref__", "_failed", "_revision", "_told", "loaded", "published", "using")

    def __init__(self, using: str) -> None:
        self.using = using
        #: Whether a commit, or a test that runs the hooks of one, has published it.
        self.published = False
        #: Ids of the history's rows that were written beside a fixture.
        self.loaded: set[int] = set()
        self._revision: int | None = None
        self._told = False
        self._failed = _unpublished.get()

    def publish(self) -> None:
        """Give the policies a new revision; never fails, as the changes are committed."""
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
        """Publish, and send ``policies_changed``; the hook of each change."""
        self.publish()
        if not self._told:
            self._told = True
            policies_changed.send_robust(sender=None, revision=self._revision)


def publish_on_commit(using: str) -> None:
    """Publish when the alias' open transaction is committed: once, however many changes it holds."""
    publication = _open_publication(using)
    if publication is None:
        _publish_at_commit(transaction.get_connection(using))
        publication = _Publication(using)
    # With each change: tests that capture hooks run those registered since, and a savepoint's go with it.
    transaction.on_commit(publication.run, using=using, robust=True)
    _mine.publications.add(publication)


def publication_pending() -> bool:
    """Whether an open transaction of this thread holds policy changes of its own, visible to nobody else yet."""
    return len(_mine.publications) > 0


def loaded_ids(using: str) -> set[int]:
    """Return the ids written beside a fixture in the alias' open transaction, to be added to."""
    publication = _open_publication(using)
    return set() if publication is None else publication.loaded


@contextmanager
def when_unpublished(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` where a change made inside was committed, but could not be published."""
    token = _unpublished.set(call)
    try:
        yield
    finally:
        _unpublished.reset(token)


def _open_publication(using: str) -> _Publication | None:
    mine = (one for one in _mine.publications if one.using == using and not one.published)
    return next(mine, None)


def _publish_at_commit(connection: Any) -> None:
    """Let the connection's own ``commit`` publish.

    Hooks of ``on_commit`` do not run where an earlier one has raised, nor ever where AUTOCOMMIT is False.
    """
    if getattr(connection.commit, "publishes", False):
        return
    commit = connection.commit

    @wraps(commit)
    def commit_and_publish() -> None:
        commit()
        for publication in [one for one in _mine.publications if one.using == connection.alias]:
            _mine.publications.discard(publication)
            if connection.settings_dict["AUTOCOMMIT"]:
                publication.publish()
            else:
                publication.run()

    commit_and_publish.publishes = True  # type: ignore[attr-defined]
    connection.commit = commit_and_publish
