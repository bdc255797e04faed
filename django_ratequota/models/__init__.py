"""The models: plans, endpoints, lists and policies as operators edit them, their history, and usage counts."""

from __future__ import annotations

from .audiences import ListMember, Plan, PlanAssignment, SubjectList
from .base import TrackedModel
from .counts import LedgerWriter, QuotaDay, QuotaWindow, UsageCount
from .endpoints import METHODS, Endpoint
from .history import PolicyChange
from .policies import RatePolicy

__all__ = [
    "METHODS",
    "Endpoint",
    "LedgerWriter",
    "ListMember",
    "Plan",
    "PlanAssignment",
    "PolicyChange",
    "QuotaDay",
    "QuotaWindow",
    "RatePolicy",
    "SubjectList",
    "TrackedModel",
    "UsageCount",
]
