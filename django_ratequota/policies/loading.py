"""Reads policies from the database: all shared ones as a ``Snapshot``, rows that changed, one user's or subject's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Any

from django.contrib.auth import get_user_model
from django.db.models import Min
from django.utils import timezone

from ..changes.databases import subject_begins
from ..changes.validators import primary_key
from ..changes.writer import in_batches
from ..conf import settings
from ..engine.rates import show
from . import facts
from .requests.caller import is_verified
from .snapshot import Snapshot, with_rows

#: Policies are kept for a day after their end, because Redis' clock decides what has ended, not this one.
_KEPT = timedelta(days=1)
#: An open assignment that began so long ago has begun by whatever clock, so that when it did no longer matters.
_SETTLED_US = 86_400 * 10**6
#: Most policies in ``find_unreadable``.
_LISTED = 20
#: Where reading all entries goes on: which of the two tables, behind which primary key.
Place = tuple[int, int]
FIRST: Place = (0, 0)


def load_snapshot(revision: int) -> Snapshot:
    """Read all shared policies from the database (five queries). Raises ``django.db.Error``."""
    return update_snapshot(Snapshot(revision=revision), None)


def update_snapshot(snapshot: Snapshot, changed: Collection[tuple[str, int]] | None) -> Snapshot:
    """Read the rows, (model, primary key) each, None = all, and return the snapshot with them.

    Raises ``django.db.Error``.
    """
    from ..models import Endpoint, ListMember, Plan, RatePolicy, SubjectList

    def read(rows: Any, columns: Iterable[str], made: Callable[[Any], Any]) -> dict[int, Any]:
        """Return what is made of each row by its id; None for ids without a row."""
        # Named rows, because model objects would double the time that loading takes.
        rows = rows.order_by().values_list(*columns, named=True)
        wanted = [pk for model, pk in changed or () if model == rows.model._meta.model_name]
        batches = [rows] if changed is None else [rows.filter(pk__in=batch) for batch in in_batches(wanted)]
        return dict.fromkeys(wanted) | {row[0]: made(row) for batch in batches for row in batch}

    policies, members = not_ended(RatePolicy.objects.filter(user__isnull=True)), not_ended(ListMember.objects)
    return with_rows(
        snapshot,
        plans=read(Plan.objects, facts.PLAN_COLUMNS, lambda row: facts.PlanFacts(**row._asdict())),
        endpoints=read(Endpoint.objects, facts.ENDPOINT_COLUMNS, facts.endpoint_facts),
        policies=read(policies, facts.POLICY_COLUMNS, facts.policy_facts),
        lists=read(SubjectList.objects, ("pk", "name"), itemgetter(1)),
        members=read(members, facts.MEMBER_COLUMNS, lambda row: facts.member_facts(*row)),
    )


def held_policies(snapshot: Snapshot) -> Iterator[facts.PolicyFacts]:
    return (policy for groups in snapshot.groups.values() for group in groups.values() for policy in group)


def without_ended(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot without policies and members that ended long ago, because no change records their end."""
    ended = facts.to_us(timezone.now() - _KEPT)

    def long_ended(held: Iterable[facts.PolicyFacts | facts.MemberFacts]) -> dict[int, None]:
        return dict.fromkeys(one.id for one in held if one.ends_us is not None and one.ends_us < ended)

    policies, members = long_ended(held_policies(snapshot)), long_ended(snapshot.members)
    return with_rows(snapshot, policies=policies, members=members)


def not_ended(rows: Any) -> Any:
    """Return the queryset of policies or members without those that ended long ago."""
    return rows.exclude(ends_at__lt=timezone.now() - _KEPT)


def find_unreadable() -> list[str]:
    """Return a sentence for developers about a policy of each text that cannot be read, at most ``_LISTED``.

    Raw SQL or a newer version wrote such rates; ``on_error`` applies. Raises ``django.db.Error``.
    """
    from ..models import RatePolicy

    texts = RatePolicy.objects.order_by().values_list("rates", "algorithm").annotate(Min("pk"))
    bad = [pk for rates, algorithm, pk in texts if facts.read_rates(rates, algorithm) == facts.UNREADABLE][:_LISTED]
    related = RatePolicy.objects.select_related("endpoint", "user", "subject_list", "plan")
    return [
        f"Policy {policy.pk} ({policy.audience} for {policy.endpoint or 'all endpoints'}): "
        f"rates {show(policy.rates)} cannot be read, so on_error applies."
        for policy in related.filter(pk__in=bad).order_by("pk")
    ]


def find_unverified() -> list[int]:
    """Return the ids of policies that keep what unverified clients use; raises ``django.db.Error``."""
    from ..models import RatePolicy

    kinds = {kind for kind in ("ip", *settings.identifiers) if not is_verified(kind)}
    counted = [*kinds, "caller"] if kinds.intersection(settings.caller) else [*kinds]
    kept = not_ended(RatePolicy.objects.filter(durable=True, counted_per__in=counted)).exclude(mode="off")
    kept = kept.filter(user=None, subject="", subject_list=None).order_by("pk")
    found = [(pk, facts.read_rates(*rates)) for pk, *rates in kept.values_list("pk", "rates", "algorithm")]
    return [pk for pk, rates in found if any(getattr(rate, "calendar", "") for rate in rates)]


def load_entries(keys: Collection[str | facts.SubjectKey]) -> dict[str | facts.SubjectKey, facts.UserEntry]:
    """Read the entries of users (two queries per 500) and of subjects (one); ``NOBODY`` for those without rows."""
    from ..models import RatePolicy

    users = [key for key in keys if isinstance(key, str) and _may_exist(key)]
    subjects = [":".join(key) for key in keys if isinstance(key, tuple)]
    policies: dict[str | facts.SubjectKey, list[facts.PolicyFacts]] = {}
    assignments: dict[Any, list[facts.Assignment]] = {}
    for batch in in_batches(users):
        own = not_ended(RatePolicy.objects.filter(user_id__in=batch)).order_by()
        for policy in map(facts.policy_facts, own.values_list(*facts.POLICY_COLUMNS, named=True)):
            policies.setdefault(policy.user, []).append(policy)
        assignments |= _assignments("user_id", batch)
    for batch in in_batches(subjects):
        assignments |= {facts.subject_key(text): own for text, own in _assignments("subject", batch).items()}
    settled_us = facts.to_us(timezone.now()) - _SETTLED_US
    # Looked up by key, because a database may find other spellings of a subject as well.
    return {
        key: facts.entry_of(tuple(policies.get(key, ())), tuple(assignments.get(key, ())), settled_us) for key in keys
    }


def next_keys(at: Place, rows: int) -> tuple[set[str | facts.SubjectKey], Place | None]:
    """Return the keys of ``rows`` assignments and users' policies from a place on (two queries at most).

    Also returns where the next ones begin; None = there are no more.
    """
    from ..models import PlanAssignment, RatePolicy

    table, after = at
    tables: list[Any] = [PlanAssignment.objects, not_ended(RatePolicy.objects.filter(user__isnull=False))]
    keys: set[str | facts.SubjectKey] = set()
    for number, own in enumerate(tables[table:], start=table):
        found = list(own.filter(pk__gt=after).order_by("pk").values_list("pk", "user_id", "subject")[:rows])
        keys |= {facts.subject_key(subject) if user is None else str(user) for _pk, user, subject in found}
        if len(found) == rows:
            return keys, (number, found[-1][0])
        after = 0
    return keys, None


def load_user_endpoints() -> tuple[dict[int | None, frozenset[str]], bool]:
    """Read the ``counted_per`` of users' own policies by endpoint, and whether an assignment has an ``anchor``.

    Log-only policies are left out; an endpoint that has no others has an empty set.
    """
    from ..models import PlanAssignment, RatePolicy

    own = not_ended(RatePolicy.objects.filter(user__isnull=False).exclude(mode="off"))
    found: dict[int | None, frozenset[str]] = {}
    for endpoint_id, counted_per, mode in own.order_by().values_list("endpoint_id", "counted_per", "mode").distinct():
        found[endpoint_id] = found.get(endpoint_id, frozenset()).union([counted_per] if mode == "enforce" else ())
    return found, PlanAssignment.objects.filter(anchor__gt=1).exists()


def load_assigned_kinds() -> set[str]:
    """Return the names of IDENTIFIERS with a subject on a plan, now or at another time (one query each)."""
    from ..models import PlanAssignment

    rows = PlanAssignment.objects.order_by()
    begins = {kind: subject_begins(f"{kind}:", rows.db) for kind in settings.identifiers}
    return {kind for kind, condition in begins.items() if rows.filter(condition).exists()}


def assignments_of(subjects: Iterable[str]) -> dict[str, list[facts.Assignment]]:
    """Read the assignments, also ended ones, of subjects such as ``user:42`` and ``tenant:acme``."""
    ids = {subject: subject.removeprefix("user:") for subject in subjects}
    users = [pk for subject, pk in ids.items() if pk != subject and _may_exist(pk)]
    others = [subject for subject, pk in ids.items() if pk == subject]
    found: dict[str, list[facts.Assignment]] = {}
    for batch in in_batches(users):
        found |= {f"user:{pk}": own for pk, own in _assignments("user_id", batch).items()}
    for batch in in_batches(others):
        found |= _assignments("subject", batch)
    return found


def _assignments(column: str, values: Sequence[str]) -> dict[str, list[facts.Assignment]]:
    """Return the assignments with one of the values in the column, by its text; ended ones may tell a month's day."""
    from ..models import PlanAssignment

    found: dict[str, list[facts.Assignment]] = {}
    rows = PlanAssignment.objects.filter(**{f"{column}__in": values}).order_by()
    for row in rows.values_list(column, "pk", "plan_id", "starts_at", "ends_at", "anchor", named=True):
        found.setdefault(str(getattr(row, column)), []).append(facts.assignment_facts(row))
    return found


def _may_exist(user_id: str) -> bool:
    # The id may belong to no row of the user model, as a token's service account.
    key = primary_key(get_user_model(), user_id)
    return key is not None and str(key) == user_id  # "010" parses as 10, and is not that user
