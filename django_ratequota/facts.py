"""Plans, endpoints and policies as the resolver needs them: immutable, without the database."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .conf import Network
from .rates import Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """A plan as the resolver needs it."""

    id: int
    name: str
    slug: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFacts:
    """An endpoint as the resolver needs it; ``methods`` empty = all but OPTIONS."""

    id: int
    name: str
    routes: tuple[str, ...]
    methods: frozenset[str]
    cost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts:
    """A policy as the resolver needs it; times in µs since the Unix epoch, None = open."""

    id: int
    endpoint_id: int | None
    user: str
    subject: str
    plan_id: int | None
    counted_per: str
    text: str
    #: The rates to count by, or the words unlimited and blocked.
    rates: tuple[Rate, ...] | str
    mode: str
    on_error: str
    starts_us: int | None
    ends_us: int | None
    #: The addresses that a subject ``ip:...`` stands for; None for other audiences.
    network: Network | None = None

    @property
    def dated(self) -> bool:
        """Whether it has a start or an end: a dated policy beats an open one."""
        return self.starts_us is not None or self.ends_us is not None

    def active(self, now_us: int) -> bool:
        """Whether it counts at ``now_us``."""
        return (self.starts_us is None or self.starts_us <= now_us) and (
            self.ends_us is None or now_us < self.ends_us
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A user's plan for a time."""

    plan_id: int
    starts_us: int
    ends_us: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEntry:
    """What belongs to one user only."""

    policies: tuple[PolicyFacts, ...] = ()
    assignments: tuple[Assignment, ...] = ()

    def plan_id(self, now_us: int) -> int | None:
        """The plan assigned at ``now_us``: a dated assignment beats an open one, then the latest start."""
        active = [a for a in self.assignments if a.starts_us <= now_us and (a.ends_us is None or now_us < a.ends_us)]
        best = max(active, key=lambda a: (a.ends_us is not None, a.starts_us), default=None)
        return None if best is None else best.plan_id


NOBODY = UserEntry()


class Group:
    """The policies that compete for one endpoint and counted_per, indexed by audience; users' own left out."""

    __slots__ = ("by_plan", "by_subject", "everyone", "networks", "policies")

    def __init__(self, policies: Iterable[PolicyFacts]) -> None:
        #: All of them, those that are off included, for ``explain``.
        self.policies = tuple(policies)
        self.by_subject: dict[str, list[PolicyFacts]] = {}
        self.networks: list[PolicyFacts] = []
        self.by_plan: dict[int, list[PolicyFacts]] = {}
        self.everyone: list[PolicyFacts] = []
        for policy in self.policies:
            if policy.mode == "off":
                continue
            if policy.network is not None:
                self.networks.append(policy)
            elif policy.subject:
                self.by_subject.setdefault(policy.subject, []).append(policy)
            elif policy.plan_id is not None:
                self.by_plan.setdefault(policy.plan_id, []).append(policy)
            else:
                self.everyone.append(policy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that is not one user's own, as the database held it at ``revision`` or later."""

    revision: int
    plans: Mapping[int, PlanFacts]
    #: default_for -> plan id
    defaults: Mapping[str, int]
    endpoints: Mapping[int, EndpointFacts]
    #: endpoint id (None = all endpoints) -> counted_per -> the policies that compete there.
    groups: Mapping[int | None, Mapping[str, Group]]
    #: Kinds of subjects that some policy names as its audience.
    subject_kinds: frozenset[str]
    loaded_at: float = field(default_factory=time.time)

    def plan_by_slug(self, slug: str) -> PlanFacts | None:
        """The plan that code calls ``slug``."""
        return next((plan for plan in self.plans.values() if plan.slug == slug), None)
