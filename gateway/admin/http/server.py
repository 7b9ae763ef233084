"""HTTP listener: accepts connections up to a limit, and closes waiting ones in favour of new ones.

At `http.connections_max` a new connection replaces one that waits for its client: among those of the address
with most connections, the one that has waited longest. So a health probe, which sends its request at once, is
served even while another client holds as many connections as are allowed. If the gateway is serving a request
on every connection, the new one receives 503.
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

from gateway.admin.http.connection import HttpConnection
from gateway.admin.responses import PROBLEM, problem_document
from gateway.containment import contained
from gateway.settings import Http
from gateway.transport.http import response

NO_DESCRIPTORS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
PAUSE_SECS: Final = 0.1  # Pause after a failed accept.

log = structlog.get_logger(limited=True)


class HttpServer:
    """HTTP server on one listening socket for the ASGI application `app`.

    `refused` counts refused connections and requests by reason.
    """

    def __init__(
        self,
        app: ASGIApp,
        http: Http,
        refused: Counter[str],
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """Create the server with the settings `http`.

        `tls` returns the TLS context for a new connection; None serves plain HTTP.
        """
        self.connections: set[HttpConnection] = set()
        self._app = app
        self._http = http
        self._refused = refused
        self._tls = tls
        self._turns = trio.Lock()

    async def run(
        self, listening: socket.socket, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve connections to the socket `listening` until cancelled."""
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
                        self._serve_or_refuse(accepted, nursery)
                    except Exception as error:
                        accepted.close()
                        if not isinstance(error, OSError):  # Otherwise the client has already disconnected.
                            contained("http", error)

    async def _cannot_accept(self, error: OSError) -> None:
        if error.errno in NO_DESCRIPTORS:
            self._refused["descriptors"] += 1
            log.warning("HTTP accept failed", error=str(error))
            self._evict()
        await trio.sleep(PAUSE_SECS)

    def _serve_or_refuse(self, accepted: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        """Start a task that serves an accepted connection, or refuse it at the limit of connections.

        Raises OSError if the client has already disconnected.
        """
        if len(self.connections) >= self._http.connections_max and not self._evict():
            self._refused["connections"] += 1
            log.warning("HTTP connection refused, limit reached", connections_max=self._http.connections_max)
            with accepted:
                if self._tls is not None:
                    return  # No handshake has taken place, so there is no way to respond.
                text = problem_document(503, "too many connections").decode()
                data = response(503, text, {"Retry-After": "1"}, kind=PROBLEM)
                os.write(accepted.fileno(), data)  # The buffer of a new socket is empty.
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
        """Close one idle connection, so that a new client can be served. Return False if none is idle.

        An idle connection waits for its client. The connection that is closed is from the address with the
        most idle connections, and is the one that has been idle for the longest time.
        """
        counts = Counter(connection.address for connection in self.connections)
        waiting = [
            (-counts[connection.address], since, id(connection), connection)
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
