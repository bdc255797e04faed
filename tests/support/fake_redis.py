"""Servers that answer as a Redis of some version, or as another kind of server."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django_ratequota.runtime import default_limiter


class RedisHandler(socketserver.StreamRequestHandler):
    """Speaks RESP: answers INFO with the server's reply, knows no scripts, and answers OK to all else."""

    server: FakeServer

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                words.append(self.rfile.read(int(self.rfile.readline()[1:])))
                self.rfile.readline()
            if words[0] == b"HELLO":
                self.wfile.write(b"%2\r\n+server\r\n+redis\r\n+proto\r\n:3\r\n")
            elif words[0] == b"INFO":
                # Before Redis 7, INFO took one section at most. The check must work with these servers too.
                self.wfile.write(self.server.reply if len(words) < 3 else b"-ERR syntax error\r\n")
            elif words[0] in (b"EVALSHA", b"EVAL"):
                self.wfile.write(b"-ERR unknown command\r\n")
            else:
                self.wfile.write(b"+OK\r\n")


class FakeServer(socketserver.ThreadingTCPServer):
    """Its handlers send ``reply``."""

    reply: bytes


@contextmanager
def fake_redis(reply: bytes, handler: type[socketserver.BaseRequestHandler] = RedisHandler) -> Iterator[str]:
    """Start a server that answers INFO with this reply; yields its URL."""
    with FakeServer(("127.0.0.1", 0), handler) as fake:
        fake.reply = reply
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"redis://127.0.0.1:{fake.server_address[1]}/0"
        finally:
            # A handler ends when its connection is closed.
            default_limiter().store.close()
            fake.shutdown()
            thread.join()


class OtherHandler(socketserver.BaseRequestHandler):
    """Answers everything with the server's reply, as another kind of server would."""

    server: FakeServer

    def handle(self) -> None:
        self.request.recv(4096)
        self.request.sendall(self.server.reply)
