"""Two sides of a protocol wired together in memory: what AMQP 0-9-1 and AMQP/Fast need alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

MOVES_MAX = 20

ServerT = TypeVar("ServerT")
ClientT = TypeVar("ClientT")
EventT = TypeVar("EventT")


class Wiring(ABC, Generic[ServerT, ClientT, EventT]):
    """Both sides; `move` carries bytes to and fro until neither has more to say."""

    def __init__(self, server: ServerT, client: ClientT) -> None:
        self.server = server
        self.client = client
        self.now = 0.0
        self.to_server: list[EventT] = []
        self.to_client: list[EventT] = []

    @abstractmethod
    def _answer(self, event: EventT) -> bool:
        """What the application says to it; True: now its side goes on with what it has heard already."""

    def move(self, split: Callable[[bytes], list[bytes]] = lambda data: [data]) -> None:
        server: Any = self.server
        client: Any = self.client
        for _ in range(MOVES_MAX):
            sent = client.data_to_send()
            for piece in split(sent):
                self.to_server += self._feed(server, piece)
            said = server.data_to_send()
            for piece in split(said):
                self.to_client += self._feed(client, piece)
            if not sent and not said:
                return
        raise AssertionError("they never stop talking")

    def _feed(self, side: Any, data: bytes) -> list[EventT]:
        events: list[EventT] = side.receive_data(data, self.now)
        while getattr(side, "unread", False):
            events += side.receive_data(b"", self.now)
        for event in events:
            if self._answer(event):
                events += self._feed(side, b"")
        return events

    def take(self) -> tuple[list[EventT], list[EventT]]:
        """What the server and the client have reported since the last call."""
        taken = self.to_server, self.to_client
        self.to_server, self.to_client = [], []
        return taken
