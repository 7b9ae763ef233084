"""Protocol-independent interface of a client connection, with defaults for optional parts.

The stream, the listener, memory management and the console use it. Each protocol has a subclass, which owns
the stream and drives the protocol machine. The module also defines the reasons for which the gateway itself
closes a connection.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from mypy_extensions import mypyc_attr

from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.memory_shares import Holder
from gateway.ingress.waiting_publishes import WaitingPublishes
from gateway.model.message import Sender
from gateway.model.spooled_bodies import Piece
from gateway.telemetry.stats import FrameCounts
from gateway.transport.stream import Stream


class CloseReason(Enum):
    """Reasons for which the gateway closes a connection without a fault of the client."""

    STOPPING = "the gateway is stopping"
    DISMISSED = "an operator disconnected this client"
    EXPIRED = "the client's credentials have expired"
    REVOKED = "the client's user was removed"
    UNSERVED = "the broker cluster is unreachable for too long"
    RULES_CHANGED = "the access rules changed"


class InFlight(NamedTuple):
    """Messages in flight on a connection.

    `unsettled` are published and await an outcome; `unacknowledged` are delivered and await an
    acknowledgement.
    """

    unsettled: int = 0
    unacknowledged: int = 0


class NegotiatedValues(NamedTuple):
    """Client properties and negotiated values of a connection.

    A value that the protocol does not have is 0 or empty. `frame_max` is in bytes, `heartbeat_secs` in
    seconds.
    """

    client_properties: Mapping[str, Any] = MappingProxyType({})
    frame_max: int = 0
    channel_max: int = 0
    heartbeat_secs: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class IngressClient:
    """Client connection of any protocol, which owns a stream.

    `sender` has the client's data after authentication. Memory management treats the connection as a
    publisher, and the console lists it.
    """

    __slots__ = ()

    stream: Stream
    sender: Sender

    # Interface to the stream; see gateway.transport.stream.StreamOwner.

    @abstractmethod
    def receive(self, data: bytes, now: float) -> None:
        """Process received bytes. `now` is in loop-clock seconds."""

    @abstractmethod
    def data_to_send(self) -> bytes | list[Piece]:
        """Return all output that can be written now."""

    @abstractmethod
    def resume_writing(self) -> None:
        """Resume deliveries: the client's send buffer has drained."""

    @abstractmethod
    def connection_lost(self, reason: str) -> None:
        """Release the connection's resources, because it has ended for `reason`."""

    # Interface to the listener.

    @property
    @abstractmethod
    def frames(self) -> FrameCounts:
        """Object that counts the frames of this connection, always the same one."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True if the client has no published message that awaits its outcome."""

    @abstractmethod
    def in_flight(self) -> InFlight:
        """Return the numbers of unsettled publishes and unacknowledged deliveries."""

    @property
    def consumes(self) -> bool:
        """True if the client may have to acknowledge deliveries, so that it has to be read."""
        return False

    def hold(self) -> Callable[[], None] | None:
        """Stop reading from the client, for lack of memory or queue capacity.

        Return a function that resumes reading. If the client consumes, return None and continue to
        read, because its acknowledgements are needed.
        """
        if self.consumes:
            return None
        self.stream.hold()
        return self.stream.release

    def hold_publishes(self, channel: int) -> Callable[[], None] | None:
        """Stop processing the publishes of a channel. Return a function that lets them continue.

        Return None if the client consumes: its publishes are then not held, but refused when the queue has
        twice its limit. In a protocol whose publishes cannot wait in the gateway, reading from the client
        stops instead, as by `hold`.
        """
        waiting = self.waiting_publishes
        if waiting is None:
            return self.hold()
        return None if self.consumes else waiting.hold(channel)

    @abstractmethod
    def shut_down(self, close_reason: CloseReason) -> None:
        """Close the connection for the reason `close_reason`, with the protocol's message for it."""

    def tick(self, now: float) -> None:
        """Process the connection's timers. `now` is in loop-clock seconds."""

    def is_at_rest(self, now: float) -> bool:
        """Return True if `tick` need not be called yet. `now` is in loop-clock seconds."""
        return False

    def rules_changed(self) -> None:
        """Recheck the client after a change of the access rules. Raises Pending if a decision is pending.

        By default the client is disconnected, and reconnects under the new rules. Protocols that know what
        the client uses end only what is no longer allowed.
        """
        self.shut_down(CloseReason.RULES_CHANGED)

    @property
    def has_will(self) -> bool:
        """True if the client has a will, which is published when its connection is lost."""
        return False

    @property
    def virtual_host(self) -> str:
        """Name of the client's virtual host; "" if the protocol has none."""
        return ""

    @property
    def channel_count(self) -> int:
        """Number of open channels."""
        return 0

    def negotiated(self) -> NegotiatedValues:
        """Return the client properties and the negotiated values of the connection."""
        return NegotiatedValues()

    # Interface to disk and memory management; see gateway.broker.memory.HeldPublisher.

    def blocked(self, reason: str) -> None:
        """Process a change of the store: `reason` is why it is read-only, or "" if it is writable again."""

    def notify_memory(self, short: bool) -> None:
        """Notify the client that memory is short (`short` True), or no longer is.

        By default the client gets no notification, and only notices that the gateway stops reading.
        """

    @property
    def begun_bytes(self) -> int:
        """Number of bytes of messages that are incomplete or not committed."""
        return 0

    @property
    def outstanding_bytes(self) -> int:
        """Number of bytes of unacknowledged deliveries that no session or queue counts as its own."""
        return 0

    @property
    def transactions(self) -> Iterable[tuple[Holder, int]]:
        """Open transactions, each as (object that can stop its growth, bytes of its publishes in memory)."""
        return ()

    @property
    def waiting_publishes(self) -> WaitingPublishes[Any] | None:
        """Publishes that wait until a full queue has capacity; None if the protocol has none."""
        return None

    @property
    def incomplete(self) -> int:
        """Number of bytes of messages that have not arrived completely."""
        return self.begun_bytes - sum([byte_count for _, byte_count in self.transactions])

    @property
    def cached_bytes(self) -> int:
        """Estimated number of bytes of routing entries that are cached for this client alone."""
        return 0

    def forget_entries(self) -> None:
        """Drop the routing entries that are cached for this client alone."""

    def close_for_memory(self) -> None:
        """Close the connection, because no memory is left for its incomplete messages."""
        self.stream.end(LOW_ON_MEMORY.text)
