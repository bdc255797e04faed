"""The operators' pages in the Django admin.

One module per model registers its ModelAdmin: ``plans``, ``assignments``, ``endpoints``, ``policies``, ``history``.
A page beside Django's own is one class (see ``pages``) and one entry in ``pages`` of its ModelAdmin.
"""

from __future__ import annotations

from . import assignments, endpoints, history, plans, policies
from .users import QuotaLinkMixin

__all__ = ["QuotaLinkMixin", "assignments", "endpoints", "history", "plans", "policies"]
