"""What a client writes about itself, through the HTTP stack: each true client is admitted its limit, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from django.test import Client

from django_ratequota.models import RatePolicy

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: (path, address, headers)
Call = tuple[str, str, dict[str, str]]
Admitted = Callable[[Iterable[Call]], int]

LIMIT = 3
CLIENT, OTHER, PROXY = "203.0.113.7", "203.0.113.8", "10.0.0.1"
#: DRF's throttle, the decorator on sync and async views, and the middleware with ENFORCE_ALL.
EVERYWHERE = pytest.mark.parametrize("path", ["/search/", "/decorated/", "/adecorated/", "/plain/"])

#: What a client may write into X-Forwarded-For itself.
FORGED = [
    *"198.51.100.1|198.51.100.2|127.0.0.1|10.0.0.2, 10.0.0.3|198.51.100.3, 10.0.0.2".split("|"),
    *"198.51.100.4, unknown, 10.0.0.2|unknown|_hidden|for=198.51.100.5;proto=https|198.51.100.256".split("|"),
    *"198.51.100.7:4711|198.51.100.8:99999:1|[2001:db8::1]:80|[2001:db8::2|2001:db8::3".split("|"),
    *"::ffff:198.51.100.9|fe80::1%eth0|010.0.0.1|0x0a000001|167772161|*||,|,,, ,\t,|\x00|\xff\xfe\xe9".split("|"),
    *(CLIENT, OTHER, PROXY, ", ".join(f"198.51.100.{n}" for n in range(200)), "x" * 8000),
    *("198.51.100.1\r\nX-Forwarded-For: 198.51.100.2", "'; DROP TABLE clients; --"),
]
#: Headers that other software believes; nothing here reads them.
OTHER_HEADERS = (
    "X-Real-IP X-Client-IP X-Cluster-Client-IP True-Client-IP CF-Connecting-IP Fastly-Client-IP Forwarded Via "
    "Remote-Addr X-Forwarded X-Forwarded-Host X-Original-Forwarded-For"
).split()


@pytest.fixture
def admitted(settings: Any) -> Admitted:
    """How many of the calls are not refused, made one after another, under ``LIMIT``/hour per caller."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    RatePolicy.objects.create(rates=f"{LIMIT}/hour")

    def send(calls: Iterable[Call]) -> int:
        statuses = [Client().get(path, REMOTE_ADDR=a, headers=h).status_code for path, a, h in calls]
        assert set(statuses) <= {200, 429}
        return statuses.count(200)

    return send


def call(path: str, address: str, forwarded: str | None = None, **headers: str) -> Call:
    """A request from an address, with what it carries in X-Forwarded-For and other headers."""
    return path, address, headers if forwarded is None else {"X-Forwarded-For": forwarded, **headers}


@EVERYWHERE
def test_an_address_in_a_header(admitted: Admitted, path: str) -> None:
    assert admitted(call(path, CLIENT, forged) for forged in FORGED) == LIMIT
    assert admitted(call(path, CLIENT, **{name: f"198.51.100.{n}"}) for n, name in enumerate(OTHER_HEADERS)) == 0
    assert admitted(call(path, OTHER, CLIENT) for _ in range(LIMIT + 1)) == LIMIT, "nor uses up another's limit"
