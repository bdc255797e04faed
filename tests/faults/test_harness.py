"""The tools of this directory work: a fault that does not happen proves nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import redis

from . import poll
from .proxy import Proxy
from .servers import Node

Lost = (redis.ConnectionError, redis.TimeoutError)


def test_the_error_of_poll_names_the_condition_and_the_last_value() -> None:
    seen = iter([0, 0, 7])
    assert poll(lambda: next(seen), 5, "a number") < 5
    with pytest.raises(AssertionError, match=r"not within 0\.1 s: the moon \(last seen: ''\)"):
        poll(lambda: "", 0.1, "the moon")

    def refused() -> None:
        raise redis.ConnectionError("refused")

    with pytest.raises(AssertionError, match="refused"):
        poll(refused, 0.1, "an answer")


def test_a_frozen_server_is_silent_and_a_killed_one_forgets(node: Node) -> None:
    with node.client(socket_timeout=0.2) as client:
        client.set("key", "value")
        node.freeze()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        node.thaw()
        assert client.get("key") == b"value"
        node.freeze()
    url = node.url
    node.kill()
    with pytest.raises(redis.ConnectionError):
        node.command("PING")
    node.start()
    assert (node.url, node.command("GET", "key")) == (url, None)


def test_a_server_that_cannot_start_says_why(nodes: Callable[..., Node], node: Node) -> None:
    with pytest.raises(AssertionError, match="nonsense"):
        nodes("nonsense 1")
    second = Node()
    second.port = node.port
    with second:
        assert second.port != node.port, "another took it"


def test_a_server_ends_with_its_block_whatever_happened() -> None:
    def fail() -> None:
        with node:
            node.freeze()
            raise KeyError

    node = Node()
    with pytest.raises(KeyError):
        fail()
    assert not node.runs
    assert not node.directory.exists()


@pytest.mark.parametrize(("knob", "counted"), [("cut_before_request_is_passed_on", 3), ("cut_after_execution", 5)])
def test_requests_are_cut_before_or_after_their_execution(proxy: Proxy, knob: str, counted: int) -> None:
    proxy.spare = 2
    setattr(proxy, knob, 2)
    with proxy.client() as client:
        assert [client.incr("count"), client.incr("count")] == [1, 2]
        for _ in range(2):
            with pytest.raises(Lost):
                client.incr("count")
        assert client.incr("count") == counted
        assert proxy.requests == 5
    poll(lambda: proxy.open == 0, 5, "the proxy sees that its client is gone")


def test_delay_and_trickle_slow_replies_down(proxy: Proxy) -> None:
    with proxy.client() as client:
        client.set("key", "0123456789")  # "$10\r\n0123456789\r\n" is 17 bytes
        for knob, value, least in (("delay", 0.2, 0.2), ("trickle", 0.01, 16 * 0.01)):
            setattr(proxy, knob, value)
            begun = time.monotonic()
            assert client.get("key") == b"0123456789"
            assert least <= time.monotonic() - begun < 5
            setattr(proxy, knob, 0)


def test_a_frozen_proxy_accepts_connections_and_forwards_no_bytes(proxy: Proxy, node: Node) -> None:
    with proxy.client(socket_timeout=0.2) as old, proxy.client(socket_timeout=0.2) as new:
        old.set("key", "value")
        proxy.freeze()
        for client in (old, new):
            with pytest.raises(redis.TimeoutError):
                client.incr("count")
        assert proxy.accepted == 2
        assert node.command("GET", "count") is None
        proxy.thaw()
        assert old.get("key") == new.get("key") == b"value"


@pytest.mark.parametrize("state", ["idle", "frozen", "delayed", "gone"])
def test_a_proxy_leaves_no_thread(node: Node, state: str) -> None:
    before = threading.active_count()
    with Proxy(node.host, node.port) as proxy, proxy.client(socket_timeout=0.2) as client:
        client.ping()
        proxy.delay = 60 if state == "delayed" else 0
        if state == "frozen":
            proxy.freeze()
        elif state == "gone":
            node.kill()
        if state != "idle":
            with pytest.raises(Lost):
                client.ping()
    assert threading.active_count() == before
