"""Every disguise a client can put on, through the HTTP stack: each true client is admitted its limit, no more."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from ipaddress import IPv6Address
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import User
from django.test import AsyncClient, Client

from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.policies.requests.caller import Caller

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

#: (method, path, address, headers)
Call = tuple[str, str, str, dict[str, str]]
Admitted = Callable[[Iterable[Call]], int]

LIMIT = 3
CLIENT, OTHER, PROXY = "203.0.113.7", "203.0.113.8", "10.0.0.1"
#: DRF's throttle, the decorator on sync and async views, and the middleware with ENFORCE_ALL.
PATHS = ["/search/", "/decorated/", "/adecorated/", "/plain/"]
EVERYWHERE = pytest.mark.parametrize(
    ("admitted", "path"),
    [("wsgi", path) for path in PATHS] + [("asgi", path) for path in ("/adecorated/", "/plain/")],
    indirect=["admitted"],
)

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


class Peer(AsyncClient):
    """Connects from an address of its own."""

    address = ""

    async def request(self, **request: Any) -> Any:
        return await super().request(client=(self.address, 4711), **request)


@pytest.fixture(params=["wsgi", "asgi"])
def admitted(request: Any, settings: Any) -> Admitted:
    """How many of the calls are not refused, made one after another, under ``LIMIT``/hour per caller."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "ENFORCE_ALL": True}
    RatePolicy.objects.create(rates=f"{LIMIT}/hour")
    plain, awaited = Client(), Peer()

    async def await_all(calls: list[Call]) -> list[int]:
        statuses = []
        for method, path, awaited.address, headers in calls:
            statuses.append((await awaited.generic(method, path, headers=headers)).status_code)
        return statuses

    def send(calls: Iterable[Call]) -> int:
        if request.param == "asgi":
            statuses = async_to_sync(await_all)(list(calls))
        else:
            statuses = [plain.generic(m, path, REMOTE_ADDR=a, headers=h).status_code for m, path, a, h in calls]
        # A view that does not know the method has been asked all the same.
        assert set(statuses) <= {200, 405, 429}
        return len(statuses) - statuses.count(429)

    return send


def call(path: str, address: str, forwarded: str | None = None, method: str = "GET", **headers: str) -> Call:
    """A request from an address, with what it carries in X-Forwarded-For and other headers."""
    return method, path, address, headers if forwarded is None else {"X-Forwarded-For": forwarded, **headers}


@EVERYWHERE
def test_without_trusted_proxies_nothing_that_is_written_makes_another_client(admitted: Admitted, path: str) -> None:
    assert admitted(call(path, CLIENT, forged) for forged in FORGED) == LIMIT
    assert admitted(call(path, CLIENT, **{name: f"198.51.100.{n}"}) for n, name in enumerate(OTHER_HEADERS)) == 0
    assert admitted(call(path, OTHER, CLIENT) for _ in range(LIMIT + 1)) == LIMIT, "nor uses up another's limit"


@EVERYWHERE
@pytest.mark.parametrize("chain", ["{}", "{},10.9.9.9:8080 ,\t[2001:db8:ffff::1]:443"])
def test_behind_trusted_proxies_the_hop_that_the_proxies_saw_is_the_client(
    admitted: Admitted, settings: Any, path: str, chain: str
) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8", "2001:db8:ffff::/48"]}
    one = (call(path, PROXY, chain.format(f"{forged}, {CLIENT}")) for forged in FORGED)
    assert admitted(one) == LIMIT
    assert admitted(call(path, f"10.0.0.{n}", chain.format(CLIENT)) for n in range(5)) == 0, "by another proxy"
    assert admitted(call(path, CLIENT, forged) for forged in FORGED) == 0, "past the proxies"
    other = (call(path, PROXY, chain.format(f"{CLIENT}, {OTHER}:{port}")) for port in range(1024, 1034))
    assert admitted(other) == LIMIT, "from one port after another"


@EVERYWHERE
def test_garbage_where_a_proxy_should_name_the_client_counts_for_the_proxy(
    admitted: Admitted, settings: Any, path: str
) -> None:
    """Fewer counters for those behind a proxy that names nobody, never more."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8"]}
    garbage = ["unknown", "", " ", "_7f", "1.2.3.4.5", "for=1.2.3.4", "\x00", "%31.2.3.4", "1.2.3.4 5", "x" * 999]
    assert admitted(call(path, PROXY, f"198.51.100.{n}, {text}") for n, text in enumerate(garbage)) == LIMIT
    assert admitted([call(path, PROXY)]) == 0
    assert admitted(call(path, PROXY, CLIENT) for _ in range(LIMIT + 1)) == LIMIT


@EVERYWHERE
def test_mapped_ipv4_clients_are_their_ipv4_selves(admitted: Admitted, settings: Any, path: str) -> None:
    """A /64 mask put on mapped addresses made all of IPv4 one client."""
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8"]}
    spelt = "{0}|::ffff:{0}|::FFFF:{0}|0:0:0:0:0:ffff:{0}|[::ffff:{0}]:4711|{0}:4711".split("|")
    for last in (7, 8, 9, 10):
        address = f"203.0.113.{last}"
        assert admitted(call(path, spelling.format(address)) for spelling in spelt) == LIMIT
        assert admitted(call(path, f"::ffff:cb00:71{last:02x}") for _ in range(2)) == 0
        forwarded = (call(path, "::ffff:10.0.0.1", f"9.9.9.9,{spelling.format(address)}") for spelling in spelt)
        assert admitted(forwarded) == 0


def test_two_to_the_sixteenth_addresses_of_one_network_are_one_client() -> None:
    first = int(IPv6Address("2001:db8:1:2::"))
    rng = random.Random(64)
    within = [first + n for n in range(2**15)] + [first + rng.getrandbits(64) for _ in range(2**15)]
    requests = (SimpleNamespace(META={"REMOTE_ADDR": str(IPv6Address(address))}) for address in within)
    assert {Caller(request).subject("ip", None) for request in requests} == {"ip:2001:db8:1:2::/64"}


@EVERYWHERE
def test_a_network_of_ipv6_addresses_has_one_limit(admitted: Admitted, settings: Any, path: str) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8"]}
    rng = random.Random(path)
    first = int(IPv6Address("2001:db8:1:2::"))

    def addresses(network: int) -> list[str]:
        found = [IPv6Address(first + (network << 64) + rng.getrandbits(64)) for _ in range(20)]
        return [text for a in found for text in (str(a), a.exploded.upper(), f"[{a}]:{rng.randrange(1, 65536)}")]

    assert admitted(call(path, text) for text in addresses(0)) == LIMIT
    assert admitted(call(path, PROXY, f"198.51.100.9, {text}") for text in addresses(0)) == 0
    for neighbour in (-1, 1):
        assert admitted(call(path, text) for text in addresses(neighbour)[: LIMIT + 2]) == LIMIT


@EVERYWHERE
def test_every_method_counts_however_it_is_spelt(admitted: Admitted, path: str) -> None:
    methods = "GET HEAD get Head OPTIONS options POST PUT PATCH DELETE TRACE PROPFIND X".split()
    for n, method in enumerate(methods[::4]):
        assert admitted(call(path, f"198.51.100.{n}", method=method) for _ in range(LIMIT)) == LIMIT, method
        assert admitted(call(path, f"198.51.100.{n}", method=other) for other in methods) == 0, method


@EVERYWHERE
def test_hosts_schemes_and_queries_are_one_door(admitted: Admitted, path: str) -> None:
    hosts = "testserver TESTSERVER testserver:80 TestServer. localhost 127.0.0.1:8000 evil.example".split()
    asked = [call(f"{path}?page={n}", CLIENT, Host=host) for n, host in enumerate(hosts)]
    assert admitted(asked) == LIMIT
    assert admitted([call(path, CLIENT, Accept="text/html", Cookie="sessionid=1; a=b", **{"User-Agent": "x"})]) == 0


def test_every_spelling_of_a_path_that_reaches_the_view_is_its_endpoint(admitted: Admitted) -> None:
    """The view is found without regard to case or trailing slash; its endpoint is found by the view's own name."""
    files = Endpoint.objects.create(name="files", routes="files")
    items = Endpoint.objects.create(name="items", routes="/v1/items/*")
    RatePolicy.objects.update(rates="1000/hour")
    for endpoint in (files, items):
        RatePolicy.objects.create(endpoint=endpoint, rates=f"{LIMIT}/hour")
    spellings = ["/files/", "/FILES/", "/files", "/FiLeS", "/%66iles/", "/files/?", "/files?/", "/fil%65s?a=/x/"]
    assert admitted(call(path, CLIENT) for path in spellings) == LIMIT
    assert admitted(call(path, CLIENT) for path in (f"/v1/items/{n}/" for n in ("1", "2", "001", "4" * 20))) == LIMIT
    assert admitted(call("/plain/", CLIENT) for _ in range(5)) == 5


def test_names_do_not_multiply_an_address(admitted: Admitted) -> None:
    """Counted per ip, one who logs in as somebody else each time is one client still."""
    RatePolicy.objects.update(rates=f"{LIMIT}/hour", counted_per="ip")
    names = [User.objects.create(username=f"user{n}").username for n in range(2 * LIMIT)]
    asked = [call("/search/", CLIENT, FORGED[n], Authorization=f"Name {name}") for n, name in enumerate(names)]
    assert admitted(asked) == LIMIT
