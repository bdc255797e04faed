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


class RequestCost(NamedTuple):
    """The cost of a request that was checked before, for the record of a later check."""

    #: Units of the later check.
    units: int
    #: (endpoint id, the most units of the checks there); id 0 = of all checks.
    each: tuple[tuple[int, int], ...]
    #: The attempt recorded before, which this one replaces: Unix time, endpoint ids, cost.
    before: tuple[int, tuple[int, ...], Any]
    #: The series that counted the request before, see ``packing``.
    counted: tuple[str, ...]

    @property
    def attempt(self) -> tuple[tuple[int, ...], Any]:
        """The endpoint ids of all checks, and the cost: one number where it is the same everywhere, else ``each``."""
        endpoint_ids = tuple(endpoint for endpoint, _cost in self.each if endpoint)
        costs = {cost for _endpoint, cost in self.each}
        return endpoint_ids, self.each if len(costs) > 1 else self.each[0][1]


class DecisionRecord(NamedTuple):
    """What is counted of a decision; equal records are counted together."""

    #: Unix time, whole seconds.
    second: int
    #: ``user:42``, ``ip:203.0.113.7``, ``tenant:acme``; as ``stored_name`` returns it.
    caller: str
    #: The client's address as ``ip:...``; "" when unknown.
    ip: str
    plan_id: int | None
    endpoint_ids: tuple[int, ...]
    #: Units; a ``RequestCost`` where the request was checked before.
    cost: int | RequestCost
    policy_ids: tuple[int, ...]
    allowed: bool
    #: Policies that refused it, or, where it was admitted, would have if they were enforced.
    against: tuple[int | None, ...]

    @property
    def attempt(self) -> tuple[Any, ...]:
        """What was requested, by all checks so far: the fields that do not depend on the decision."""
        return self[:6] if isinstance(self.cost, int) else (*self[:4], *self.cost.attempt)

    @property
    def replaced(self) -> tuple[Any, ...] | None:
        """The attempt of the checks before, which ``attempt`` includes; None = there were none."""
        if isinstance(self.cost, int):
            return None
        second, *before = self.cost.before
        return second, *self[1:4], *before

    @property
    def result(self) -> tuple[Any, ...]:
        """(endpoint_ids, policy_ids, allowed, against): the decision, without the caller."""
        return self.endpoint_ids, self.policy_ids, self.allowed, self.against

    @property
    def counted(self) -> tuple[str, ...]:
        """The series that counted the request at an earlier check."""
        return () if isinstance(self.cost, int) else self.cost.counted


def is_sampled(caller: str, level: int) -> bool:
    """Return whether one in 2^level callers includes this one: the same in every process."""
    return level <= 0 or int.from_bytes(blake2b(caller.encode(), digest_size=8).digest()) >> (64 - level) == 0


def stored_name(name: str) -> str:
    """Return any text as statistics keep it: of bounded length and without lone surrogates."""
    if len(name) > MAX_NAME:
        name = f"{name[:MAX_NAME]}~{digest(name)}"
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


def digest(text: str) -> str:
    """Return ten letters and digits. Keyed: an address could be found from its plain digest by trying all."""
    key = blake2b(str(django_settings.SECRET_KEY).encode()).digest()
    keyed = blake2b(text.encode(errors="surrogatepass"), key=key, digest_size=7).digest()
    return b32encode(keyed).decode().lower()[:10]
