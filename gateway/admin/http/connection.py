"""Connection of one HTTP client: passes parsed requests to the ASGI application, and sends its responses.

h11 parses the requests. A client is waited for only with a deadline: for the head of a request, for its body,
for reading the response, and between two requests. An invalid request ends in a `ServerRefusal`: an error
response, counted by its reason, after which the connection closes. Upgrades are not supported: a request for
one is served as if it had none.
"""

from __future__ import annotations

import socket
from collections import Counter
from email.utils import formatdate
from typing import Final
from urllib.parse import unquote

import h11
import structlog
import trio
from starlette.types import ASGIApp, Message, Scope

from gateway import clock
from gateway.admin.responses import PROBLEM, problem_document
from gateway.containment import contained
from gateway.settings import Http
from gateway.transport.first_bytes import check_first_bytes
from gateway.transport.http import response

READ_BYTES: Final = 16_384
FIRST_BYTES: Final = 8  # They show the protocol.
# Minimum that a piece of a body counts, since each takes as much time as a long one.
CHUNK_BYTES_MIN: Final = 16
UNREAD_PIECES_MAX: Final = 16  # Pieces of an unused body that are skipped to find its end.
LINGER_SECS: Final = 1.0
LINGER_BYTES: Final = 1_048_576
PROBES: Final = frozenset((b"/livez", b"/livez/", b"/readyz", b"/readyz/", b"/health", b"/health/"))
OVER: Final = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
DISCONNECT: Final[Message] = {"type": "http.disconnect"}

log = structlog.get_logger(limited=True)


class ServerRefusal(Exception):
    """Refusal of a request by the HTTP server itself: an error response, after which the connection closes.

    `status` is the HTTP status, `reason` the label under which the metric counts it, `text` the error
    message.
    """

    def __init__(self, status: int, reason: str, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.reason = reason


class ClientDisconnected(Exception):
    """Error for a client that has disconnected, or has not read a response in time."""


class HttpConnection:
    """Connection of one HTTP client to the ASGI application `app`.

    All connections share the lock `turns`: it lets only one of them start to serve a request in each turn of
    the event loop. `refused` counts refused requests by reason.
    """

    def __init__(
        self,
        app: ASGIApp,
        stream: trio.SocketStream | trio.SSLStream[trio.SocketStream],
        http: Http,
        turns: trio.Lock,
        refused: Counter[str],
    ) -> None:
        self.stream = stream
        self._secured = isinstance(stream, trio.SSLStream)
        self._socket = (stream.transport_stream if isinstance(stream, trio.SSLStream) else stream).socket
        self.scope = trio.CancelScope()
        self.waits_since: float | None = clock.now()
        """Time since when the connection waits for its client; None while the application serves it."""
        name = self._socket.getpeername()
        self.address: str = name[0]
        self._client = (self.address, int(name[1]))
        self._app = app
        self._http = http
        self._turns = turns
        self._refused = refused
        self._h11 = h11.Connection(h11.SERVER, max_incomplete_event_size=http.head_bytes_max)
        self._served = 0
        self._begun = False  # the first bytes have been checked
        self._start: h11.Response | None = None
        self._is_head = False
        self._refusal: ServerRefusal | None = None
        self._closed = False
        self._body_bytes = 0
        self._body_deadline = 0.0

    async def run(self) -> None:
        """Serve requests until one side closes the connection.

        Raises nothing: unexpected errors are counted and logged.
        """
        try:
            with self.scope:
                await self._serve()
        except ClientDisconnected:
            pass
        except Exception as error:
            contained("http", error, address=self.address)
        finally:
            self._socket.close()

    async def _serve(self) -> None:
        try:
            while (request := await self._request()) is not None:
                await self._run_application(request)
                self._served += 1
                if not self._prepare_next_request():
                    break
            else:
                return
        except ServerRefusal as refusal:
            await self._refuse(refusal)
        if self._h11.their_state not in OVER or self._h11.trailing_data[0]:
            await self._linger()

    # Requests.

    async def _request(self) -> h11.Request | None:
        """Return the next request, or None if no request arrives within `keep_alive_secs`.

        Raises ServerRefusal if the request is invalid, or if its head does not arrive completely in time.
        Raises ClientDisconnected if the client has disconnected.
        """
        http = self._http
        if self._served and not self._h11.trailing_data[0]:
            with trio.move_on_after(http.keep_alive_secs) as idle:
                await self._read()
            if idle.cancelled_caught:
                return None
        with trio.move_on_after(http.head_timeout_secs):
            event = await self._next_event()
            if not isinstance(event, h11.Request):
                return None
            self._check(event)
            self._body_bytes = 0
            self._body_deadline = clock.now() + http.body_timeout_secs
            return event
        raise ServerRefusal(408, "head_timeout", f"incomplete head after {http.head_timeout_secs:g} s")

    def _check(self, request: h11.Request) -> None:
        """Raise ServerRefusal for a request that is not supported or too large.

        Refused are HTTP versions other than 1, the method CONNECT, and a head or body above its size limit.
        """
        self._is_head = request.method == b"HEAD"
        if not request.http_version.startswith(b"1."):
            raise ServerRefusal(505, "unsupported", "this server supports only HTTP/1.1")
        head = len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)
        if head > self._http.head_bytes_max:  # h11 limits only heads that are incomplete.
            raise ServerRefusal(431, "head_bytes", f"the head exceeds {self._http.head_bytes_max} bytes")
        if request.method == b"CONNECT":
            raise ServerRefusal(501, "unsupported", "this server is not a proxy")
        lengths = [int(value) for name, value in request.headers if name == b"content-length"]
        if lengths and lengths[0] > self._http.body_bytes_max:
            raise self._too_large()

    def _too_large(self) -> ServerRefusal:
        return ServerRefusal(413, "body_bytes", f"the body exceeds {self._http.body_bytes_max} bytes")

    async def _next_event(self) -> object:
        """Return the next h11 event; read from the socket until h11 has one.

        Raises ServerRefusal for invalid HTTP, and ClientDisconnected if the client has disconnected.
        """
        while True:
            try:
                event = self._h11.next_event()
            except h11.RemoteProtocolError as error:
                reason = "head_bytes" if error.error_status_hint == 431 else "malformed"
                raise ServerRefusal(error.error_status_hint, reason, f"invalid HTTP/1.1: {error}") from error
            if event is not h11.NEED_DATA:
                return event
            await self._read()

    async def _read(self) -> None:
        """Read bytes from the socket and pass them to h11.

        Raises ClientDisconnected if the client has disconnected.
        """
        self.waits_since = clock.now()
        try:
            if not self._begun:
                await self._check_first_bytes()
            data = await self.stream.receive_some(READ_BYTES)
        except (trio.BrokenResourceError, OSError) as error:
            raise ClientDisconnected from error
        finally:
            self.waits_since = None
        if not data:
            raise ClientDisconnected
        self._h11.receive_data(bytes(data))

    async def _check_first_bytes(self) -> None:
        """Raise ServerRefusal if a client without TLS uses a port with TLS, or the reverse.

        The error response is then sent without TLS.
        """
        data = await self._socket.recv(FIRST_BYTES, socket.MSG_PEEK)
        self._begun = True
        found = check_first_bytes(data, secure=self._secured) if data else None
        if found is not None:
            self.stream = trio.SocketStream(self._socket)
            raise ServerRefusal(400, found.reason, found.text)

    async def _receive(self) -> Message:
        """Return the next part of the request's body as an ASGI message.

        Return a disconnect message after the end of the body, if the body is refused, or if the client has
        disconnected.
        """
        if self._closed or self._refusal is not None or self._h11.their_state is not h11.SEND_BODY:
            return DISCONNECT
        try:
            if self._h11.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                await self._write(self._h11.send(go_on) or b"")
            with trio.move_on_at(self._body_deadline):
                await trio.lowlevel.checkpoint()
                return self._piece(await self._next_event())
            secs = self._http.body_timeout_secs
            raise ServerRefusal(408, "body_timeout", f"incomplete body after {secs:g} s")
        except ServerRefusal as refusal:
            self._refusal = refusal
        except ClientDisconnected:
            self._closed = True
        return DISCONNECT

    def _piece(self, event: object) -> Message:
        if not isinstance(event, h11.Data):
            return {"type": "http.request", "body": b"", "more_body": False}
        self._body_bytes += max(len(event.data), CHUNK_BYTES_MIN)
        if self._body_bytes > max(self._http.body_bytes_max, CHUNK_BYTES_MIN):
            raise self._too_large()
        return {"type": "http.request", "body": bytes(event.data), "more_body": True}

    # Responses.

    async def _run_application(self, request: h11.Request) -> None:
        """Have the ASGI application serve a request.

        An error of the application is counted and logged. Raises ServerRefusal if the body is refused, and
        ClientDisconnected if the client has disconnected.
        """
        scope = self._asgi(request)
        if scope["raw_path"] not in PROBES:
            async with self._turns:  # Many simultaneous requests do not delay the event loop by their sum.
                await trio.lowlevel.checkpoint()
        try:
            await self._app(scope, self._receive, self._send)
        except Exception as error:
            if self._refusal is None and not self._closed:
                contained("http", error, address=self.address, path=scope["path"][:100])
        if self._refusal is not None:
            raise self._refusal
        if self._closed:
            raise ClientDisconnected

    def _asgi(self, request: h11.Request) -> Scope:
        """Return the ASGI scope of a request."""
        target = request.target
        if not target.startswith(b"/") and b"://" in target:  # Absolute form, which servers must accept.
            target = b"/" + target.partition(b"://")[2].partition(b"/")[2]
        path, _, query = target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "https" if self._secured else "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": list(request.headers),
            "client": self._client,
            "server": None,
        }

    async def _send(self, message: Message) -> None:
        """Write an ASGI message of the application to the client.

        Do nothing if an error response of the server will replace it. Raises BrokenPipeError once the client
        has disconnected, so that endless responses end.
        """
        if self._closed:
            raise BrokenPipeError("the client has disconnected")
        if self._refusal is not None:
            return
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", []), (b"Date", formatdate(usegmt=True).encode())]
            if not self._discard_body():
                headers.append((b"Connection", b"close"))
            self._start = h11.Response(status_code=message["status"], headers=headers)
            return
        data = b""
        if self._start is not None:
            data = self._h11.send(self._start) or b""
            self._start = None
        body = message.get("body", b"")
        if body and not self._is_head:
            data += self._h11.send(h11.Data(data=body)) or b""
        if not message.get("more_body", False):
            data += self._h11.send(h11.EndOfMessage()) or b""
        try:
            await self._write(data)
        except ClientDisconnected:
            self._closed = True

    def _discard_body(self) -> bool:
        """Discard the parts of the request's body that have arrived. Return True if the end has arrived."""
        for _ in range(UNREAD_PIECES_MAX):
            if self._h11.their_state is not h11.SEND_BODY:
                break
            try:
                if self._h11.next_event() is h11.NEED_DATA:
                    break
            except h11.RemoteProtocolError:
                break
        return self._h11.their_state not in (h11.SEND_BODY, h11.ERROR)

    async def _write(self, data: bytes) -> None:
        self.waits_since = clock.now()
        try:
            with trio.fail_after(self._http.send_timeout_secs):
                await self.stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise ClientDisconnected from error
        except trio.TooSlowError as error:
            self._refused["send_timeout"] += 1
            raise ClientDisconnected from error
        finally:
            self.waits_since = None

    def _prepare_next_request(self) -> bool:
        """Prepare h11 for the next request on this connection. Return False if the connection must close."""
        if self._h11.our_state is not h11.DONE or self._h11.their_state is not h11.DONE:
            return False
        self._h11.start_next_cycle()
        return True

    async def _refuse(self, refusal: ServerRefusal) -> None:
        self._refused[refusal.reason] += 1
        log.info(
            "HTTP request refused", address=self.address, reason=refusal.reason, error=str(refusal)[:200]
        )
        if self._h11.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # No other response has been begun.
            text = problem_document(refusal.status, str(refusal)).decode()
            await self._write(response(refusal.status, text, with_body=not self._is_head, kind=PROBLEM))

    async def _linger(self) -> None:
        """Close the sending side, and then discard received bytes for at most LINGER_SECS.

        If the socket were closed with unread bytes in it, the operating system would send a reset, and the
        client would lose the response.
        """
        with trio.move_on_after(LINGER_SECS):
            try:
                if isinstance(self.stream, trio.SocketStream):
                    await self.stream.send_eof()
                self.waits_since = clock.now()
                remaining = LINGER_BYTES
                while remaining > 0 and (data := await self.stream.receive_some(READ_BYTES)):
                    remaining -= len(data)
            except trio.BrokenResourceError:
                pass
