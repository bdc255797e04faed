"""What is noted of one decision: for counts, and, of a refusal, for its id."""

from __future__ import annotations

import json
from base64 import b32encode
from hashlib import blake2b
from ipaddress import ip_address
from typing import Any, NamedTuple

from django.conf import settings as django_settings

from ..engine.types import BucketStatus, Decision
from ..utils.addresses import network_of

#: Characters of a name that statistics keep.
MAX_NAME = 200
#: The plan of a note whose user was not read, because no policy there depends on the user.
UNTOLD_PLAN = 0


class Note(NamedTuple):
    """What is counted of a decision; equal ones are counted together."""

    second: int
    caller: str
    ip: str
    plan_id: int | None
    endpoint_ids: tuple[int, ...]
    cost: int
    policy_ids: tuple[int, ...]
    allowed: bool
    #: Policies that refused it, or, where it was admitted, would have if they were enforced.
    against: tuple[int | None, ...]


def sampled(caller: str, level: int) -> bool:
    """Whether usage is kept of the caller where it is kept of one in 2^level: the same in every process."""
    return level <= 0 or int.from_bytes(blake2b(caller.encode(), digest_size=8).digest()) >> (64 - level) == 0


def bounded(name: str) -> str:
    """A caller's name as statistics keep it: any text, of bounded length and without lone surrogates."""
    if len(name) > MAX_NAME:
        name = f"{name[:MAX_NAME]}~{digest(name)}"
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()


def describe(noted: Note, scope: str, route: str, method: str, decision: Decision) -> str:
    """A refusal as JSON; see ``statistics.Refusal``."""
    return json.dumps(
        {
            "at": noted.second,
            "caller": noted.caller,
            "ip": noted.ip,
            "plan_id": noted.plan_id,
            "scope": scope[:MAX_NAME],
            "route": route[:MAX_NAME],
            "method": method[:20],
            "cost": noted.cost,
            "violated": [title[:MAX_NAME] for title in decision.violated],
            "error": decision.error,
            "revision": decision.revision,
            "buckets": [_bucket(status) for status in decision.statuses],
        }
    )


def _bucket(status: BucketStatus) -> dict[str, Any]:
    bucket = status.bucket
    return {
        "title": bucket.title[:MAX_NAME],
        "rate": str(bucket.rate),
        "policy_id": bucket.policy_id,
        "subject": bounded(bucket.subject),
        "refused": status.refused,
        "limit": status.limit,
        "remaining": status.remaining,
        "retry_after": status.retry_after,
        "reset_after": status.reset_after,
    }


def shared_network(ip: str) -> str:
    """Return the network whose clients share ``collecting.MAX_OF_NETWORK`` refusal ids; "" without an address."""
    text = ip.removeprefix("ip:").partition("/")[0]
    return network_of(ip_address(text)) if text else ""


def digest(text: str) -> str:
    """Ten letters and digits. Keyed, for an address could be found from its plain digest by trying all."""
    key = blake2b(str(django_settings.SECRET_KEY).encode()).digest()
    keyed = blake2b(text.encode(errors="surrogatepass"), key=key, digest_size=7).digest()
    return b32encode(keyed).decode().lower()[:10]
