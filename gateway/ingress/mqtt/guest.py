"""A client, as the source of its listener knows it: what it is told of its messages, and what is asked."""

from __future__ import annotations

from abc import abstractmethod

from gateway.broker.routing import RoutingEntry
from gateway.ingress.guest import Guest
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.protocols.mqtt.server import ServerConnection
from gateway.transport.stream import Stream


class MqttGuest(Guest):
    """The owner of one client's stream."""

    __slots__ = ("machine", "sender", "stream")

    def __init__(self, stream: Stream, sender: Sender, machine: ServerConnection) -> None:
        self.stream = stream
        self.sender = sender
        self.machine = machine

    @property
    def frames(self) -> ServerConnection:
        """The protocol machine counts them."""
        return self.machine

    # What the source tells of published messages.

    @abstractmethod
    def accepted(self, packet_id: int, qos: int, *, taken: bool = True) -> None:
        """Every target has the message; not `taken`: there is none, for which MQTT 5 has a word (3.4.2.1)."""

    @abstractmethod
    def refused(self, receipt: Receipt, outcome: Outcome) -> None:
        """A target did not take the message."""

    @abstractmethod
    def is_untold(self, retries: bool, outcome: Outcome) -> bool:
        """Return True if the client cannot be told that a route rejects a message, so that the route has to
        keep it. `retries`: the route asks for another attempt."""

    @abstractmethod
    def note_undone(self, packet_id: int, routes: frozenset[str]) -> None:
        """The routes of these names alone have not accepted a message, and take it for now."""

    @abstractmethod
    def left_of(self, packet_id: int, entry: RoutingEntry) -> RoutingEntry:
        """Return what is left of an entry for a message that is tried again: who has not accepted it."""

    @abstractmethod
    def not_served(self, why: str) -> None:
        """Turn away a client whose CONNECT has not been answered yet, for now (0x88; 3: code 3)."""

    @abstractmethod
    def taken_over(self, *, patient: bool = False) -> None:
        """Another connection has come with the same client identifier (3.1.4). `patient`: a goodbye that is
        on its way may come first."""


Receipt = tuple[MqttGuest, int, int, Message, RoutingEntry]
