"""Routers of projects with more than one database."""

from __future__ import annotations

import random
from typing import Any

_CHOICE = random.Random(1)


class Replicas:
    """Writes to ``default`` and reads from two replicas, as in Django's documentation."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return _CHOICE.choice(["replica1", "replica2"])

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"

    def allow_relation(self, *objects: Any, **hints: Any) -> bool:
        return True


class OwnAlias:
    """This app's models on an alias of their own."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "policies" if model._meta.app_label == "django_ratequota" else None

    db_for_write = db_for_read


class NoDefault:
    """Everything on one alias that is not called ``default``."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "main"

    db_for_write = db_for_read
