"""Policies that a test writes, made into a snapshot without a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError

from ..changes.validators import assignable_subject, canonical_subject
from ..conf import settings
from ..models import Endpoint, RatePolicy
from ..policies.audiences import Members
from ..policies.cache import in_plan_order
from ..policies.facts import (
    NOBODY,
    Assignment,
    EndpointFacts,
    MemberFacts,
    PlanFacts,
    PolicyFacts,
    SubjectKey,
    UserEntry,
    endpoint_facts,
    member_facts,
    policy_facts,
    subject_key,
)
from ..policies.snapshot import Snapshot, regrouped

_REVISION = 1


@dataclass(frozen=True, slots=True)
class Policy:
    """A rate policy as a test writes it, with the fields of the model ``RatePolicy``.

    Set one of ``user``, ``subject``, ``subject_list`` and ``plan`` at most; none = the policy is for everyone.
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
    durable: bool = True
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    #: The name of a list in ``lists``.
    subject_list: str = ""


#: Endpoint's name (None = all endpoints together) -> rates, a ``Policy``, or several of these.
Policies = Mapping[str | None, str | Policy | Iterable[str | Policy]]


class FixedPolicies:
    """Takes the place of ``PolicyCache`` for policies that are not in a database, and never change."""

    #: No assignment names the day on which months begin.
    anchored = False

    def __init__(self, snapshot: Snapshot, entries: Mapping[str | SubjectKey, UserEntry]) -> None:
        self._snapshot, self._entries = snapshot, entries
        own = [policy for entry in entries.values() for policy in entry.policies]
        self.user_endpoints: Mapping[int | None, frozenset[str]] = {
            at: frozenset(policy.counted_per for policy in own if policy.endpoint_id == at)
            for at in {policy.endpoint_id for policy in own}
        }

    def current(self, revision: int = 0, instead_of: int | None = None) -> Snapshot:
        return self._snapshot

    poll = reload = current

    def overdue(self) -> bool:
        return False

    def load_user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        return self.user_endpoints

    def user(self, user_id: str, pending: bool | None = None) -> UserEntry:
        return self._entries.get(user_id, NOBODY)

    load_user = user

    def entries(self, keys: Collection[str | SubjectKey]) -> dict[str | SubjectKey, UserEntry]:
        return {key: self._entries.get(key, NOBODY) for key in keys}

    def plan_kinds(self) -> tuple[str, ...]:
        return in_plan_order({key[0] for key in self._entries if isinstance(key, tuple)})

    @property
    def assigned_kinds(self) -> tuple[str, ...]:
        return self.plan_kinds()


def fixed_policies(
    policies: Policies,
    endpoints: Iterable[Endpoint] = (),
    plans: Mapping[Any, str] | None = None,
    default_plans: Mapping[str, str] | None = None,
    lists: Mapping[str, Iterable[Any]] | None = None,
) -> FixedPolicies:
    """Make the arguments of ``override_policies`` into policies; raises ``ValueError`` naming the wrong entry."""
    if not isinstance(policies, Mapping):
        raise TypeError(f"policies: write {{'search': '3/min', None: '100/min'}}, not {policies!r:.80}")
    rows = [(name, policy) for name, entry in policies.items() for policy in _as_list(name, entry)]
    by_name = _endpoints([name for name, _ in rows if name is not None], endpoints)
    by_slug = _plans([policy.plan for _, policy in rows], plans or {}, default_plans or {})
    list_ids = {name: number for number, name in enumerate(lists or {}, start=1)}
    facts = [_policy_facts(number, *row, by_name, by_slug, list_ids) for number, row in enumerate(rows, start=1)]
    snapshot = Snapshot(
        revision=_REVISION,
        plans={plan.id: plan for plan in by_slug.values()},
        endpoints={endpoint.id: endpoint for endpoint in by_name.values()},
        groups=regrouped({}, {policy.id: policy for policy in facts if not policy.user}),
        lists={number: name for name, number in list_ids.items()},
        members=Members(_members(lists or {}, list_ids)),
    )
    assigned = {_owner("plans", who, assignable_subject): by_slug[slug].id for who, slug in (plans or {}).items()}
    # One plan may be the default for both kinds of callers here.
    defaults = {audience: by_slug[slug].id for audience, slug in (default_plans or {}).items()}
    owners = {*assigned, *(policy.user for policy in facts if policy.user)}
    return FixedPolicies(
        snapshot.copied(defaults=defaults), {owner: _entry(owner, facts, assigned) for owner in owners}
    )


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
    lists: Mapping[str, int],
) -> PolicyFacts:
    where = f"policies[{name!r}]"
    if (policy.user is not None) + bool(policy.subject) + bool(policy.subject_list) + bool(policy.plan) > 1:
        raise ValueError(f"{where}: a policy is for a user, a subject, a list or a plan, one of them at most")
    if policy.subject_list and policy.subject_list not in lists:
        raise ValueError(f"{where}: write lists={{{policy.subject_list!r}: [...]}} with the members of that list")
    others = ("user", "plan", "subject_list")
    row = RatePolicy(**{one.name: getattr(policy, one.name) for one in fields(policy) if one.name not in others})
    _validate(where, row)
    return replace(
        policy_facts(row),
        id=number,
        endpoint_id=None if name is None else endpoints[name].id,
        user="" if policy.user is None else _user_id(policy.user),
        plan_id=plans[policy.plan].id if policy.plan else None,
        list_id=lists.get(policy.subject_list),
    )


def _members(lists: Mapping[str, Iterable[Any]], ids: Mapping[str, int]) -> list[MemberFacts]:
    rows: list[tuple[int, str | None, str | None]] = []
    for name, members in lists.items():
        if isinstance(members, str):
            raise TypeError(f"lists[{name!r}]: write a list of users and subjects, not {members!r:.80}")
        for member in members:
            owner = _owner(f"lists[{name!r}]", member, canonical_subject)
            rows.append((ids[name], owner, None) if isinstance(owner, str) else (ids[name], None, ":".join(owner)))
    return [member_facts(pk, *row, None, None) for pk, row in enumerate(rows, start=1)]


def _owner(where: str, who: Any, canonical: Callable[[str], str]) -> str | SubjectKey:
    """Return a user's primary key, or the kind and value of a subject such as ``tenant:acme``."""
    if isinstance(who, str):
        try:
            return subject_key(canonical(who))
        except ValidationError as error:
            if who.partition(":")[0] in ("user", "ip", *settings.identifiers):
                raise ValueError(f"{where}: {' '.join(error.messages)}") from error
    return _user_id(who)


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


def _entry(
    owner: str | SubjectKey, policies: Iterable[PolicyFacts], assigned: Mapping[str | SubjectKey, int]
) -> UserEntry:
    assignments = (Assignment(plan_id=assigned[owner], starts_us=0, ends_us=None),) if owner in assigned else ()
    return UserEntry(policies=tuple(p for p in policies if p.user == owner), assignments=assignments)
