"""Tests of the system checks."""

from __future__ import annotations

from django.core import checks


def ids(messages: list[checks.CheckMessage]) -> list[str]:
    """Return the ids of messages, each of which must have a hint and the level that its id says."""
    names = [str(message.id).removeprefix("django_ratequota.") for message in messages]
    levels = {"E": checks.ERROR, "W": checks.WARNING, "I": checks.INFO}
    for name, message in zip(names, messages, strict=True):
        assert message.hint or "ratequota" not in str(message.id), name
        assert message.level == levels.get(name[0], message.level), name
    return names
