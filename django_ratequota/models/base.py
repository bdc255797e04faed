"""The bases of the models; the changes of most are recorded in the transaction that makes them.

Saves and deletions are recorded by Django's signals, which it also sends for what a user's deletion takes along;
``update``, ``bulk_create`` and ``bulk_update``, for which it sends none, by the manager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models.signals import post_save, pre_delete, pre_save

from ..changes.databases import PrimaryQuerySet, policy_alias
from ..changes.publication import join_save
from ..changes.writer import BATCH, in_batches, rows_by_pk, write_changes, write_deletion, write_publication

_BEFORE = "_ratequota_before"


class TrackingQuerySet(PrimaryQuerySet):
    """A queryset that records and publishes its bulk changes like single ones."""

    def update(self, **kwargs: Any) -> int:
        """``QuerySet.update``, recorded row by row."""
        count = 0
        with transaction.atomic(using=self.db):
            rows, pks = self._rows()
            # By key, because a matching row that another transaction commits meanwhile would go unrecorded.
            for batch in in_batches(pks) or [[]]:
                before = rows_by_pk(self.model, batch, self.db, lock=True)
                count += super(TrackingQuerySet, rows.filter(pk__in=list(before))).update(**kwargs)
                after = rows_by_pk(self.model, before, self.db)
                write_changes(((row, after.get(pk)) for pk, row in before.items()), self.db)
                if len(after) < len(before):
                    # The update has changed primary keys, and the database does not return the new ones.
                    write_publication(f"new keys of {self.model._meta.verbose_name_plural}", self.db)
        return count

    def bulk_create(self, objs: Iterable[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``QuerySet.bulk_create``, recorded row by row."""
        with transaction.atomic(using=self.db):
            created = super().bulk_create(objs, *args, **kwargs)
            over = kwargs.get("update_conflicts") or kwargs.get("ignore_conflicts") or len(args) > 1
            if over or any(instance.pk is None for instance in created):
                # The database does not return which rows were overwritten, and MySQL returns no keys at all.
                write_publication(f"bulk_create of {self.model._meta.verbose_name_plural}", self.db)
            else:
                for batch in in_batches([instance.pk for instance in created]):
                    write_changes(((None, row) for row in rows_by_pk(self.model, batch, self.db).values()), self.db)
        return created

    def bulk_update(self, objs: Iterable[Any], fields: Iterable[str], batch_size: int | None = None) -> int:
        """``QuerySet.bulk_update``, recorded row by row, in statements of at most ``BATCH`` rows."""
        return super().bulk_update(objs, fields, BATCH if batch_size is None else min(batch_size, BATCH))

    def _rows(self) -> tuple[Any, list[Any]]:
        """Return a queryset from which an update takes batches, and the keys of the rows that it will change."""
        ordered = self.order_by()
        query = ordered.query
        keys = ordered.values_list("pk", flat=True)
        if query.count_active_tables() > 1 or query.group_by is not None or query.distinct:
            # Batches keep the conditions. A condition on related rows may find a row more than once.
            return self, list(dict.fromkeys(keys))
        # Locked rows keep meeting the conditions, which may be a list of 50,000 keys: not sent with every batch.
        rows = self._chain()  # type: ignore[attr-defined]
        rows.query.clear_where()
        return rows, list(keys.select_for_update())


class UnrecordedModel(models.Model):
    """A model without recorded changes; its rows are read where they are written."""

    objects = models.Manager.from_queryset(PrimaryQuerySet)()

    class Meta:
        abstract = True
        default_permissions: ClassVar[tuple[str, ...]] = ()


class TrackedModel(models.Model):
    """A model whose changes are recorded in the transaction that makes them."""

    objects = models.Manager.from_queryset(TrackingQuerySet)()

    class Meta:
        abstract = True
        # Because changes through related objects (plan.policies.add(...)) use the base manager.
        base_manager_name = "objects"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """``Model.save`` in a transaction, because otherwise Django would commit before the change is recorded."""
        with transaction.atomic(using=kwargs.get("using") or policy_alias(type(self), instance=self)):
            super().save(*args, **kwargs)

    def clean_fields(self, exclude: Collection[str] | None = None) -> None:
        """``Model.clean_fields``, but related objects may be missing on a replica, where Django looks for them."""
        try:
            super().clean_fields(exclude)
        except ValidationError as error:
            errors = {name: own for name, own in error.error_dict.items() if not self._exists(name, own)}
            if errors:
                raise ValidationError(errors) from error

    def _exists(self, name: str, errors: Sequence[ValidationError]) -> bool:
        related: Any = self._meta.get_field(name).related_model
        missing = [error.params["pk"] for error in errors if error.params and "pk" in error.params]
        if related is None or len(missing) != len(errors):
            return False
        found: bool = related._base_manager.using(policy_alias(related)).filter(pk__in=missing).exists()
        return found


def _before_save(sender: Any, instance: Any, using: str, raw: bool, **_: Any) -> None:
    if not raw:
        # Locked, because a save in between would be recorded after this one, and still be overwritten by it.
        setattr(instance, _BEFORE, _stored(sender, instance.pk, using, lock=True))


def _after_save(sender: Any, instance: Any, using: str, raw: bool, **_: Any) -> None:
    if raw:
        # Fixtures are not recorded, as they may bring history rows of their own. Until the commit, which a test never
        # makes, this transaction's requests obey what it has loaded.
        with transaction.atomic(using=using, savepoint=False):
            join_save(using)
    else:
        change = (instance.__dict__.pop(_BEFORE, None), _stored(sender, instance.pk, using))
        write_changes([change], using)


def _before_delete(sender: Any, instance: Any, using: str, **_: Any) -> None:
    # Before the first row of a cascade is deleted, because its endpoint or user may be gone afterwards.
    write_deletion(sender, instance.pk, using)


def _stored(model: Any, pk: Any, using: str, lock: bool = False) -> Any:
    # Read the stored values, because the object's fields may be unsaved or expressions.
    return None if pk is None else rows_by_pk(model, [pk], using, lock).get(pk)


def connect_receivers() -> None:
    """Record the changes of all recorded models, a project's proxies of them included; called once at start."""
    receivers: dict[Any, Any] = {pre_save: _before_save, post_save: _after_save, pre_delete: _before_delete}
    for model in [model for model in apps.get_models() if issubclass(model, TrackedModel)]:
        for signal, receiver in receivers.items():
            signal.connect(receiver, sender=model, dispatch_uid=f"ratequota_{receiver.__name__}")
