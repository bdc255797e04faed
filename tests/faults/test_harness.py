"""The tools of this directory work: a fault that does not happen proves nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import redis
from redis.cluster import RedisCluster
from redis.sentinel import Sentinel

from . import poll
from .cluster import Cluster
from .proxy import Proxy
from .servers import PATIENCE, Node, Pair, Sentinels, in_step

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


# --- One server. ---


def test_a_frozen_server_is_silent_and_a_thawed_one_answers(node: Node) -> None:
    with node.client(socket_timeout=0.2) as client:
        client.ping()
        node.freeze()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        node.thaw()
        assert client.ping()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_server_forgets_and_comes_back_on_its_port(node: Node, frozen: bool) -> None:
    url = node.url
    node.command("SET", "key", "value")
    if frozen:
        node.freeze()
    node.kill()
    with pytest.raises(redis.ConnectionError):
        node.command("PING")
    node.start()
    assert node.url == url
    assert node.command("GET", "key") is None


def test_a_stopped_server_saves_to_its_configured_directory(nodes: Callable[..., Node]) -> None:
    node = nodes("save 3600 1")
    node.command("SET", "key", "value")
    node.stop()
    assert not node.runs
    node.start()
    assert node.command("GET", "key") == "value"


def test_configuration_reaches_the_server_and_its_errors_are_raised(nodes: Callable[..., Node]) -> None:
    assert nodes("maxmemory 10mb").command("CONFIG", "GET", "maxmemory") == {"maxmemory": "10485760"}
    with pytest.raises(AssertionError, match="nonsense"):
        nodes("nonsense 1")


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
    with pytest.raises(redis.ConnectionError):
        node.command("PING")


def test_a_port_that_another_took_is_changed(node: Node) -> None:
    second = Node()
    second.port = node.port
    with second:
        assert second.port != node.port
        assert second.info("server")["tcp_port"] == second.port


# --- Several. ---


@pytest.mark.thorough
def test_a_pair_is_in_step(pair: Pair) -> None:
    pair.primary.command("SET", "key", "value")
    assert pair.primary.command("WAIT", 1, 5000) == 1
    assert pair.replica.command("GET", "key") == "value"
    with pytest.raises(redis.exceptions.ReadOnlyError):
        pair.replica.command("SET", "key", "value")


@pytest.mark.thorough
def test_sentinels_promote_the_replica_and_take_the_old_primary_back(sentinels: Sentinels) -> None:
    old, new = sentinels.primary, sentinels.replica
    with old.client() as client:
        client.set("key", "value")
        assert client.wait(1, 5000) == 1
    watchers = Sentinel(sentinels.addresses)
    try:
        assert watchers.discover_master(sentinels.service) == old.address
        assert watchers.discover_slaves(sentinels.service) == [new.address]
        old.kill()
        poll(lambda: sentinels.agree_on(new), PATIENCE, "the replica is promoted")
        assert watchers.discover_master(sentinels.service) == new.address
    finally:
        for watcher in watchers.sentinels:
            watcher.close()
    assert (sentinels.primary, sentinels.replica) == (new, old)
    old.start()
    poll(lambda: in_step(new, old), PATIENCE, "the old primary is a replica")
    assert old.command("GET", "key") == "value"


@pytest.mark.thorough
def test_a_cluster_serves_moves_slots_and_fails_over(cluster: Cluster) -> None:
    keys = [f"{{user:1}}:{number}" for number in range(250)]
    with RedisCluster.from_url(cluster.url) as client:
        for key in keys:
            client.set(key, key)
        source = cluster.owner(keys[0])
        target = next(node for node in cluster.primaries() if node is not source)
        assert cluster.move_slot(cluster.slot(keys[0]), source, target) == 250
        assert cluster.owner(keys[0]) is target
        assert [client.get(key).decode() for key in keys] == keys
    with pytest.raises(redis.exceptions.MovedError):
        source.command("GET", keys[0])
    target.command("SET", keys[0], "last")
    assert target.command("WAIT", 1, 5000) == 1
    replica = cluster.replica_of(target)
    target.kill()
    poll(lambda: cluster.owner(keys[0]) is replica, PATIENCE, "the replica took over")
    assert replica.command("GET", keys[0]) == "last"
    target.start()
    poll(cluster.well, PATIENCE, "the old primary is a replica")


@pytest.mark.thorough
def test_a_slot_on_its_way_answers_ask(cluster: Cluster) -> None:
    key = "{user:1}:0"
    source = cluster.owner(key)
    target = next(node for node in cluster.primaries() if node is not source)
    cluster.begin_move(cluster.slot(key), source, target)
    with pytest.raises(redis.exceptions.AskError):
        source.command("GET", key)
    cluster.end_move(cluster.slot(key), source, target)
    assert target.command("GET", key) is None


# --- The network. ---


def test_the_proxy_passes_all_on_and_counts(proxy: Proxy, node: Node) -> None:
    text = "x" * 300_000
    with proxy.client() as first, proxy.client() as second:
        first.set("key", text)
        assert second.get("key") == text.encode()
        assert first.pipeline(transaction=False).get("key").get("nothing").execute() == [text.encode(), None]
        assert (proxy.accepted, proxy.open, proxy.requests) == (2, 2, 4)
    poll(lambda: proxy.open == 0, 5, "the proxy sees that its clients are gone")


def test_a_request_cut_before_it_is_passed_on_is_not_executed(proxy: Proxy, node: Node) -> None:
    proxy.cut_before_request_is_passed_on = 2
    with proxy.client() as client:
        for _ in range(2):
            with pytest.raises(Lost):
                client.incr("count")
        assert client.incr("count") == 1


def test_a_request_cut_after_execution_is_executed(proxy: Proxy, node: Node) -> None:
    proxy.cut_after_execution = 2
    with proxy.client() as client:
        for _ in range(2):
            with pytest.raises(Lost):
                client.incr("count")
        assert client.incr("count") == 3


def test_requests_may_be_spared_before_the_cut(proxy: Proxy, node: Node) -> None:
    proxy.spare, proxy.cut_after_execution = 2, 1
    with proxy.client() as client:
        assert [client.incr("count"), client.incr("count")] == [1, 2]
        with pytest.raises(Lost):
            client.incr("count")
        assert client.incr("count") == 4


def test_delay_and_trickle_slow_replies_down(proxy: Proxy, node: Node) -> None:
    with proxy.client() as client:
        client.set("key", "0123456789")  # "$10\r\n0123456789\r\n" is 17 bytes
        for knob, least in (("delay", 0.2), ("trickle", 16 * 0.01)):
            setattr(proxy, knob, 0.2 if knob == "delay" else 0.01)
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


def test_only_new_connections_are_led_elsewhere(proxy: Proxy, node: Node, nodes: Callable[..., Node]) -> None:
    other = nodes()
    node.command("SET", "name", "first")
    other.command("SET", "name", "second")
    with proxy.client() as old, proxy.client() as new:
        assert old.get("name") == b"first"
        proxy.retarget(other.host, other.port)
        assert (old.get("name"), new.get("name")) == (b"first", b"second")
        proxy.hang_up()  # the client sees that before it asks, and connects anew
        assert old.get("name") == b"second"


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
