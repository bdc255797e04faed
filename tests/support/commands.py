"""``manage.py ratequota``, run in the process of the test."""

from __future__ import annotations

import io

from django.core.management import call_command


def run(*args: str) -> str:
    """Run ``manage.py ratequota`` with these arguments; returns its output."""
    out = io.StringIO()
    call_command("ratequota", *args, stdout=out)
    return out.getvalue()
