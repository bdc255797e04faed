"""docs/howto/celery.md, channels.md, costs.md, outbound.md: snippets run, with stand-ins for what they import."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import AnonymousUser, User
from django.test import Client

import django_ratequota.celery  # noqa: F401 - before the stand-in
from django_ratequota import Limiter, turn
from django_ratequota.models import RatePolicy
from tests.package.test_docs import DOCS, Page

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fresh_policies")]

Run = Callable[..., None]


class Retry(Exception):
    """What ``Task.retry`` raises; ``args`` are its arguments."""


class Task:
    """A bound task of Celery; calling it runs it."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, *args: Any) -> Any:
        return self.run(self, *args)

    def retry(self, *, countdown: float) -> Retry:
        return Retry(countdown)


def shared_task(run: Any = None, **_options: Any) -> Any:
    """``@shared_task``, or one with options: those are for bound tasks."""
    return run or Task


class Consumer:
    """A consumer of Channels that keeps what it sends."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.sent: list[Any] = []

    async def accept(self) -> None:
        self.sent.append("accept")

    async def close(self, code: int) -> None:
        self.sent.append(code)

    async def send_json(self, content: Any) -> None:
        self.sent.append(content)


class GraphQLError(Exception):
    """The error of graphql-core, with ``extensions``."""

    def __init__(self, message: str, *, extensions: dict[str, Any]) -> None:
        super().__init__(message)
        self.extensions = extensions


class Transport:
    """Both transports of httpx, and the adapter of requests: what they get is what they return."""

    def handle_request(self, request: Any) -> Any:
        return request

    async def handle_async_request(self, request: Any) -> Any:
        return request

    def send(self, request: Any, **options: Any) -> Any:
        return request, options


class HttpClient:
    """A client of httpx, or a session of requests: a request goes through its transport or the adapter mounted."""

    def __init__(self, *, transport: Any = None) -> None:
        self.transport = transport

    def mount(self, prefix: str, adapter: Any) -> None:
        self.prefix, self.transport = prefix, adapter


#: Modules that the pages import and that are not installed here -> the names that they use.
STAND_INS: dict[str, dict[str, Any]] = {
    "celery": {"shared_task": shared_task, "Celery": lambda name: MagicMock()},
    "channels": {},
    "channels.generic": {},
    "channels.generic.websocket": {"AsyncJsonWebsocketConsumer": Consumer},
    "graphql": {"GraphQLError": GraphQLError},
    "httpx": {"HTTPTransport": Transport, "AsyncHTTPTransport": Transport, "Client": HttpClient},
    "requests": {"Session": HttpClient},
    "requests.adapters": {"HTTPAdapter": Transport},
}


@pytest.fixture
def run(settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name, held in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    User.objects.create_user("alice", password="secret")
    return lambda name: Page(DOCS / "howto" / name, settings, monkeypatch, tmp_path).run()


def test_a_task_over_its_users_limit_is_retried_later(run: Run) -> None:
    run("celery.md")
    export, alice = sys.modules["tasks"].export, User.objects.get()
    assert [export(alice.pk, number) for number in (1, 2, 3)] == [f"report {n} of user {alice.pk}" for n in (1, 2, 3)]
    with pytest.raises(Retry) as retried:
        export(alice.pk, 4)
    assert retried.value.args == (600,), "a unit of 3/hour takes 20 minutes"
    assert export(4711, 1) == "report 1 of user 4711"
    RatePolicy.objects.update(rates="blocked")
    assert export(alice.pk, 5) is None


def test_messages_are_limited_per_recipient_and_while_the_gateway_fails(run: Run) -> None:
    run("celery.md")
    send = sys.modules["messages"].send
    RatePolicy.objects.create(rates="1/hour")
    assert [send("+1", "hello") for _ in range(7)] == [*["sent"] * 6, "later"]
    for _ in range(3):
        with pytest.raises(ConnectionError):
            send("+0", "hello")
    assert [send(number, "hello") for number in ("+0", "+2", "+1")] == [*["gateway is failing"] * 2, "later"]


def test_each_message_of_a_websocket_is_checked(run: Run) -> None:
    run("channels.md")
    scope = {"user": User.objects.get(), "client": ["203.0.113.7", 4711], "headers": []}
    chat: Any = sys.modules["consumers"].Chat(scope)

    async def talk() -> None:
        await chat.connect()
        for number in range(6):
            await chat.receive_json({"text": number})

    async_to_sync(talk)()
    assert chat.sent[:6] == ["accept", *({"text": number} for number in range(5))]
    assert chat.sent[6]["error"] == "too many messages"
    assert 0 < chat.sent[6]["retry_after"] <= 2
    RatePolicy.objects.update(rates="blocked")
    async_to_sync(chat.receive_json)({"text": "blocked"})
    async_to_sync(chat.connect)()
    assert chat.sent[7:] == [1008, 1013]


def test_a_websocket_behind_a_unix_socket_has_no_client(run: Run) -> None:
    run("channels.md")
    chat: Any = sys.modules["consumers"].Chat({"user": User.objects.get(), "client": None, "headers": []})
    async_to_sync(chat.connect)()
    assert chat.sent == ["accept"]


@pytest.mark.parametrize(
    ("client", "forwarded", "found"),
    [
        (["203.0.113.7", 1], [b"198.51.100.1"], "203.0.113.7"),
        (["10.0.0.1", 1], [b"198.51.100.1"], "198.51.100.1"),
        # The client's own header, then the proxy's; only the last one counted.
        (["10.0.0.1", 1], [b"203.0.113.9, 198.51.100.1", b"10.0.0.2"], "198.51.100.1"),
        (None, [b"198.51.100.1"], "198.51.100.1"),
        (None, [], "None"),
    ],
)
def test_the_client_of_a_websocket_is_found_behind_a_proxy(
    run: Run, settings: Any, client: Any, forwarded: list[bytes], found: str
) -> None:
    run("channels.md")
    settings.RATEQUOTA = {**settings.RATEQUOTA, "TRUSTED_PROXIES": ["10.0.0.0/8", "unix"]}
    scope = {"client": client, "headers": [(b"x-forwarded-for", value) for value in forwarded]}
    assert str(sys.modules["addresses"].client_address(scope)) == found


def test_a_field_of_graphql_is_limited_by_its_calls_and_its_rows(run: Run) -> None:
    run("costs.md")
    info = SimpleNamespace(context=SimpleNamespace(user=AnonymousUser(), META={"REMOTE_ADDR": "203.0.113.7"}))
    resolve: Any = sys.modules["schema"].resolve_reports
    assert [len(resolve(None, info, first=1)) for _ in range(10)] == [1] * 10
    with pytest.raises(GraphQLError, match="Too many requests for this field"):
        resolve(None, info, first=1)


def test_a_batch_without_room_is_refused_whole(run: Run, client: Client) -> None:
    run("costs.md")

    def post(items: int) -> tuple[int, str]:
        address, kind = "203.0.113.7", "application/json"
        response = client.post("/import/", list(range(items)), content_type=kind, REMOTE_ADDR=address)
        return response.status_code, response["X-RateLimit-Remaining"]

    assert [post(60), post(60), post(40)] == [(200, "40"), (429, "40"), (200, "0")]


def test_calls_to_a_partner_wait_for_their_turn_whatever_sends_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("outbound.md")
    waits = list[float]()
    monkeypatch.setattr(time, "sleep", waits.append)
    assert sys.modules["with_httpx"].client.transport.handle_request("by httpx") == "by httpx"
    slots = sys.modules["partner"].slots
    Limiter().reset([slots])  # the clock does not move while nobody sleeps, so a third call would not begin
    Limiter().acquire(slots, timeout=0)
    session = sys.modules["with_requests"].session
    assert session.transport.send("by requests", timeout=3) == ("by requests", {"timeout": 3})
    assert [round(wait) for wait in waits] == [5, 5]
    Limiter().reset([slots])
    transport = sys.modules["with_httpx"].AsyncInTurn()
    assert async_to_sync(transport.handle_async_request)("awaited") == "awaited"
    with pytest.raises(TimeoutError), turn(slots, timeout=0):
        pytest.fail("no slot was taken")
