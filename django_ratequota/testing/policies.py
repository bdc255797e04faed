"""Policies that a test writes, made into a snapshot without a database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError

from ..models import Endpoint, RatePolicy
from ..policies.facts import (
    NOBODY,
    Assignment,
    EndpointFacts,
    PlanFacts,
    PolicyFacts,
    UserEntry,
    endpoint_facts,
    policy_facts,
)
from ..policies.snapshot import Snapshot, group_policies

_REVISION = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """A rate policy as a test writes it, with the fields of the model ``RatePolicy``.

    Set one of ``user``, ``subject`` and ``plan`` at most; none = the policy is for everyone.
    """

    rates: str
    #: A user, or the primary key of one.
    user: Any = None
    #: Such as ``tenant:acme``.
    subject: str = ""
    #: The slug of a plan.
    plan: str = ""
    counted_per: str = "caller"
    algorithm: str = "token_bucket"
    mode: str = "enforce"
    on_error: str = ""
    starts_at: datetime | None = None
    ends_at: datetime | None = None


#: Endpoint's name (None = all endpoints together) -> rates, a ``Policy``, or several of these.
Policies = Mapping[str | None, str | Policy | Iterable[str | Policy]]


class FixedPolicies:
    """Takes the place of ``PolicyCache`` for policies that are not in a database, and never change."""

    def __init__(self, snapshot: Snapshot, users: Mapping[str, UserEntry]) -> None:
        self._snapshot = snapshot
        self._users = users

    def current(self, revision: int = 0, instead_of: int | None = None) -> Snapshot:
        return self._snapshot

    poll = reload = current

    def overdue(self) -> bool:
        return False

    @property
    def user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        found: dict[int | None, frozenset[str]] = {}
        for policy in (policy for entry in self._users.values() for policy in entry.policies):
            found[policy.endpoint_id] = found.get(policy.endpoint_id, frozenset()) | {policy.counted_per}
        return found

    def load_user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        return self.user_endpoints

    def user(self, user_id: str, pending: bool | None = None) -> UserEntry:
        return self._users.get(user_id, NOBODY)

    load_user = user


def fixed_policies(
    policies: Policies,
    endpoints: Iterable[Endpoint] = (),
    plans: Mapping[Any, str] | None = None,
    default_plans: Mapping[str, str] | None = None,
) -> FixedPolicies:
    """Make the arguments of ``override_policies`` into policies; raises ``ValueError`` naming the wrong entry."""
    if not isinstance(policies, Mapping):
        raise TypeError(f"policies: write {{'search': '3/min', None: '100/min'}}, not {policies!r:.80}")
    rows = [(name, policy) for name, entry in policies.items() for policy in _as_list(name, entry)]
    by_name = _endpoints([name for name, _ in rows if name is not None], endpoints)
    by_slug = _plans([policy.plan for _, policy in rows], plans or {}, default_plans or {})
    facts = [_policy_facts(number, *row, by_name, by_slug) for number, row in enumerate(rows, start=1)]
    snapshot = Snapshot(
        revision=_REVISION,
        plans={plan.id: plan for plan in by_slug.values()},
        defaults={audience: by_slug[slug].id for audience, slug in (default_plans or {}).items()},
        endpoints={endpoint.id: endpoint for endpoint in by_name.values()},
        groups=group_policies(policy for policy in facts if not policy.user),
    )
    assigned = {_user_id(user): by_slug[slug].id for user, slug in (plans or {}).items()}
    users = {*assigned, *(policy.user for policy in facts if policy.user)}
    return FixedPolicies(snapshot, {user: _entry(user, facts, assigned) for user in users})


def _as_list(name: object, entry: object) -> list[Policy]:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"policies[{name!r:.80}]: write the name of an endpoint, or None for all endpoints together")
    # A mapping would be read as a list of its keys.
    several = isinstance(entry, Iterable) and not isinstance(entry, str | bytes | Mapping)
    found: list[Policy] = []
    for item in entry if several else [entry]:  # type: ignore[attr-defined]
        if not isinstance(item, str | Policy):
            text = f"write rates such as '3/min', Policy('3/min', ...), or a list of these, not {item!r:.80}"
            raise TypeError(f"policies[{name!r}]: {text}")
        found.append(Policy(item) if isinstance(item, str) else item)
    return found


def _endpoints(names: Iterable[str], rows: Iterable[Endpoint]) -> dict[str, EndpointFacts]:
    """Return the endpoints by name; without a row of its own, an endpoint has no routes and costs 1."""
    described = {row.name: row for row in rows}
    for name in names:
        described.setdefault(name, Endpoint(name=name))
    for name, row in described.items():
        _validate(f"endpoint {name!r}", row)
    # Numbered here, because unsaved rows have no ids.
    return {
        row.name: replace(endpoint_facts(row), id=number) for number, row in enumerate(described.values(), start=1)
    }


def _plans(named: Iterable[str], assigned: Mapping[Any, str], defaults: Mapping[str, str]) -> dict[str, PlanFacts]:
    unknown = set(defaults) - {"authenticated", "anonymous"}
    if unknown:
        raise ValueError(f"default_plans: write 'authenticated' or 'anonymous', not {unknown.pop()!r}")
    slugs = dict.fromkeys(slug for slug in (*named, *assigned.values(), *defaults.values()) if slug)
    return {slug: PlanFacts(id=number, name=slug, slug=slug) for number, slug in enumerate(slugs, start=1)}


def _policy_facts(
    number: int,
    name: str | None,
    policy: Policy,
    endpoints: Mapping[str, EndpointFacts],
    plans: Mapping[str, PlanFacts],
) -> PolicyFacts:
    where = f"policies[{name!r}]"
    if (policy.user is not None) + bool(policy.subject) + bool(policy.plan) > 1:
        raise ValueError(f"{where}: a policy is for a user, a subject or a plan, one of them at most")
    row = RatePolicy(
        rates=policy.rates,
        subject=policy.subject,
        counted_per=policy.counted_per,
        algorithm=policy.algorithm,
        mode=policy.mode,
        on_error=policy.on_error,
        starts_at=policy.starts_at,
        ends_at=policy.ends_at,
    )
    _validate(where, row)
    return replace(
        policy_facts(row),
        id=number,
        endpoint_id=None if name is None else endpoints[name].id,
        user="" if policy.user is None else _user_id(policy.user),
        plan_id=plans[policy.plan].id if policy.plan else None,
    )


def _validate(where: str, row: Any) -> None:
    """Validate a row as the admin's form does, except against other rows."""
    try:
        row.full_clean(exclude=["endpoint", "user", "plan"], validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        # Wrong rates get the same message from the field and from the model: it is shown once.
        texts = [f"{field}: {' '.join(dict.fromkeys(messages))}" for field, messages in error.message_dict.items()]
        raise ValueError(f"{where}: {'; '.join(texts)}") from error


def _user_id(user: Any) -> str:
    key = getattr(user, "pk", user)
    if key is None:
        raise ValueError(f"{user!r} has no primary key: save the user first")
    return str(key)


def _entry(user_id: str, policies: Iterable[PolicyFacts], assigned: Mapping[str, int]) -> UserEntry:
    assignments = (Assignment(plan_id=assigned[user_id], starts_us=0, ends_us=None),) if user_id in assigned else ()
    return UserEntry(policies=tuple(p for p in policies if p.user == user_id), assignments=assignments)
