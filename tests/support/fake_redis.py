"""Servers that answer as a Redis of some version, as a Redis that fails, or as another kind of server."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from django_ratequota.runtime import default_limiter

#: Returns the reply to a command; None = it never replies.
Answer = Callable[[list[bytes]], bytes | None]


class RedisHandler(socketserver.StreamRequestHandler):
    """Speaks RESP, and replies as the server's ``answer`` says."""

    server: FakeServer

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            if (reply := self.server.answer(words)) is not None:
                self.wfile.write(reply)


class OtherHandler(socketserver.BaseRequestHandler):
    """Sends one reply to whatever it reads first, as another kind of server would."""

    server: FakeServer

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(self.server.answer([]))


class FakeServer(socketserver.ThreadingTCPServer):
    """A server in threads; ``close`` waits until its clients have hung up."""

    def __init__(self, answer: Answer, handler: type[socketserver.BaseRequestHandler] = RedisHandler) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.answer, self.port = answer, self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def handle_error(self, *_: object) -> None:
        """The client was gone first."""

    def close(self) -> None:
        self.shutdown()
        self._thread.join(timeout=30)
        self.server_close()


@contextmanager
def fake_redis(reply: bytes, handler: type[socketserver.BaseRequestHandler] = RedisHandler) -> Iterator[str]:
    """Start a server that replies so to INFO, knows no scripts and replies OK to all else; yields its URL."""

    def answer(words: list[bytes]) -> bytes:
        if words[:1] in ([], [b"INFO"]):
            # Before Redis 7, INFO took one section at most. The check must work with these servers too.
            return reply if len(words) < 3 else b"-ERR syntax error\r\n"
        return b"-ERR unknown command\r\n" if words[0] in (b"EVALSHA", b"EVAL") else b"+OK\r\n"

    fake = FakeServer(answer, handler)
    try:
        yield f"redis://127.0.0.1:{fake.port}/0"
    finally:
        default_limiter().store.close()
        fake.close()
