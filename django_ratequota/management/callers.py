"""The verbs ``explain``, ``near``, ``reset`` and ``give-back`` of ``manage.py ratequota``."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError

from ..conf import settings
from ..engine.rates import MAX_UNITS
from ..engine.types import Bucket, BucketStatus
from ..models import Plan, QuotaWindow
from ..monitoring import refusals
from ..monitoring.refusals import Refusal
from ..operations import counters
from ..operations.explain import ExplainQuery, Explanation, anchor_of, explain_caller, idle_policies
from ..operations.near import LEVELS, Chosen, Row, all_near, current_periods
from ..operations.past_windows import windows_of
from ..operations.subjects import find_accounts, named, only_account, subject_names
from ..operations.what_to_tell import policies_of, what_to_tell
from ..policies.limit_names import limit_name, limit_names
from ..policies.reasons import others_in_words
from ..policies.requests.caller import UNKNOWN, failed_kind
from ..runtime import default_limiter, process
from .maintenance import whole_number, why_not_kept

#: Options of ``add_caller`` that a refusal's id replaces.
_WHO_AND_WHERE = ("user", "ip", "identifier", "plan", "endpoint", "path", "method")
#: Help of each option ``--user``.
USER_HELP = "User name, email address or primary key. user:KEY is always the key."


def add_verbs(verbs: Any) -> None:
    """Add the verbs with their options."""
    text = "Explain which limits apply to a customer. Consumes no units."
    explaining = verbs.add_parser("explain", run=explain, help=text)
    resetting = verbs.add_parser("reset", run=give_back, help="Reset a customer's own counters to zero.")
    resetting.set_defaults(units=None)
    text = "Refund units to a customer's own counters. This cannot be undone."
    giving = verbs.add_parser("give-back", run=give_back, help=text)
    for verb in (explaining, resetting, giving):
        add_caller(verb)
    text = "Units to refund, or requests if the rate is in requests. At most the used units of each limit."
    giving.add_argument("--units", type=whole_number(MAX_UNITS), required=True, help=text)
    for verb in (resetting, giving):
        text = "A limit as explain shows it, such as 'search: 10/min'. May be repeated. Default: all."
        verb.add_argument("--limit", action="append", default=[], help=text)
        text = "First day of a past period, such as 2026-10-01. Default: the periods that run now."
        verb.add_argument("--first-day", type=_day, metavar="YYYY-MM-DD", help=text)
        verb.add_argument("--reason", default="", help="Reason for the history.")
        text = "A text of up to 64 characters. A second call with the same one changes nothing."
        verb.add_argument("--key", default="", help=text)
    text = "List the subjects that have used most of a calendar limit that is kept in the database."
    listing = verbs.add_parser("near", run=list_near, help=text)
    text = "Lowest percentage to list (default 80)."
    listing.add_argument("--level", default="80", choices=[str(level) for level in LEVELS], help=text)
    text = "Length of the calendar period. Default: the longest that is used."
    listing.add_argument("--window", choices=QuotaWindow.Period.values, help=text)


def add_caller(verb: Any) -> None:
    """Add the options of a caller and a request, which ``query_of`` reads."""
    verb.add_argument("--id", help="Id from a refused response, in place of the customer and the request.")
    verb.add_argument("--user", help=USER_HELP)
    verb.add_argument("--ip", help="Client address, such as 203.0.113.7.")
    text = "Value of a name in RATEQUOTA['IDENTIFIERS'], such as tenant=acme. May be repeated."
    verb.add_argument("--identifier", action="append", default=[], metavar="NAME=VALUE", help=text)
    verb.add_argument("--plan", help="Slug of the customer's plan if PLAN_RESOLVER is set.")
    verb.add_argument("--endpoint", help="Endpoint name (scope).")
    verb.add_argument("--path", help="Path to resolve, such as /api/reports/7/.")
    verb.add_argument("--method", help="HTTP method. Needed where the limits depend on it.")


def explain(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Yield a refusal, if there is an ``--id``, and the explanation of the request."""
    limiter = process.limiter()
    if limiter.store.absent and not limiter.unlimited:
        raise CommandError(f"No counters can be read from here: {limiter.store.absent}")
    if options["id"]:
        yield from _refusal_lines(_refusal_of(options))
    yield from _explanation_lines(query_of(options).explain())


def list_near(command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Yield the subjects of windows of one length, a line each; raises ``CommandError`` where none are kept."""
    chosen = Chosen(level=int(options["level"]))
    periods = current_periods()
    if not periods and (why := why_not_kept()):
        raise CommandError(why)
    listed = False
    for period in [options["window"]] if options["window"] else periods[:1]:
        for batch in all_near(period, chosen):
            names = subject_names(row.bucket.subject for row in batch)
            yield from (_line(row, names) for row in batch)
            listed = listed or bool(batch)
    if not listed:
        command.stderr.write(f"All customers are below {chosen.level} % of their calendar limits")


def _line(row: Row, names: Mapping[str, str]) -> str:
    bucket = row.bucket
    place = f"{bucket.rate} for {bucket.scope or 'all endpoints'} (policy {row.policy.pk})"
    who = _subject_name(bucket.subject, names)
    return f"{row.percent:>3} %  {row.used} of {row.limit}  {who}: {place}"


def give_back(_command: BaseCommand, options: dict[str, Any]) -> Iterator[str]:
    """Reset the caller's own counters, or refund units to each, and yield what they had used before and after."""
    if absent := default_limiter().store.absent:
        raise CommandError(f"No counters can be changed from here: {absent}")
    query, units, first_day = query_of(options), options["units"], options["first_day"]
    explanation = explain_caller(query.caller(), **query.request_arguments())
    buckets: Iterable[Bucket] = explanation.resolution.buckets
    if first_day is not None:  # by other policies, perhaps
        windows = windows_of(query.caller()).filter(first_day=first_day)
        places = {None, *(endpoint.id for endpoint in explanation.context.endpoints)}
        buckets = counters.recorded_buckets(row for row in windows if row.endpoint_id in places)
    own = [bucket for bucket in buckets if not counters.is_shared(bucket.counted_per, bucket.subject)]
    known = {limit_name(bucket) for bucket in own}
    if own and (wrong := [name for name in options["limit"] if name not in known]):
        raise CommandError(f"The customer has no counter of {wrong[0]!r} there. Choose one of {sorted(known)}.")
    chosen = [bucket for bucket in own if not options["limit"] or limit_name(bucket) in options["limit"]]
    try:
        found = counters.give_back(chosen, units, options["reason"], first_day=first_day, key=options["key"])
    except ValidationError as error:
        hint = f" Choose a limit with --limit, one of {sorted(known)}." if len(chosen) > 1 else ""
        raise CommandError(" ".join(error.messages) + hint) from error
    names = subject_names(one.subject for one in found)
    limits = {counters.own_title(bucket): limit_name(bucket) for bucket in chosen}
    for one in found:
        counter = f"{limits.get(one.title, one.title)} of {_subject_name(one.subject, names)}"
        done = "reset" if units is None else f"refunded {one.units} to"
        yield f"{done} {counter}: {one.used_before} used before, {one.used_after} now"
    if any(one.repeated for one in found):
        yield "Nothing changed now, because the key was used before"
    elif found:
        yield f"{len(found)} counter{'s' if len(found) > 1 else ''} {'reset' if units is None else 'changed'}"
    else:
        yield f"Nothing to {'reset' if units is None else 'refund'}, because the customer has no counters there"


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise ArgumentTypeError("write a day as in 2026-10-01") from error


def query_of(options: dict[str, Any]) -> ExplainQuery:
    """Return the caller and the request that the options name; raises ``CommandError`` and ``ValidationError``."""
    if options["id"]:
        refusal = _refusal_of(options)
        query = ExplainQuery.from_refusal(refusal)
        if query.everywhere and refusal.route:
            hint = "Write the customer and an endpoint instead of --id, such as with --user alice --endpoint search."
            raise CommandError(f"There is no route {refusal.route} any more. {hint}")
        return query
    if not options["user"] and not options["ip"] and not options["identifier"]:
        who = "--user NAME, --ip ADDRESS or --identifier NAME=VALUE"
        raise CommandError(f"Choose a customer with {who}, or a refusal with --id")
    identifiers = {}
    for text in options["identifier"]:
        name, equals, value = text.partition("=")
        if not equals or name not in settings.identifiers:
            known = ", ".join(settings.identifiers) or "none are configured"
            raise CommandError(f"--identifier needs NAME=VALUE with a name from RATEQUOTA['IDENTIFIERS'] ({known})")
        identifiers[name] = value
    slug = options["plan"]
    if slug and not Plan.objects.filter(slug=slug).exists():
        slugs = ", ".join(Plan.objects.values_list("slug", flat=True)) or "none yet"
        raise CommandError(f"There is no plan {slug!r} (existing plans: {slugs})")
    if settings.plan_resolver and slug is None:
        raise CommandError("PLAN_RESOLVER needs a request. Enter the plan with --plan SLUG, '' if it returns None.")
    query = ExplainQuery(
        user_id=user_of(options["user"])[0].removeprefix("user:") if options["user"] else None,
        ip=options["ip"] or "",
        identifiers=identifiers,
        plan_slug=slug or None,
        endpoint=options["endpoint"] or "",
        path=options["path"] or "",
        method=options["method"] or "GET",
    )
    methods = [query.method] if options["method"] else query.methods()
    if len(methods) > 1:
        choice = " or ".join(f"--method {method}" for method in methods)
        raise CommandError(f"The limits of this request depend on the method. Write {choice}.")
    return replace(query, method=methods[0])


def _refusal_of(options: dict[str, Any]) -> Refusal:
    """Return the refusal with the id of the options; raises ``CommandError``."""
    if given := [f"--{name}" for name in _WHO_AND_WHERE if options[name]]:
        text = "because a refusal names both the customer and the request"
        raise CommandError(f"Leave out either --id or {' and '.join(given)}, {text}.")
    refusal = refusals.find_refusal(options["id"])
    if refusal is None:
        hint = "Write the customer and the request instead, such as --user alice --path /search/ --method POST."
        raise CommandError(f"No refusal {options['id']!r} is recorded. Refusals are kept for 48 hours. {hint}")
    return refusal


def user_of(text: str, hint: str = "") -> tuple[str, str]:
    """Return the subject and the name of the user that the text names; raises ``CommandError``, with the hint.

    Raises ``ValidationError`` where it names several.
    """
    matches = find_accounts([text]).get(text)
    if not matches:
        raise CommandError(f"There is no user {text!r}{hint}")
    return only_account(matches)


def _refusal_lines(refusal: Refusal) -> Iterator[str]:
    """Yield what was decided at that time."""
    names = subject_names([refusal.caller, *(bucket.subject for bucket in refusal.buckets)])
    yield f"refused      {refusal.at:%Y-%m-%d %H:%M:%S %Z}, {refusal.count} times in that minute"
    yield f"customer     {_subject_name(refusal.caller, names)}{f' from {refusal.ip}' if refusal.ip else ''}"
    request = " ".join(part for part in (refusal.method, refusal.route, refusal.scope) if part)
    yield f"request      {request}, cost {refusal.cost}"
    unanswered = f" (Redis was unavailable: {refusal.error})" if refusal.error else ""
    yield f"by           {', '.join(refusal.limits)}{unanswered}"
    for bucket in refusal.buckets:
        verdict = "refused" if bucket.refused else "had room"
        state = f"{bucket.remaining} of {bucket.limit} left, {verdict}"
        yield f"         {limit_name(bucket)} of {_subject_name(bucket.subject, names)}: {state}"
    yield f"tell         {what_to_tell(refusal, policies_of(refusal), _clock)}"
    yield "now"


def _clock(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S %Z}"


def _subject_name(subject: str, names: Mapping[str, str]) -> str:
    """Return the subject with its display name, or words for callers whose identifier function failed."""
    kind = failed_kind(subject)
    return f"{kind} unknown (its function failed)" if kind else named(subject, names.get(subject, ""))


def _explanation_lines(explanation: Explanation) -> Iterator[str]:
    plan = explanation.plan
    yield f"plan         {plan.name if plan else 'none'} ({explanation.plan_source})"
    if scope := explanation.scope_without_endpoint:
        yield f"scope        {scope}: no endpoint has this name, so the view has no limits of its own"
    if explanation.exempt:
        yield f"exempt       never limited: {explanation.exempt}"
    idle = idle_policies(explanation)
    if not (explanation.candidates or explanation.built_in or explanation.others or idle):
        yield "No policy applies, so requests are not limited"
        return
    yield "policies"
    decision = explanation.decision
    found: Iterable[BucketStatus] = decision.statuses
    if decision.blocked_by and not decision.degraded:  # the check of a blocked client reads no counters
        found = counters.peek(explanation.resolution.buckets).values()
    statuses = {(s.bucket.policy_id, s.bucket.rate): s for s in found}
    names = subject_names([explanation.customer, *(bucket.subject for bucket in explanation.resolution.buckets)])

    def counter(bucket: Bucket) -> str:
        subject, state = bucket.subject, _counter_state(statuses.get((bucket.policy_id, bucket.rate)))
        if subject == UNKNOWN != explanation.customer:
            subject, state = explanation.customer, "each of its clients has one"
        elif anchor_of(bucket):
            state += f" (months begin on day {anchor_of(bucket)})"
        return f"{limit_name(bucket)} of {_subject_name(subject, names)}: {state}"

    for candidate in explanation.candidates:
        policy = candidate.policy
        note = "" if policy.mode == "enforce" else f" [{policy.mode}]"
        yield f"  {policy.id:>5}  {policy.text}{note}, counted per {policy.counted_per}: {candidate.reason}"
        for bucket in candidate.buckets:
            yield f"         {counter(bucket)}"
    for row, why in idle:
        yield f"  {row.pk:>5}  {row.rates}, counted per {row.counted_per}: {why}"
    for sentence in others_in_words(explanation.others):
        yield f"  {sentence}"
    for bucket in explanation.built_in:
        yield f"  built in: {counter(bucket)}"
    yield f"decision     {_verdict(explanation)}"


def _counter_state(status: BucketStatus | None) -> str:
    if status is None:
        return "no live counter"
    if status.bucket.rate.concurrent:
        return f"{status.remaining} of {status.limit} slots free"
    when = f", full again in {status.reset_after:.1f} s" if status.reset_after else ""
    if not status.allowed:
        wait = status.retry_after
        when = ", never enough for this cost" if wait is None else f", room again in {wait:.1f} s"
    return f"{status.remaining} of {status.limit} left{when}"


def _verdict(explanation: Explanation) -> str:
    decision, cost = explanation.decision, explanation.resolution.cost
    what = "each limit has room" if explanation.everywhere else f"a request of cost {cost} would be admitted"
    verdict = f"{what} now" if decision.allowed else f"a request of cost {cost} would be refused now"
    if decision.violated:
        verdict += f", by {', '.join(limit_names(decision.violated, explanation.resolution.buckets))}"
    return f"{verdict} (Redis was unavailable: {decision.error})" if decision.degraded else verdict
