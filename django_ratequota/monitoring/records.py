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
    #: Units.
    cost: int
    policy_ids: tuple[int, ...]
    allowed: bool
    #: Policies that refused it, or, where it was admitted, would have if they were enforced.
    against: tuple[int | None, ...]

    @property
    def attempt(self) -> tuple[Any, ...]:
        """What was requested: the fields that do not depend on the decision."""
        return self[:6]

    @property
    def result(self) -> tuple[Any, ...]:
        """(endpoint_ids, policy_ids, allowed, against): the decision, without the caller."""
        return self.endpoint_ids, self.policy_ids, self.allowed, self.against


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
