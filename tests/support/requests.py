"""Checks of requests, as views make them."""

from __future__ import annotations

from typing import Any

from django_ratequota import Decision, check_request
from tests.project.views import request_from


def check_from(user: Any = None, address: str = "203.0.113.7", **kwargs: Any) -> Decision:
    """Check a new request of this user (None = anonymous) at this address; returns the decision."""
    return check_request(request_from(user, address), **kwargs)
