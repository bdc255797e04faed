"""The operators' pages in the Django admin, one module a model."""

from __future__ import annotations

from . import assignments, endpoints, plans, policies
from . import history as changes

__all__ = ["assignments", "changes", "endpoints", "plans", "policies"]
