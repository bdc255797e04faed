"""Validators of the models: rates, subjects, dates, and unique constraints that the database cannot enforce."""

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

#: Characters that change the direction of the text around them.
_DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")
_ADDRESS = re.compile(r"([0-9]+(\.[0-9]+){3}|[0-9a-f]*(:[0-9a-f.]*){2,})(/[0-9.]*)?", re.IGNORECASE)


def visible(text: Any) -> str:
    """Return the text with characters that change the direction of text escaped."""
    return _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):x}", str(text))


def rate_problem(error: InvalidRate) -> str:
    """Return the error's message in the active language."""
    params = {name: gettext(str(value)) if name == "what" else value for name, value in error.params.items()}
    text = gettext(error.template)
    return text % params if params else text


def canonical_subject(text: str) -> str:
    """Return ``kind:value`` with addresses and networks in canonical form. Raises ``ValidationError``.

    ``ip:`` is put in front of an address or network without a kind.
    """
    text = text.strip()
    kind, colon, value = text.partition(":")
    known = ("ip", *settings.identifiers)
    if kind not in known and is_address_like(text):
        kind, colon, value = "ip", ":", text
    if kind == "user" and value:
        raise ValidationError(_("Choose the user instead of %(subject)s."), params={"subject": visible(text)})
    if not colon or not value or kind not in known:
        raise ValidationError(
            _(
                "Enter kind:value, such as ip:203.0.113.7. The kind is one of %(known)s. RATEQUOTA['IDENTIFIERS'] "
                "adds kinds."
            ),
            params={"known": ", ".join(known)},
        )
    if "\x00" in value:
        raise ValidationError(_("A subject cannot contain NUL characters."))
    if kind != "ip":
        return f"{kind}:{value}"
    try:
        network = unmap_network(ipaddress.ip_network(value if "/" in value else ipaddress.ip_address(value)))
    except ValueError as error:
        raise ValidationError(
            _("%(error)s. Enter an address such as 203.0.113.7 or a network such as 203.0.113.0/24."),
            params={"error": str(error)[:100]},
        ) from error
    return f"ip:{network if '/' in value else network.network_address}"


def assignable_subject(text: str) -> str:
    """Return the canonical subject of a plan assignment. Raises ``ValidationError`` with what to write instead."""
    known = ", ".join(settings.identifiers)
    kind, _colon, value = text.strip().partition(":")
    if not known and (kind != "user" or not value):
        raise ValidationError(
            _("Choose a user. Subjects cannot be on a plan, because RATEQUOTA['IDENTIFIERS'] is empty.")
        )
    if kind not in ("user", *settings.identifiers) or not value:
        raise ValidationError(
            _("Enter kind:value, such as %(example)s. The kind is one of %(known)s."),
            params={"known": known, "example": f"{next(iter(settings.identifiers))}:acme"},
        )
    return canonical_subject(text)


def is_address_like(text: str) -> bool:
    """Return whether the text is meant as an address or a network; with a fault such as ``10.0.0.0/33`` as well."""
    return _ADDRESS.fullmatch(text) is not None


def check_rates(text: str, algorithm: str) -> None:
    """Raise ``ValidationError`` if the rates cannot be parsed."""
    try:
        parse_rates(text, algorithm)
    except InvalidRate as error:
        raise ValidationError(rate_problem(error), code="invalid_rate") from error


def refuse_unreadable(before: Any, after: Any) -> None:
    """Raise ``ValidationError`` if a write has stored rates that cannot be parsed.

    RatesField validates only its text, without the row's ``algorithm``, and no SQL expressions.
    """
    written: tuple[Any, Any] = (getattr(after, "rates", None), getattr(after, "algorithm", None))
    if None in written or (before is not None and written == (before.rates, before.algorithm)):
        return
    check_rates(*written)


def check_year(value: Any) -> None:
    """Raise ``ValidationError`` for a time that other zones may not have, such as 9999-12-31 23:59."""
    if value is not None and not 1 < value.year < 9999:
        raise ValidationError(
            _("The year must be between 2 and 9998. Leave the field empty for a time that never comes.")
        )


def check_dates(starts_at: Any, ends_at: Any) -> None:
    """Raise ``ValidationError`` if one is out of range, or if both are set and the end is not after the start."""
    for name, value in (("starts_at", starts_at), ("ends_at", ends_at)):
        try:
            check_year(value)
        except ValidationError as error:
            raise ValidationError({name: error}) from error
    if starts_at is not None and ends_at is not None and ends_at <= starts_at:
        raise ValidationError({"ends_at": _("The end must be after the start.")})


def unsupported_constraints(model: type[models.Model], using: str) -> list[models.UniqueConstraint]:
    """Return the model's unique constraints that the database cannot enforce, as MySQL no conditional ones."""
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
    """Raise ``IntegrityError`` if rows violate a unique constraint that the database cannot enforce.

    Call it in the transaction that wrote the rows. It does not see rows of concurrent transactions.
    """
    for constraint in unsupported_constraints(model, using):
        rows: Any = model._base_manager.using(using).order_by()
        rows = rows if constraint.condition is None else rows.filter(constraint.condition)
        parts = (*map(models.F, constraint.fields), *constraint.expressions)
        keys = {f"_key{number}": part for number, part in enumerate(parts)}
        if rows.annotate(**keys).values(*keys).annotate(_rows=models.Count("pk")).filter(_rows__gt=1).exists():
            raise IntegrityError(f"two rows break the constraint {constraint.name}")


def primary_key(model: type[models.Model], value: Any) -> Any:
    """Return the value as a primary key of the model; None where it cannot be one.

    A number beyond the column's range cannot: it overflows in SQLite's driver.
    """
    try:
        key = model._meta.pk.to_python(value)
        model._meta.pk.run_validators(key)
    except ValidationError:
        return None
    return key
