"""A connection of a listener, as whoever knows no protocol knows it: what it is asked, and what it does when
its protocol has nothing of its own to do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from mypy_extensions import mypyc_attr

from gateway.broker.memory import LOW_ON_MEMORY
from gateway.ingress.waiting_publishes import WaitingPublishes
from gateway.model.message import Sender
from gateway.model.spooled import Piece
from gateway.telemetry.stats import FrameCounts
from gateway.transport.stream import Stream


class Farewell(Enum):
    """Why the gateway ends a connection whose client did nothing wrong."""

    STOPPING = "the gateway is stopping"
    DISMISSED = "an operator has disconnected this client"
    EXPIRED = "its credentials have expired"
    REVOKED = "its user is no more"
    UNSERVED = "what serves this client is away for too long"
    RULES_CHANGED = "other rules are in force"


class InFlight(NamedTuple):
    """Messages that are under way at a connection: those that its client has published and waits to be told
    of, and those that it has been sent and has not acknowledged."""

    unsettled: int = 0
    unacknowledged: int = 0


class Agreed(NamedTuple):
    """What a client says of itself, and what both sides have agreed on, as far as its protocol has that."""

    client_properties: Mapping[str, Any] = MappingProxyType({})
    frame_max: int = 0
    channel_max: int = 0
    heartbeat_secs: int = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class Guest:
    """The owner of one client's stream, a publisher as memory knows it, and a connection as the console shows
    it. `sender` has a client once that has said who it is."""

    __slots__ = ()

    stream: Stream
    sender: Sender

    # What the stream asks; see gateway.transport.stream.StreamOwner.

    @abstractmethod
    def receive(self, data: bytes, now: float) -> None:
        """Octets arrived."""

    @abstractmethod
    def data_to_send(self) -> bytes | list[Piece]:
        """Everything to be written now."""

    @abstractmethod
    def drained(self) -> None:
        """The client reads again."""

    @abstractmethod
    def lost(self, reason: str) -> None:
        """The connection is gone."""

    # What the listener asks.

    @property
    @abstractmethod
    def frames(self) -> FrameCounts:
        """What counts its frames: always the same object."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True: nothing of this connection awaits settlement."""

    @abstractmethod
    def in_flight(self) -> InFlight:
        """What is under way."""

    @abstractmethod
    def hold(self) -> Callable[[], None] | None:
        """Stop reading, memory is short; returns what undoes it, None when this must not be stopped."""

    def hold_publishes(self, channel: int) -> Callable[[], None] | None:
        """Have what is published on a channel wait, as `hold`; by default nothing is read."""
        return self.hold()

    @abstractmethod
    def shut_down(self, farewell: Farewell) -> None:
        """Say goodbye in the protocol's words and end the stream."""

    def tick(self, now: float) -> None:
        """Do what is due by the clock."""

    def rules_changed(self) -> None:
        """Other rules are in force. Nobody knows what this client holds by the old ones: it goes, and comes
        back by the new ones. A protocol that does know takes what is not allowed any more. Raises
        Pending."""
        self.shut_down(Farewell.RULES_CHANGED)

    @property
    def leaves_a_will(self) -> bool:
        """Whether something is published when it goes."""
        return False

    @property
    def virtual_host(self) -> str:
        """Where it is; "" if its protocol has no such thing."""
        return ""

    @property
    def channel_count(self) -> int:
        """How many channels it has open."""
        return 0

    def agreed(self) -> Agreed:
        """What was said when it came in."""
        return Agreed()

    # What the disk and memory ask; see gateway.broker.memory.Publisher.

    def blocked(self, reason: str) -> None:
        """The disk takes nothing, for this reason; "": it does again."""

    def told_of_memory(self, short: bool) -> None:
        """It is to wait, or may go on: the client sees that it is not read."""

    @property
    def begun(self) -> int:
        """Octets of messages that have not come whole, or are not committed."""
        return 0

    @property
    def outstanding_octets(self) -> int:
        """Octets of messages that it has been sent, has not acknowledged, and nobody else counts."""
        return 0

    @property
    def waiting_publishes(self) -> WaitingPublishes[Any] | None:
        """The publishes that wait until a full queue has room; None if its protocol has none that wait."""
        return None

    def let_go_for_memory(self) -> None:
        """End it: there is no memory for what it has begun."""
        self.stream.end(LOW_ON_MEMORY.text)
