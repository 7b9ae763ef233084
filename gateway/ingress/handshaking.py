"""A guest whose client may say more before the handshake is over than the handshake has asked for."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from mypy_extensions import mypyc_attr

from gateway.ingress.guest import Guest


class Machine(Protocol):
    """A protocol machine, as octets go into it; it counts frames."""

    received: Any
    sent: Any

    @property
    def unread(self) -> bool:
        """There are octets that it has not looked at."""

    def receive_data(self, data: bytes, now: float) -> list[Any]:
        """What has happened."""


MachineT = TypeVar("MachineT", bound=Machine)


@mypyc_attr(allow_interpreted_subclasses=True)
class HandshakingGuest(Guest, Generic[MachineT]):
    """What a client sends ahead of our answers in the handshake waits in its machine."""

    machine: MachineT
    _ready: bool  # the handshake is over

    @property
    def frames(self) -> MachineT:
        """The machine counts them."""
        return self.machine

    @abstractmethod
    def _process(self, events: list[Any]) -> None:
        """Do what they mean, or have them wait."""

    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived."""
        machine = self.machine
        handshake = not self._ready
        self._process(self.stream.postponed() or machine.receive_data(data, now))
        if handshake:
            while not (machine.unread or self.stream.unread) and (events := machine.receive_data(b"", now)):
                self._process(events)
        if machine.unread:
            self.stream.again()
