"""Whom operators ask about, and where: said in a form, on the command line, or by a refusal that was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network
from typing import Any

from django.core.exceptions import ValidationError
from django.urls import Resolver404
from django.utils.translation import gettext as _

from ..conf import settings
from ..models import Endpoint, Plan
from ..monitoring.refusals import Refusal
from ..policies.requests.identity import UNKNOWN, DescribedCaller, client_text
from ..policies.requests.routes import find_route, known_views, resolve_path, resolved
from ..policies.requests.views import scope_of
from ..recording.validators import visible
from ..utils.addresses import unmap
from .explain import Explanation, explain_caller

#: Names of endpoints that a message lists.
_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """A caller and a request of theirs, in words; what cannot be read is told when it is asked for."""

    #: Primary key of the user as text; None = anonymous.
    user_id: str | None = None
    #: An address, or the IPv6 network that counts as one client; ``unknown`` = none could be told.
    ip: str = ""
    #: What IDENTIFIERS would answer, by name.
    identifiers: Mapping[str, str] = field(default_factory=dict)
    #: What PLAN_RESOLVER would answer; None = nothing.
    plan_slug: str | None = None
    #: An endpoint's name; "" = none named.
    endpoint: str = ""
    #: A path, or a route as endpoints list it; "" = none.
    path: str = ""
    method: str = "GET"
    #: Units; None = the endpoint's own cost.
    cost: int | None = None

    @classmethod
    def about(cls, caller: str, ip: str = "", **where: Any) -> ExplainQuery:
        """About a caller as counters and refusals name them: ``user:42``, ``ip:203.0.113.7``, ``tenant:acme``."""
        kind, _colon, value = caller.partition(":")
        return cls(
            user_id=value if kind == "user" else None,
            ip=ip.partition(":")[2] or (value if kind == "ip" else ""),
            identifiers={} if kind in ("user", "ip") else {kind: value},
            **where,
        )

    @classmethod
    def of(cls, refusal: Refusal) -> ExplainQuery:
        """The request that was refused, to be asked about as things stand now."""
        slug = None
        if settings.plan_resolver and refusal.plan_id is not None:
            slug = Plan.objects.filter(pk=refusal.plan_id).values_list("slug", flat=True).first()
        known = Endpoint.objects.filter(name=refusal.scope).exists()
        found = cls.about(
            refusal.caller,
            refusal.ip,
            plan_slug=slug,
            endpoint=refusal.scope if known else "",
            path=refusal.route,
            method=refusal.method,
            cost=refusal.cost,
        )
        # Counters name what the caller's name does not: what refused comes first, as forms ask about one.
        subjects = [one.subject for one in sorted(refusal.buckets, key=lambda one: not one.refused)]
        counted = {kind: value for kind, _colon, value in (subject.partition(":") for subject in subjects)}
        known_kinds = {kind: value for kind, value in counted.items() if kind in settings.identifiers}
        return replace(found, identifiers={**known_kinds, **found.identifiers})

    def caller(self) -> DescribedCaller:
        """Who asks; raises ``ValidationError`` on ``ip``."""
        try:
            address = _address(self.ip.strip())
        except ValidationError as error:
            raise ValidationError({"ip": error}) from error
        return DescribedCaller(
            user_id=self.user_id, address=address, identifiers=dict(self.identifiers), plan_slug=self.plan_slug
        )

    def place(self) -> dict[str, Any]:
        """What ``explain_caller`` takes beside the caller; raises ``ValidationError`` on ``endpoint`` or ``path``."""
        scope = self.endpoint or None
        if scope and not Endpoint.objects.filter(name=scope).exists():
            names = ", ".join(Endpoint.objects.values_list("name", flat=True)[:_LISTED]) or _("none yet")
            text = _("There is no endpoint %(name)r; there are: %(names)s")
            raise ValidationError({"endpoint": text % {"name": scope[:100], "names": visible(names)}})
        where: dict[str, Any] = {"scope": scope, "method": self.method.upper()}
        path = self.path.strip()
        if path:
            route, name, view = _resolve(path)
            where |= {"route": route, "name": name, "scope": scope or scope_of(view), "view": view}
        elif scope and where["method"] not in ("GET", "HEAD"):
            views = [view for _, _, view in known_views() if scope_of(view) == scope]
            where["view"] = views[0] if len(views) == 1 else None
        return where

    def explain(self) -> Explanation:
        """What applies now; raises ``ValidationError`` and ``django.db.Error``."""
        return explain_caller(self.caller(), **self.place(), cost=self.cost)


def _address(text: str) -> str | None:
    """One client's address; None where there is none."""
    if not text or f"ip:{text}" == UNKNOWN:
        return None
    try:
        if "/" not in text:
            return str(ip_address(text))
        network = ip_network(text, strict=False)
    except ValueError as error:
        raise ValidationError(
            _("%(error)s; write an address such as 203.0.113.7."), params={"error": str(error)[:100]}
        ) from error
    # An IPv6 network may be one client: addresses that share IPV6_PREFIX bits are.
    if len({client_text(unmap(network[at]), settings.ipv6_prefix) for at in (0, -1)}) > 1:
        raise ValidationError(
            _("%(network)s is many clients; write the address of one."), params={"network": network}
        )
    return str(network[0])


def _resolve(path: str) -> tuple[str | None, str | None, Any]:
    """(route, URL name, view) of a path, or of a route as endpoints list it, in whichever language."""
    found = find_route(path)
    if found is not None:
        return found
    try:
        match = resolve_path(path.partition("?")[0])
    except Resolver404 as error:
        text = _("No route matches %(path)r; write a path such as /api/reports/") % {"path": path[:100]}
        raise ValidationError({"path": text}) from error
    return (*resolved(match), match.func)
