"""Locking others out of their accounts, and clients with whole networks of addresses."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client, RequestFactory

from django_ratequota import check_request
from django_ratequota.changes.validators import canonical_subject
from django_ratequota.identifiers import network
from django_ratequota.models import RatePolicy
from django_ratequota.policies.requests.caller import Caller, client_address
from django_ratequota.utils.addresses import unmap, unmap_network
from tests.package.test_docs import Page
from tests.project.views import request_from
from tests.security.test_promises import with_database
from tests.support.properties import thorough_after
from tests.support.snippets import ROOT

CROSS_SITE = {"HTTP_ORIGIN": "https://evil.example", "REMOTE_ADDR": "198.51.100.1"}


# --- The login of the how-to, as it stands there. ---


@pytest.fixture
def how_to(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Its views, settings and policies; alice and bob as its page has them, and nothing used yet."""
    for name in ("alice", "bob"):
        User.objects.create_user(name, password="secret")
    path = ROOT / "docs" / "howto" / "login.md"
    page = Page(path, settings, monkeypatch, tmp_path)
    end = path.read_text().partition("\n## Failed authentication")[0].count("\n")
    page._snippets = [one for one in page._snippets if one.line < end and (one.file or one.language == "yaml")]
    page.run()


def log_in(name: str, password: str, address: str) -> int:
    """As a browser does that has loaded the form: with the cookie and the token of this site."""
    browser = Client(enforce_csrf_checks=True, REMOTE_ADDR=address)
    browser.cookies["csrftoken"] = token = "t" * 32
    fields = {"username": name, "password": password, "csrfmiddlewaretoken": token}
    return browser.post("/login/", fields).status_code


@with_database
@pytest.mark.parametrize("with_middleware", [True, False])
def test_forms_on_another_site(how_to: None, settings: Any, with_middleware: bool) -> None:
    """Five forms that a page elsewhere sent from the victim's own browser locked the victim's address and name."""
    if not with_middleware:
        settings.MIDDLEWARE = [one for one in settings.MIDDLEWARE if "csrf" not in one.lower()]
    browser = Client(enforce_csrf_checks=True)
    forged = [browser.post("/login/", {"username": "alice", "password": "x"}, **CROSS_SITE) for _ in range(30)]
    assert {response.status_code for response in forged} == {403}
    assert not any("RateLimit" in response for response in forged)
    assert log_in("alice", "secret", "198.51.100.1") == 200


@with_database
def test_a_guesser_elsewhere_locks_out_himself(how_to: None) -> None:
    assert [log_in("alice", "secret", "203.0.113.7") for _ in range(25)] == [200] * 25, "right ones are not counted"
    guesses = [log_in("alice", "guess", "203.0.113.7") for _ in range(8)]
    assert guesses == [400] * 5 + [429] * 3
    assert log_in("alice", "secret", "198.51.100.1") == 200
    assert log_in("bob", "secret", "203.0.113.7") == 200


@with_database
def test_many_addresses_at_one_name_end_at_its_own_fuse(how_to: None) -> None:
    statuses = [log_in("alice", "guess", f"10.{n}.0.1") for n in range(130)]
    assert statuses.count(400) in range(100, 103), "a slow run gets some back"
    assert log_in("bob", "secret", "10.1.0.1") == 200


@with_database
@pytest.mark.parametrize("address", thorough_after(1, ["203.0.113.{}", "2001:db8:7:{}::1"]), ids=["IPv4", "IPv6"])
def test_many_addresses_of_one_network(how_to: None, address: str) -> None:
    """Each address of a /48 has a name of its own to guess at: 65,536 counters of an IPv6 client's."""
    statuses = [log_in(f"user{n}", "guess", address.format(n % 250)) for n in range(340)]
    assert statuses.count(400) in range(300, 304), "a slow run gets some back"
    assert log_in("alice", "secret", "198.51.100.1") == 200


# --- Networks. ---


def test_a_client_s_network() -> None:
    for address, expected in {
        "203.0.113.7": "203.0.113.0/24",
        "::ffff:203.0.113.7": "203.0.113.0/24",
        "64:ff9b::203.0.113.7": "203.0.113.0/24",
        "2001:db8:1:2::7": "2001:db8:1::/48",
        "": "unknown",
    }.items():
        assert network(RequestFactory().get("/", REMOTE_ADDR=address)) == expected


# --- IPv4 clients of an IPv6 server: NAT64. ---


def test_ipv4_written_as_ipv6() -> None:
    for address, expected in {
        "64:ff9b::cb00:7107": "203.0.113.7",
        "::ffff:10.0.0.1": "10.0.0.1",
        "203.0.113.7": "203.0.113.7",
    }.items():
        assert unmap(ip_address(address)) == ip_address(expected)
    for unchanged in (
        # Not of the well-known prefix: who knows where the address stands; 6to4; Teredo.
        *("64:ff9b:1::cb00:7107", "64:ff9b::1:cb00:7107", "2002:cb00:7107::1", "2001:0:cb00:7107::1"),
        # No translator may write these: they would be from within, or a trusted proxy.
        *("64:ff9b::", "64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "64:ff9b::172.31.0.1", "64:ff9b::192.168.1.1"),
        *("64:ff9b::100.64.0.1", "64:ff9b::169.254.0.1"),
    ):
        assert unmap(ip_address(unchanged)) == ip_address(unchanged)


def test_a_network_behind_a_nat64() -> None:
    for written, expected in {
        "64:ff9b::203.0.113.0/120": "203.0.113.0/24",
        "64:ff9b::203.0.113.7": "203.0.113.7/32",
        "::ffff:203.0.113.0/120": "203.0.113.0/24",
        "64:ff9b::/96": "64:ff9b::/96",
        "64:ff9b::10.0.0.0/104": "64:ff9b::a00:0/104",
        "203.0.113.0/24": "203.0.113.0/24",
    }.items():
        assert unmap_network(ip_network(written)) == ip_network(expected)


def test_the_way_through_proxies_reads_such_addresses(settings: Any) -> None:
    proxies = [ip_network("10.0.0.0/8"), ip_network("198.51.100.0/24")]
    assert client_address("64:ff9b::198.51.100.1", "64:ff9b::203.0.113.7", proxies) == ip_address("203.0.113.7")
    forged = client_address("64:ff9b::10.0.0.1", "203.0.113.7", proxies)
    assert forged == ip_address("64:ff9b::a00:1"), "no proxy of ours"
    settings.RATEQUOTA = {"TRUSTED_PROXIES": ["64:ff9b::198.51.100.0/120", "::ffff:10.0.0.0/104"]}
    for peer in ("64:ff9b::198.51.100.1", "198.51.100.1", "10.0.0.1"):
        assert (
            Caller(request_from(address=peer, headers={"X-Forwarded-For": "203.0.113.7"})).value("ip")
            == "203.0.113.7"
        )


@with_database
def test_a_policy_stored_in_another_spelling_goes_on() -> None:
    policy = RatePolicy.objects.create(subject="203.0.113.7", rates="blocked")
    assert canonical_subject("64:ff9b::203.0.113.7") == "ip:203.0.113.7"
    assert canonical_subject("ip:64:ff9b::cb00:7100/120") == "ip:203.0.113.0/24"
    with connection.cursor() as cursor:
        cursor.execute("UPDATE django_ratequota_ratepolicy SET subject = %s", ["ip:64:ff9b::cb00:7107"])
    policy.refresh_from_db()
    assert policy.subject == "ip:64:ff9b::cb00:7107"
    for address in ("203.0.113.7", "64:ff9b::203.0.113.7", "::ffff:203.0.113.7"):
        assert not check_request(request_from(address=address)).allowed, address
