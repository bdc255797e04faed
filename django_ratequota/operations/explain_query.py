"""A caller and a request to explain: from a form, the command line, or a recorded refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

from django.core.exceptions import ValidationError
from django.urls import Resolver404
from django.utils.translation import gettext as _

from ..conf import settings
from ..models import Endpoint, Plan
from ..monitoring.refusals import Refusal
from ..policies.requests.caller import UNKNOWN, DescribedCaller, client_text
from ..policies.requests.routes import find_route, known_views, resolve_path, resolved
from ..policies.requests.view_declarations import cost_of, least_cost, scope_of, scopes_of, shows_usage
from ..utils.addresses import Network, named_network, unmap
from .explain import Explanation, explain_caller

#: Prefix of identifiers in query strings, because an identifier may have the name of another parameter.
IDENTIFIER = "identifier_"
#: The plan in query strings where PLAN_RESOLVER returns None; no slug has brackets.
NO_PLAN = "(none)"


def caller_params(caller: str) -> dict[str, str]:
    """Return the query string that names a caller: ``user:42`` is ``user=42``; {} without a value."""
    kind, _colon, value = caller.partition(":")
    return {kind if kind in ("user", "ip") else f"{IDENTIFIER}{kind}": value} if value else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainQuery:
    """A caller and a request, as text; the methods raise ``ValidationError`` on what cannot be read."""

    #: Primary key of the user as text; None = anonymous.
    user_id: str | None = None
    #: An address, or the IPv6 network that counts as one client; "" or ``unknown`` = no address.
    ip: str = ""
    #: Values of IDENTIFIERS by name.
    identifiers: Mapping[str, str] = field(default_factory=dict)
    #: Result of PLAN_RESOLVER; None = no plan.
    plan_slug: str | None = None
    #: Endpoint name (scope); "" = none.
    endpoint: str = ""
    #: A path, or a route as written in an endpoint; "" = none.
    path: str = ""
    method: str = "GET"
    #: Units; None = the cost that the view declares, else the endpoint's own.
    cost: int | None = None

    @classmethod
    def from_refusal(cls, refusal: Refusal) -> ExplainQuery:
        """Build a query for the request that was refused, to explain it by the current policies.

        A route that this process does not have is left out: then the scope alone says where the request counts.
        """
        slug = None
        if settings.plan_resolver and refusal.plan_id is not None:
            slug = Plan.objects.filter(pk=refusal.plan_id).values_list("slug", flat=True).first()
        known = Endpoint.objects.filter(name=refusal.scope).exists()
        # Its counters and its plan name identifiers that the caller's name lacks.
        named = dict(subject.partition(":")[::2] for subject in (refusal.ip, *refusal.subjects, refusal.caller))
        return cls(
            user_id=named.get("user"),
            ip=named.get("ip", ""),
            identifiers={kind: value for kind, value in named.items() if kind in settings.identifiers},
            plan_slug=slug,
            endpoint=refusal.scope if known else "",
            path=refusal.route if find_route(refusal.route) else "",
            method=refusal.method,
            cost=refusal.cost,
        )

    def params(self) -> dict[str, str]:
        """Return the query string that asks this."""
        fields = {
            "user": self.user_id,
            "ip": self.ip,
            **{f"{IDENTIFIER}{kind}": value for kind, value in self.identifiers.items()},
            "plan": (self.plan_slug or NO_PLAN) if settings.plan_resolver else "",
            "endpoint": self.endpoint,
            "path": self.path,
            "method": self.method,
            "cost": "" if self.cost is None else str(self.cost),
        }
        return {name: text for name, text in fields.items() if text}

    def caller(self) -> DescribedCaller:
        """Return the caller; raises ``ValidationError`` on ``ip``."""
        address = _address(self.ip.strip())
        return DescribedCaller(
            user_id=self.user_id, address=address, identifiers=dict(self.identifiers), plan_slug=self.plan_slug
        )

    def request_arguments(self) -> dict[str, Any]:
        """Return arguments of ``explain_caller``; raises ``ValidationError`` on ``endpoint`` or ``path``.

        Without a path, the view is the only one that declares the scope, or the usage endpoint.
        """
        scope, path = self.endpoint or None, self.path.strip()
        request: dict[str, Any] = {"scope": scope, "method": self.method.upper()}
        if path:
            route, name, view = _resolve(path)
            declared = scope_of(view, request["method"])
            request |= {"route": route, "name": name, "scope": scope or declared, "view": view}
        elif scope:
            views = [view for _route, _name, view in known_views() if scope in scopes_of(view)]
            request["view"] = views[0] if views and (len(views) == 1 or all(map(shows_usage, views))) else None
        # The usage endpoint has a built-in limit, and need not have a row.
        built_in = shows_usage(request.get("view")) and scope_of(request["view"]) == scope
        if scope and not built_in and not Endpoint.objects.filter(name=scope).exists():
            raise ValidationError({"endpoint": _("There is no endpoint %(name)r.") % {"name": scope[:100]}})
        return request

    @property
    def everywhere(self) -> bool:
        """Whether it names no request, so that the limits at all endpoints are explained."""
        return not (self.endpoint or self.path)

    def explain(self) -> Explanation:
        """Return what applies now; raises ``ValidationError`` and ``django.db.Error``."""
        request, cost = self.request_arguments(), self.cost
        view, method = request.get("view"), request["method"]
        if cost is None and not self.everywhere and request["scope"] == scope_of(view, method):
            declared = cost_of(view, method)
            # A function needs a request.
            cost = None if callable(declared) else least_cost(declared)
        return explain_caller(self.caller(), **request, cost=cost, everywhere=self.everywhere)


def _address(text: str) -> str | None:
    """Return one client's address; None where there is none. Raises ``ValidationError``."""
    if not text or f"ip:{text}" == UNKNOWN:
        return None
    try:
        if "/" not in text:
            return str(ip_address(text))
        network = ip_network(text, strict=False)
    except ValueError as error:
        text = _("%(error)s. Enter an address such as 203.0.113.7.") % {"error": str(error)[:100]}
        raise ValidationError({"ip": text}) from error
    if many_clients(text):
        text = _("%(network)s is a network of many clients. Enter the address of one.")
        raise ValidationError({"ip": text % {"network": network}})
    return str(network[0])


def many_clients(name: str) -> Network | None:
    """Return the network that is named, ``203.0.113.0/24`` or ``ip:203.0.113.0/24``; None if it is one client."""
    network = named_network(name)
    # An IPv6 network may be one client: addresses that share IPV6_PREFIX bits are.
    clients = {client_text(unmap(network[at]), settings.ipv6_prefix) for at in (0, -1)} if network else ()
    return network if len(clients) > 1 else None


def _resolve(path: str) -> tuple[str | None, str | None, Any]:
    """Return (route, URL name, view) of a path or a route, in any language; raises ``ValidationError``."""
    found = find_route(path)
    if found is not None:
        return found
    try:
        match = resolve_path(path.partition("?")[0])
    except Resolver404 as error:
        text = _("No route matches %(path)r. Enter a path such as /api/reports/") % {"path": path[:100]}
        raise ValidationError({"path": text}) from error
    return (*resolved(match), match.func)
