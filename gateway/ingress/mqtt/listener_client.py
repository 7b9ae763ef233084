"""Interface between an MQTT connection and the source of its listener.

The source calls these methods to report outcomes of published messages and to end the connection. The
implementation is in the modules `admission` and `connection`. A receipt is (connection, packet identifier,
QoS, message, routing entry).
"""

from __future__ import annotations

from abc import abstractmethod

from gateway.broker.routing import RoutingEntry
from gateway.ingress.client import IngressClient
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.protocols.mqtt.server import ServerConnection
from gateway.transport.stream import Stream


class MqttListenerClient(IngressClient):
    """Interface of an MQTT client's connection to the listener. The connection owns its stream."""

    __slots__ = ("machine", "sender", "stream")

    def __init__(self, stream: Stream, sender: Sender, machine: ServerConnection) -> None:
        self.stream = stream
        self.sender = sender
        self.machine = machine

    @property
    def frames(self) -> ServerConnection:
        """Object that counts the connection's frames: the protocol machine."""
        return self.machine

    # Outcomes of published messages, reported by the source.

    @abstractmethod
    def acknowledge(self, packet_id: int, qos: int, *, has_target: bool = True) -> None:
        """Acknowledge a message that every target has accepted.

        `has_target` False means that there was no target, which MQTT 5 reports with 0x10 (5: 3.4.2.1).
        """

    @abstractmethod
    def handle_refusal(self, receipt: Receipt, outcome: Outcome) -> None:
        """Report to the client that its message `receipt` was refused, or schedule another attempt."""

    @abstractmethod
    def cannot_notify(self, retries: bool, outcome: Outcome) -> bool:
        """Return True if the client cannot be notified that a route rejected its message.

        The route then has to store a dead letter. `retries` is True if the route has `on_reject: retry`.
        """

    @abstractmethod
    def record_remaining_routes(self, packet_id: int, routes: frozenset[str]) -> None:
        """Record the routes (by name) that have not accepted a message; only these get its next attempt."""

    @abstractmethod
    def remaining_entry(self, packet_id: int, entry: RoutingEntry) -> RoutingEntry:
        """Return the entry restricted to the routes that have not accepted the message `packet_id` yet."""

    @abstractmethod
    def note_local_delivery(self, packet_id: int, entry: RoutingEntry) -> None:
        """Request that the packet identifier of a QoS 2 message is stored together with the message.

        The message is the one that is published next. Do nothing if the session ends with its connection, or
        if a target of `entry` gets the message only later.
        """

    @abstractmethod
    def refuse_unavailable(self, why: str) -> None:
        """Refuse a CONNECT that has no response yet, as the server is unavailable (0x88; 3.1.1: code 3).

        `why` is the reason for the log.
        """

    @abstractmethod
    def handle_takeover(self, *, patient: bool = False) -> None:
        """Disconnect the client, because another connection uses its client identifier (3.1.4).

        With `patient`, the client stays connected for a short time, so that packets that are on their way,
        such as DISCONNECT, may still arrive.
        """


Receipt = tuple[MqttListenerClient, int, int, Message, RoutingEntry]
