"""What competes where: the endpoints of a request, and the groups of policies there.

Both are the same for all requests of a route, so the snapshot remembers them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from .facts import NOBODY, EndpointFacts, PolicyFacts, UserEntry
from .requests.identity import Caller
from .requests.methods import MethodHandling, counts
from .requests.routes import spellings
from .snapshot import Group, Snapshot


class Contest(NamedTuple):
    """A group that a request is subject to, in one place."""

    endpoint: EndpointFacts | None
    counted_per: str
    #: The user's own policies there.
    own: list[PolicyFacts]
    group: Group | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedPolicies:
    """What competes at some endpoints, those without a user's own policies all alike."""

    groups: tuple[Contest, ...]
    #: Kinds of subjects to know of a caller, and whether its address counts as well.
    kinds: tuple[str, ...]
    by_address: bool
    endpoint_ids: tuple[int, ...]
    cost: int


def match_endpoints(
    snapshot: Snapshot,
    *,
    scope: str | None,
    route: str | None,
    name: str | None,
    method: str,
    handling: MethodHandling = "any",
) -> tuple[EndpointFacts, ...]:
    """The endpoints that a request belongs to: the one named by its scope first, then those matched by route.

    ``route`` is the resolved route with a leading slash in the default language, ``name`` the URL name with its
    namespaces. A route with DRF's format suffix matches with and without it, a route that depends on the language in
    each. A scope without an endpoint matches nothing. ``handling`` says what the view does with the method.
    """
    method = "GET" if method == "HEAD" else method
    # All that no endpoint names is alike, so that neither scopes nor methods made up by clients fill the memory.
    if method == "GET" and handling == "any":
        handling = "own"  # the form of a view that takes posts, most often
    key = (
        scope if scope in snapshot.names else None,
        route,
        name,
        method if method in snapshot.methods else "",
        handling,
    )
    remembered = snapshot.memo.endpoints
    matched = remembered.get(key)
    if matched is None:
        matched = _match(snapshot, *key)
        remembered.put(key, matched)
    return matched


def match_policies(
    snapshot: Snapshot, endpoints: tuple[EndpointFacts, ...], scope: str | None, entry: UserEntry
) -> MatchedPolicies:
    """The groups that compete at the endpoints, as ``match_endpoints`` found them, and for the user."""
    own = entry if entry.policies else NOBODY
    named = bool(endpoints) and endpoints[0].name == scope
    remembered, key = snapshot.memo.policies, (endpoints, named, own)
    policies = remembered.get(key)
    if policies is None:
        policies = _find_policies(snapshot, endpoints, named, own)
        remembered.put(key, policies)
    return policies


def contenders(
    caller: Caller, own: list[PolicyFacts], group: Group | None, plan_id: int | None
) -> Iterator[PolicyFacts]:
    """The policies of a group whose audience includes the caller."""
    if own:
        yield from (policy for policy in own if policy.mode != "off")
    if group is None:
        return
    for kind in group.kinds:
        value = caller.value(kind)
        if value:  # no policy is for callers whose value cannot be found out
            yield from group.by_subject.get(f"{kind}:{value}", ())
    if group.by_network and caller.address is not None:
        yield from group.containing(caller.address)
    if plan_id is not None:
        yield from group.by_plan.get(plan_id, ())
    yield from group.everyone


def _match(
    snapshot: Snapshot, scope: str | None, route: str | None, name: str | None, method: str, handling: MethodHandling
) -> tuple[EndpointFacts, ...]:
    routes = () if route is None else spellings(route)
    matched = [
        endpoint
        for endpoint in snapshot.endpoints.values()
        if endpoint.name == scope or any(_matches(pattern, routes, name) for pattern in endpoint.routes)
    ]
    counted = [endpoint for endpoint in matched if counts(endpoint, method, handling, matched)]
    return tuple(sorted(counted, key=lambda endpoint: (endpoint.name != scope, endpoint.id)))


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
    kinds = {one.counted_per for one in found}.difference(("caller", "plan", "everyone"))
    return MatchedPolicies(
        groups=tuple(found),
        kinds=tuple(kinds.union(*[one.group.kinds for one in found if one.group])),
        by_address=any(one.group and one.group.by_network for one in found),
        endpoint_ids=tuple(endpoint.id for endpoint in endpoints),
        cost=(endpoints[0].cost if named else 0) or max((e.cost for e in endpoints), default=1),
    )


def _matches(pattern: str, routes: tuple[str, ...], name: str | None) -> bool:
    """Whether a glob covers a spelling of the route, or the name."""
    if pattern.startswith("/"):
        return any(_covers(pattern, route) for route in routes)
    return name is not None and _covers(pattern, name)


def _covers(pattern: str, text: str) -> bool:
    """Whether a glob covers a text. Only * is special: routes are full of brackets."""
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
