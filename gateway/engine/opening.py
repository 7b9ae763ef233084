"""A client that connects: the shared database says what session it finds, and then it is let in."""

from __future__ import annotations

from typing import NamedTuple

import trio

from gateway.broker.mqtt.namespace import Newcomer
from gateway.ingress.mqtt.guest import MqttGuest
from gateway.state.interface import Opened, Owner


class Opening:
    """An OpenSession on its way. The client's connection is not read until it is answered."""

    def __init__(self, guest: MqttGuest, coming: Newcomer) -> None:
        self.guest = guest
        self.coming = coming
        self._answered = trio.Event()

    @property
    def client(self) -> str:
        """Return the client identifier."""
        return self.coming.client_id

    async def wait(self) -> None:
        """Wait for the answer."""
        await self._answered.wait()

    def answer(self) -> None:
        """The database has answered; what it says is looked up."""
        self._answered.set()

    def lose(self, why: str) -> None:
        """Turn the client away with the reason: it gets no session."""
        if not self.guest.stream.closed:
            self.guest.not_served(why)
        self._answered.set()


class Arrival(NamedTuple):
    """A client that may be let in, who owns the session, and what the database has found."""

    opening: Opening
    owner: Owner
    found: Opened
