"""Copy the policies of a plan to another one, with the same limits or all of them multiplied."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy
from decimal import ROUND_HALF_UP, Decimal

from django.core.exceptions import ValidationError
from django.utils.text import Truncator
from django.utils.translation import gettext as _

from ..changes.validators import visible
from ..engine.rates import MAX_UNITS
from ..models import Plan, RatePolicy

#: A limit or a burst in canonical rates.
_NUMBER = re.compile(r"(?:^|(?<=, )|(?<= burst ))[0-9]+")
#: Digits that a multiplied limit keeps: 12,345 × 1.5 is 18,500.
_DIGITS = 3


def scaled(rates: str, factor: Decimal) -> str:
    """Return the rates with all limits and bursts multiplied, and rounded to three digits; at least 1."""
    return _NUMBER.sub(lambda found: str(_scaled(int(found[0]), factor)), rates)


def _scaled(units: int, factor: Decimal) -> int:
    exact = units * factor
    unit = Decimal(10) ** max(0, exact.adjusted() + 1 - _DIGITS)
    return max(1, min(int((exact / unit).quantize(Decimal(1), ROUND_HALF_UP) * unit), MAX_UNITS))


def copy_policies(policies: Iterable[RatePolicy], plan: Plan, factor: Decimal = Decimal(1)) -> int:
    """Create the same policies for the plan, their limits times ``factor``, and return their number.

    Raises ``ValidationError`` for a policy that is no longer valid (it was written by raw SQL, or is counted per an
    identifier that has left the settings).
    """
    relations = [field.name for field in RatePolicy._meta.concrete_fields if field.is_relation]
    copies = []
    for policy in policies:
        own = copy(policy)
        copies.append(own)
        own.pk, own.plan = None, plan
        own.rates = policy.rates if factor == 1 else scaled(policy.rates, factor)
        try:
            # Related objects and constraints need no check: only the plan differs, and it had no policy.
            own.full_clean(relations, validate_unique=False, validate_constraints=False)
        except ValidationError as error:
            text = _("The plan was not copied, because %(policy)s is not valid. %(errors)s")
            words = {"policy": Truncator(visible(policy)).chars(200), "errors": " ".join(error.messages)}
            raise ValidationError(text % words) from error
    return len(RatePolicy.objects.bulk_create(copies))
