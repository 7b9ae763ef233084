"""Enhanced authentication by AUTH packets: SCRAM-SHA-256 or tokens, also while connected (5: 4.12).

| client | gateway |
|---|---|
| CONNECT with the method and perhaps the first message | AUTH 0x18 with its first message, or without one |
| AUTH 0x18 with the next message | CONNACK with the last message, or 0x87 |
| later AUTH 0x19, then the same | AUTH 0x00 at the end, or DISCONNECT 0x87 |

With a token (method OAUTH2-JWT, or the name that the back end configures) the client's only message is the
token. A client that authenticates again must remain the same user.
"""

from __future__ import annotations

from typing import Any

from gateway.access.authentication import Access
from gateway.access.scram import METHOD, ScramError, ScramExchange
from gateway.protocols.mqtt.data_types import violation
from gateway.protocols.mqtt.packets import Auth, Connect
from gateway.protocols.mqtt.spec import Property, ReasonCode


class Authentication:
    """SCRAM exchanges of one connection, one at a time; `user` is the authenticated user, or ""."""

    __slots__ = ("_access", "_exchange", "connect", "user")

    def __init__(self, access: Access, connect: Connect) -> None:
        self.connect = connect
        self.user = ""
        self._access = access
        self._exchange: ScramExchange | None = access.begin_scram()

    @property
    def is_complete(self) -> bool:
        """True if no exchange is running and the last one succeeded."""
        return self._exchange is None

    @property
    def claimed_user(self) -> str:
        """User that the client claims to be; "" if it has not sent a name yet."""
        return self.user if self._exchange is None else self._exchange.user

    def answer(self, packet: Connect | Auth) -> dict[Property, Any]:
        """Process the client's next message. Return the properties of the response.

        Raises ScramError if the authentication fails or yields another user, and RemoteProtocolError for AUTH
        outside an exchange.
        """
        if isinstance(packet, Auth) and packet.reason == ReasonCode.REAUTHENTICATE:
            self._exchange = self._access.begin_scram()
        exchange = self._exchange
        if exchange is None:
            raise violation("AUTH continues an exchange that has not begun")
        data = packet.properties.get(Property.AUTHENTICATION_DATA, b"")
        properties: dict[Property, Any] = {Property.AUTHENTICATION_METHOD: METHOD}
        if not data and isinstance(packet, Connect):
            return properties  # the client may send its first message in an AUTH packet
        properties[Property.AUTHENTICATION_DATA] = exchange.answer(data)
        if exchange.done:
            name = self.connect.user_name
            if (self.user or exchange.user) != exchange.user or name not in (None, exchange.user):
                raise ScramError("re-authentication with another user")
            self.user = exchange.user
            self._exchange = None
        return properties


class TokenAuthentication:
    """Enhanced authentication of one connection by a token, which arrives in a CONNECT or AUTH packet."""

    __slots__ = ("connect", "method")

    def __init__(self, connect: Connect, method: str) -> None:
        self.connect = connect
        self.method = method

    @property
    def properties(self) -> dict[Property, Any]:
        """Properties of every AUTH or CONNACK response of this authentication."""
        return {Property.AUTHENTICATION_METHOD: self.method}
