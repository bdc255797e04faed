"""The models: plans, endpoints, lists and policies as operators edit them, their history, counts and outages."""

from .audiences import ListMember, Plan, PlanAssignment, SubjectList
from .base import TrackedModel
from .counts import LedgerWriter, Outage, QuotaDay, QuotaWindow, UsageCount
from .endpoints import METHODS, Endpoint
from .policy_changes import PolicyChange, SaveLock
from .rate_policies import RatePolicy

__all__ = ["METHODS", "Endpoint", "LedgerWriter", "ListMember", "Outage", "Plan", "PlanAssignment", "PolicyChange"]
__all__ += ["QuotaDay", "QuotaWindow", "RatePolicy", "SaveLock", "SubjectList", "TrackedModel", "UsageCount"]
