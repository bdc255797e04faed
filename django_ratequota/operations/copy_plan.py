"""Copy the policies of a plan to another one."""

from __future__ import annotations

from collections.abc import Sequence

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
    fields = RatePolicy._meta.concrete_fields
    names = [field.attname for field in fields if not field.primary_key]
    copies = [
        RatePolicy(**{**{name: getattr(policy, name) for name in names}, "plan_id": plan.pk}) for policy in policies
    ]
    for copy, policy in zip(copies, policies, strict=True):
        try:
            # Related objects and constraints need no check: only the plan differs, and it had no policy.
            copy.clean_fields(exclude=[field.name for field in fields if field.is_relation])
            copy.clean()
        except ValidationError as error:
            text = _("Nothing was copied, because %(policy)s is not valid. %(errors)s")
            words = {"policy": Truncator(visible(policy)).chars(200), "errors": " ".join(error.messages)}
            raise ValidationError(text % words) from error
    return len(RatePolicy.objects.bulk_create(copies))
