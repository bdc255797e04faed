"""The refusals that one process has recorded and not sent yet: those of a minute, described by the first of each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from ..engine.decision import Decision
from ..engine.types import BucketStatus
from ..utils.addresses import network_of
from ..utils.locks import ForkSafeLock
from .packing import MINUTE
from .records import MAX_NAME, DecisionRecord, digest, stored_name

#: Most refusals with an id per minute: of all clients, and of one network (/24, IPv6 /48).
MAX_REFUSALS, MAX_OF_NETWORK = 300, 30
#: The same for would-be refusals, by policies in log mode: of all policies, and of one.
MAX_WOULD_BE, MAX_OF_POLICY = 100, 10
#: A network's first refusals of a minute, which stay in Redis when there are too many and its others go.
_FIRST_OF_NETWORK = 3


@dataclass(slots=True)
class _Refusal:
    second: int  # of the first
    minute: int
    text: str  # as ``_describe`` returns it
    share: object  # key in ``_shares``
    #: 0; 1 = the network had ``_FIRST_OF_NETWORK`` before; 2 = a would-be refusal.
    kind: int
    count: int = 1  # since they were last taken


class PendingRefusals:
    """A process's refusals of the minute, would-be ones included."""

    def __init__(self) -> None:
        self._refusals: dict[str, _Refusal] = {}
        #: Network -> its refusals among these; policies in log mode -> their would-be refusals.
        self._shares: Counter[Any] = Counter()
        #: How many of them are would-be refusals.
        self._would_be = 0
        self._lock = ForkSafeLock()

    def __bool__(self) -> bool:
        return bool(self._refusals)

    def add(
        self, record: DecisionRecord, scope: str, route: str, method: str, decision: Decision, assigned_to: str = ""
    ) -> str:
        """Add a refusal, or a would-be refusal; returns its id, "" if there are too many.

        ``assigned_to`` is that of the ``Resolution``.
        """
        minute, would_be = record.second // MINUTE, decision.allowed
        by = record.against if would_be else decision.violated
        refusal_id = digest(repr((record.caller, record.ip, scope, record.endpoint_ids, by, minute)))
        with self._lock:
            known = self._refusals.get(refusal_id)
            if known is not None:
                known.count += 1
                return refusal_id
            share = by if would_be else _network(record.ip)
            earlier = self._shares[share]
            if would_be:
                full = self._would_be >= MAX_WOULD_BE or earlier >= MAX_OF_POLICY
            else:
                full = len(self._refusals) - self._would_be >= MAX_REFUSALS or earlier >= MAX_OF_NETWORK
            if full:
                return ""
            text = _describe(record, scope, route, method, decision, assigned_to)
            kind = 2 if would_be else int(earlier >= _FIRST_OF_NETWORK)
            self._refusals[refusal_id] = _Refusal(record.second, minute, text, share, kind)
            self._shares[share] += 1
            self._would_be += would_be
        return refusal_id

    def take(self) -> list[list[Any]]:
        """Return the refusals to send: [id, Unix time, count, description, kind].

        Refusals of past minutes are forgotten.
        """
        with self._lock:
            current = max((refusal.minute for refusal in self._refusals.values()), default=0)
            taken = [
                [refusal_id, refusal.second, refusal.count, refusal.text, refusal.kind]
                for refusal_id, refusal in self._refusals.items()
                if refusal.count
            ]
            self._refusals = {name: refusal for name, refusal in self._refusals.items() if refusal.minute == current}
            for refusal in self._refusals.values():
                refusal.count = 0
            self._shares = Counter(refusal.share for refusal in self._refusals.values())
            self._would_be = sum(refusal.kind == 2 for refusal in self._refusals.values())
        return taken

    def clear(self) -> None:
        """Drop everything that is not sent yet."""
        self._refusals.clear()
        self._shares.clear()
        self._would_be = 0


def _describe(
    record: DecisionRecord, scope: str, route: str, method: str, decision: Decision, assigned_to: str = ""
) -> str:
    """Return the JSON of a refusal, from which ``refusals.Refusal`` is read."""
    return json.dumps(
        {
            "at": record.second,
            "caller": record.caller,
            "ip": record.ip,
            "plan_id": record.plan_id,
            "scope": scope[:MAX_NAME],
            "route": route[:MAX_NAME],
            "method": method[:20],
            "cost": record.cost if isinstance(record.cost, int) else record.cost.units,
            "violated": [title[:MAX_NAME] for title in decision.violated],
            "error": decision.error,
            "revision": decision.revision,
            "against": record.against,
            "assigned_to": stored_name(assigned_to),
            "buckets": [_describe_bucket(status) for status in decision.statuses],
        }
    )


def _describe_bucket(status: BucketStatus) -> dict[str, Any]:
    """Return the fields of a ``refusals.RefusedBucket``."""
    bucket = status.bucket
    return {
        "title": bucket.title[:MAX_NAME],
        "rate": str(bucket.rate),
        "policy_id": bucket.policy_id,
        "subject": stored_name(bucket.subject),
        "refused": status.refused,
        "limit": status.limit,
        "remaining": status.remaining,
        "retry_after": status.retry_after,
        "reset_after": status.reset_after,
    }


def _network(ip: str) -> str:
    """Return the network whose clients share ``MAX_OF_NETWORK`` refusal ids; "" without an address."""
    text = ip.removeprefix("ip:").partition("/")[0]
    return network_of(ip_address(text)) if text else ""
