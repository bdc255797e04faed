"""Clients that hang up: an ASGI server cancels their request's task; what they used must be charged all the same."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import redis
from django.http import HttpResponse

from django_ratequota import Bucket, Limiter, Rate, check_request
from django_ratequota.enforcement.settlement import asettle
from django_ratequota.models import Endpoint, RatePolicy
from django_ratequota.utils import shielding
from tests.enforcement.test_propagation import Process
from tests.faults import Address, poll
from tests.faults.test_http_servers import SECONDS, editor, environment, serving
from tests.faults.wire import Wire
from tests.project.views import request_from

__all__ = ["editor", "environment"]

# --- A real server. ---

UVICORN = "uvicorn --port 0 --lifespan off --factory tests.security.hanging:served"
LEFT = (
    "from django_ratequota import check_request; from tests.project.views import request_from; "
    "answer = check_request(request_from(address='127.0.0.1'), 'completions', 0).remaining"
)


class Model:
    """The views of ``hanging``, and an attacker who asks them."""

    def __init__(self, port: int) -> None:
        self._port = port

    def counts(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.get("/asked/"))
        return found

    def get(self, path: str) -> bytes:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=SECONDS)
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()

    def attack(self, path: str, times: int, until: Callable[[bytes], object] = lambda came: True) -> dict[str, int]:
        """Ask, and hang up once the model was asked and ``until`` holds of what came, or the request was refused."""
        for _ in range(times):
            before = self.counts()["asked"]
            with socket.create_connection(("127.0.0.1", self._port), timeout=SECONDS) as client:
                client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                client.setblocking(False)
                came = bytearray()

                def ready(client: socket.socket = client, came: bytearray = came, before: int = before) -> bool:
                    try:
                        came.extend(client.recv(65536))
                    except BlockingIOError:
                        pass
                    return b" 429 " in came or (self.counts()["asked"] > before and bool(until(bytes(came))))

                poll(ready, SECONDS, "the model is asked, or the client refused")
        return self.counts()


@pytest.fixture
def model(editor: Process, environment: dict[str, str], tmp_path: Path) -> Iterator[Model]:
    editor.run(
        "completions = Endpoint.objects.create(name='completions');"
        "RatePolicy.objects.create(endpoint=completions, rates='1000/3650day fixed_window')"
    )
    with serving(UVICORN, environment, tmp_path / "log") as port:
        yield Model(port)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_hanging_up_during_the_work(model: Model, editor: Process) -> None:
    """A charge at the end never came: 60 calls of a model where 10 were allowed."""
    assert model.attack("/complete/", 20)["asked"] == 10
    assert editor.run(LEFT) == 0


def test_what_was_streamed_until_then_is_charged(model: Model, editor: Process) -> None:
    found = model.attack("/stream/", 4, lambda came: came.count(b"word") == 5)
    assert found == {"asked": 4, "said": 20}
    poll(lambda: editor.run(LEFT) == 1000 - 20, SECONDS, "20 words are charged")


# --- Cancelled at any moment. ---

TOKENS = Bucket("user:1", Rate.parse("1000/day"))


async def while_it_waits(call: Any) -> None:
    """Cancel it once it waits for a connection, or for Redis' reply."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)  # it begins
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def before_it_begins(call: Any) -> None:
    """Cancel it while its task does something else, so that its first wait ends it."""

    async def late() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await call

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(late())


@pytest.fixture(params=[while_it_waits, before_it_begins])
def cancelled(request: Any) -> Any:
    return request.param


@pytest.fixture(params=["cold", "warm"])
def used(request: Any, redis_client: redis.Redis) -> Iterator[Any]:
    """Runs a story in a loop, with or without a connection in it, and returns the units used once it holds still."""
    limiter = Limiter(client=redis_client, prefix="rqtest", timeout=5)

    def run(story: Callable[[Limiter], Any]) -> int:
        async def loop() -> int:
            if request.param == "warm":
                await limiter.apeek([TOKENS])
            await story(limiter)
            await settled()
            return (await limiter.apeek([TOKENS])).statuses[0].used

        return asyncio.run(loop())

    yield run
    limiter.store.close()


async def settled() -> None:
    """Wait for all tasks that continue without a caller; garbage collection removes none of them."""
    gc.collect()
    async with asyncio.timeout(SECONDS):
        while shielding._detached:
            await asyncio.wait(shielding._detached)
            await asyncio.sleep(0)  # a turn of the loop: the callbacks of what has ended run


async def charge(limiter: Limiter, cancelled: Any) -> None:
    await cancelled(limiter.check([TOKENS]).acharge(349))


async def engine_verbs(limiter: Limiter, cancelled: Any) -> None:
    await cancelled(limiter.acharge([TOKENS], 300))
    await settled()  # a refund that overtook its charge would find nothing to give back
    await cancelled(limiter.arefund([TOKENS], 100))


async def refund_of_several_charges(limiter: Limiter, cancelled: Any) -> None:
    decision = await limiter.check([TOKENS], 100).acharge(200)
    await cancelled(decision.arefund(250))


async def refund_of_what_was_charged_so(limiter: Limiter, cancelled: Any) -> None:
    decision = limiter.check([TOKENS], 100)
    await cancelled(decision.acharge(200))
    await settled()
    await decision.arefund(250)


@pytest.mark.parametrize(
    ("story", "units"),
    [(charge, 350), (engine_verbs, 200), (refund_of_several_charges, 50), (refund_of_what_was_charged_so, 50)],
)
def test_hanging_up_during_the_charge(used: Any, cancelled: Any, story: Any, units: int) -> None:
    assert used(lambda limiter: story(limiter, cancelled)) == units


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fresh_policies")
def test_an_outcome_that_is_known_gives_its_units_back(cancelled: Any) -> None:
    """The middleware's way: the response is there, and the client hangs up before it is settled."""
    login = Endpoint.objects.create(name="login", charged_statuses="401")
    RatePolicy.objects.create(endpoint=login, rates="10/hour")

    async def story() -> None:
        await cancelled(asettle(request, HttpResponse(status=200)))
        await settled()

    request = request_from()
    assert check_request(request, "login", 3).remaining == 7
    asyncio.run(story())
    assert check_request(request_from(), "login", 0).remaining == 10


def test_a_cancelled_caller_does_not_wait_for_redis(redis_client: redis.Redis) -> None:
    """Nor do tasks that continue without it outlive the decision's deadline."""
    kwargs = redis_client.connection_pool.connection_kwargs

    async def story() -> list[str]:
        decision = await limiter.acheck([TOKENS])
        proxy.freeze()
        await while_it_waits(decision.acharge(5))
        alone = list(shielding._detached)
        assert not alone[0].done()
        errors = await asyncio.wait_for(asyncio.gather(*alone, return_exceptions=True), SECONDS)
        return [error.reason for error in errors]

    with Wire(Address(kwargs["host"], kwargs["port"])) as proxy, proxy.client() as client:
        limiter = Limiter(client=client, prefix="rqtest", timeout=0.2)
        assert asyncio.run(story()) == ["timeout"]
        limiter.store.close()
    assert not shielding._detached


def test_no_more_than_a_number_goes_on_alone(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shielding, "MAX_DETACHED", 2)
    ended: list[int] = []

    async def story() -> None:
        go_on = asyncio.Event()

        async def call(number: int) -> None:
            await go_on.wait()
            ended.append(number)

        for number in range(3):
            await while_it_waits(shielding.shielded(call(number)))
        assert len(shielding._detached) == 2
        go_on.set()
        await settled()

    asyncio.run(story())
    assert ended == [0, 1]


def test_a_loop_that_ends_takes_them_along() -> None:
    async def story() -> None:
        await while_it_waits(shielding.shielded(asyncio.Event().wait()))
        assert len(shielding._detached) == 1

    asyncio.run(story())
    assert not shielding._detached
