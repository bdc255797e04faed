"""Public signals, and the receivers that hand saves and deletes to ``recording``."""

from __future__ import annotations

from typing import Any

from django.db.models.signals import post_save, pre_delete, pre_save
from django.dispatch import Signal

from .recording import image, policies_changed, record, stored_image

__all__ = ["policies_changed", "request_refused"]

#: Sent when a request was refused: ``request``, ``decision``. Receivers' errors are logged, not raised.
request_refused = Signal()

_BEFORE = "_ratequota_before"


def _remember(sender: Any, instance: Any, using: str, **_: Any) -> None:
    setattr(instance, _BEFORE, None if instance.pk is None else stored_image(sender, instance.pk, using))


def _saved(instance: Any, using: str, **_: Any) -> None:
    after = image(instance)
    before = instance.__dict__.pop(_BEFORE, None)
    if before != after:
        record(instance, before, after, using)


def _to_be_deleted(instance: Any, using: str, **_: Any) -> None:
    # Before the first row of a cascade goes: afterwards an object may no longer know its endpoint or user.
    record(instance, image(instance), None, using)


def connect() -> None:
    """Listen to the models that decide what is enforced; called once the apps are ready."""
    from .models import Endpoint, Plan, PlanAssignment, RatePolicy

    for model in (Plan, PlanAssignment, Endpoint, RatePolicy):
        for signal, receiver in (
            (pre_save, _remember),
            (post_save, _saved),
            (pre_delete, _to_be_deleted),
        ):
            signal.connect(receiver, sender=model, dispatch_uid=f"ratequota_{receiver.__name__}")
