"""Redis keys: the one place where a key is built.

``{prefix}:{<subject>}:<endpoint>:<algorithm><period>``, such as ``rq:{user:42}:7:tb60``; a queue's ends in ``queue``,
one that counts beside an enforced policy's in ``log``.
The subject in braces is the Cluster hash tag. A key has at most 128 bytes, and two different counters never share
one, whatever the text.
"""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from datetime import date
from functools import lru_cache
from hashlib import blake2b

from ..exceptions import InvalidBucket
from .rates import CONCURRENT
from .types import Bucket

_ALGORITHM = {
    "fixed_window": "fw",
    "sliding_window_log": "sl",
    "sliding_window_counter": "sc",
    "token_bucket": "tb",
    "leaky_bucket": "lb",
    "gcra": "gc",
    "concurrent": "co",
}
#: Subjects that clients cannot choose stay readable; every other kind (API keys, header values) is hashed.
_READABLE = re.compile(r"(?:everyone|(?:user|plan|ip):[0-9A-Za-z_.:/-]{1,43})", re.ASCII)
_READABLE_SCOPE = re.compile(r"[A-Za-z_][0-9A-Za-z_-]{0,26}", re.ASCII)
_READABLE_PER = re.compile(r"[a-z0-9_]{1,12}", re.ASCII)
_KIND = re.compile(r"[a-z0-9_]{1,16}(?=:)", re.ASCII)
_PREFIX = re.compile(r"[0-9A-Za-z_.:-]{1,16}", re.ASCII)
#: The longest text from a client that is not hashed; no policy's subject is longer.
_MAX_TEXT = 200
#: Nor has any NUL or lone surrogates, on which databases' drivers raise.
_STORED = re.compile(f"[^\0\ud800-\udfff]{{,{_MAX_TEXT}}}")


def check_prefix(prefix: str) -> str:
    """Return the prefix; raises ``InvalidBucket`` when keys cannot begin with it."""
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise InvalidBucket("PREFIX must be 1 to 16 ASCII letters, digits or _ . : -")
    return prefix


def bucket_key(prefix: str, bucket: Bucket) -> str:
    """Return the key of the bucket's counter."""
    rate = "queue" if bucket.queued else _rate(bucket.rate.algorithm, bucket.rate.period, bucket.rate.counts)
    return f"{prefix}:{beginning(bucket.subject)}{_endpoint(bucket)}:{rate}{'log' if bucket.beside else ''}"


def window_key(key: str, first_day: date) -> str:
    """Return the key of one calendar window of a counter, by its key."""
    return f"{key}:{first_day}"


def is_per_caller(counter: str) -> bool:
    """Whether the subject's counter of this name is counted per caller, and not per a kind that the policy names."""
    return "." not in counter.rsplit(":", 2)[-2]


def counter_name(bucket: Bucket) -> str:
    """Return the name of the bucket's counter in the database: its key without the prefix, whatever the day."""
    return bucket_key("", bucket)[1:]


def beginning(subject: str) -> str:
    """Return what the names of the subject's counters begin with."""
    return f"{{{subject_tag(subject)}}}:"


def window_name(counter: str, first_day: date) -> tuple[str, str]:
    """Return the tag of the subject, and what names the window among the subject's own; takes ``counter_name``."""
    tag, _braces, name = window_key(counter, first_day)[1:].partition("}:")
    return tag, name


def short(text: str) -> str:
    """Return the text, or a digest of one that is long or that databases refuse; no two subjects share one.

    Clients must not choose how much memory they use.
    """
    return text if _STORED.fullmatch(text) else f"~{_digest(text)}"


def revision_key(prefix: str) -> str:
    """Return the key of the policies' revision."""
    return f"{prefix}:revision"


def own_keys(prefix: str) -> str:
    """Return the pattern of all other keys; those of a longer prefix, such as ``rq:b`` beside ``rq``, don't match."""
    return f"{prefix}:{{*"


def workers_key(prefix: str, worker: str = "") -> str:
    """Return the key of the list of reporting processes, or of one's report; no subject's tag is ``workers``."""
    return f"{prefix}:{{workers}}:{worker}" if worker else f"{prefix}:{{workers}}"


def statistics_key(prefix: str, name: str) -> str:
    """Return the key of a part of the statistics; all share one Cluster slot. No subject's tag is ``statistics``."""
    return f"{prefix}:{{statistics}}:{name}"


def subject_tag(subject: str) -> str:
    """Return what stands for the subject in the keys of its counters."""
    if _READABLE.fullmatch(subject):
        return subject
    kind = _KIND.match(subject)
    return f"{kind[0] if kind else ''}:~{_digest(subject)}"


def _endpoint(bucket: Bucket) -> str:
    if bucket.endpoint_id is not None:
        endpoint = str(bucket.endpoint_id)
    else:
        endpoint = _readable(bucket.scope, _READABLE_SCOPE) if bucket.scope else "0"
    # Because an anonymous caller is ip:X, and so is anyone at X under a policy counted per ip: two counters.
    if bucket.counted_per in ("", "caller", "plan", "everyone"):
        return endpoint
    name = f"{endpoint}.{_readable(bucket.counted_per, _READABLE_PER)}"
    # The longest prefix, subject and rate leave 39 of 128 bytes. No scope's own digest begins with a dot.
    return name if len(name) <= 39 else f".~{_digest(name)}"


def _readable(text: str, pattern: re.Pattern[str]) -> str:
    return text if pattern.fullmatch(text) else f"~{_digest(text)}"


@lru_cache
def _rate(algorithm: str, period: float | str, counts: str) -> str:
    if algorithm == CONCURRENT:
        return _ALGORITHM[algorithm]
    if isinstance(period, float | int):
        period_us = round(period * 10**6)
        period = f"{period_us}us" if period_us % 10**6 else str(period_us // 10**6)
    return f"{_ALGORITHM[algorithm]}{period}{'r' if counts == 'requests' else ''}"


def _digest(text: str) -> str:
    # surrogatepass: lone surrogates are text too. 120 bits: nobody finds a collision.
    return urlsafe_b64encode(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=15).digest()).decode()
