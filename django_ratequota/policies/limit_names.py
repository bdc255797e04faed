"""What people call a limit, everywhere but in headers and problem bodies: ``login: 5/min per address``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from django.utils.translation import gettext as _

from ..engine.rates import ALGORITHMS


class Limit(Protocol):
    """A bucket, or what was recorded of one."""

    @property
    def title(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def rate(self) -> Any: ...
    @property
    def counted_per(self) -> str: ...
    @property
    def mode(self) -> str: ...


def limit_name(limit: Limit) -> str:
    """Return the endpoint, the rate without its algorithm, who shares the counter, and whether it is log only."""
    rate = " ".join(word for word in str(limit.rate).split() if word not in ALGORITHMS)
    name = f"{limit.scope or _('all endpoints')}: {rate}"
    if limit.counted_per not in ("", "caller"):
        shared = {"ip": _("per address"), "plan": _("per plan"), "everyone": _("for everyone together")}
        name += f" {shared.get(limit.counted_per, _('per %(name)s') % {'name': limit.counted_per})}"
    return f"{name} ({_('log only')})" if limit.mode == "log" else name


def limit_names(titles: Iterable[str], limits: Iterable[Limit]) -> list[str]:
    """Return what people call the enforced limits with these titles; ``limits`` lacks those without a counter."""
    known = {limit.title: limit for limit in limits if limit.mode == "enforce"}
    return [limit_name(known[title]) if title in known else _without_counter(title) for title in titles]


def _without_counter(title: str) -> str:
    """Return the name of a block, ``search/blocked``, or of a limit that was recorded by its title alone."""
    place, _slash, word = title.rpartition("/")
    words = {"blocked": _("blocked"), "unreadable": _("its rates cannot be read")}
    return f"{_('all endpoints') if place == 'all' else place}: {words[word]}" if word in words else title
