"""Tests of the system checks."""

from __future__ import annotations

from django.core import checks


def ids(messages: list[checks.CheckMessage]) -> list[str]:
    return [str(message.id).removeprefix("django_ratequota.") for message in messages]
