"""Enhanced authentication by AUTH packets: SCRAM-SHA-256 or tokens, also while connected (5: 4.12).

| client | we |
|---|---|
| CONNECT with the method and perhaps the first message | AUTH 0x18 with our first message, or without one |
| AUTH 0x18 with its next message | CONNACK with our last one, or 0x87 |
| later AUTH 0x19, then the same | AUTH 0x00 at the end, or DISCONNECT 0x87 |

With a token (OAUTH2-JWT, or whatever the back end calls it) the client's only message is the token. Whoever
authenticates again must be the same user.
"""

from __future__ import annotations

from typing import Any

from gateway.access.authentication import Access
from gateway.access.scram import METHOD, Exchange, ScramError
from gateway.protocols.mqtt.octets import violation
from gateway.protocols.mqtt.packets import Auth, Connect
from gateway.protocols.mqtt.spec import Property, ReasonCode


class Authentication:
    """The exchanges of one connection, of which one goes on at a time; `user` is who proved to be it."""

    __slots__ = ("_access", "_exchange", "connect", "user")

    def __init__(self, access: Access, connect: Connect) -> None:
        self.connect = connect
        self.user = ""
        self._access = access
        self._exchange: Exchange | None = access.exchange()

    @property
    def done(self) -> bool:
        """No exchange goes on, and the last one was a success."""
        return self._exchange is None

    @property
    def claimed(self) -> str:
        """Who the client says it is; "": it has not said so yet."""
        return self.user if self._exchange is None else self._exchange.user

    def answer(self, packet: Connect | Auth) -> dict[Property, Any]:
        """The properties of what is said to the client's next message; raises ScramError when it fails."""
        if isinstance(packet, Auth) and packet.reason == ReasonCode.REAUTHENTICATE:
            self._exchange = self._access.exchange()
        exchange = self._exchange
        if exchange is None:
            raise violation("AUTH goes on, and nothing has begun")
        data = packet.properties.get(Property.AUTHENTICATION_DATA, b"")
        properties: dict[Property, Any] = {Property.AUTHENTICATION_METHOD: METHOD}
        if not data and isinstance(packet, Connect):
            return properties  # the client's first message may come in an AUTH of its own
        properties[Property.AUTHENTICATION_DATA] = exchange.answer(data)
        if exchange.done:
            name = self.connect.user_name
            if (self.user or exchange.user) != exchange.user or name not in (None, exchange.user):
                raise ScramError("another user than before")
            self.user = exchange.user
            self._exchange = None
        return properties


class TokenShown:
    """A client that shows tokens, the first one with its CONNECT or behind it."""

    __slots__ = ("connect", "method")

    def __init__(self, connect: Connect, method: str) -> None:
        self.connect = connect
        self.method = method

    @property
    def properties(self) -> dict[Property, Any]:
        """What every answer says."""
        return {Property.AUTHENTICATION_METHOD: self.method}
