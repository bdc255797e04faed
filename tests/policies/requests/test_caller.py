"""Who is asking: client addresses through proxies, callers, and whatever identifiers answer."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.test import RequestFactory
from hypothesis import given
from hypothesis import strategies as st

from django_ratequota import check_request
from django_ratequota.models import RatePolicy
from django_ratequota.policies.requests import caller as caller_module
from django_ratequota.policies.requests.caller import Caller, client_address, client_text
from django_ratequota.utils import problems
from tests.project.views import request_from
from tests.support.properties import examples

PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8:ffff::/48"))
CLIENT = "198.51.100.1"


@pytest.mark.parametrize(
    ("remote", "forwarded", "expected"),
    [
        # no proxy: what the client writes is not read
        ("203.0.113.7", CLIENT, "203.0.113.7"),
        ("203.0.113.7", "10.0.0.1", "203.0.113.7"),
        # one and two trusted proxies
        ("10.0.0.1", CLIENT, CLIENT),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", f"{CLIENT}, 10.0.0.2", CLIENT),
        ("2001:db8:ffff::1", f"{CLIENT},10.0.0.2", CLIENT),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        # spoofed hops stand left of the client's own
        ("10.0.0.1", f"1.2.3.4, {CLIENT}", CLIENT),
        ("10.0.0.1", f"1.2.3.4, 10.9.9.9, {CLIENT}, 10.0.0.2", CLIENT),
        # garbage ends the walk at the last hop that was an address
        ("10.0.0.1", f"{CLIENT}, unknown", "10.0.0.1"),
        ("10.0.0.1", f"{CLIENT}, unknown, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", f"{CLIENT},", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1\x00", "10.0.0.1"),
        ("10.0.0.1", "١٩٨.51.100.1", "10.0.0.1"),
        ("10.0.0.1", "," * 100_000, "10.0.0.1"),
        # ports, brackets, blanks
        ("203.0.113.7:4711", "", "203.0.113.7"),
        ("10.0.0.1:80", f"{CLIENT}:4711", CLIENT),
        ("10.0.0.1", "[2001:db8::7]:4711", "2001:db8::7"),
        ("10.0.0.1", f"  {CLIENT}\t", CLIENT),
        # IPv4 in IPv6 clothes is IPv4, as a client and as a proxy
        ("::ffff:203.0.113.7", "", "203.0.113.7"),
        ("::ffff:10.0.0.1", f"::ffff:{CLIENT}", CLIENT),
        # nobody there
        ("", "", None),
        ("", CLIENT, None),
        ("unix:", CLIENT, None),
        ("nonsense", CLIENT, None),
    ],
)
def test_client_address(remote: str, forwarded: str, expected: str | None) -> None:
    found = client_address(remote, forwarded, PROXIES)
    assert found == (None if expected is None else ip_address(expected))


def test_a_trusted_unix_socket_is_a_proxy() -> None:
    for remote, forwarded, expected in [
        ("", CLIENT, CLIENT),
        ("", f"1.2.3.4, {CLIENT}, 10.0.0.2", CLIENT),
        ("", "", None),
        ("", "unknown", None),
        # nginx writes this for a peer on a Unix socket
        ("unix:", CLIENT, CLIENT),
        ("unix:", "", None),
        ("nonsense", CLIENT, CLIENT),
        ("203.0.113.7", CLIENT, "203.0.113.7"),
    ]:
        found = client_address(remote, forwarded, PROXIES, unix=True)
        assert found == (None if expected is None else ip_address(expected))


@given(st.text())
@examples(200)
def test_what_a_client_writes_never_decides_its_address(written: str) -> None:
    assert client_address("10.0.0.1", f"{written}, {CLIENT}", PROXIES) == ip_address(CLIENT)
    assert client_address(CLIENT, written, PROXIES) == ip_address(CLIENT)


@pytest.mark.parametrize(
    ("address", "prefix", "expected"),
    [
        ("2001:db8:1:2:3:4:5:6", 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:3::", 64, "2001:db8:1:3::/64"),
        ("2001:db8:1:2::", 48, "2001:db8:1::/48"),
        ("2001:0DB8::0001", 128, "2001:db8::1"),
        ("fe80::1%eth0", 128, "fe80::1"),
        ("203.0.113.7", 64, "203.0.113.7"),
        ("203.0.113.7", 128, "203.0.113.7"),
    ],
)
def test_ipv6_addresses_count_by_their_network(address: str, prefix: int, expected: str) -> None:
    assert client_text(ip_address(address), prefix) == expected


def test_the_settings_say_who_is_believed_and_what_one_client_is(settings: Any) -> None:
    settings.RATEQUOTA = {"TRUSTED_PROXIES": ["10.0.0.0/8", "unix"], "IPV6_PREFIX": 56}
    forwarded = {"X-Forwarded-For": "2001:db8:1:2ff::7"}
    for proxy in ("10.0.0.1", "", "unix:"):
        caller = Caller(request_from(address=proxy, headers=forwarded))
        assert caller.subject("ip", None) == "ip:2001:db8:1:200::/56"
    settings.RATEQUOTA = {"TRUSTED_PROXIES": ["10.0.0.0/8"]}
    assert Caller(request_from(address="", headers=forwarded)).address is None


@pytest.mark.parametrize(
    ("trusted", "proxy", "headers", "expected"),
    [
        ("10.0.0.0/8", "10.0.0.1", {}, True),
        ("unix", "unix:", {}, True),
        ("10.0.0.0/8", "10.0.0.1", {"X-Forwarded-For": CLIENT}, False),
        ("10.0.0.0/8", "203.0.113.7", {}, False),  # a client
        ("10.0.0.0/8", "unix:", {}, False),
    ],
)
def test_a_trusted_proxy_that_sends_only_forwarded_is_a_problem(
    settings: Any, caplog: Any, trusted: str, proxy: str, headers: dict[str, str], expected: bool
) -> None:
    """All clients behind it are its own address; logged once, not for each request."""
    problems.forget()
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": [trusted]}
    for number in range(2):
        request = request_from(address=proxy, headers={"Forwarded": f"for=198.51.100.{number}", **headers})
        assert Caller(request).subject("ip", None) is not None
    logged = [one.message for one in caplog.records]
    assert logged == [text for text in problems.recent().values() if "X-Forwarded-For" in text]
    assert len(logged) == expected


IDENTIFIERS = {"tenant": "tests.project.views.tenant", "api_key": "tests.project.views.api_key"}


@pytest.mark.parametrize(
    ("order", "logged_in", "key", "expected"),
    [
        (["user", "ip"], True, "k1", "user:7"),
        (["user", "ip"], False, "k1", "ip:203.0.113.7"),
        (["user", "api_key", "ip"], True, "k1", "user:7"),
        (["user", "api_key", "ip"], False, "k1", "api_key:k1"),
        (["user", "api_key", "ip"], False, None, "ip:203.0.113.7"),
        (["api_key", "user"], True, "k1", "api_key:k1"),
        (["api_key", "user"], True, "", "user:7"),
        (["ip"], True, "k1", "ip:203.0.113.7"),
        (["user"], False, "k1", "ip:unknown"),
    ],
)
def test_the_caller_is_the_first_that_answers(
    settings: Any, order: list[str], logged_in: bool, key: str | None, expected: str
) -> None:
    settings.RATEQUOTA = {"CALLER": order, "IDENTIFIERS": IDENTIFIERS}
    request = request_from(User(pk=7) if logged_in else None, headers=None if key is None else {"X-Api-Key": key})
    assert Caller(request).subject("caller", None) == expected


def test_a_caller_of_whom_nothing_is_known() -> None:
    caller, kinds = Caller(request_from(address="")), ("ip", "caller", "plan", "everyone", "tenant")
    assert [caller.subject(kind, None) for kind in kinds] == ["ip:unknown", "ip:unknown", None, "everyone", None]


def test_who_is_not_logged_in_has_no_user_id() -> None:
    request = request_from()
    for user in (None, AnonymousUser(), User(pk=None), User(pk=None, username="unsaved")):
        request.user = user
        assert Caller(request).user_id is None
    assert Caller(RequestFactory().get("/")).user_id is None, "without the middleware"


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_no_two_values_of_an_identifier_share_a_counter(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IDENTIFIERS": IDENTIFIERS}
    RatePolicy.objects.create(counted_per="tenant", rates="1/hour")
    long = "x" * 10**6
    values: list[Any] = ["a", "A", " a", "a ", "{a}", "a}", "}:a{", "a\x00", "a\ud800", "a\udfff", "*", "~a", b"a"]
    values += [long, f"{long}y", "0", 0.5, "user:1", "everyone", "ip:203.0.113.7", "tenant:a"]
    values += ["\u00e9", "e\u0301", "a\r\n", "\u202ea"]
    for value in values:
        assert check_request(request_from(tenant=value)).allowed, ascii(value)[:60]
    for value in values:
        assert not check_request(request_from(tenant=value)).allowed, ascii(value)[:60]


def test_a_header_is_read_once_and_again_under_other_settings(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = caller_module.ip_address

    def counting(text: str) -> Any:
        read.append(text)
        return real(text)

    monkeypatch.setattr(caller_module, "ip_address", counting)
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8"]}
    headers = {"X-Forwarded-For": "2001:db8::7"}

    def subject(headers: dict[str, str]) -> str | None:
        return Caller(request_from(address="10.0.0.1", headers=headers)).subject("ip", None)

    assert [subject(headers) for _ in range(3)] == ["ip:2001:db8::/64"] * 3
    assert read == ["10.0.0.1", "2001:db8::7"]
    settings.RATEQUOTA = {**settings.RATEQUOTA, "IPV6_PREFIX": 48}
    assert subject(headers) == "ip:2001:db8::/48"
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": []}
    assert subject(headers) == "ip:10.0.0.1"
    # Nobody's word is taken, so that no client fills the memory with its own.
    read.clear()
    assert {subject({"X-Forwarded-For": f"203.0.113.{n}"}) for n in range(9)} == {"ip:10.0.0.1"}
    assert read == []


def test_long_headers_are_read_each_time(settings: Any) -> None:
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8"]}
    long = ", ".join(["10.0.0.2"] * 30)
    for n in (1, 2, 1):
        caller = Caller(request_from(address="10.0.0.1", headers={"X-Forwarded-For": f"203.0.113.{n}, {long}"}))
        assert caller.subject("ip", None) == f"ip:203.0.113.{n}"
