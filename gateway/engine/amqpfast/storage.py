"""What a destination has on the cluster, as its queue at this replica sees it: the queue's storage.

What is published goes to the cluster, and is accepted when that has confirmed it. What comes from there has a
place in the local queue, which hands it out as the embedded broker does; when a client has acknowledged it,
or it has expired, it is acknowledged at the cluster. As many messages are consumed as clients here may hold
unacknowledged (`window`), so that what nobody here can take is there for other replicas; what comes back from
a client that leaves goes back to the cluster, if nobody else here has room for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import trio

from gateway.broker.pressure import FULL
from gateway.broker.priorities import PriorityQueue
from gateway.broker.queue import ALWAYS_OPEN
from gateway.engine.consumers import PREFETCH_MAX, Consumer, Content, Done
from gateway.errors import StoreError
from gateway.model.address import Address
from gateway.model.batch import SubBatch
from gateway.model.message import Message, weight_of
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.properties import Headers
from gateway.protocols.amqp091 import methods as m
from gateway.store.messages import MessageReader

RUN_MAX: Final = 65_536  # messages that are looked through for one that was delivered before


class Failure(NamedTuple):
    """Why a queue cannot be: the broker's code, and its words."""

    code: int
    text: str


class Cluster(Protocol):
    """What is said to the cluster."""

    exchange: str
    direct: str  # the exchange that leads to queues by their names
    reader: MessageReader

    def question(self, method: m.Method, answered: Callable[[int, str], None]) -> None:
        """Ask for something that may be refused."""

    def ask(self, method: m.Method, then: Callable[[], None] | None = None) -> None:
        """The same, when nobody wants to know the answer; `then` it is there."""

    def send(
        self,
        part: SubBatch,
        messages: list[Message],
        address_of: Callable[[Message], Address],
        missing: Callable[[], None] | None = None,
        answered: Callable[[int], None] | None = None,
    ) -> None:
        """Publish a part; `answered` hears of how many of its messages the cluster has said what became."""

    def keep(self, storage: ClusterStorage, *, ends: bool) -> None:
        """Its queue is there. `ends`: it goes when it is not used."""

    def delete(self, storage: ClusterStorage) -> None:
        """Its queue goes."""

    def renew(self, storage: ClusterStorage) -> None:
        """Another number of its messages can be taken here."""

    def touch(self, storage: ClusterStorage) -> None:
        """It has something to hand out when the wake-up ends."""

    def bury(self, content: Content, why: str, then: Callable[[], None]) -> None:
        """Nobody can read a message."""


class ClusterStorage:
    """The queue `queue` of the cluster, for `local`; bound to `key`, if it is to get what is for topics."""

    def __init__(
        self,
        session: Cluster,
        local: PriorityQueue,
        wants: Callable[[Message], bool],
        queue: str,
        address: Address,
        arguments: Headers,
        keys: tuple[str, ...] = (),
        *,
        missing: Callable[[], None],
    ) -> None:
        """`missing` is called when it was taken to be there, and is not."""
        self.queue = queue
        self.address = address  # of the cluster, by which the queue is published to
        self.arguments = arguments
        self.prefetch = 0
        self._most = 0  # messages that may wait here
        self.fresh = False
        self.unbound: dict[str, tuple[bool, Done]] = {}
        self.restrained = False
        self.count = self.octets = 0  # nobody knows what waits on the cluster
        self.recovered = sys.maxsize  # anything may have been delivered before
        self.there = False  # the cluster has said so
        self.failure: Failure | None = None  # why it never will be
        self.gone = False
        self.missing = missing
        self._settled = trio.Event()
        self._early: list[tuple[SubBatch, list[Message]]] = []  # published before it was there
        self._early_messages = self._early_octets = 0
        self._session = session
        self._local = local
        self._wants = wants
        self._keys = keys
        self._held: dict[int, tuple[Consumer, int]] = {}  # by position: where it is settled
        self._again: set[int] = set()  # positions of those that may have been delivered before
        self._emptying = False
        self._unanswered = 0  # messages published to the queue, of which the cluster has said nothing yet
        self._clearing = False  # it is to be emptied, once the cluster has these
        local.keep_in(self, 0, 0, ALWAYS_OPEN)

    # What the local queue asks of its storage.

    @property
    def first(self) -> int | None:
        """What waits on the cluster alone has no position."""
        return None

    @property
    def held(self) -> int:
        """Messages of the cluster that are here, handed out or not."""
        return len(self._held)

    def holds(self, position: int) -> bool:
        """Whether what is there can still be settled."""
        return position in self._held

    def untouched(self) -> list[tuple[int, int]]:
        """The cluster knows it."""
        return []

    def take(self, part: SubBatch, messages: list[Message]) -> None:
        """To the cluster with them, as soon as the queue is there."""
        if self.failure is not None:
            part.settle(_refusal(self.failure))
        elif self.there:
            self._unanswered += len(messages)
            self._session.send(part, messages, self._address_of, self.missing, self._answered)
        elif self._early_messages >= self._local.messages_max or self._early_octets >= self._local.octets_max:
            part.settle(FULL)
        else:
            self._early.append((part, messages))
            self._early_messages += len(messages)
            self._early_octets += weight_of(messages)

    # Whether it is there.

    def declare(self, heard: Callable[[int, str], None]) -> None:
        """Ask the cluster for it; `heard` is told the answer, and says `found` or `fail`."""

        def declared(code: int, text: str) -> None:
            if code:
                heard(code, text)
            else:
                self._session.question(m.QueueBind(self.queue, self._session.direct, self.queue), heard)

        self._session.question(m.QueueDeclare(self.queue, durable=True, arguments=self.arguments), declared)

    def bind(self, heard: Callable[[int, str], None]) -> None:
        """It gets what it is for."""
        for key in self._keys:
            self._session.question(m.QueueBind(self.queue, self._session.exchange, key), heard)

    def found(self, *, ends: bool, consumed: bool = True) -> None:
        """It is there. `ends`: it goes when nobody uses it. `consumed`: maybe here."""
        self.there = True
        if self.gone:
            self._session.ask(m.QueueDelete(self.queue))
            return
        if consumed:
            self._session.keep(self, ends=ends)
        self._go_on()

    def _go_on(self) -> None:
        for part, messages in self._take_early():
            self.take(part, messages)
        self._settled.set()
        self._session.touch(self)

    def lack(self) -> None:
        """It is not there any more; it has to be declared again."""
        self.there = False
        self._settled = trio.Event()

    def fail(self, code: int, text: str) -> None:
        """It will not be."""
        self.failure = Failure(code, text)
        for part, _ in self._take_early():
            part.settle(_refusal(self.failure))
        self._settled.set()

    def _take_early(self) -> list[tuple[SubBatch, list[Message]]]:
        early, self._early = self._early, []
        self._early_messages = self._early_octets = 0
        return early

    async def wait(self) -> None:
        """Wait until that is known."""
        await self._settled.wait()

    def delivered(self, position: int) -> tuple[bool, int]:
        """Whether a message may have been delivered before, and up to where that is so."""
        again = self._again
        if not again:
            return False, sys.maxsize
        found = position in again
        end = position + 1
        while end < position + RUN_MAX and end < self._local.next and (end in again) is found:
            end += 1
        return found, end

    def forget(self, positions: Sequence[int]) -> None:
        """These are settled."""
        for position in positions:
            self._again.discard(position)
            held = self._held.pop(position, None)
            if held is not None:
                held[0].settle(held[1])

    def refill(self) -> bool:
        """What comes, comes by itself."""
        return False

    def clear(self, first: int | None) -> None:
        """The queue is emptied, here from position `first` on, and on the cluster. To that it is said beside
        what is published and what is consumed: what was published before is waited for, and what comes next
        waits, or it might come out of it still, or be lost with the rest.
        """
        if first is not None:
            self.forget([position for position in self._held if position >= first])
        if self._local.deleted or self._clearing:
            return
        if not self.there:
            self._session.ask(m.QueuePurge(self.queue))
            return
        self.lack()
        self._clearing = True
        self._session.touch(self)
        self._answered(0)

    def _answered(self, count: int) -> None:
        """The cluster has said what became of so many messages."""
        self._unanswered -= count
        if self._clearing and not self._unanswered:
            self._session.ask(m.QueuePurge(self.queue), self._cleared)

    def _cleared(self) -> None:
        self._clearing = False
        if not self.gone:
            self.there = True
            self._go_on()

    def forget_beside(self, positions: Sequence[int]) -> None:
        """The cluster has no transactions: it hears of them afterwards."""

    def when_loaded(self, then: Callable[[], None]) -> None:
        """Nothing is waited for."""
        then()

    def drop(self) -> None:
        """The destination is no more."""
        self.gone = True
        self.fail(0, "the destination is gone")
        self._session.delete(self)

    # What the connection asks: this is a queue that is consumed.

    @property
    def keys(self) -> Iterable[str]:
        """What it is bound to."""
        return self._keys

    def deliver(self, consumer: Consumer, tag: int, redelivered: bool, content: Content) -> None:
        """A message has come."""
        try:
            message = self._session.reader.decode_one(bytes(content[2]))
        except StoreError as error:
            self._session.bury(content, str(error), lambda: consumer.settle(tag))
            return
        if self._clearing or not self._wants(message):
            consumer.settle(tag)
            return
        local = self._local
        position = local.next
        self._held[position] = (consumer, tag)
        if redelivered:
            self._again.add(position)
        local.put([message])
        self._session.touch(self)

    def waits(self, count: int) -> None:
        """So many are there already."""

    def unreachable(self) -> None:
        """The node that has it is down; it is looked for again."""

    # What the session asks.

    def lost(self) -> None:
        """The connection is gone: the cluster gives others what was here, and nobody hears what clients
        acknowledge of it."""
        self._held.clear()
        self._again.clear()
        self.prefetch = 0
        self._empty()
        self._session.touch(self)

    def pump(self) -> None:
        """Hand out what has come."""
        self._local.dispatch()

    def adjust(self, window: int) -> None:
        """Consumers have come, gone or been stopped: what they cannot take goes back, and no more comes than
        they can."""
        if self.gone or self._emptying:
            return
        window = min(window, PREFETCH_MAX) if self.there else 0
        if window < self.prefetch:
            self._most = window
        elif window > self.prefetch:
            # What came for the smaller one is here beside what comes for this one; but no more than that, or
            # each consumer that joins and acknowledges nothing would have as much here as all of them.
            self._most = window + self.prefetch
        if len(self._local) > self._most:
            self._empty()
        if window != self.prefetch:
            self.prefetch = window
            self._session.renew(self)

    def _address_of(self, message: Message) -> Address:
        return self.address

    def give_back(self, position: int) -> None:
        """Another replica may have it."""
        self._again.discard(position)
        held = self._held.pop(position, None)
        if held is not None:
            held[0].give_back(held[1])

    def _empty(self) -> None:
        """What waits here goes back, and is not here any more."""
        local = self._local
        self._emptying = True
        try:
            while (taken := local.take()) is not None:
                local.unacknowledged -= 1
                self.give_back(taken[0])
        finally:
            self._emptying = False


def _refusal(failure: Failure) -> Outcome:
    return Outcome(Verdict.REJECTED, Reason.TARGET_REFUSED, failure.text)
