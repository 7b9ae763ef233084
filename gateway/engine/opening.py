"""A client that wants in: the log hears of it, and when that comes back it is known what it has found."""

from __future__ import annotations

from typing import NamedTuple

import trio

from gateway.engine.records import Owner, WillSaid
from gateway.ingress.mqtt.guest import MqttGuest


class Coming(NamedTuple):
    """What the record says of it, and its connection."""

    guest: MqttGuest
    client: str
    clean: bool
    expiry_secs: float
    user: str
    place: str
    will: WillSaid | None
    only_own: bool


class Opening:
    """Its connection is not read until the log has answered."""

    def __init__(self, coming: Coming, owner: Owner) -> None:
        self.coming = coming
        self.owner = owner
        self._answered = trio.Event()

    async def wait(self) -> None:
        """Wait for the answer."""
        await self._answered.wait()

    def answer(self) -> None:
        """The log has it; what comes of it is looked up."""
        self._answered.set()

    def lose(self, why: str) -> None:
        """Turn the client away with the reason: it gets no session."""
        if not self.coming.guest.stream.closed:
            self.coming.guest.not_served(why)
        self._answered.set()
