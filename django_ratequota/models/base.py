"""The base of models whose changes are recorded in the transaction that makes them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from django.core.exceptions import ValidationError
from django.db import models, transaction

from ..recording.databases import policy_alias
from ..recording.querysets import RecordingManager
from ..recording.recorder import deleting


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
