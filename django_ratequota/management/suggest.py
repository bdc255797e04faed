"""The verb ``suggest`` of ``manage.py ratequota``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from ..models import Endpoint, Plan, RatePolicy
from ..monitoring.packing import HOUR, KEPT_SECONDS
from ..operations.impact_audience import NotEstimable
from ..operations.suggest import SHARES, sentences, suggest


def add_verbs(verbs: Any) -> None:
    """Add the verb with its options."""
    text = "Show the rates under which most callers stayed so far; changes nothing."
    verb = verbs.add_parser("suggest", help=text)
    verb.set_defaults(run=suggest_rates)
    verb.add_argument("--endpoint", help="Endpoint name (default: all endpoints together).")
    verb.add_argument("--plan", help="Slug of the callers' plan (default: everyone).")
    verb.add_argument("--counted-per", default="caller", help="Who shares one counter (default caller).")
    verb.add_argument("--algorithm", default=RatePolicy().algorithm, help="Algorithm of the rates.")
    verb.add_argument("--hours", type=int, default=24, help="Recorded hours to look at, 1 to 48 (default 24).")


def suggest_rates(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Yield a line per period, then what the rates are based on."""
    hours, most = options["hours"], KEPT_SECONDS // HOUR
    if not 1 <= hours <= most:
        raise CommandError(f"--hours must be 1 to {most}, not {hours}")
    policy = RatePolicy(
        endpoint=_named(Endpoint, "name", options["endpoint"]),
        plan=_named(Plan, "slug", options["plan"]),
        counted_per=options["counted_per"],
        algorithm=options["algorithm"],
        rates="1/day",
    )
    policy.full_clean(validate_unique=False, validate_constraints=False)
    try:
        found = suggest(policy, hours)
    except NotEstimable as reason:
        raise CommandError(str(reason)) from reason
    if found.rows:
        yield "  ".join(f"{f'{share / 10:g} %':>18}" for share in SHARES)
    for row in found.rows:
        yield "  ".join(f"{rate:>18}" for rate in row.rates) + f"  highest {row.peak} ({row.peak_caller})"
    yield from sentences(found, hours)


def _named(model: Any, field: str, value: str | None) -> Any:
    if value is None:
        return None
    found = model.objects.filter(**{field: value}).first()
    if found is None:
        raise CommandError(f"There is no {model._meta.verbose_name} {value!r}")
    return found
