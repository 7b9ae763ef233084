"""Pending acceptance of a connecting client, while the shared database looks up its session."""

from __future__ import annotations

from typing import NamedTuple

import trio

from gateway.broker.mqtt.namespace import ConnectingClient
from gateway.ingress.mqtt.guest import MqttGuest
from gateway.state.interface import OpenedSession, OpenSession, Owner


class Opening:
    """OpenSession operation in progress. The client's connection is not read until the reply has arrived."""

    def __init__(self, guest: MqttGuest, coming: ConnectingClient) -> None:
        self.guest = guest
        self.coming = coming
        self._answered = trio.Event()

    @property
    def client(self) -> str:
        """Client identifier."""
        return self.coming.client_id

    async def wait(self) -> None:
        """Wait for the reply of the database."""
        await self._answered.wait()

    def answer(self) -> None:
        """Wake the waiting client, because the reply has arrived."""
        self._answered.set()

    def deny(self, why: str) -> None:
        """Deny the client, with the reason: it gets no session."""
        if not self.guest.stream.closed:
            self.guest.not_served(why)
        self._answered.set()


class OpeningClient(NamedTuple):
    """Client that may be accepted, the owner of its session, and the session that the database has found.

    `operation` has opened the session.
    """

    opening: Opening
    operation: OpenSession
    owner: Owner
    found: OpenedSession
