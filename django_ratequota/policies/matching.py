"""Matches a request to its endpoints, and the endpoints to the groups of policies that compete there.

Because both are the same for all requests of a route, the snapshot's memo keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .facts import NOBODY, EndpointFacts, PolicyFacts, UserEntry
from .requests.caller import Caller
from .requests.routes import Handling, spellings
from .snapshot import Group, Snapshot

#: The method of a check without an HTTP request, which counts at the endpoint of its scope, whatever its methods.
NO_METHOD = "-"


class Contest(NamedTuple):
    """The policies that compete at one endpoint (None = all endpoints) and counted_per; one of them wins."""

    endpoint: EndpointFacts | None
    counted_per: str
    #: The user's own policies.
    own: list[PolicyFacts]
    group: Group | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedPolicies:
    """The contests at a set of endpoints. Users without policies of their own share one instance."""

    groups: tuple[Contest, ...]
    #: Kinds of subjects that the contests depend on, and whether they depend on the address as well.
    kinds: tuple[str, ...]
    by_address: bool
    #: Kinds of members of the lists that contests have policies for; () = no contest has one.
    list_kinds: tuple[str, ...]
    endpoint_ids: tuple[int, ...]
    cost: int
    #: Whether limits count months that a caller's assignment may begin on another day.
    monthly: bool = False
    #: Name of an exempt endpoint among these: then no policy applies. "" = none is exempt.
    exempt: str = ""


def match_endpoints(
    snapshot: Snapshot,
    *,
    scope: str | None,
    route: str | None,
    name: str | None,
    method: str,
    handling: Handling = "own",
) -> tuple[EndpointFacts, ...]:
    """Return the endpoints of a request: first the one that its scope names, then those that match its route.

    ``route`` is the resolved route with a leading slash in the default language, ``name`` the URL name with its
    namespaces. A route with DRF's format suffix matches with and without it, a translated route in each language. A
    scope without an endpoint matches nothing. ``handling`` is what the view has for the method.
    """
    method = "GET" if method == "HEAD" else method
    # Scopes and methods that no endpoint names share a key: clients could fill the memo with made-up ones.
    scope = scope if scope in snapshot.names else None
    method = method if method in snapshot.methods or method == NO_METHOD else ""
    key = (scope, route, name, method, handling)
    remembered = snapshot.memo.endpoints
    matched = remembered.get(key)
    if matched is None:
        matched = _match(snapshot, *key)
        remembered.put(key, matched)
    return matched


def match_policies(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], scope: str | None, entry: UserEntry
) -> MatchedPolicies:
    """Return the contests at the endpoints, in the order of ``match_endpoints``, with the user's own policies."""
    own = entry if entry.policies else NOBODY
    named = bool(endpoints) and endpoints[0].name == scope
    remembered, key = snapshot.memo.policies, (endpoints, named, own)
    policies = remembered.get(key)
    if policies is None:
        policies = _find_policies(snapshot, endpoints, named, own)
        remembered.put(key, policies)
    return policies


def contenders(
    caller: Caller, own: list[PolicyFacts], group: Group | None, plan_id: int | None, lists: Collection[int]
) -> Iterator[PolicyFacts]:
    """Yield the policies of a contest whose audience includes the caller, who is in ``lists`` now."""
    if own:
        yield from (policy for policy in own if policy.mode != "off")
    if group is None:
        return
    for kind in group.kinds:
        value = caller.value(kind)
        if value:  # "" = the identifier failed, and no policy names such callers
            yield from group.by_subject.get(f"{kind}:{value}", ())
    if group.by_network and caller.address is not None:
        yield from group.containing(caller.address)
    for list_id in lists:
        yield from group.by_list.get(list_id, ())
    if plan_id is not None:
        yield from group.by_plan.get(plan_id, ())
    yield from group.everyone


def _match(
    snapshot: Snapshot, scope: str | None, route: str | None, name: str | None, method: str, handling: Handling
) -> tuple[EndpointFacts, ...]:
    routes = () if route is None else spellings(route)
    matched = [
        endpoint
        for endpoint in snapshot.endpoints.values()
        if endpoint.name == scope or any(_matches(pattern, routes, name) for pattern in endpoint.routes)
    ]
    counted = [endpoint for endpoint in matched if _counts(endpoint, method, handling)]
    return tuple(sorted(counted, key=lambda endpoint: (endpoint.name != scope, endpoint.id)))


def _counts(endpoint: EndpointFacts, method: str, handling: Handling) -> bool:
    """Whether a request counts at an endpoint that its route or scope matches.

    An exempt endpoint counts only the methods that it names: no exemption is wider than the operator wrote.
    """
    named = method in endpoint.methods
    if named or (endpoint.exempt and endpoint.methods):
        return named
    if not endpoint.methods or method == NO_METHOD:
        return handling != "preflight"
    return handling == "none" and endpoint.methods != {"GET"}


def _find_policies(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], named: bool, entry: UserEntry
) -> MatchedPolicies:
    found: list[Contest] = []
    for endpoint in (None, *endpoints):
        endpoint_id = endpoint.id if endpoint else None
        own: dict[str, list[PolicyFacts]] = {}
        for policy in entry.policies:
            if policy.endpoint_id == endpoint_id:
                own.setdefault(policy.counted_per, []).append(policy)
        groups = snapshot.groups.get(endpoint_id, {})
        found += [Contest(endpoint, per, own.get(per, []), groups.get(per)) for per in {**groups, **own}]
    kinds = {contest.counted_per for contest in found}.difference(("caller", "plan", "everyone"))
    lists = {list_id for contest in found if contest.group for list_id in contest.group.by_list}
    list_kinds = snapshot.members.kinds_of(lists) if lists else frozenset()
    kinds |= list_kinds - {"ip"}
    return MatchedPolicies(
        groups=tuple(found),
        kinds=tuple(kinds.union(*[contest.group.kinds for contest in found if contest.group])),
        by_address="ip" in list_kinds or any(contest.group and contest.group.by_network for contest in found),
        list_kinds=tuple(list_kinds),
        endpoint_ids=tuple(endpoint.id for endpoint in endpoints),
        cost=(endpoints[0].cost if named else 0) or max((e.cost for e in endpoints), default=1),
        monthly=any(one.group and one.group.monthly and one.counted_per not in ("everyone", "ip") for one in found),
        exempt=next((endpoint.name for endpoint in endpoints if endpoint.exempt), ""),
    )


def _matches(pattern: str, routes: tuple[str, ...], name: str | None) -> bool:
    """Whether a glob covers a spelling of the route, or the URL name."""
    if pattern.startswith("/"):
        return any(_covers(pattern, route) for route in routes)
    return name is not None and _covers(pattern, name)


def _covers(pattern: str, text: str) -> bool:
    """Whether a glob covers a text. Only * is special, because routes are full of brackets."""
    first, *parts = pattern.split("*")
    if not parts:
        return text == pattern
    last = parts.pop()
    if not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for part in parts:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return at <= end
