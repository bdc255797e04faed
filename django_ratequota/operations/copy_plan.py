"""Copy the policies of a plan to another one."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from django.core.exceptions import ValidationError
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.validators import visible
from ..models import Plan, RatePolicy


def copy_policies(policies: Sequence[RatePolicy], plan: Plan) -> int:
    """Create the same policies for the plan, with all of their fields, and return their number.

    Raises ``ValidationError`` for a policy that is no longer valid (it was written by raw SQL, or is counted per an
    identifier that has left the settings).
    """
    relations = [field.name for field in RatePolicy._meta.concrete_fields if field.is_relation]
    copies = [copy(policy) for policy in policies]
    for own, policy in zip(copies, policies, strict=True):
        own.pk, own.plan = None, plan
        try:
            # Related objects and constraints need no check: only the plan differs, and it had no policy.
            own.full_clean(relations, validate_unique=False, validate_constraints=False)
        except ValidationError as error:
            text = _("Nothing was copied, because %(policy)s is not valid. %(errors)s")
            words = {"policy": Truncator(visible(policy)).chars(200), "errors": " ".join(error.messages)}
            raise ValidationError(text % words) from error
    return len(RatePolicy.objects.bulk_create(copies))
