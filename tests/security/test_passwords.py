"""No part of a password appears in checks, logs and exceptions, however a URL is parsed."""

from __future__ import annotations

import socket
import traceback
from itertools import product
from typing import Any

import pytest

from django_ratequota import check_request, conf
from django_ratequota.checks.settings import check_settings
from django_ratequota.checks.store import check_exposed, check_store
from django_ratequota.exceptions import ConfigurationError
from django_ratequota.models import RatePolicy
from django_ratequota.runtime import store_from_settings
from django_ratequota.store.factory import store_from_url
from tests.project.views import request_from
from tests.support.properties import thorough_after

#: What URLs, percent-encoding and lists of URLs are made of, and what text is made of.
SPECIAL = [*"/@#?%:;,&=[]{}+ \\\"'$!~^|\t\n", *"@/ /@ // #? ?db= :// %2F %zz ü ℀".split(), "", "\x00"]
#: Parts of a password, one of which passes for a port, a host or the number of a database.
PARTS = [("4711", "hush"), ("hush", "4711")]
URLS = [
    "redis://user:{}@127.0.0.1:1/0",
    "redis://:{}@127.0.0.1:1",
    "rediss://user:{}@127.0.0.1:1/0",
    "redis://127.0.0.1:1/0?password={}",
    "unix://user:{}@/nowhere/redis.sock",
    "redis+sentinel://user:{}@127.0.0.1:1,127.0.0.1:2/main/0",
    "redis+sentinel://127.0.0.1:1/main?sentinel_password={}",
]


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: Any) -> None:
    """A part of a password may be taken for a host."""
    resolve = socket.getaddrinfo

    def only_numbers(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host != "127.0.0.1":
            raise socket.gaierror(-2, "Name or service not known")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", only_numbers)


def everything_said(settings: Any, caplog: Any, ratequota: dict[str, Any], location: str) -> str:
    """Return the text of checks, the log and an exception's traceback for these settings."""
    caplog.clear()
    settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": location}}
    settings.RATEQUOTA = {"TIMEOUT": 0.05, **ratequota}
    messages = [message for check in (check_settings, check_store, check_exposed) for message in check()]
    texts = [f"{message.msg} {message.hint}" for message in messages]
    try:
        store_from_settings(conf.settings).close()
    except ConfigurationError as error:
        shown = traceback.TracebackException.from_exception(error, lookup_lines=False)
        while shown is not None:  # without lines of source code, which hold no values
            texts += shown.format_exception_only()
            shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return "\n".join([*texts, caplog.text])


@pytest.mark.parametrize("form", thorough_after(2, URLS))
def test_a_password_in_checks_logs_or_errors(settings: Any, caplog: Any, form: str) -> None:
    nowhere = "redis://127.0.0.1:1/0"
    leaks = []
    for (first, last), special in product(PARTS, SPECIAL):
        url = form.format(f"{first}{special}{last}")
        for ratequota, location in (({"REDIS_URL": url}, nowhere), ({}, url)):
            said = everything_said(settings, caplog, ratequota, location)
            leaks += [(ratequota, url) for part in (first, last) if part in said]
    assert leaks == []


@pytest.mark.parametrize("special", ["/", "#", "@", ""])
@pytest.mark.parametrize(
    "more", [{"CLUSTER": True}, {"REDIS_URL": "", "CACHE": "url"}], ids=["Cluster", "as an alias"]
)
def test_no_part_is_said_where_it_belongs_less(
    settings: Any, caplog: Any, more: dict[str, Any], special: str
) -> None:
    url = f"redis://user:4711{special}hush@127.0.0.1:1/0"
    ratequota = {"REDIS_URL": url, **more, **({"CACHE": url} if "CACHE" in more else {})}
    said = everything_said(settings, caplog, ratequota, "redis://127.0.0.1:1/0")
    assert said
    assert "4711" not in said
    assert "hush" not in said


@pytest.mark.parametrize("wrap", [str.encode, lambda url: [url], lambda url: {"LOCATION": url}])
@pytest.mark.parametrize("key", ["REDIS_URL", "CACHE"])
def test_a_value_of_the_wrong_type_is_not_quoted(settings: Any, key: str, wrap: Any) -> None:
    settings.RATEQUOTA = {key: wrap("redis://user:hush@127.0.0.1:1/0")}
    [error] = check_settings()
    assert error.msg == f"RATEQUOTA[{key!r}] cannot be used."


@pytest.mark.django_db
@pytest.mark.usefixtures("fresh_policies")
def test_a_request_logs_no_part_of_it(settings: Any, caplog: Any) -> None:
    RatePolicy.objects.create(rates="1/s")
    for special in SPECIAL:
        settings.RATEQUOTA = {"REDIS_URL": f"redis://user:4711{special}hush@127.0.0.1:1/0", "TIMEOUT": 0.05}
        assert check_request(request_from()).degraded
    assert "4711" not in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1/abc",
        "redis://127.0.0.1:1/1/2",
        "redis://127.0.0.1:1/١",
        "redis://127.0.0.1:1/0#1",
        "redis://127.0.0.1:1/0?bd=1",
        "unix:///nowhere/redis.sock?db=abc",
        "redis+sentinel://127.0.0.1:1/main/abc",
    ],
)
def test_what_is_no_number_is_not_database_0(settings: Any, url: str) -> None:
    with pytest.raises(
        ConfigurationError, match="REDIS_URL cannot be used: its host, port or number of the database"
    ):
        store_from_url(url, 1)
    if "sentinel" in url:
        return
    settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}}
    settings.RATEQUOTA = {}
    [error] = check_store()
    assert error.id == "django_ratequota.E002"
    assert error.msg.startswith(
        "CACHES['default'] cannot be used: LOCATION: its host, port or number of the database"
    )


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1",
        "redis://127.0.0.1:1/",
        "redis://127.0.0.1:1/15",
        "redis://127.0.0.1:1?db=3",
        "redis://user:p%40ss%2F@127.0.0.1:1/0?client_name=web",
        "redis://127.0.0.1:1/0?password=p@ss&max_connections=5&socket_timeout=1",
        "rediss://127.0.0.1:1/0?ssl_cert_reqs=none&ssl_check_hostname=false",
        "unix:///nowhere/redis@2.sock?db=1",
        "unix://user:secret@/nowhere/redis.sock",
    ],
)
def test_urls_that_are_right_stay_right(settings: Any, url: str) -> None:
    store_from_url(url, 1).close()
    settings.CACHES = {"default": {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": url}}
    settings.RATEQUOTA = {}
    assert "django_ratequota.E002" not in [message.id for message in check_store()]
