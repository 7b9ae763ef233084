"""One connection of a link to a broker with queues, as far as that is not its protocol's: its time, the
acknowledgements that gather until something is written, faults that are counted, and how it ends.
"""

from __future__ import annotations

from abc import abstractmethod
from enum import IntEnum
from typing import ClassVar, Final, Generic, Protocol, TypeVar

from gateway.telemetry.stats import LinkStats
from gateway.transport.stream import Stream

SUCCESS: Final = 200  # the reply code of both protocols
GOODBYE: Final = "the gateway is stopping"


class Flushable(Protocol):
    """A consumer, as its connection sees it."""

    live: bool

    def flush(self) -> None:
        """Encode the acknowledgements that have gathered."""


class Machine(Protocol):
    """A protocol's client, as far as it is needed here."""

    def tick(self, now: float) -> None:
        """Heartbeats."""

    def timed_out(self, now: float) -> bool:
        """Nothing has been heard for too long."""

    def close(self, code: int = 0, text: str = "") -> None:
        """Say goodbye."""


ConsumerT = TypeVar("ConsumerT", bound=Flushable)
MachineT = TypeVar("MachineT", bound=Machine)


class QueueLinkConnection(Generic[MachineT, ConsumerT]):
    """The owner of a link's stream, for as long as that connection lives. The handshake must be over
    at `deadline`, when `open` must be set.
    """

    _codes: ClassVar[type[IntEnum]]

    def __init__(self, machine: MachineT, stats: LinkStats, stream: Stream, deadline: float) -> None:
        self.machine = machine
        self.open = False
        self._stats = stats
        self._stream = stream
        self._deadline = deadline
        self._up = False
        self._consumers: dict[int, ConsumerT] = {}  # by channel number
        self._owing: dict[ConsumerT, None] = {}  # acknowledgements
        self._why = ""

    def shut_down(self) -> None:
        """The gateway is stopping: acknowledge, say goodbye, end the stream."""
        self._acknowledge()
        self.machine.close(SUCCESS, GOODBYE)
        self._stream.end(GOODBYE)

    def _in_time(self, now: float) -> bool:
        """Heartbeats, and the time for the handshake. False: the connection is given up."""
        if not self.open and now >= self._deadline:
            self._stats.protocol_errors.add("connect_timeout")
            self._stream.abort("no handshake in time")
            return False
        self.machine.tick(now)
        if self.machine.timed_out(now):
            self._stats.protocol_errors.add("heartbeat_timeout")
            self._stream.abort("heartbeat timeout")
            return False
        return True

    def _let_go(self) -> None:
        """The connection is gone: nobody waits for our acknowledgements."""
        for consumer in self._consumers.values():
            consumer.live = False
        self._consumers.clear()
        self._owing.clear()

    def _wake(self, consumer: ConsumerT) -> None:
        self._owing[consumer] = None
        self._stream.mark()

    def _acknowledge(self) -> None:
        if self._owing:
            owing, self._owing = self._owing, {}
            for consumer in owing:
                consumer.flush()
                self._leave(consumer)

    @abstractmethod
    def _leave(self, consumer: ConsumerT) -> None:
        """Close the channel of what is not wanted any more, when all its messages are answered."""

    def _count_fault(self, code: int) -> None:
        try:
            word = self._codes(code).name.lower()
        except ValueError:
            word = "other"
        self._stats.protocol_errors.add(word)
