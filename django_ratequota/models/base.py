"""What the models share: changes are recorded, in the transaction that makes them."""

from __future__ import annotations

from typing import Any

from django.db import models, transaction

from ..databases import policy_alias
from ..recording import RecordingManager


class RecordedModel(models.Model):
    """A model whose changes are recorded (see ``recording``) in the transaction that makes them."""

    objects = RecordingManager()

    class Meta:
        abstract = True
        # Changes through related objects (plan.policies.add(...)) go by the base manager.
        base_manager_name = "objects"

    def save(self, *args: Any, **kwargs: Any) -> None:
        """``Model.save`` in a transaction: outside one, Django would commit before the change is recorded."""
        with transaction.atomic(using=kwargs.get("using") or policy_alias(type(self), instance=self)):
            super().save(*args, **kwargs)
