"""TLS in front of a server."""

from __future__ import annotations

import select
import socket
import ssl
import threading
from contextlib import suppress

from . import Address
from .servers import Node


class Terminator(Address):
    """Terminates TLS in front of a server; one thread per connection."""

    def __init__(self, node: Node, context: ssl.SSLContext) -> None:
        self._node, self._context = node, context
        self._flowing = threading.Event()
        self._flowing.set()
        self._clients: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def freeze(self) -> None:
        """Hold replies back."""
        self._flowing.clear()

    def close(self) -> None:
        self._flowing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(30)  # it adds to both lists until then
        for client in self._clients:
            with suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    return
                # The thread has a descriptor of its own: shutting this one down ends its waits.
                self._clients.append(client.dup())
                self._threads.append(threading.Thread(target=self._serve, args=(client, self._clients[-1])))
                self._threads[-1].start()

    def _serve(self, client: socket.socket, handle: socket.socket) -> None:
        with (
            handle,
            suppress(OSError),  # a client that turns away, or the end of the test
            self._context.wrap_socket(client, server_side=True) as tls,
            socket.create_connection(self._node.address) as server,
        ):
            while True:
                ready, _, _ = ([tls], [], []) if tls.pending() else select.select([tls, server], [], [])
                source, target = (tls, server) if tls in ready else (server, tls)
                data = source.recv(65_536)
                if not data:
                    return
                if source is server:
                    self._flowing.wait()
                target.sendall(data)
