"""MQTT over WebSocket as a filter (RFC 6455; MQTT 5.0 and 3.1.1, section 6), for listeners and for links.

The upgrade is one HTTP request, which must offer one of the listener's subprotocols (`mqtt`, `mqttv3.1`).
Frames follow it: the bytes of binary frames form one stream, in which packets may begin and end anywhere.
Output is one binary frame per flush. Extensions (compression) are not offered.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Ping,
    RejectConnection,
    TextMessage,
)
from wsproto.events import Request as UpgradeRequest
from wsproto.frame_protocol import CloseReason
from wsproto.handshake import H11Handshake
from wsproto.utilities import RemoteProtocolError, generate_accept_token

from gateway.transport.filter import Ending
from gateway.transport.filter_stack import Stacked
from gateway.transport.http import Refusal, Request, parse_request

VERSION: Final = "13"  # RFC 6455, 4.1
KEY_BYTES: Final = 16
FRAMES_MAX: Final = 128  # frames per turn: each costs more than a message, and may be empty
UPGRADE: Final = {"Upgrade": "websocket", "Sec-WebSocket-Version": VERSION}


class _Frames:
    """Base of both sides of a WebSocket connection: processes the frames after the HTTP upgrade.

    A peer that violates the protocol gets a close frame with the matching code, and the connection ends. A
    message of more than `message_bytes_max` bytes is refused with code 1009; None means no limit.
    """

    def __init__(self, message_bytes_max: int | None) -> None:
        self.ended: Ending | None = None
        self.certificate = b""
        self.unread = False
        self._message_bytes_max = message_bytes_max
        self._message_bytes = 0
        self._frames: Connection | None = None  # None until the upgrade
        self._out = bytearray()

    def send(self, data: bytes) -> bytes:
        """Return pending control frames, then `data` as one binary frame.

        Before the upgrade (an MQTT server sends nothing before its client does) and after the end `data` is
        discarded.
        """
        out = self._out
        if data and self._frames is not None and self.ended is None:
            out += self._frames.send(BytesMessage(data))
        self._out = bytearray()
        return bytes(out)

    def finish(self) -> bytes:
        """Return the close frame, or b"" if the connection has ended already.

        The gateway does not wait for the peer's close frame.
        """
        if self._frames is None or self.ended is not None:
            return b""
        return bytes(self._frames.send(CloseConnection(CloseReason.NORMAL_CLOSURE)))

    def _content(self, frames: Connection, data: bytes) -> bytes:
        """Return the content of the binary frames in `data`, and process the control frames.

        Sets `ended` if the peer closes or violates the protocol.
        """
        frames.receive_data(data)
        self.unread = False
        pieces = []
        for number, event in enumerate(frames.events(), 1):
            if number == FRAMES_MAX:
                self.unread = True  # there may be more: one more call costs little
            if isinstance(event, BytesMessage):
                self._message_bytes += len(event.data)
                if self._message_bytes_max is not None and self._message_bytes > self._message_bytes_max:
                    self._fail(frames, CloseReason.MESSAGE_TOO_BIG, "the message is too large")
                    break
                pieces.append(event.data)
                if event.message_finished:
                    self._message_bytes = 0
            elif isinstance(event, Ping):
                self._out += frames.send(event.response())
            elif isinstance(event, TextMessage):  # MQTT-6.0.0-1
                self._fail(frames, CloseReason.UNSUPPORTED_DATA, "MQTT must be sent in binary frames")
                break
            elif isinstance(event, CloseConnection):
                if frames.state is ConnectionState.REMOTE_CLOSING:
                    self._out += frames.send(event.response())
                    self.ended = Ending("closed by the peer")
                else:
                    self._fail(frames, event.code, event.reason or "")
                break
            if self.unread:
                break
        return b"".join(pieces)

    def _fail(self, frames: Connection, code: int, text: str) -> None:
        """Send a close frame with `code`, and set `ended`."""
        self._out += frames.send(CloseConnection(code, text))
        self.ended = Ending(f"WebSocket: {text}", violation=f"websocket_{int(code)}")


class WebSocketFilter(_Frames):
    """Server side of one WebSocket connection.

    Requests for another path than `path` get 404. `subprotocols` are the supported ones, the preferred one
    first. `origins` are the origins of the web pages that may connect; None permits all. A request without an
    Origin header does not come from a browser and is accepted.
    """

    def __init__(
        self,
        path: str,
        *,
        subprotocols: Sequence[str],
        origins: Collection[str] | None = None,
        message_bytes_max: int,
    ) -> None:
        super().__init__(message_bytes_max)
        self._path = path
        self._subprotocols = subprotocols
        self._origins = None if origins is None else {origin.lower() for origin in origins}
        self._head = b""
        # True if opened by a web page that is neither named in the configuration nor of this machine.
        self.from_foreign_page = False

    def receive(self, data: bytes) -> bytes:
        """Process bytes from the socket and return the content of binary frames.

        Sets `ended` if the request is refused.
        """
        if self.ended is not None:
            return b""
        if self._frames is None:
            self._head += data
            try:
                request = parse_request(self._head)
                if request is None:
                    return b""
                self._out += self._upgrade(request)
            except Refusal as refusal:
                self._out += refusal.response
                self.ended = Ending(str(refusal), refused=f"http_{refusal.status}")
                return b""
            self._head = b""
            self._frames = Connection(ConnectionType.SERVER)
            data = request.rest
        return self._content(self._frames, data) if data or self.unread else b""

    def _upgrade(self, request: Request) -> bytes:
        """Return the response that accepts the request (RFC 6455, 4.2). Raises Refusal."""
        if request.path != self._path:
            raise Refusal(404, "nothing is served at this path")
        if request.method != "GET":
            raise Refusal(405, "a WebSocket must be opened with GET", {"Allow": "GET"})
        if "websocket" not in (word.lower() for word in request.tokens("upgrade")):
            raise Refusal(426, "this path is only for MQTT over WebSocket", UPGRADE)
        if "upgrade" not in (word.lower() for word in request.tokens("connection")):
            raise Refusal(400, "`Connection: Upgrade` is missing")
        if request.version < "1.1":
            raise Refusal(400, "an upgrade needs HTTP/1.1")
        if request.headers.get("sec-websocket-version") != VERSION:
            raise Refusal(426, f"only version {VERSION} of WebSocket is supported", UPGRADE)
        key = request.headers.get("sec-websocket-key", "")
        if not _is_key(key):
            raise Refusal(400, f"Sec-WebSocket-Key is not {KEY_BYTES} bytes in base64")
        origin = request.headers.get("origin")
        if origin is not None and self._origins is not None and origin.lower() not in self._origins:
            raise Refusal(403, "the origin is not in websocket_origins")
        self.from_foreign_page = origin is not None and self._origins is None and not _is_here(origin)
        offered = request.tokens("sec-websocket-protocol")
        chosen = next((one for one in self._subprotocols if one in offered), None)
        if chosen is None:  # MQTT-6.0.0-3
            raise Refusal(400, f"Sec-WebSocket-Protocol offers none of {', '.join(self._subprotocols)}")
        lines = (
            "HTTP/1.1 101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {generate_accept_token(key.encode()).decode()}",
            f"Sec-WebSocket-Protocol: {chosen}",  # MQTT-6.0.0-4
        )
        return "\r\n".join([*lines, "", ""]).encode()


def opened_by_foreign_page(layer: object) -> bool:
    """Return True if a web page that is neither configured nor local opened this connection.

    `layer` is the outermost layer of the connection's stream; without a WebSocket the result is False. A page
    is configured if the listener's `origins` contain it, and local if it was loaded from this machine.
    """
    inner = layer.inner if isinstance(layer, Stacked) else layer
    return isinstance(inner, WebSocketFilter) and inner.from_foreign_page


def _is_here(origin: str) -> bool:
    """Return True if an Origin header, such as `http://localhost:3000`, names this machine as host."""
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # `null`, another name
        return False


class WebSocketClient(_Frames):
    """Client side of a WebSocket, for a link to a server at `host` (as in the Host header) and `path`.

    Data sent before the upgrade is done is buffered until then: an MQTT client sends first.
    """

    def __init__(self, host: str, path: str, subprotocol: str) -> None:
        super().__init__(None)  # no limit: data is passed on, not buffered, and MQTT's own limits apply
        self._handshake = H11Handshake(ConnectionType.CLIENT)
        self._out += self._handshake.send(UpgradeRequest(host, path, subprotocols=[subprotocol]))
        self._subprotocol = subprotocol
        self._early = b""

    def receive(self, data: bytes) -> bytes:
        """Process bytes from the socket and return the content of binary frames."""
        if self.ended is not None:
            return b""
        if self._frames is None:
            self._upgrade(data)
            data = b""  # bytes after the response are in the frame parser already
        if self._frames is None or self.ended is not None:
            return b""
        return self._content(self._frames, data)

    def send(self, data: bytes) -> bytes:
        """Return `data` as one binary frame.

        Before the upgrade, buffer `data` and return the upgrade request.
        """
        if self._frames is None:
            self._early += data
            return super().send(b"")
        early, self._early = self._early, b""
        return super().send(early + data)

    def _upgrade(self, data: bytes) -> None:
        """Process the response to the upgrade request (RFC 6455, 4.1). Sets `ended` if it is no upgrade."""
        try:
            self._handshake.receive_data(data)
            for event in self._handshake.events():
                if isinstance(event, AcceptConnection):
                    if event.subprotocol != self._subprotocol:  # MQTT-6.0.0-4
                        self._refused("the server does not support MQTT at this path")
                    self._frames = self._handshake.connection
                elif isinstance(event, RejectConnection):
                    self._refused(
                        f"the server responded with status {event.status_code} instead of an upgrade"
                    )
        except RemoteProtocolError as error:
            self._refused(f"the server's response is not an upgrade: {error}")

    def _refused(self, text: str) -> None:
        """Set `ended` because the server refused the upgrade, unless `ended` is set already."""
        self.ended = self.ended or Ending(f"WebSocket: {text}", refused="websocket_upgrade")


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == KEY_BYTES
    except (binascii.Error, ValueError):
        return False
