"""Signal receivers that pass the saves and deletions of models to ``recording``."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db.models.signals import post_save, pre_delete, pre_save

from ..recording.fixtures import move_aside
from ..recording.recorder import record, record_deletion, rows_by_pk

_BEFORE = "_ratequota_before"


def _before_save(sender: Any, instance: Any, using: str, **_: Any) -> None:
    # Locked, because a save in between would be recorded after this one, and still be overwritten by it.
    setattr(instance, _BEFORE, _stored(sender, instance.pk, using, lock=True))


def _after_save(sender: Any, instance: Any, using: str, raw: bool, **_: Any) -> None:
    record(instance.__dict__.pop(_BEFORE, None), _stored(sender, instance.pk, using), using, raw)


def _before_delete(sender: Any, instance: Any, using: str, **_: Any) -> None:
    # Before the first row of a cascade is deleted, because its endpoint or user may be gone afterwards.
    record_deletion(sender, instance.pk, using)


def _stored(model: Any, pk: Any, using: str, lock: bool = False) -> Any:
    # As stored, because the object's fields may be unsaved, or expressions.
    return None if pk is None else rows_by_pk(model, [pk], using, lock).get(pk)


def _before_history_save(sender: Any, instance: Any, using: str, raw: bool, **_: Any) -> None:
    if raw:
        move_aside(sender, instance.pk, using)


def connect() -> None:
    """Connect the receivers to all recorded models, a project's proxies of them included; called once at start."""
    from . import PolicyChange, RecordedModel

    pre_save.connect(_before_history_save, sender=PolicyChange, dispatch_uid="ratequota_history_loaded")
    for model in apps.get_models():
        if issubclass(model, RecordedModel):
            for signal, receiver in (
                (pre_save, _before_save),
                (post_save, _after_save),
                (pre_delete, _before_delete),
            ):
                signal.connect(receiver, sender=model, dispatch_uid=f"ratequota_{receiver.__name__}")
