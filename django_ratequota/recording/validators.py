"""What the models share: subjects in one spelling, dates in order, names that disturb no other text."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

from django.core.exceptions import ValidationError
from django.db import IntegrityError, connections, models
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import settings
from ..engine.rates import parse_rates
from ..exceptions import InvalidRate
from ..utils.addresses import unmap_network

#: Characters that turn around whatever text stands next to them.
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def visible(text: Any) -> str:
    """The text with each character that would turn its neighbours around written as its code."""
    return _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):x}", str(text))


def rate_problem(error: InvalidRate) -> str:
    """What is wrong with a rate, in the language of whoever wrote it."""
    params = {name: gettext(str(value)) if name == "what" else value for name, value in error.params.items()}
    text = gettext(error.template)
    return text % params if params else text


def canonical_subject(text: str) -> str:
    """``kind:value`` with an address or network in its usual spelling; raises ``ValidationError``.

    An address or network alone is taken as ``ip:``.
    """
    text = text.strip()
    kind, colon, value = text.partition(":")
    known = ("ip", *settings.identifiers)
    if kind not in known and _is_network(text):
        kind, colon, value = "ip", ":", text
    if not colon or not value or kind not in known:
        raise ValidationError(
            _("Write kind:value, where kind is one of %(known)s, such as ip:203.0.113.7."),
            params={"known": ", ".join(known)},
        )
    if "\x00" in value:
        raise ValidationError(_("A subject has no NUL characters."))
    if kind != "ip":
        return f"{kind}:{value}"
    try:
        network = unmap_network(ipaddress.ip_network(value if "/" in value else ipaddress.ip_address(value)))
    except ValueError as error:
        raise ValidationError(
            _("%(error)s; write an address such as 203.0.113.7 or a network such as 203.0.113.0/24."),
            params={"error": str(error)[:100]},
        ) from error
    return f"ip:{network if '/' in value else network.network_address}"


def _is_network(text: str) -> bool:
    try:
        # With its host bits set it is one as well: what is wrong with it is said as of ``ip:``.
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


def refuse_unreadable(before: Any, after: Any) -> None:
    """Raise ``ValidationError`` where a write has left rates in a row that cannot be read.

    The field judges its text alone; what ``algorithm`` makes of it, or an SQL expression wrote, shows in the row.
    """
    written: tuple[Any, Any] = (getattr(after, "rates", None), getattr(after, "algorithm", None))
    if None in written or (before is not None and written == (before.rates, before.algorithm)):
        return
    try:
        parse_rates(*written)
    except InvalidRate as error:
        raise ValidationError(rate_problem(error), code="invalid_rate") from error


def check_dates(starts_at: Any, ends_at: Any) -> None:
    """Raises ``ValidationError`` on ``ends_at`` unless the end lies after the start, where both are given."""
    if starts_at is not None and ends_at is not None and ends_at <= starts_at:
        raise ValidationError({"ends_at": _("The end must lie after the start.")})


def unsupported_constraints(model: type[models.Model], using: str) -> list[models.UniqueConstraint]:
    """The model's constraints that the database cannot hold, as MySQL and MariaDB cannot hold conditional ones."""
    features = connections[using].features
    return [
        rule
        for rule in model._meta.constraints
        if isinstance(rule, models.UniqueConstraint)
        and (
            (rule.condition is not None and not features.supports_partial_indexes)
            or (bool(rule.expressions) and not features.supports_expression_indexes)
        )
    ]


def refuse_duplicates(model: type[models.Model], using: str) -> None:
    """Raise ``IntegrityError`` where rows break a constraint that the database itself cannot hold.

    Called in the transaction that wrote them, which does not see what others write at the same moment.
    """
    for rule in unsupported_constraints(model, using):
        rows: Any = model._base_manager.using(using).order_by()
        rows = rows if rule.condition is None else rows.filter(rule.condition)
        keys = {f"_key{number}": one for number, one in enumerate((*map(models.F, rule.fields), *rule.expressions))}
        if rows.annotate(**keys).values(*keys).annotate(_rows=models.Count("pk")).filter(_rows__gt=1).exists():
            raise IntegrityError(f"two rows break the constraint {rule.name}")
