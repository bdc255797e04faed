"""The refusals that one process has recorded and not sent yet: those of a minute, described by the first of each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

from ..engine.decision import Decision
from ..engine.keys import short
from ..engine.types import BucketStatus
from ..utils import forks
from ..utils.addresses import network_of
from .packing import MINUTE
from .records import MAX_NAME, DecisionRecord, digest

#: A share's first refusals of a minute, which stay in Redis when there are too many and its others go.
_FIRST_OF_SHARE = 3
#: Fields of a ``DecisionRecord`` and of a ``BucketStatus`` that describe a refusal as they are.
_OF_RECORD = ("caller", "ip", "plan_id", "endpoint_ids", "cost", "against")
_OF_STATUS = ("refused", "limit", "remaining", "retry_after", "reset_after")


@dataclass(slots=True)
class _Refusal:
    second: int  # of the first
    text: str  # as ``_describe`` returns it
    share: object  # key in ``_shares``
    is_later: bool  # the share had ``_FIRST_OF_SHARE`` before
    count: int = 1  # since they were last taken


class PendingRefusals:
    """A process's refusals of the minute, or its would-be refusals, by policies in log mode.

    Clients of one network (/24, IPv6 /48) have a share of the refusals, and the same policies one of the would-be
    refusals.
    """

    def __init__(self, most: int, most_of_share: int) -> None:
        """``most`` have an id in a minute."""
        self.most, self.most_of_share = most, most_of_share
        self._refusals: dict[str, _Refusal] = {}
        #: How many of them each share has.
        self._shares: Counter[Any] = Counter()
        self._lock = forks.lock()

    def __bool__(self) -> bool:
        return bool(self._refusals)

    def add(
        self,
        record: DecisionRecord,
        scope: str,
        route: str,
        method: str,
        decision: Decision,
        assigned_to: str = "",
        plan_named: bool = False,
    ) -> str:
        """Add a refusal; returns its id, "" if there are too many. The last two are those of the ``Resolution``."""
        minute = record.second // MINUTE
        refusal_id = digest(repr((record.caller, record.ip, scope, record.endpoint_ids, record.against, minute)))
        with self._lock:
            known = self._refusals.get(refusal_id)
            if known is not None:
                known.count += 1
                return refusal_id
            share = record.against if record.allowed else _network(record.ip)
            earlier = self._shares[share]
            if len(self._refusals) >= self.most or earlier >= self.most_of_share:
                return ""
            plan = {"assigned_to": short(assigned_to), "plan_named": plan_named}
            text = _describe(record, scope, route, method, decision, plan)
            self._refusals[refusal_id] = _Refusal(record.second, text, share, earlier >= _FIRST_OF_SHARE)
            self._shares[share] += 1
        return refusal_id

    def take(self) -> list[list[Any]]:
        """Return the refusals to send: [id, Unix time, count, description, 1 = its share had others before].

        Refusals of past minutes are forgotten.
        """
        with self._lock:
            current = max((refusal.second // MINUTE for refusal in self._refusals.values()), default=0)
            taken = [
                [refusal_id, refusal.second, refusal.count, refusal.text, int(refusal.is_later)]
                for refusal_id, refusal in self._refusals.items()
                if refusal.count
            ]
            kept = ((name, one) for name, one in self._refusals.items() if one.second // MINUTE == current)
            self._refusals = {name: replace(refusal, count=0) for name, refusal in kept}
            self._shares = Counter(refusal.share for refusal in self._refusals.values())
        return taken


def _describe(
    record: DecisionRecord, scope: str, route: str, method: str, decision: Decision, plan: dict[str, Any]
) -> str:
    """Return the JSON of a refusal, from which ``refusals.Refusal`` is read."""
    described = {name: getattr(record, name) for name in _OF_RECORD}
    described |= {"at": record.second, "method": method[:20], "scope": scope[:MAX_NAME], "route": route[:MAX_NAME]}
    described |= {"error": decision.error, "revision": decision.revision, **plan}
    described["violated"] = [title[:MAX_NAME] for title in decision.violated]
    described["buckets"] = [_describe_bucket(status) for status in decision.statuses]
    return json.dumps(described, ensure_ascii=False).encode(errors="replace").decode()  # without lone surrogates


def _describe_bucket(status: BucketStatus) -> dict[str, Any]:
    """Return the fields of a ``refusals.RefusedBucket``."""
    bucket, described = status.bucket, {name: getattr(status, name) for name in _OF_STATUS}
    described |= {"title": bucket.title[:MAX_NAME], "rate": str(bucket.rate), "policy_id": bucket.policy_id}
    described |= {"scope": bucket.scope[:MAX_NAME], "counted_per": bucket.counted_per, "mode": bucket.mode}
    return {**described, "subject": short(bucket.subject)}


def _network(ip: str) -> str:
    """Return the network of clients that share refusal ids; "" without an address."""
    text = ip.removeprefix("ip:").partition("/")[0]
    return network_of(ip_address(text)) if text else ""
