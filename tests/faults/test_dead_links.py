"""Links that died quietly: a load balancer forgets connections that were idle for long, silently or with a reset."""

from __future__ import annotations

import ssl
from collections.abc import Callable

import pytest

from django_ratequota import Limiter
from tests.support.properties import thorough_after

from . import poll
from .asking import Begin, outcomes
from .servers import Node
from .wire import Wire

#: Seconds of a deadline that only a dead link misses.
LONG = 30


@pytest.mark.parametrize("secure", [False, True], ids=["tcp", "tls"])
@pytest.mark.parametrize("reset", [False, True], ids=["silent", "reset"])
@pytest.mark.parametrize(("links", "at_once"), thorough_after(1, [(12, False), (1, False), (64, False), (64, True)]))
def test_limits_are_enforced_again(
    node: Node,
    limiters: Callable[..., Limiter],
    begin: Begin,
    server_context: ssl.SSLContext,
    trusted: str,
    *,
    at_once: bool,
    links: int,
    reset: bool,
    secure: bool,
) -> None:
    """Of 12 silent links, one was found dead with each probe of the breaker, one a second."""
    with Wire(node, context=server_context if secure else None) as wire:
        options = {"ssl": True, "ssl_ca_certs": trusted} if secure else {}
        limiter, callers = limiters(wire, **options), links if at_once else 1
        limiter.store.timeout = LONG
        wire.hold()
        opened = begin(limiter, links)
        poll(lambda: wire.asked >= links, LONG, f"{links} requests at once, each on a connection of its own")
        wire.thaw()
        assert set(outcomes(opened)) == {"decided"}
        wire.forget(reset=reset)
        limiter.store.timeout = 0.1
        outcomes(begin(limiter, callers))
        poll(lambda: outcomes(begin(limiter, 1)) == ["decided"], LONG, "the breaker's probe")
        limiter.store.timeout = LONG
        assert set(outcomes(begin(limiter, links))) == {"decided"}
        assert 1 <= wire.unheard <= callers, "a request was sent on a link as old as those that were found dead"
