"""The base of models whose changes are recorded in the transaction that makes them, by Django's signals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.apps import apps
from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models.signals import post_save, pre_delete, pre_save

from ..recording.databases import policy_alias
from ..recording.publication import join_save
from ..recording.querysets import RecordingManager
from ..recording.recorder import deleting, record, record_deletion, rows_by_pk

_BEFORE = "_ratequota_before"


class RecordedModel(models.Model):
    """A model whose changes ``recording`` records in the transaction that makes them."""

    objects = RecordingManager()

    class Meta:
        abstract = True
        # Because changes through related objects (plan.policies.add(...)) use the base manager.
        base_manager_name = "objects"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """``Model.save`` in a transaction, because otherwise Django would commit before the change is recorded."""
        with transaction.atomic(using=kwargs.get("using") or policy_alias(type(self), instance=self)):
            super().save(*args, **kwargs)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:
        """``Model.delete``, recorded in batches together with its cascade."""
        using = using or policy_alias(type(self), instance=self)
        with deleting(using):
            return super().delete(using=using, keep_parents=keep_parents)

    delete.alters_data = True  # type: ignore[attr-defined]

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
        record(instance.__dict__.pop(_BEFORE, None), _stored(sender, instance.pk, using), using)


def _before_delete(sender: Any, instance: Any, using: str, **_: Any) -> None:
    # Before the first row of a cascade is deleted, because its endpoint or user may be gone afterwards.
    record_deletion(sender, instance.pk, using)


def _stored(model: Any, pk: Any, using: str, lock: bool = False) -> Any:
    # As stored, because the object's fields may be unsaved, or expressions.
    return None if pk is None else rows_by_pk(model, [pk], using, lock).get(pk)


def connect_receivers() -> None:
    """Record the changes of all recorded models, a project's proxies of them included; called once at start."""
    for model in apps.get_models():
        if issubclass(model, RecordedModel):
            for signal, receiver in (
                (pre_save, _before_save),
                (post_save, _after_save),
                (pre_delete, _before_delete),
            ):
                signal.connect(receiver, sender=model, dispatch_uid=f"ratequota_{receiver.__name__}")
