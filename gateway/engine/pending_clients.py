"""Connecting clients that wait for the shared database to report their sessions."""

from __future__ import annotations

from typing import NamedTuple

import trio

from gateway import clock
from gateway.broker.mqtt.namespace import ConnectingClient
from gateway.broker.mqtt.records import will_bytes
from gateway.ingress.mqtt.listener_client import MqttListenerClient
from gateway.state.interface import OpenedSession, OpenSession, Owner


class PendingOpen:
    """Connecting MQTT client whose OpenSession operation has no reply from the database yet.

    `connection` is its connection, from which nothing is read until the reply has arrived. `connecting` has
    the contents of its CONNECT packet.
    """

    def __init__(self, connection: MqttListenerClient, connecting: ConnectingClient) -> None:
        self.connection = connection
        self.connecting = connecting
        self.opened_at = clock.now()
        self._answered = trio.Event()

    @property
    def client(self) -> str:
        """Client identifier of the connecting client."""
        return self.connecting.client_id

    async def wait(self) -> None:
        """Wait until the database has replied to the OpenSession, or the client is denied."""
        await self._answered.wait()

    @property
    def will_bytes(self) -> int:
        """Size of the client's will for limits, 0 without one."""
        will = self.connecting.will
        return 0 if will is None else will_bytes(will)

    def answer(self) -> None:
        """Continue processing the client's CONNECT, because the reply has arrived."""
        self._answered.set()

    def deny(self, why: str) -> None:
        """Deny the connection, for the reason `why`."""
        if not self.connection.stream.closed:
            self.connection.refuse_unavailable(why)
        self._answered.set()


class OpeningClient(NamedTuple):
    """Client that may be accepted, because the database has opened its session with `operation`.

    `owner` is the owner of the session, `found` the session as the database had it.
    """

    opening: PendingOpen
    operation: OpenSession
    owner: Owner
    found: OpenedSession
