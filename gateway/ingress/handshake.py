"""Base of connections whose client may send data before it has the responses of the handshake.

Such data waits unprocessed in the protocol machine. After each step of the handshake the connection requests
the next events from the machine. AMQP 0-9-1 and AMQP/Fast use this class.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from mypy_extensions import mypyc_attr

from gateway.ingress.client import IngressClient


class ServerMachine(Protocol):
    """Interface of a protocol's state machine (server side) to the client connection that uses it."""

    received: Any
    sent: Any

    @property
    def unread(self) -> bool:
        """True if the machine has bytes that it has not processed."""

    def receive_data(self, data: bytes, now: float) -> list[Any]:
        """Process bytes. Return the resulting events. `now` is in loop-clock seconds."""


MachineT = TypeVar("MachineT", bound=ServerMachine)


@mypyc_attr(allow_interpreted_subclasses=True)
class HandshakingClient(IngressClient, Generic[MachineT]):
    """Client connection of a protocol with a handshake.

    Bytes that the client sends before it gets a response of the handshake are held back by the protocol
    machine and processed, in order, after the response.
    """

    machine: MachineT
    _ready: bool  # the handshake is over

    @property
    def frames(self) -> MachineT:
        """Object that counts the connection's frames: the protocol machine."""
        return self.machine

    @abstractmethod
    def _process(self, events: list[Any]) -> None:
        """Process events in order. Store events that have to wait in the stream, by `stream.postpone`."""

    def receive(self, data: bytes, now: float) -> None:
        """Pass received bytes to the protocol machine and process its events.

        During the handshake, continue with the bytes that the machine has not decoded yet, until they contain
        no further event.
        """
        machine = self.machine
        handshake = not self._ready
        self._process(self.stream.postponed() or machine.receive_data(data, now))
        if handshake:
            while not (machine.unread or self.stream.unread) and (events := machine.receive_data(b"", now)):
                self._process(events)
        if machine.unread:
            self.stream.request_turn()
