"""The Quotas page: who has used how much of a rate in the window that runs now, and the list as CSV."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.auth import get_user_model
from django.http import HttpResponseRedirect
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..exceptions import StoreError
from ..models import Endpoint
from ..monitoring.near import LEVELS, Candidate, Window
from ..monitoring.near import windows as near_windows
from ..operations.counters import shared_reason
from ..operations.near import Row, all_near, near_rows
from ..runtime import default_limiter
from .formatting import clock_and_wait, number_text, shown
from .names import caller_text, usernames
from .pages import AdminPage, reply
from .permissions import may
from .usage.export import Table, csv_response
from .usage.labels import explain_url

_PAGE = 50
#: Users found by name, most: their subjects are searched for.
_MOST_USERS = 1_000
_ID = re.compile("[0-9]{1,18}")
#: Chosen at first: near the limit, with or without room left.
_LEVEL = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the operator selected."""

    window: Window | None = None
    level: int = _LEVEL
    endpoint_id: int | None = None
    policy_id: int | None = None
    search: str = ""
    #: Rows on earlier pages.
    start: int = 0

    def query(self, **changes: Any) -> str:
        """Return the query string of a link to this selection with ``changes``."""
        other = replace(self, **{"start": 0, **changes})
        params = {
            "window": other.window and other.window.name,
            "level": other.level,
            "endpoint": other.endpoint_id,
            "policy": other.policy_id,
            "q": other.search or None,
            "start": other.start or None,
        }
        return "?" + urlencode({name: value for name, value in params.items() if value is not None})

    @property
    def filtered(self) -> bool:
        """Whether only some of the window's subjects are selected."""
        return self.endpoint_id is not None or self.policy_id is not None or bool(self.search)


class _NearPage(AdminPage):
    """A page about what the query string selects."""

    def selection(self, request: Any) -> tuple[Selection, list[Window], dict[int, Endpoint]]:
        """Return the selection, and the windows and endpoints to choose from; raises ``StoreError``.

        Warns of parameters that are ignored.
        """
        windows, endpoints = near_windows(), {one.pk: one for one in Endpoint.objects.order_by("name")}
        params = {name: request.GET.get(name, "") for name in ("window", "level", "endpoint", "policy", "start")}
        window = next((one for one in windows if one.name == params["window"]), None)
        numbers = {name: int(text) for name, text in params.items() if _ID.fullmatch(text)}
        known = {
            "window": window is not None,
            "level": numbers.get("level") in LEVELS,
            "endpoint": numbers.get("endpoint") in endpoints,
            "policy": "policy" in numbers,
            "start": "start" in numbers,
        }
        for name, value in params.items():
            if value and not known[name]:
                numbers.pop(name, None)
                text = _("%(name)s=%(value)s was ignored: unknown value.")
                self.admin.message_user(request, text % {"name": name, "value": shown(value)[:60]}, messages.WARNING)
        selection = Selection(
            window=window or next(iter(windows), None),
            level=numbers.get("level", _LEVEL),
            endpoint_id=numbers.get("endpoint"),
            policy_id=numbers.get("policy"),
            search=request.GET.get("q", "").replace("\x00", "").strip()[:200],
            start=numbers.get("start", 0),
        )
        return selection, windows, endpoints

    def matches(self, request: Any, selection: Selection) -> Callable[[Candidate], bool]:
        """Return whether a candidate is selected, and of a policy that the operator may see: two queries at most."""
        endpoint_id, policy_id, text = selection.endpoint_id, selection.policy_id, selection.search.casefold()
        users = _users_named(selection.search) if text else frozenset()
        sees_all = self.admin.sees_all_policies(request)
        visible = (
            frozenset() if sees_all else frozenset(self.admin.get_queryset(request).values_list("pk", flat=True))
        )

        def matches(one: Candidate) -> bool:
            return (
                (sees_all or one.policy_id in visible)
                and (policy_id is None or one.policy_id == policy_id)
                and (endpoint_id is None or one.endpoint_id == endpoint_id)
                and (not text or one.subject in users or text in one.subject.casefold())
            )

        return matches


class QuotasPage(_NearPage):
    """Who is near a limit now, the fullest first."""

    path, name = "quotas/", "quotas"
    media = forms.Media(css={"all": ["django_ratequota/usage.css", "django_ratequota/quotas.css"]})

    def links(self, request: Any, obj: Any) -> list[tuple[str, Any]]:
        """Return the link from a policy to those who are near its limits."""
        return [(self.url(query={"policy": str(obj.pk), "level": str(LEVELS[0])}), _("Quotas"))]

    def view(self, request: Any) -> Any:
        """Return the page; without Redis it says so."""
        absent = reply(lambda: default_limiter().store.absent)[0] or ""
        found, error = (None, "") if absent else reply(lambda: self._found(request))
        context = {"title": gettext("Quotas"), "absent": absent, "error": error, **(found or {})}
        return self.render(request, "quotas.html", context)

    def _found(self, request: Any) -> dict[str, Any]:
        """Return the choices and the rows; raises ``StoreError``."""
        selection, windows, endpoints = self.selection(request)
        choices: dict[str, Any] = {
            "selection": selection,
            "windows": [(one.name, one.title, one == selection.window) for one in windows],
            "levels": [(level, _level_text(level), level == selection.level) for level in LEVELS],
            "endpoint_choices": [(pk, shown(one), pk == selection.endpoint_id) for pk, one in endpoints.items()],
        }
        if selection.window is None:
            return choices
        matches = self.matches(request, selection)
        page = near_rows(selection.window, selection.level, matches, selection.start, _PAGE)
        users = usernames(row.status.bucket.subject for row in page.rows)
        policies = {row.policy.pk: shown(row.policy) for row in page.rows}
        if selection.policy_id is not None:
            policies.setdefault(selection.policy_id, gettext("policy %s") % selection.policy_id)
        now_us, boosts = default_limiter().now_us, may(request.user, "add", override=True)
        counted = not selection.filtered and self.admin.sees_all_policies(request)
        return {
            **choices,
            "title": gettext("Quotas: %s") % selection.window.title,
            "rows": [self._row(row, users, now_us, boosts) for row in page.rows],
            "policy_choices": [(pk, text, pk == selection.policy_id) for pk, text in policies.items()],
            "counts": [
                (_level_text(level), number_text(page.counts[level]), selection.query(level=level))
                for level in LEVELS
                if counted
            ],
            "lower": selection.query(level=LEVELS[0]) if selection.level > LEVELS[0] else "",
            "first": selection.query() if selection.start else "",
            "next": selection.query(start=selection.start + len(page.rows)) if page.more else "",
            "csv": self.admin.page_url("quotas_csv") + selection.query(),
        }

    def _row(self, row: Row, users: Mapping[str, str], now_us: int, boosts: bool) -> dict[str, Any]:
        bucket, policy = row.status.bucket, row.policy
        own = not shared_reason(bucket.counted_per, bucket.subject)
        explain = explain_url(self.site, bucket.subject, bucket.scope) if own else ""
        boost = explain.replace(self.admin.page_url("explain"), self.admin.page_url("boost"), 1)
        end_us = _reset_at(row, now_us) * 10**6
        return {
            "name": caller_text(bucket.subject, users),
            "subject": shown(bucket.subject) if bucket.subject in users else "",
            "policy": shown(f"{policy.audience} × {policy.endpoint or gettext('all endpoints')}"),
            "policy_url": self.admin.page_url("change", policy.pk),
            "rate": str(bucket.rate),
            "logs": bucket.mode == "log",
            "used": number_text(row.status.used),
            "limit": number_text(row.status.limit),
            "percent": row.percent,
            "over": row.percent >= 100,
            "share": _share(row.percent),
            "resets": clock_and_wait(now_us, end_us - now_us),
            "explain": explain,
            "boost": f"{boost}&policy={policy.pk}" if boost and boosts and bucket.mode == "enforce" else "",
        }


class QuotasExport(_NearPage):
    """The selected list as CSV, with all its rows."""

    path, name = "quotas/csv/", "quotas_csv"

    def view(self, request: Any) -> Any:
        """Return the file; redirect to the page with an error if Redis does not answer."""
        try:
            selection, _windows, _endpoints = self.selection(request)
            matches = self.matches(request, selection)
            batches = iter(()) if selection.window is None else all_near(selection.window, selection.level, matches)
            first = next(batches, [])
        except StoreError as error:
            text = _("Redis did not answer (%(reason)s). Nothing was exported. Try again later.")
            self.admin.message_user(request, text % {"reason": error.reason}, messages.ERROR)
            return HttpResponseRedirect(self.admin.page_url("quotas"))
        window = selection.window.name.replace(":", "-") if selection.window else "none"
        return csv_response(f"ratequota-quotas-{window}-{selection.level}", _table(chain([first], batches)))


def _table(batches: Iterator[list[Row]]) -> Table:
    heads = [_("caller"), _("name"), "id", _("policy"), _("endpoint"), _("rate"), _("used"), _("limit")]
    return [*heads, _("percent"), _("resets at")], _lines(batches)


def _lines(batches: Iterator[list[Row]]) -> Iterator[list[Any]]:
    """Yield the lines; when Redis stops answering, the last one says so."""
    try:
        for rows in batches:
            users, now_us = usernames(row.status.bucket.subject for row in rows), default_limiter().now_us
            for row in rows:
                bucket = row.status.bucket
                yield [
                    bucket.subject,
                    caller_text(bucket.subject, users),
                    row.policy.pk,
                    row.policy,
                    bucket.scope,
                    bucket.rate,
                    row.status.used,
                    row.status.limit,
                    row.percent,
                    datetime.fromtimestamp(_reset_at(row, now_us), UTC).isoformat(),
                ]
    except StoreError as error:
        yield [gettext("Redis did not answer (%(reason)s). Rows are missing here.") % {"reason": error.reason}]


def _reset_at(row: Row, now_us: int) -> int:
    """Return when the counter is back to zero, as Unix time in whole seconds."""
    return round((now_us + row.status.reset_after_us) / 10**6)


def _users_named(text: str) -> frozenset[str]:
    """Return the subjects of the users whose name contains the text."""
    model: Any = get_user_model()
    found = model._default_manager.filter(**{f"{model.USERNAME_FIELD}__icontains": text})
    return frozenset(f"user:{pk}" for pk in found.values_list("pk", flat=True)[:_MOST_USERS])


def _share(percent: int) -> str:
    return gettext("%(share)s %%") % {"share": percent}


def _level_text(level: int) -> str:
    return gettext("used up") if level == 100 else gettext("%(share)s %% used or more") % {"share": level}
