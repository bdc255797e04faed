"""The models: plans, endpoints, lists and policies as operators edit them, their history, and usage counts."""

from __future__ import annotations

from .base import RecordedModel
from .endpoints import METHODS, Endpoint
from .history import PolicyChange
from .lists import ListMember, SubjectList
from .plans import Plan, PlanAssignment
from .policies import RatePolicy
from .quotas import QuotaWindow
from .usage import UsageCount

__all__ = [
    "METHODS",
    "Endpoint",
    "ListMember",
    "Plan",
    "PlanAssignment",
    "PolicyChange",
    "QuotaWindow",
    "RatePolicy",
    "RecordedModel",
    "SubjectList",
    "UsageCount",
]
