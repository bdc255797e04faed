"""The home of operators on the app's index: status, refusals of the hour, changes of the day, and what comes next."""

from __future__ import annotations

from datetime import timedelta
from operator import itemgetter
from typing import Any

from django.utils import timezone
from django.utils.translation import gettext

from ..models import Endpoint, PlanAssignment, PolicyChange, RatePolicy
from ..monitoring import timeline
from .formatting import moment, number_text, percent
from .names import caller_names, caller_text, endpoint_name, explain_url
from .pages import may_view, mode_text, model_url, reply
from .saves import describe
from .usage.status import Status, current_status, outage_texts
from .usage.traffic import most_refused, sum_counts

#: Endpoints, callers and changes that are listed; starts and ends that are, and for how long ahead.
_LISTED, _COMING, _AHEAD = 3, 5, timedelta(days=30)


def home(site: Any, request: Any) -> dict[str, Any]:
    """Return the parts of the home that the operator may see; each part says so where it cannot be read."""
    context: dict[str, Any] = {}
    if may_view(site, RatePolicy, request):
        mode = mode_text()
        status = Status(text=mode, kind="bad", answered=False) if mode else current_status()
        context |= {name: model_url(site, RatePolicy, name) for name in ("explain", "subjects", "health")}
        context["status"] = status
        context["outages"] = outage_texts()
        if status.answered:
            context["refusals"] = _refusals(site)
    if may_view(site, PolicyChange, request):
        context["changes"] = _changes(site, request)
    context["coming"] = _coming(site, request)
    return context


def _refusals(site: Any) -> dict[str, Any]:
    """Return how many requests were refused lately, and where and whom it concerned most, all of the same time."""
    found, error = reply(lambda: (timeline.timeline("hour"), timeline.top_callers("hour", most=_LISTED)["refused"]))
    if found is None:
        return {"error": error}
    hour, tops = found
    total = sum_counts(hour.total)
    refused = [(pk, counts) for pk, counts in most_refused(hour.endpoints)[:_LISTED] if counts.refused]
    names = dict(Endpoint.objects.filter(pk__in=[pk for pk, _counts in refused]).values_list("pk", "name"))
    users = caller_names([top.caller for top in tops])
    traffic = model_url(site, RatePolicy, "traffic")
    endpoints = [
        (endpoint_name(pk, names), f"{traffic}?endpoint={pk}", number_text(counts.refused)) for pk, counts in refused
    ]
    callers = [
        (caller_text(top.caller, users), explain_url(site, top.caller), number_text(top.counts.refused))
        for top in tops
    ]
    return {
        "number": number_text(total.refused),
        "share": percent(total.refused, total.admitted + total.refused),
        "requests": number_text(total.admitted + total.refused),
        "since": moment(hour.starts[0]),
        "tops": {gettext("Endpoint"): endpoints, gettext("Customer"): callers},
    }


def _coming(site: Any, request: Any) -> list[dict[str, Any]]:
    """Return the next policies and plan assignments to start or to end, the soonest first."""
    now, verbs = timezone.now(), {"starts_at": gettext("starts"), "ends_at": gettext("ends")}
    found: list[tuple[Any, str, Any]] = []
    for model in (RatePolicy, PlanAssignment):
        if not may_view(site, model, request):
            continue
        rows = site.get_model_admin(model).get_queryset(request).select_related("user", "plan")
        if model is RatePolicy:
            rows = rows.exclude(mode=RatePolicy.Mode.OFF).select_related("user", "plan", "endpoint", "subject_list")
        for name, verb in verbs.items():
            dated = rows.filter(**{f"{name}__gt": now, f"{name}__lte": now + _AHEAD}).order_by(name)
            found += [(getattr(row, name), verb, row) for row in dated[:_COMING]]
    found.sort(key=itemgetter(0))
    return [
        {"at": moment(at), "verb": verb, "row": row, "url": model_url(site, type(row), "change", row.pk)}
        for at, verb, row in found[:_COMING]
    ]


def _changes(site: Any, request: Any) -> dict[str, Any]:
    """Return the newest saves of the last day: an import of thousands of rows is one."""
    since = timezone.now() - timedelta(days=1)
    # In the order of the times, which have an index: without any change of the day, no others are read.
    recent = PolicyChange.objects.filter(at__gte=since, first=True).order_by("-at", "-pk")
    newest = list(recent.select_related("actor")[:_LISTED])
    describe(newest)
    return {
        "url": model_url(site, PolicyChange, "changelist", query={"at__gte": since.isoformat(timespec="seconds")}),
        "rows": [
            {"change": change, "url": model_url(site, PolicyChange, "save", change.change_id)} for change in newest
        ],
    }
