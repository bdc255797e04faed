"""What the models share: changes are recorded, in the transaction that makes them."""

from __future__ import annotations

from typing import Any

from django.db import models, router, transaction

from ..recording import RecordingManager, deleting


class RecordedModel(models.Model):
    """A model whose changes are recorded (see ``recording``) in the transaction that makes them."""

    objects = RecordingManager()

    class Meta:
        abstract = True
        # Changes through related objects (plan.policies.add(...)) go by the base manager.
        base_manager_name = "objects"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """``Model.save`` in a transaction: outside one, Django would commit before the change is recorded."""
        with transaction.atomic(using=kwargs.get("using") or router.db_for_write(type(self), instance=self)):
            super().save(*args, **kwargs)

    def delete(self, using: str | None = None, keep_parents: bool = False) -> tuple[int, dict[str, int]]:
        """``Model.delete``, recorded in batches with all that goes along."""
        using = using or router.db_for_write(type(self), instance=self)
        with deleting(using):
            return super().delete(using=using, keep_parents=keep_parents)

    delete.alters_data = True  # type: ignore[attr-defined]
