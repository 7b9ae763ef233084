"""MQTT over WebSocket as a filter (RFC 6455; MQTT 5.0 and 3.1.1, section 6).

First the upgrade: one HTTP request, which must offer the subprotocol `mqtt` or `mqttv3.1`. Then frames: the
octets of binary ones are a stream, whose packets begin and end where they like; what is to be sent is one
binary frame per flush. Extensions (compression) are not offered.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from typing import Final

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import generate_accept_token

from gateway.transport.http import Refusal, Request, parse_request
from gateway.transport.stream import Ending

SUBPROTOCOLS: Final = ("mqtt", "mqttv3.1")
VERSION: Final = "13"  # RFC 6455, 4.1
KEY_OCTETS: Final = 16
UPGRADE: Final = {"Upgrade": "websocket", "Sec-WebSocket-Version": VERSION}


class WebSocketFilter:
    """The server's side of one WebSocket. What breaks its rules ends it with the close code that says so.

    `path` is where it is found (404 elsewhere). `origins` may connect, None: any; a request without an origin
    does not come from a browser, and may. A message of more than `message_octets_max` is refused (1009).
    """

    def __init__(self, path: str, *, origins: Collection[str] | None = None, message_octets_max: int) -> None:
        self.ended: Ending | None = None
        self._path = path
        self._origins = None if origins is None else {origin.lower() for origin in origins}
        self._message_octets_max = message_octets_max
        self._message_octets = 0
        self._head = b""
        self._frames: Connection | None = None  # None until the upgrade
        self._out = bytearray()

    def receive(self, data: bytes) -> bytes:
        """The octets of binary frames."""
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
        return self._content(self._frames, data) if data else b""

    def send(self, data: bytes) -> bytes:
        """One binary frame, behind what the layer has to say. Before the upgrade nothing can be said: MQTT's
        server speaks second.
        """
        out = self._out
        if data and self._frames is not None and self.ended is None:
            out += self._frames.send(BytesMessage(data))
        self._out = bytearray()
        return bytes(out)

    def finish(self) -> bytes:
        """The close frame, unless one was sent; the client's own is not awaited."""
        if self._frames is None or self.ended is not None:
            return b""
        return bytes(self._frames.send(CloseConnection(CloseReason.NORMAL_CLOSURE)))

    # The upgrade.

    def _upgrade(self, request: Request) -> bytes:
        """The response that accepts it (RFC 6455, 4.2). Raises Refusal."""
        if request.path != self._path:
            raise Refusal(404, "there is nothing here")
        if request.method != "GET":
            raise Refusal(405, "a WebSocket is opened with GET", {"Allow": "GET"})
        if "websocket" not in (word.lower() for word in request.tokens("upgrade")):
            raise Refusal(426, "MQTT over WebSocket is spoken here", UPGRADE)
        if "upgrade" not in (word.lower() for word in request.tokens("connection")):
            raise Refusal(400, "`Connection: Upgrade` is missing")
        if request.version < "1.1":
            raise Refusal(400, "an upgrade needs HTTP/1.1")
        if request.headers.get("sec-websocket-version") != VERSION:
            raise Refusal(426, f"version {VERSION} of WebSocket is spoken here", UPGRADE)
        key = request.headers.get("sec-websocket-key", "")
        if not _is_key(key):
            raise Refusal(400, f"Sec-WebSocket-Key is not {KEY_OCTETS} octets in base64")
        origin = request.headers.get("origin")
        if origin is not None and self._origins is not None and origin.lower() not in self._origins:
            raise Refusal(403, "this origin may not connect")
        offered = request.tokens("sec-websocket-protocol")
        chosen = next((one for one in SUBPROTOCOLS if one in offered), None)
        if chosen is None:  # MQTT-6.0.0-3
            raise Refusal(400, f"Sec-WebSocket-Protocol offers none of {', '.join(SUBPROTOCOLS)}")
        lines = (
            "HTTP/1.1 101 Switching Protocols",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Accept: {generate_accept_token(key.encode()).decode()}",
            f"Sec-WebSocket-Protocol: {chosen}",  # MQTT-6.0.0-4
        )
        return "\r\n".join([*lines, "", ""]).encode()

    # Frames.

    def _content(self, frames: Connection, data: bytes) -> bytes:
        frames.receive_data(data)
        pieces = []
        for event in frames.events():
            if isinstance(event, BytesMessage):
                self._message_octets += len(event.data)
                if self._message_octets > self._message_octets_max:
                    self._fail(frames, CloseReason.MESSAGE_TOO_BIG, "the message is too large")
                    break
                pieces.append(event.data)
                if event.message_finished:
                    self._message_octets = 0
            elif isinstance(event, Ping):
                self._out += frames.send(event.response())
            elif isinstance(event, TextMessage):  # MQTT-6.0.0-1
                self._fail(frames, CloseReason.UNSUPPORTED_DATA, "MQTT is sent in binary frames")
                break
            elif isinstance(event, CloseConnection):
                if frames.state is ConnectionState.REMOTE_CLOSING:
                    self._out += frames.send(event.response())
                    self.ended = Ending("closed by the peer")
                else:
                    self._fail(frames, event.code, event.reason or "")
                break
        return b"".join(pieces)

    def _fail(self, frames: Connection, code: int, text: str) -> None:
        self._out += frames.send(CloseConnection(code, text))
        self.ended = Ending(f"WebSocket: {text}", broke=f"websocket_{int(code)}")


def _is_key(text: str) -> bool:
    try:
        return len(base64.b64decode(text, validate=True)) == KEY_OCTETS
    except (binascii.Error, ValueError):
        return False
