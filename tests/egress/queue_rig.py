"""A link to a broker with queues whose remote end is in memory, as far as that is not its protocol's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar, cast

import trio

from gateway.broker.dispatcher import Dispatcher
from gateway.egress.link import LinkStatus
from gateway.model.batch import Batch, Recipient, Sink, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.spooled_bodies import join_pieces
from gateway.model.times import Monotonic
from gateway.telemetry.stats import LinkStats

TURNS_MAX = 2_000


class RemoteEnd(Protocol):
    """A broker's side of one connection."""

    machine: Any

    def receive(self, data: bytes) -> None:
        """Hear bytes, and do as the test has said."""


ConversationT = TypeVar("ConversationT")
ConnectionT = TypeVar("ConnectionT")
RemoteT = TypeVar("RemoteT", bound=RemoteEnd)


class MemoryStream(Generic[ConnectionT]):
    """As much of a Stream as an owner uses."""

    def __init__(self, remote: str) -> None:
        self.owner: ConnectionT | None = None
        self.remote = remote
        self.queued = 0
        self.congested = False
        self.closed = False
        self.last: Any = b""
        self._postponed: list[Any] | None = None

    def mark_for_flush(self) -> None:
        return

    def expect(self, byte_count: int) -> None:
        """Here all comes at once."""

    def request_turn(self) -> None:
        cast(Any, self.owner).receive(b"", trio.current_time())

    def postpone(self, events: list[Any]) -> None:
        self._postponed = events

    def postponed(self) -> list[Any] | None:
        events, self._postponed = self._postponed, None
        return events

    def is_turn_spent(self) -> bool:
        return False

    @property
    def ending(self) -> bool:
        return self.closed

    def end(self, reason: str) -> None:
        owner = cast(Any, self.owner)
        if not self.closed and owner is not None:
            self.closed = True
            self.last = owner.data_to_send()
            owner.connection_lost(reason)

    abort = end


class NotedStatus(LinkStatus):
    """Notes what a link session tells."""

    def __init__(self, stats: LinkStats) -> None:
        super().__init__(stats.name, stats)
        self.downs: list[str] = []

    @property
    def ups(self) -> int:
        return self.stats.connects

    def mark_down(self, why: str) -> None:
        super().mark_down(why)
        self.downs.append(why)


class Settled:
    """A source that writes down what became of its messages."""

    def __init__(self) -> None:
        self.outcomes: dict[object, Outcome] = {}
        self.order: list[object] = []

    def settle(self, receipts: list[Any], refused: dict[int, Outcome] | None, received: float) -> None:
        for at, receipt in enumerate(receipts):
            assert receipt not in self.outcomes, "settled twice"
            self.outcomes[receipt] = (refused or {}).get(at, ACCEPTED)
            self.order.append(receipt)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        return []

    def part(self, messages: Iterable[Message], sink: Sink) -> SubBatch:
        """A part of messages whose receipts are their bodies."""
        batch = Batch(self, Monotonic(trio.current_time()))
        recipient = Recipient(sink)
        part = SubBatch(batch, recipient)
        for message in messages:
            batch.add_only(message.body, recipient, message)
            part.messages.append(message)
            part.slots.append(len(part.slots))
        return part


class QueueRig(Generic[ConversationT, ConnectionT, RemoteT]):
    """A conversation with its remote broker, of which `make_remote` makes one for each connection."""

    def __init__(self, conversation: ConversationT, make_remote: Callable[[], RemoteT]) -> None:
        talking = cast(Any, conversation)
        self.session = conversation
        self.link: NotedStatus = talking.status
        self.stats = talking.stats
        self.settings = talking.settings
        self._make_remote = make_remote
        self._fresh()

    def _fresh(self) -> None:
        self.stream: MemoryStream[ConnectionT] = MemoryStream("remote:1")
        self.remote = self._make_remote()

    @property
    def dispatcher(self) -> Dispatcher:
        return cast(Dispatcher, cast(Any, self.session).dispatcher)

    @property
    def connection(self) -> ConnectionT:
        assert self.stream.owner is not None
        return self.stream.owner

    def connect(self) -> None:
        """A new connection, as far as both sides take it."""
        self._fresh()
        talking, now = cast(Any, self.session), trio.current_time()
        self.stream.owner = talking.connect(self.stream, self.settings.target(), now)
        self.stats.add_connection(self.stream.owner.machine)
        self.move()

    def lose(self) -> None:
        """The connection breaks."""
        self.stream.abort("broken")

    def move(self) -> None:
        """Carry bytes to and fro until neither side has more to say."""
        talking = cast(Any, self.session)
        for _ in range(TURNS_MAX):
            connection = cast(Any, self.connection)
            said_by_us = connection.data_to_send()
            sent = said_by_us if isinstance(said_by_us, bytes) else join_pieces(said_by_us)
            self.stream.queued = 0
            if sent:
                self.remote.receive(sent)
            said = self.remote.machine.data_to_send()
            if said:
                connection.receive(said, trio.current_time())
                talking.end_turn()
            if self.stream.closed or (not sent and not said):
                return
        raise AssertionError("they never stop talking")

    def tick(self) -> None:
        talking = cast(Any, self.session)
        cast(Any, self.connection).tick(trio.current_time())
        talking.tick(trio.current_time())
        talking.end_turn()
        self.move()
