"""Roll out: a log-only policy becomes enforced and takes the place of the policy that was enforced there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from django.core.exceptions import ValidationError
from django.db.models import Model, QuerySet
from django.utils.translation import gettext as _

from ..changes.databases import saving
from ..changes.writer import field_values, rows_by_pk
from ..models import RatePolicy

#: The columns in which a log-only policy and the enforced one of its place are equal, apart from their dates.
PLACE = ("endpoint_id", "user_id", "subject", "subject_list_id", "plan_id", "counted_per")


def replaced_by(policy: RatePolicy) -> QuerySet[RatePolicy]:
    """Return the other policies of the same place and dates that are not log only."""
    place = {name: getattr(policy, name) for name in (*PLACE, "starts_at", "ends_at")}
    return RatePolicy.objects.filter(**place).exclude(mode=RatePolicy.Mode.LOG).exclude(pk=policy.pk)


def state_of(policies: Iterable[Model]) -> str:
    """Return a hash of the policies, to refuse rolling out in another state than the operator saw."""
    rows = sorted(json.dumps(field_values(one)) for one in policies)
    return hashlib.sha256("".join(rows).encode()).hexdigest()[:20]


def roll_out(policy: RatePolicy, seen: str) -> list[RatePolicy]:
    """Enforce the log-only policy and delete those it replaces, in one save; return these.

    ``seen`` is the ``state_of`` all of them. Raises ``ValidationError`` if it has changed; then nothing is done.
    """
    with saving(RatePolicy) as alias:
        replaced = list(replaced_by(policy))
        pks = [one.pk for one in replaced]
        if state_of(rows_by_pk(RatePolicy, [policy.pk, *pks], alias, lock=True).values()) != seen:
            raise ValidationError(_("An object was changed in the meantime. Compare again."))
        RatePolicy.objects.filter(pk__in=pks).delete()
        RatePolicy.objects.filter(pk=policy.pk).update(mode=RatePolicy.Mode.ENFORCE)
    return replaced
