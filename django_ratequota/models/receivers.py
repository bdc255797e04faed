"""Receivers that hand the saves and deletions of the models to ``recording``."""

from __future__ import annotations

from typing import Any

from django.apps import apps
from django.db.models.signals import post_save, pre_delete, pre_save

from ..recording.fixtures import move_aside
from ..recording.recorder import record, record_deletion, rows_by_pk

_BEFORE = "_ratequota_before"


def _remember(sender: Any, instance: Any, using: str, **_: Any) -> None:
    # Locked: a save that comes between would be recorded after this one, and be overwritten by it all the same.
    setattr(instance, _BEFORE, _stored(sender, instance.pk, using, lock=True))


def _saved(sender: Any, instance: Any, using: str, raw: bool, **_: Any) -> None:
    record(instance.__dict__.pop(_BEFORE, None), _stored(sender, instance.pk, using), using, raw)


def _to_be_deleted(sender: Any, instance: Any, using: str, **_: Any) -> None:
    # Before the first row of a cascade goes: afterwards an object may no longer know its endpoint or user.
    record_deletion(sender, instance.pk, using)


def _stored(model: Any, pk: Any, using: str, lock: bool = False) -> Any:
    # What the database holds, not what the object says: fields may be unsaved, or expressions.
    return None if pk is None else rows_by_pk(model, [pk], using, lock).get(pk)


def _history_loaded(sender: Any, instance: Any, using: str, raw: bool, **_: Any) -> None:
    if raw:
        move_aside(sender, instance.pk, using)


def connect() -> None:
    """Listen to the models that decide what is enforced, a project's proxies of them too; called once at start."""
    from . import PolicyChange, RecordedModel

    pre_save.connect(_history_loaded, sender=PolicyChange, dispatch_uid="ratequota_history_loaded")
    for model in apps.get_models():
        if issubclass(model, RecordedModel):
            for signal, receiver in (
                (pre_save, _remember),
                (post_save, _saved),
                (pre_delete, _to_be_deleted),
            ):
                signal.connect(receiver, sender=model, dispatch_uid=f"ratequota_{receiver.__name__}")
