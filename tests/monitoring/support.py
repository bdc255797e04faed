"""Records of decisions, and sums of counts."""

from __future__ import annotations

from typing import Any

from django_ratequota.monitoring.packing import OUTCOMES
from django_ratequota.monitoring.records import DecisionRecord
from django_ratequota.monitoring.timeline import Counts


def total(counts: tuple[Counts, ...]) -> Counts:
    return Counts(*(sum(getattr(slot, outcome) for slot in counts) for outcome in OUTCOMES))


def record(second: int, caller: str = "user:1", **more: Any) -> DecisionRecord:
    values = {"ip": "", "plan_id": None, "endpoint_ids": (), "cost": 1, "policy_ids": (), "allowed": True}
    return DecisionRecord(**{"second": second, "caller": caller, **values, "against": (), **more})
