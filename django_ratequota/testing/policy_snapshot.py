"""Policies that a test writes, made into a snapshot without a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError

from ..changes.validators import assignable_subject, canonical_subject
from ..conf import settings
from ..models import Endpoint, RatePolicy
from ..policies.cache import in_plan_order
from ..policies.facts import (
    NOBODY,
    Assignment,
    PlanFacts,
    SubjectKey,
    UserEntry,
    endpoint_facts,
    member_facts,
    policy_facts,
    subject_key,
)
from ..policies.snapshot import Snapshot, with_rows


class Policy:
    """A rate policy as a test writes it. ``fields`` are those of the model ``RatePolicy``, such as ``counted_per``.

    ``user`` is a user or its primary key, ``plan`` a slug, ``subject_list`` the name of a list in ``lists``. Set one
    of these and ``subject`` at most; none = the policy is for everyone.
    """

    def __init__(
        self, rates: str, *, user: Any = None, plan: str = "", subject_list: str = "", **fields: Any
    ) -> None:
        self.user, self.plan, self.subject_list = user, plan, subject_list
        self.fields = {"rates": rates, **fields}


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
            at: frozenset(one.counted_per for one in own if one.endpoint_id == at and one.mode == "enforce")
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
    plans, defaults, lists = plans or {}, default_plans or {}, lists or {}
    if unknown := set(defaults) - {"authenticated", "anonymous"}:
        raise ValueError(f"default_plans: write 'authenticated' or 'anonymous', not {unknown.pop()!r}")
    written = list(_written(policies))
    rows = {name: Endpoint(name=name) for name, _policy in written if name is not None}
    rows |= {row.name: row for row in endpoints}
    for name, row in rows.items():
        _validate(f"endpoint {name!r}", row)
    slugs = [*(policy.plan for _, policy in written), *plans.values(), *defaults.values()]
    ids = {"endpoint": _numbered(rows), "plan": _numbered(filter(None, slugs)), "subject_list": _numbered(lists)}
    facts = [policy_facts(_row(pk, *entry, ids)) for pk, entry in enumerate(written, start=1)]
    members = (member_facts(pk, *row, None, None) for pk, row in enumerate(_members(lists, ids["subject_list"])))
    snapshot = with_rows(
        Snapshot(revision=1),
        plans={pk: PlanFacts(id=pk, name=slug, slug=slug) for slug, pk in ids["plan"].items()},
        endpoints={pk: replace(endpoint_facts(rows[name]), id=pk) for name, pk in ids["endpoint"].items()},
        policies={policy.id: policy for policy in facts if not policy.user},
        lists={pk: name for name, pk in ids["subject_list"].items()},
        members={member.id: member for member in members},
    )
    assigned = {_owner("plans", who, assignable_subject): ids["plan"][slug] for who, slug in plans.items()}
    entries = {
        owner: UserEntry(
            policies=tuple(policy for policy in facts if policy.user == owner),
            assignments=() if plan_id is None else (Assignment(plan_id=plan_id, starts_us=0, ends_us=None),),
        )
        for owner, plan_id in (dict.fromkeys(policy.user for policy in facts if policy.user) | assigned).items()
    }
    # One plan may be the default for both kinds of callers here.
    default_ids = {kind: ids["plan"][slug] for kind, slug in defaults.items()}
    return FixedPolicies(snapshot.copied(defaults=default_ids), entries)


def _written(policies: Policies) -> Iterator[tuple[str | None, Policy]]:
    """Yield each policy with the name of its endpoint; raises ``TypeError``."""
    what = "write rates such as '3/min', Policy('3/min', ...), or a list of these, by endpoint (None = all endpoints)"
    if not isinstance(policies, Mapping):
        raise TypeError(f"policies: {what}, not {policies!r:.80}")
    entries: Mapping[Any, Any] = policies
    for name, entry in entries.items():
        # A mapping would be read as a list of its keys.
        several = isinstance(entry, Iterable) and not isinstance(entry, str | bytes | Mapping)
        for item in entry if several else [entry]:
            if not isinstance(name, str | None) or not isinstance(item, str | Policy):
                raise TypeError(f"policies[{name!r:.80}]: {what}, not {item!r:.80}")
            yield name, Policy(item) if isinstance(item, str) else item


def _numbered(names: Iterable[str]) -> dict[str, int]:
    """Return numbers in place of the ids that unsaved rows lack."""
    return {name: number for number, name in enumerate(dict.fromkeys(names), start=1)}


def _row(pk: int, name: str | None, policy: Policy, ids: Mapping[str, Mapping[str, int]]) -> RatePolicy:
    where = f"policies[{name!r}]"
    audiences = (policy.user is not None, policy.fields.get("subject"), policy.subject_list, policy.plan)
    if sum(map(bool, audiences)) > 1:
        raise ValueError(f"{where}: a policy is for a user, a subject, a list or a plan, one of them at most")
    if policy.subject_list and policy.subject_list not in ids["subject_list"]:
        raise ValueError(f"{where}: write lists={{{policy.subject_list!r}: [...]}} with the members of that list")
    row = RatePolicy(
        pk=pk,
        endpoint_id=None if name is None else ids["endpoint"][name],
        user_id=None if policy.user is None else _user_id(policy.user),
        plan_id=ids["plan"].get(policy.plan),
        subject_list_id=ids["subject_list"].get(policy.subject_list),
        **policy.fields,
    )
    _validate(where, row)
    return row


def _members(lists: Mapping[str, Iterable[Any]], ids: Mapping[str, int]) -> Iterator[tuple[int, Any, str | None]]:
    """Yield (list id, user, subject) of each member."""
    for name, members in lists.items():
        if isinstance(members, str):
            raise TypeError(f"lists[{name!r}]: write a list of users and subjects, not {members!r:.80}")
        for member in members:
            owner = _owner(f"lists[{name!r}]", member, canonical_subject)
            yield (ids[name], owner, None) if isinstance(owner, str) else (ids[name], None, ":".join(owner))


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
    related = ["endpoint", "user", "plan", "subject_list"]
    try:
        row.full_clean(exclude=related, validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        # Wrong rates get the same message from the field and from the model: it is shown once.
        texts = [f"{field}: {' '.join(dict.fromkeys(messages))}" for field, messages in error.message_dict.items()]
        raise ValueError(f"{where}: {'; '.join(texts)}") from error


def _user_id(user: Any) -> str:
    key = getattr(user, "pk", user)
    if key is None:
        raise ValueError(f"{user!r} has no primary key: save the user first")
    try:
        get_user_model()._meta.pk.to_python(key)
    except ValidationError:
        raise ValueError(f"write a user or a primary key, not {key!r:.80}") from None
    return str(key)
