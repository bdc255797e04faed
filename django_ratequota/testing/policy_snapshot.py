"""Policies that a test writes, made into a snapshot without a database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError

from ..changes.validators import primary_key
from ..models import Endpoint, PlanAssignment, RatePolicy
from ..policies import facts
from ..policies.cache import PolicyCache, in_plan_order
from ..policies.facts import NOBODY, SubjectKey, UserEntry, subject_key
from ..policies.snapshot import Snapshot, with_rows

_Row = TypeVar("_Row", bound=Any)


class Policy:
    """A rate policy as a test writes it. ``fields`` are those of the model ``RatePolicy``, such as ``counted_per``.

    ``user`` is a user or its primary key, ``plan`` a slug. Set one of these and ``subject`` at most; none = the
    policy is for everyone.
    """

    def __init__(self, rates: str, *, user: Any = None, plan: str = "", **fields: Any) -> None:
        self.user = user
        #: The model's columns, with the plan's slug in place of its id.
        self.columns = {"rates": rates, "plan_id": plan or None, **fields}


#: Endpoint's name (None = all endpoints together) -> rates such as 3/min, a ``Policy``, or several of these.
Policies = Mapping[str | None, str | Policy | Iterable[str | Policy]]


class FixedPolicies(PolicyCache):
    """Policies that are not in a database, and never change."""

    def __init__(self, snapshot: Snapshot, known: Mapping[Any, UserEntry]) -> None:
        super().__init__()
        self._fixed, self._known = snapshot, known
        self.load_user_endpoints()
        self.plan_kinds()

    def current(self, revision: int = 0, instead_of: int | None = None) -> Snapshot:
        """Return the one snapshot."""
        return self._fixed

    poll = reload = current

    def overdue(self) -> bool:
        """There is nothing to look for."""
        return False

    def user(self, key: str | SubjectKey, pending: bool | None = None) -> UserEntry:
        """Return the entry, which is always known."""
        return self._known.get(key, NOBODY)

    def load_user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        """Return ``user_endpoints``."""
        found: dict[int | None, frozenset[str]] = {}
        for policy in [policy for entry in self._known.values() for policy in entry.policies]:
            enforced = (policy.counted_per,) if policy.mode == "enforce" else ()
            found[policy.endpoint_id] = found.get(policy.endpoint_id, frozenset()).union(enforced)
        self.user_endpoints = found
        return found

    def plan_kinds(self) -> tuple[str, ...]:
        """Return ``assigned_kinds`` by the settings in force."""
        self.assigned_kinds = in_plan_order({key[0] for key in self._known if isinstance(key, tuple)})
        return self.assigned_kinds


def fixed_policies(
    policies: Policies,
    endpoints: Iterable[Endpoint] = (),
    plans: Mapping[Any, str] | None = None,
    default_plans: Mapping[str, str] | None = None,
) -> FixedPolicies:
    """Make the arguments of ``override_policies`` into policies; raises ``ValueError`` naming the wrong entry.

    Plans have slugs in place of the ids that they lack; endpoints have numbers, because keys contain them.
    """
    defaults = default_plans or {}
    if unknown := set(defaults) - {"authenticated", "anonymous"}:
        raise ValueError(f"default_plans: write 'authenticated' or 'anonymous', not {unknown.pop()!r}")
    plans, written = plans or {}, list(_written(policies))
    named = {name: Endpoint(name=name) for name, _policy in written if name is not None}
    named |= {row.name: row for row in endpoints}
    ids = {name: number for number, name in enumerate(named, start=1)}
    limits = [facts.policy_facts(_row(pk, *entry, ids)) for pk, entry in enumerate(written, start=1)]
    entries: dict[str | SubjectKey, UserEntry] = {}
    for who, slug in plans.items():
        row = _valid("plans", PlanAssignment(plan_id=slug, starts_at=facts.to_datetime(0), **_owner(who)))
        owner: Any = subject_key(row.subject) if row.subject else row.user_id
        entries[owner] = UserEntry(assignments=(facts.assignment_facts(row),))
    for policy in limits:
        if policy.user:
            entry = entries.get(policy.user, NOBODY)
            entries[policy.user] = replace(entry, policies=(*entry.policies, policy))
    slugs: set[Any] = {*(policy.plan_id for policy in limits), *plans.values(), *defaults.values()} - {None}
    rows = {ids[name]: _valid(f"endpoint {name!r}", row) for name, row in named.items()}
    snapshot = with_rows(
        Snapshot(revision=1),
        plans={slug: facts.PlanFacts(id=slug, name=slug, slug=slug) for slug in slugs},
        endpoints={pk: replace(facts.endpoint_facts(row), id=pk) for pk, row in rows.items()},
        policies={policy.id: policy for policy in limits if not policy.user},
    )
    # One plan may be the default for both kinds of callers here.
    return FixedPolicies(snapshot.copied(defaults=defaults), entries)


def _written(policies: Policies) -> Iterator[tuple[str | None, Policy]]:
    """Yield each policy with the name of its endpoint."""
    for name, entry in policies.items():
        for item in [entry] if isinstance(entry, str | Policy) else entry:
            yield name, item if isinstance(item, Policy) else Policy(item)


def _row(pk: int, name: str | None, policy: Policy, ids: Mapping[str, int]) -> RatePolicy:
    where, columns = f"policies[{name!r}]", policy.columns
    if len([one for one in (policy.user, columns.get("subject"), columns["plan_id"]) if one]) > 1:
        raise ValueError(f"{where}: a policy is for a user, a subject or a plan, one of them at most")
    user = {} if policy.user is None else {"user_id": _user_id(policy.user)}
    return _valid(where, RatePolicy(pk=pk, endpoint_id=ids.get(name or ""), **user, **columns))


def _owner(who: Any) -> dict[str, Any]:
    """Return the columns for a subject such as ``tenant:acme``, or for a user or its primary key."""
    return {"subject": who} if isinstance(who, str) and ":" in who else {"user_id": _user_id(who)}


def _user_id(user: Any) -> str:
    key = getattr(user, "pk", user)
    if key is None or primary_key(get_user_model(), key) is None:
        raise ValueError(f"write a saved user or a primary key, not {user!r:.80}")
    return str(key)


def _valid(where: str, row: _Row) -> _Row:
    """Return the row, validated as the admin's form does, except against other rows."""
    related = ["endpoint", "user", "plan", "subject_list"]
    try:
        row.full_clean(exclude=related, validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        # Wrong rates get the same message from the field and from the model: it is shown once.
        texts = [f"{field}: {' '.join(dict.fromkeys(messages))}" for field, messages in error.message_dict.items()]
        raise ValueError(f"{where}: {'; '.join(texts)}") from error
    return row
