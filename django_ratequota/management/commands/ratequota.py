"""``manage.py ratequota VERB``: what operators ask, and do, without opening the admin."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.core.exceptions import ObjectDoesNotExist, ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db import Error as DatabaseError

from ...conf import settings
from ...engine.types import Bucket, BucketStatus
from ...exceptions import StoreError
from ...models import Plan, PolicyChange
from ...monitoring import refusals
from ...monitoring.health import Health, reports, state_of
from ...monitoring.rollup import KEEP_DAYS, KEEP_HOURS, roll_up
from ...operations.counters import reset_caller
from ...operations.explain import Explanation
from ...operations.explain_query import ExplainQuery
from ...policies.requests.identity import failed_kind
from ...policies.unreadable import find_unreadable
from ...recording.recorder import record_publication
from ...runtime import default_limiter
from ...store.server import server_version
from ...utils.histogram import merged, quantile
from .. import policyfile as files


class Command(BaseCommand):
    """One command with a verb for each thing to do; ``explain``, ``status`` and ``export`` change nothing."""

    help = "Explain, reset, publish, roll up, inspect, export and import rate quotas."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """The verbs and their options."""
        names = "explain | reset | publish | rollup | status | export | import"
        verbs = parser.add_subparsers(dest="verb", required=True, metavar=names)
        explain = verbs.add_parser("explain", help="What applies to a caller, and why; consumes nothing.")
        reset = verbs.add_parser("reset", help="Forget what a caller's own counters hold.")
        for verb in (explain, reset):
            verb.add_argument("--user", help="User name.")
            verb.add_argument("--ip", help="Client address, such as 203.0.113.7.")
            verb.add_argument(
                "--identifier",
                action="append",
                default=[],
                metavar="NAME=VALUE",
                help="Value of a name in RATEQUOTA['IDENTIFIERS'], such as tenant=acme; may be repeated.",
            )
            verb.add_argument("--plan", help="Slug of the caller's plan, where PLAN_RESOLVER says it.")
            verb.add_argument("--endpoint", help="Endpoint name (scope).")
            verb.add_argument("--path", help="Path to resolve, such as /api/reports/7/.")
            verb.add_argument("--method", default="GET", help="HTTP method (default GET).")
        explain.add_argument("--id", help="Id that a refused response carried; instead of all the others.")
        reset.add_argument("--reason", default="", help="Kept in the history.")
        publish = verbs.add_parser("publish", help="Make every process read all policies anew, after raw SQL.")
        publish.add_argument("--reason", default="ratequota publish", help="Kept in the history.")
        rollup = verbs.add_parser(
            "rollup", help="Keep counts in the database before Redis lets them go; run it about once an hour."
        )
        for name, days, what in (("hours", KEEP_HOURS, "hours"), ("days", KEEP_DAYS, "days")):
            rollup.add_argument(
                f"--keep-{name}",
                type=int,
                default=days,
                metavar="DAYS",
                help=f"Delete {what} older than this ({days}).",
            )
        verbs.add_parser("status", help="The store, and the revision here and there.")
        files.add_verbs(verbs)

    def handle(self, *args: Any, verb: str, **options: Any) -> None:
        """Run one verb."""
        try:
            getattr(self, f"_{verb}")(options)
        except ValidationError as error:
            raise CommandError(" ".join(error.messages)) from error
        except DatabaseError as error:
            raise CommandError(f"The database gives no answer: {error}") from error
        except StoreError as error:
            raise CommandError(f"Redis gives no answer ({error.reason}): {error}") from error

    def _explain(self, options: dict[str, Any]) -> None:
        if options["id"]:
            refusal = refusals.find_refusal(options["id"])
            if refusal is None:
                raise CommandError(f"No refusal {options['id']!r} is kept; they are kept for 48 hours")
            for line in _recall(refusal):
                self.stdout.write(line)
            question = ExplainQuery.of(refusal)
        else:
            question = _question(options)
        for line in _describe(question.explain()):
            self.stdout.write(line)

    def _reset(self, options: dict[str, Any]) -> None:
        question = _question(options)
        before = reset_caller(question.caller(), reason=options["reason"], **question.place())
        for status in before:
            bucket = status.bucket
            self.stdout.write(
                f"reset {bucket.title} of {_named(bucket.subject)}: {status.remaining} of {status.limit} were left"
            )
        self.stdout.write(
            f"{len(before)} counters reset" if before else "Nothing of this caller's own is counted there"
        )

    def _publish(self, options: dict[str, Any]) -> None:
        before = default_limiter().stored_revision()
        record_publication(options["reason"])
        revision = default_limiter().stored_revision()
        if revision <= before:
            raise CommandError("The publication is recorded, but Redis has no new revision; see the log")
        self.stdout.write(f"Published revision {revision}; every process reads all policies anew")

    def _rollup(self, options: dict[str, Any]) -> None:
        done = roll_up(options["keep_hours"], options["keep_days"])
        self.stdout.write(f"{done.hours} hourly and {done.days} daily rows written, {done.deleted} old ones deleted")

    def _status(self, options: dict[str, Any]) -> None:
        limiter = default_limiter()
        for server, info in limiter.store.info().items():
            name, version = server_version(info)
            # Not every server tells all of it.
            up, policy, evicted = (
                info.get(key, "unknown") for key in ("uptime_in_seconds", "maxmemory_policy", "evicted_keys")
            )
            self.stdout.write(f"store        {name} {version} at {server}, up {up} s")
            self.stdout.write(f"eviction     {policy}, {evicted} keys evicted")
        revision = limiter.stored_revision()
        newest = PolicyChange.objects.exclude(model="counter").order_by("-pk").first()
        self.stdout.write(f"keys         {settings.prefix}:*")
        self.stdout.write(f"revision     {revision or 'none published yet'}")
        change = f"{newest.at:%Y-%m-%d %H:%M:%S %Z} {newest}" if newest else "none"
        self.stdout.write(f"last change  {change}")
        for unreadable in find_unreadable():
            self.stdout.write(f"unreadable   {unreadable}")
        for line in _workers(reports(), revision):
            self.stdout.write(line)

    def _export(self, options: dict[str, Any]) -> None:
        files.export_file(self, options)

    def _import(self, options: dict[str, Any]) -> None:
        files.import_file(self, options)


#: What a process is by ``state_of``; one that has decided nothing since the revision judges by no older one.
_STATES = {
    "live": "at this revision",
    "idle": "without a decision since",
    "behind": "behind",
    "fresh": "without policies yet",
    "silent": "silent",
}


def _workers(workers: list[Health], revision: int) -> Iterator[str]:
    """What the processes reported in the last minute."""
    if not workers:
        yield "processes    none has reported in the last minute"
        return
    found = Counter(state_of(worker, revision) for worker in workers)
    states = ", ".join(f"{found[state]} {text}" for state, text in _STATES.items() if found[state] or state == "live")
    closed = sum(not worker.down for worker in workers)
    latency = merged(worker.latency for worker in workers)
    failing = sum(bool(worker.errors) for worker in workers)
    errors = f"; errors in {failing}" if failing else ""
    yield f"processes    {len(workers)}; {states}; breaker closed in {closed}{errors}"
    yield f"latency      {_latency(latency)} in the last minute"
    for worker in workers:
        yield f"  {worker.process}"
        yield f"             revision {worker.revision or 'none yet'}, {_latency(worker.latency)}"
        down = ", ".join(f"open to {server} ({reason})" for server, reason in worker.down.items())
        yield f"             breaker {down or 'closed'}"
        for reason, message in sorted(worker.errors.items()):
            known = "" if message.startswith(reason) else f"{reason}: "
            yield f"             error in the last minute: {known}{message}"
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(worker.degraded.items()))
        yield f"             decided without Redis: {reasons or 'none'}"


def _latency(counts: list[int]) -> str:
    p50, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
    if p50 is None or p99 is None:
        return "no decisions"
    return f"{sum(counts)} decisions, p50 {p50 * 1000:.2f} ms, p99 {p99 * 1000:.2f} ms"


def _question(options: dict[str, Any]) -> ExplainQuery:
    if not options["user"] and not options["ip"] and not options["identifier"]:
        raise CommandError("Say who is asking: --user NAME, --ip ADDRESS or --identifier NAME=VALUE")
    user_id = None
    if options["user"]:
        users = get_user_model()._default_manager
        try:
            user_id = str(users.get_by_natural_key(options["user"]).pk)
        except ObjectDoesNotExist as error:
            raise CommandError(f"There is no user {options['user']!r}") from error
    identifiers = {}
    for text in options["identifier"]:
        name, equals, value = text.partition("=")
        if not equals or name not in settings.identifiers:
            known = ", ".join(settings.identifiers) or "none are configured"
            raise CommandError(f"--identifier wants NAME=VALUE with a name from RATEQUOTA['IDENTIFIERS'] ({known})")
        identifiers[name] = value
    slug = options["plan"]
    if slug and not Plan.objects.filter(slug=slug).exists():
        slugs = ", ".join(Plan.objects.values_list("slug", flat=True)) or "none yet"
        raise CommandError(f"There is no plan {slug!r}; there are: {slugs}")
    if settings.plan_resolver and slug is None:
        raise CommandError("PLAN_RESOLVER says the plan, and it needs a request: give --plan SLUG, or '' for none")
    return ExplainQuery(
        user_id=user_id,
        ip=options["ip"] or "",
        identifiers=identifiers,
        plan_slug=slug or None,
        endpoint=options["endpoint"] or "",
        path=options["path"] or "",
        method=options["method"],
    )


def _recall(refusal: refusals.Refusal) -> Iterator[str]:
    """What was decided then."""
    yield f"refused      {refusal.at:%Y-%m-%d %H:%M:%S %Z}, {refusal.count} times in that minute"
    yield f"caller       {_named(refusal.caller)}{f' from {refusal.ip}' if refusal.ip else ''}"
    place = " ".join(part for part in (refusal.method, refusal.route, refusal.scope) if part)
    yield f"request      {place}, cost {refusal.cost}"
    unanswered = f" (Redis gave no answer: {refusal.error})" if refusal.error else ""
    yield f"by           {', '.join(refusal.violated)}{unanswered}"
    for bucket in refusal.buckets:
        verdict = "refused" if bucket.refused else "had room"
        standing = f"{bucket.remaining} of {bucket.limit} left, {verdict}"
        yield f"         {bucket.title} of {_named(bucket.subject)}: {standing}"
    yield "now"


def _named(subject: str) -> str:
    """The subject, with words for that of callers whose value nobody knows."""
    kind = failed_kind(subject)
    return f"{kind} unknown (its function failed)" if kind else subject


def _describe(explanation: Explanation) -> Iterator[str]:
    plan = explanation.plan
    yield f"plan         {plan.name if plan else 'none'} ({explanation.plan_source})"
    if not explanation.candidates and not explanation.built_in:
        yield "No policy is there for this endpoint: nothing is limited"
        return
    yield "policies"
    statuses = {(s.bucket.policy_id, s.bucket.rate): s for s in explanation.decision.statuses}

    def counter(bucket: Bucket) -> str:
        status = statuses.get((bucket.policy_id, bucket.rate))
        return f"{bucket.title} of {_named(bucket.subject)}: {_standing(status) if status else 'no live counter'}"

    for candidate in explanation.candidates:
        policy = candidate.policy
        note = "" if policy.mode == "enforce" else f" [{policy.mode}]"
        yield f"  {policy.id:>5}  {policy.text}{note}, counted per {policy.counted_per}: {candidate.reason}"
        for bucket in candidate.buckets:
            yield f"         {counter(bucket)}"
    for bucket in explanation.built_in:
        yield f"  built in: {counter(bucket)}"
    yield f"decision     {_verdict(explanation)}"


def _standing(status: BucketStatus) -> str:
    if status.allowed:
        return f"{status.remaining} of {status.limit} left, full again in {status.reset_after:.1f} s"
    if status.retry_after is None:
        return f"{status.remaining} of {status.limit} left, never enough for this cost"
    return f"{status.remaining} of {status.limit} left, room again in {status.retry_after:.1f} s"


def _verdict(explanation: Explanation) -> str:
    decision, cost = explanation.decision, explanation.resolution.cost
    verdict = f"a request of cost {cost} would be {'admitted' if decision.allowed else 'refused'} now"
    if decision.violated:
        verdict += f", by {', '.join(decision.violated)}"
    return f"{verdict} (Redis gives no answer: {decision.error})" if decision.degraded else verdict
