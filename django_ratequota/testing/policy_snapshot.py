"""Policies that a test writes, made into a snapshot without a database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from django.core.exceptions import ValidationError

from ..models import Endpoint, RatePolicy
from ..policies.cache import PolicyCache
from ..policies.facts import NOBODY, SubjectKey, UserEntry, endpoint_facts, policy_facts
from ..policies.snapshot import Snapshot, with_rows

_Row = TypeVar("_Row", bound=Any)


class Policy:
    """A rate policy as a test writes it. ``fields`` are those of the model ``RatePolicy``, such as ``counted_per``.

    It is for everyone, or for a ``subject`` such as ``ip:203.0.113.7``. Raises ``TypeError`` for what refers to rows.
    """

    def __init__(self, rates: str, **fields: Any) -> None:
        relations = {field for field in RatePolicy._meta.fields if field.is_relation}
        if refer := {name for field in relations for name in (field.name, field.attname)} & fields.keys():
            raise TypeError(f"{', '.join(sorted(refer))}: save a RatePolicy for this, and test with isolated()")
        self.fields = {"rates": rates, **fields}


#: Endpoint's name (None = all endpoints together) -> rates such as 3/min, a ``Policy``, or several of these.
Policies = Mapping[str | None, str | Policy | Iterable[str | Policy]]


class FixedPolicies(PolicyCache):
    """Policies that are not in a database, and never change. No customer has a plan or policies for itself."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._fixed, self.user_endpoints = snapshot, {}

    def current(self, revision: int = 0, instead_of: int | None = None) -> Snapshot:
        """Return the one snapshot."""
        return self._fixed

    poll = reload = current

    def overdue(self) -> bool:
        """There is nothing to look for."""
        return False

    def user(self, key: str | SubjectKey, pending: bool | None = None) -> UserEntry:
        """Return the entry of everybody."""
        return NOBODY

    def load_user_endpoints(self) -> Mapping[int | None, frozenset[str]]:
        """No endpoint has policies for users."""
        return {}

    def plan_kinds(self) -> tuple[str, ...]:
        """No kind of subject is on a plan."""
        return ()


def fixed_policies(policies: Policies, endpoints: Iterable[Endpoint] = ()) -> FixedPolicies:
    """Make the arguments of ``override_policies`` into policies.

    Raises ``ValueError`` or ``TypeError``, naming the wrong entry.
    """
    written = list(_written(policies))
    named = {name: Endpoint(name=name) for name, _policy in written if name is not None}
    named |= {row.name: row for row in endpoints}
    # Numbers in place of the ids that they lack, because keys contain them.
    ids = {name: number for number, name in enumerate(named, start=1)}
    rows = {ids[name]: _valid(f"endpoint {name!r}", row) for name, row in named.items()}
    limits = [
        _valid(f"policies[{name!r}]", RatePolicy(pk=pk, endpoint_id=ids.get(name or ""), **policy.fields))
        for pk, (name, policy) in enumerate(written, start=1)
    ]
    snapshot = with_rows(
        Snapshot(revision=1),
        endpoints={pk: replace(endpoint_facts(row), id=pk) for pk, row in rows.items()},
        policies={row.pk: policy_facts(row) for row in limits},
    )
    return FixedPolicies(snapshot)


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


def _valid(where: str, row: _Row) -> _Row:
    """Return the row, validated as the admin's form does, except against other rows."""
    try:
        row.full_clean(exclude=["endpoint"], validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        # Wrong rates get the same message from the field and from the model: it is shown once.
        texts = [f"{field}: {' '.join(dict.fromkeys(messages))}" for field, messages in error.message_dict.items()]
        raise ValueError(f"{where}: {'; '.join(texts)}") from error
    return row
