"""Protocol-independent part of a link's connection to a broker with queues.

It checks the handshake time and heartbeats, collects acknowledgements until the stream is written, counts
faults, and closes the connection.
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
    """Interface of a consumer that its connection uses."""

    live: bool

    def flush(self) -> None:
        """Encode the collected acknowledgements."""


class LinkMachine(Protocol):
    """Interface of a protocol's client state machine that the connection uses."""

    def tick(self, now: float) -> None:
        """Send a heartbeat if one is due at `now`."""

    def timed_out(self, now: float) -> bool:
        """Return True if the server has been silent for too long.

        `now` is in loop-clock seconds.
        """

    def close(self, code: int = 0, text: str = "") -> None:
        """Send the protocol's close with a reply code and text."""


ConsumerT = TypeVar("ConsumerT", bound=Flushable)
MachineT = TypeVar("MachineT", bound=LinkMachine)


class QueueLinkConnection(Generic[MachineT, ConsumerT]):
    """Connection of a link to a broker with queues, which processes the events of one stream.

    The handshake must be complete (`open` is set) by `deadline`, in loop-clock seconds.
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
        self._owing: dict[ConsumerT, None] = {}  # consumers with acknowledgements to send
        self._why = ""

    def shut_down(self) -> None:
        """Send pending acknowledgements, close the connection and end the stream: the gateway is stopping."""
        self._acknowledge()
        self.machine.close(SUCCESS, GOODBYE)
        self._stream.end(GOODBYE)

    def _in_time(self, now: float) -> bool:
        """Check the handshake deadline and heartbeats. Return False if the connection was aborted.

        `now` is in loop-clock seconds.
        """
        if not self.open and now >= self._deadline:
            self._stats.protocol_errors.add("connect_timeout")
            self._stream.abort("the handshake timed out")
            return False
        self.machine.tick(now)
        if self.machine.timed_out(now):
            self._stats.protocol_errors.add("heartbeat_timeout")
            self._stream.abort("heartbeat timeout")
            return False
        return True

    def _abandon_consumers(self) -> None:
        """Mark all consumers as dead, because acknowledgements cannot be sent any more."""
        for consumer in self._consumers.values():
            consumer.live = False
        self._consumers.clear()
        self._owing.clear()

    def _wake(self, consumer: ConsumerT) -> None:
        self._owing[consumer] = None
        self._stream.mark_for_flush()

    def _acknowledge(self) -> None:
        if self._owing:
            owing, self._owing = self._owing, {}
            for consumer in owing:
                consumer.flush()
                self._close_stopped(consumer)

    @abstractmethod
    def _close_stopped(self, consumer: ConsumerT) -> None:
        """Close the channel of an unwanted consumer once all its messages are settled."""

    def _count_fault(self, code: int) -> None:
        try:
            word = self._codes(code).name.lower()
        except ValueError:
            word = "other"
        self._stats.protocol_errors.add(word)
