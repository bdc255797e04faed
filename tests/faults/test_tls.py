"""TLS: certificates that are renewed, and connections that end while they are idle; with hiredis and without."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from django_ratequota import Limiter

from . import poll
from .asking import ENDLESS, Ask, Begin, failure, outcomes
from .servers import Node
from .wire import Wire

Make = Callable[..., Limiter]

#: Connections that are idle at once.
IDLE = 8
#: Seconds in which a slow machine opens them.
LONG = 30


def behind_tls(node: Node, server: trustme.CA, clients: trustme.CA) -> Wire:
    """TLS in front of ``node``, with a certificate by ``server``; its clients need one by ``clients``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    server.issue_cert("127.0.0.1").configure_cert(context)
    clients.configure_trust(context)
    return Wire(node, context=context)


def write_certificate(authority: trustme.CA, path: Path) -> None:
    authority.issue_cert("client@example.com").private_key_and_cert_chain_pem.write_to_path(str(path))


@pytest.mark.parametrize("renewed", ["the client's certificate", "the authority's"])
def test_certificates_are_renewed_in_place(
    node: Node, authority: trustme.CA, trusted: str, tmp_path: Path, limiters: Make, ask: Ask, renewed: str
) -> None:
    """Every awaited decision failed until the worker restarted, and opened the breaker that threads share."""
    own, later = tmp_path / "own.pem", trustme.CA()
    write_certificate(authority, own)
    by_client = renewed == "the client's certificate"
    before = behind_tls(node, authority, authority)
    after = behind_tls(node, authority if by_client else later, later if by_client else authority)
    with before, after, Wire(before) as address:
        pem = str(own)
        limiter = limiters(address, ssl=True, ssl_ca_certs=trusted, ssl_certfile=pem, ssl_keyfile=pem)
        assert ask(limiter, [ENDLESS]).allowed
        if by_client:
            write_certificate(later, own)
        else:
            later.cert_pem.write_to_path(trusted)
        address.target = after
        address.hang_up()
        before.hang_up()
        assert [failure(ask, limiter, [ENDLESS]) for _ in range(4)] == [""] * 4
        assert limiter.check([ENDLESS]).allowed
        assert after.requests, "they were decided through the renewed certificate"


def test_a_certificate_that_is_half_written(terminator: Wire, trusted: str, limiters: Make, ask: Ask) -> None:
    """Connecting fails meanwhile, as to a server that is gone; then it is used again."""
    limiter = limiters(terminator, ssl=True, ssl_ca_certs=trusted, password="secret")
    whole = Path(trusted).read_text()
    for part in (whole[: len(whole) // 2], ""):
        Path(trusted).write_text(part)
        assert failure(ask, limiter, [ENDLESS]) == "connection"
    Path(trusted).unlink()
    assert failure(ask, limiter, [ENDLESS]) == "connection"
    Path(trusted).write_text(whole)
    poll(lambda: failure(ask, limiter, [ENDLESS]) == "", LONG, "the breaker's probe")


@pytest.fixture
def idle(terminator: Wire, trusted: str, limiters: Make, begin: Begin) -> Limiter:
    """A limiter with idle connections by TLS."""
    limiter = limiters(terminator, LONG, ssl=True, ssl_ca_certs=trusted, password="secret")
    terminator.hold()
    opened = begin(limiter, IDLE)
    poll(lambda: terminator.asked >= IDLE, LONG, "requests at once, each on a connection of its own")
    terminator.thaw()
    assert set(outcomes(opened)) == {"decided"}
    return limiter


@pytest.mark.parametrize("goodbye", [True, False], ids=["goodbye", "abrupt"])
def test_connections_that_ended_while_idle_lose_no_decision(
    terminator: Wire, idle: Limiter, begin: Begin, goodbye: bool
) -> None:
    """With hiredis each of them lost one, by a ``TypeError``."""
    terminator.hang_up(goodbye=goodbye)
    assert [outcomes(begin(idle, 1)) for _ in range(IDLE)] == [["decided"]] * IDLE


@pytest.mark.parametrize("goodbye", [True, False], ids=["goodbye", "abrupt"])
def test_a_connection_that_ended_between_two_runs_of_the_loop(
    terminator: Wire, trusted: str, limiters: Make, ask: Ask, goodbye: bool
) -> None:
    """A loop that does not run notices nothing, however short that is."""
    limiter = limiters(terminator, ssl=True, ssl_ca_certs=trusted, password="secret")
    for _ in range(4):
        assert failure(ask, limiter, [ENDLESS]) == ""
        terminator.hang_up(goodbye=goodbye)


@pytest.mark.parametrize("stray", [b"+OK\r\n", b"$-1\r\n", b"*", b"-ERR idle for too long\r\n"])
def test_a_reply_that_nobody_asked_for_is_given_to_nobody(
    terminator: Wire, idle: Limiter, begin: Begin, stray: bytes
) -> None:
    known = set(terminator.pipes)
    terminator.interject(stray)
    assert [outcomes(begin(idle, 1)) for _ in range(IDLE)] == [["decided"]] * IDLE
    poll(lambda: known.isdisjoint(terminator.pipes), LONG, "none of those connections is reused")


def test_idle_connections_are_reused(terminator: Wire, idle: Limiter, begin: Begin) -> None:
    """Whatever else than replies TLS sent on them."""
    known = set(terminator.pipes)
    for _ in range(3):
        assert set(outcomes(begin(idle, IDLE))) == {"decided"}
    assert terminator.pipes == known
