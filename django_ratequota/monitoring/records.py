"""What is recorded of one decision."""

from __future__ import annotations

from base64 import b32encode
from hashlib import blake2b
from typing import Any, NamedTuple

from django.conf import settings as django_settings

#: Characters of a name that statistics keep.
MAX_NAME = 200
#: The plan of a record whose user was not read, because no policy there depends on the user.
UNKNOWN_PLAN = 0


class Recorded(NamedTuple):
    """What the checks of a request have recorded so far, which the record of the next one replaces."""

    #: Unix time, whole seconds.
    second: int
    caller: str
    endpoint_ids: tuple[int, ...]
    #: The most units of these checks; where that differs, (endpoint id, units) for each endpoint, id 0 = everywhere.
    cost: int | tuple[tuple[int, int], ...]
    policy_ids: tuple[int, ...]

    @property
    def costs(self) -> dict[int, int]:
        """The most units for each endpoint."""
        return dict.fromkeys((0, *self.endpoint_ids), self.cost) if isinstance(self.cost, int) else dict(self.cost)

    def covers(self, endpoint_ids: tuple[int, ...], units: int) -> bool:
        """Return whether a check of these endpoints and units adds nothing."""
        costs = self.costs
        return all(costs.get(endpoint, -1) >= units for endpoint in (0, *endpoint_ids))

    def joined(self, before: Recorded) -> Recorded:
        """Return this record of a later check together with the one of the checks ``before``."""
        costs = before.costs
        for endpoint, units in self.costs.items():
            costs[endpoint] = max(units, costs.get(endpoint, 0))
        return self._replace(
            endpoint_ids=tuple(endpoint for endpoint in costs if endpoint),
            cost=tuple(costs.items()) if len(set(costs.values())) > 1 else costs[0],
            policy_ids=tuple({*before.policy_ids, *self.policy_ids}),
        )


class DecisionRecord(NamedTuple):
    """What is counted of a decision; equal records are counted together."""

    #: Unix time, whole seconds.
    second: int
    #: ``user:42``, ``ip:203.0.113.7``, ``tenant:acme``; as ``engine.keys.short`` returns it.
    caller: str
    #: The client's address as ``ip:...``; "" when unknown.
    ip: str
    plan_id: int | None
    endpoint_ids: tuple[int, ...]
    #: Units.
    cost: int
    policy_ids: tuple[int, ...]
    allowed: bool
    #: Policies that refused it, or, where it was admitted, would have if they were enforced.
    against: tuple[int | None, ...]
    #: What the request's earlier checks recorded; None where it was not checked before.
    before: Recorded | None = None

    @property
    def attempt(self) -> tuple[Any, ...]:
        """What was requested, by all checks so far: the fields that do not depend on the decision."""
        if self.before is None:
            return self[:6]
        this = Recorded(self.second, self.caller, self.endpoint_ids, self.cost, self.policy_ids)
        whole = this.joined(self.before)
        return *self[:4], whole.endpoint_ids, whole.cost

    @property
    def replaced(self) -> tuple[Any, ...] | None:
        """The attempt of the checks before, which ``attempt`` includes; None = there were none."""
        before = self.before
        return None if before is None else (before.second, *self[1:4], before.endpoint_ids, before.cost)

    @property
    def result(self) -> tuple[Any, ...]:
        """(endpoint_ids, policy_ids, allowed, against): the decision, without the caller."""
        return self.endpoint_ids, self.policy_ids, self.allowed, self.against

    @property
    def counted(self) -> tuple[str, ...]:
        """The series that counted the request at an earlier check, see ``packing``."""
        if self.before is None:
            return ()
        _second, _caller, endpoint_ids, _cost, policy_ids = self.before
        return "t", *(f"e{pk}" for pk in endpoint_ids or (0,)), *(f"p{pk}" for pk in policy_ids)


def is_sampled(caller: str, level: int) -> bool:
    """Return whether one in 2^level callers includes this one: the same in every process."""
    return level <= 0 or int.from_bytes(blake2b(caller.encode(), digest_size=8).digest()) >> (64 - level) == 0


def digest(text: str) -> str:
    """Return ten letters and digits. Keyed: an address could be found from its plain digest by trying all."""
    key = blake2b(str(django_settings.SECRET_KEY).encode()).digest()
    keyed = blake2b(text.encode(errors="surrogatepass"), key=key, digest_size=7).digest()
    return b32encode(keyed).decode().lower()[:10]
