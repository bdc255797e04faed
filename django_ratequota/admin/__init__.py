"""The operators' pages in the Django admin.

These modules register the ModelAdmins: ``plans``, ``assignments`` (with the members of lists), ``endpoints``,
``lists``, ``rate_policies``, ``history``.
A page beside Django's own is one class (see ``pages``), and its path is one entry in ``pages`` of its ModelAdmin.
"""

from __future__ import annotations

from . import assignments, endpoints, history, lists, plans, rate_policies
from .users import QuotaLinkMixin

__all__ = ["QuotaLinkMixin", "assignments", "endpoints", "history", "lists", "plans", "rate_policies"]
