"""The door: accepts connections, as many as there may be, and makes room for who has something to say.

When there are `http.connections_max`, a new one takes the place of one that only waits for its peer: of the
address that has the most, the one that has waited longest. A probe, which asks at once, is served even while
a stranger holds all places. Only when all are being answered the new one is told 503.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Final

import structlog
import trio
from starlette.types import ASGIApp

from gateway.admin.answers import PROBLEM, problem_of
from gateway.admin.http.connection import HttpConnection
from gateway.containment import contained
from gateway.settings import Http
from gateway.transport.http import response

NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
PAUSE_SECS: Final = 0.1  # until accepting is tried again when it failed

log = structlog.get_logger(limited=True)


class HttpServer:
    """Serves `app` on a socket. `refused` counts what was not served, by reason."""

    def __init__(
        self,
        app: ASGIApp,
        http: Http,
        refused: Counter[str],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`tls` gives the context for the next connection; None: there is none."""
        self.connections: set[HttpConnection] = set()
        self._app = app
        self._http = http
        self._refused = refused
        self._tls = tls
        self._turns = trio.Lock()

    async def run(
        self, listening: socket.socket, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve what `listening` accepts, until cancelled."""
        door = trio.socket.from_stdlib_socket(listening)
        with door:
            async with trio.open_nursery() as nursery:
                task_status.started()
                while True:
                    try:
                        accepted, _ = await door.accept()
                    except OSError as error:
                        await self._cannot_accept(error)
                        continue
                    try:
                        self._take(accepted, nursery)
                    except Exception as error:
                        accepted.close()
                        if not isinstance(error, OSError):  # it has gone already
                            contained("http", error)

    async def _cannot_accept(self, error: OSError) -> None:
        if error.errno in NO_DESCRIPTORS:
            self._refused["descriptors"] += 1
            log.warning("HTTP cannot accept", error=str(error))
            self._evict()
        await trio.sleep(PAUSE_SECS)

    def _take(self, accepted: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        """Serve a connection, or send it off. Raises OSError when it has gone."""
        if len(self.connections) >= self._http.connections_max and not self._evict():
            self._refused["connections"] += 1
            log.warning("HTTP connection refused: there are connections_max", of=self._http.connections_max)
            with accepted:
                if self._tls is not None:
                    return  # there is no handshake in which it could be said
                text = problem_of(503, "too many connections").decode()
                octets = response(503, text, {"Retry-After": "1"}, kind=PROBLEM)
                os.write(accepted.fileno(), octets)  # it is new, and its buffer empty
            return
        plain = trio.SocketStream(accepted)
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream] = plain
        if self._tls is not None:
            stream = trio.SSLStream(plain, self._tls(), server_side=True, https_compatible=True)
        connection = HttpConnection(self._app, stream, self._http, self._turns, self._refused)
        self.connections.add(connection)
        nursery.start_soon(self._serve, connection)

    async def _serve(self, connection: HttpConnection) -> None:
        try:
            await connection.run()
        finally:
            self.connections.discard(connection)

    def _evict(self) -> bool:
        """End a connection that waits for its peer; False: there is none."""
        held = Counter(connection.address for connection in self.connections)
        waiting = [
            (-held[connection.address], since, id(connection), connection)
            for connection in self.connections
            if (since := connection.waits_since) is not None
        ]
        if not waiting:
            return False
        *_, chosen = min(waiting)
        self.connections.discard(chosen)
        chosen.scope.cancel()
        self._refused["evicted"] += 1
        return True
