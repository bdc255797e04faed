"""The database that holds the policies, how to read it inside a request's transaction, and conditions on its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

from django.apps import apps
from django.db import Error as DatabaseError
from django.db import connections, models, router, transaction

Found = TypeVar("Found")


def policy_alias(model: type[models.Model] | None = None, **hints: Any) -> str:
    """Return the database alias that policies are written to.

    Code that checks or records policies reads there as well, because a replica may lag behind a publication.
    ``model`` and ``hints`` are passed to ``router.db_for_write``; None = RatePolicy.
    """
    alias: str = router.db_for_write(model or apps.get_model("django_ratequota", "RatePolicy"), **hints)
    return alias


def in_transaction(alias: str | None = None) -> bool:
    """Whether this thread has a transaction open on the alias, None = the policies'; needs no connection."""
    connection = transaction.get_connection(alias or policy_alias())
    connected = connection.connection is not None
    autocommit = connection.autocommit if connected else connection.settings_dict["AUTOCOMMIT"]
    return bool(connection.in_atomic_block or not autocommit)


def commits(alias: str) -> bool:
    """Whether Django commits the open transaction at its end; else, with AUTOCOMMIT off, the project does."""
    return bool(transaction.get_connection(alias).commit_on_exit)


def read_from(alias: str, read: Callable[[], Found]) -> Found:
    """Return what ``read`` returns from the alias; raises ``django.db.Error``.

    It reads in a savepoint if a transaction is open: on PostgreSQL a failed query fails all later ones of its
    transaction, which may be the view's (ATOMIC_REQUESTS). Else it reads once more where the connection had broken:
    Django closes such connections only around requests, and a bot, for one, serves none.
    """
    connection: Any = connections[alias]
    connected = connection.connection is not None
    if not in_transaction(alias):
        try:
            return read()
        except DatabaseError:
            # Not ``close_if_unusable_or_obsolete``: each connection is obsolete by default, the project may use it.
            if not connected or connection.is_usable():
                raise
            connection.close()
        return read()
    if not connected:  # with AUTOCOMMIT off: end the transaction that reading begins, as nobody else would commit it
        try:
            return read()
        finally:
            connection.close()
    # Not ``atomic``: with AUTOCOMMIT off it holds a connection that has broken to be in a block for good.
    savepoint = connection.savepoint()
    try:
        found = read()
    except DatabaseError:
        connection.savepoint_rollback(savepoint)
        raise
    connection.savepoint_commit(savepoint)
    return found


@contextmanager
def saving(model: type[models.Model]) -> Iterator[str]:
    """Open the transaction of an operator's save, and yield the alias that the model is written to.

    Such saves wait for each other, so none overwrites what it has not read, and no two lock rows crosswise. Code that
    saves objects waits for their rows alone.
    """
    alias = policy_alias(model)
    lock: Any = apps.get_model("django_ratequota", "SaveLock")
    target = ["id"] if connections[alias].features.supports_update_conflicts_with_target else None
    with transaction.atomic(using=alias):
        lock.objects.using(alias).bulk_create(
            [lock(pk=1)], update_conflicts=True, update_fields=["taken_at"], unique_fields=target
        )
        yield alias


@contextmanager
def reading_and_writing(model: type[models.Model]) -> Iterator[str]:
    """Open a transaction that reads rows and then writes some, and yield the alias that the model is written to.

    On SQLite, a write waits for those of other processes unless its transaction has read before, which fails at once:
    "database is locked". So the transaction begins with a write, of no row.
    """
    alias = policy_alias(model)
    with transaction.atomic(using=alias):
        if not connections[alias].features.has_select_for_update:
            rows: Any = model._base_manager.filter(pk=0)
            rows._raw_delete(alias)
        yield alias


@contextmanager
def committing(model: type[models.Model]) -> Iterator[str]:
    """Open a transaction of a thread of ours, and yield the alias that the model is written to.

    It is committed where AUTOCOMMIT is off, too.
    """
    alias = policy_alias(model)
    if not connections[alias].in_atomic_block:
        # Else ``atomic`` commits nothing, and holds a connection that has broken to be in a block for good.
        connections[alias].set_autocommit(True)
    with transaction.atomic(using=alias):
        yield alias


def subject_begins(text: str, alias: str) -> models.Q:
    """Return the condition that a row's subject begins with the text, which is looked up in an index."""
    found = models.Q(subject__startswith=text)
    if connections[alias].vendor != "postgresql":  # LIKE uses no index
        found &= models.Q(subject__gte=text, subject__lt=f"{text}\U0010ffff")
    return found


def started(now: datetime) -> models.Q:
    """Return the condition of rows that have started."""
    return models.Q(starts_at__isnull=True) | models.Q(starts_at__lte=now)


def not_ended(now: datetime) -> models.Q:
    """Return the condition of rows that have not ended."""
    return models.Q(ends_at__isnull=True) | models.Q(ends_at__gt=now)


class PrimaryQuerySet(models.QuerySet[Any]):
    """A queryset that reads from the alias that its model is written to, unless ``using`` names another."""

    @property
    def db(self) -> str:
        """The alias of the next query."""
        return self._db or policy_alias(self.model, **self._hints)  # type: ignore[attr-defined]
