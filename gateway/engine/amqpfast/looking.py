"""What waits in a queue of the cluster, looked at without taking it.

RabbitMQ cannot be asked for it: so it is consumed, as much as there is at that moment or as may be looked at,
and given back by closing the channel. It stands where it was then, but whoever gets it next is told that it
may have been delivered before, and for that moment nobody else gets it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from hashlib import blake2b
from typing import Final

import structlog
import trio

from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.store.messages import MessageReader

log = structlog.get_logger(limited=True)

MESSAGES_MAX: Final = 1_000  # that one look brings
OCTETS_MAX: Final = 4_194_304
LOOK_SECS: Final = 2.0  # for which is waited for what others may have taken meanwhile
POSITION_OCTETS: Final = 8
Seen = dict[int, Message]
"""Messages by what stands for their positions: of equal ones, and of when they were looked at, they tell the
same."""


class _State(Enum):
    OPENING = auto()
    COUNTING = auto()
    CONSUMING = auto()
    OVER = auto()


class Look:
    """One look at one queue, on a channel of its own. `done` is called with what was there."""

    def __init__(self, queue: str, reader: MessageReader, done: Callable[[Seen], None], now: float) -> None:
        self.queue = queue
        self.deadline = now + LOOK_SECS
        self.over = False
        self._state = _State.OPENING
        self._reader = reader
        self._done = done
        self._wanted = 0
        self._octets = 0
        self._count = 0
        self._seen: Seen = {}

    def opened(self, machine: ClientConnection, channel: int) -> None:
        """How many are there?"""
        self._state = _State.COUNTING
        machine.send_method(channel, m.QueueDeclare(self.queue, passive=True))

    def answered(self, machine: ClientConnection, channel: int, method: m.Method) -> None:
        """So many."""
        if self._state is _State.COUNTING and isinstance(method, m.QueueDeclareOk):
            self._wanted = min(method.message_count, MESSAGES_MAX)
            if not self._wanted:
                self.end()
                return
            self._state = _State.CONSUMING
            machine.send_method(channel, m.BasicQos(prefetch_count=self._wanted))
            machine.send_method(channel, m.BasicConsume(self.queue))

    def take(self, octets: bytes) -> None:
        """One of them has come."""
        if self._state is not _State.CONSUMING:
            return
        self._count += 1
        self._octets += len(octets)
        try:
            message = self._reader.decode_one(octets)
        except StoreError as error:  # whoever consumes it makes it a dead letter
            log.warning("a message of the cluster cannot be looked at", queue=self.queue, why=str(error))
        else:
            self._seen[_position(octets, self._seen)] = message
        if self._count >= self._wanted or self._octets >= OCTETS_MAX:
            self.end()

    def end(self) -> None:
        """That is all."""
        if self._state is not _State.OVER:
            self._state = _State.OVER
            self.over = True
            self._done(self._seen)


def _position(octets: bytes, seen: Seen) -> int:
    """The same for the same message at each look; equal ones are told apart by their order."""
    at = int.from_bytes(blake2b(octets, digest_size=POSITION_OCTETS).digest())
    while at in seen:
        at += 1
    return at


class Looking:
    """Somebody waits for looks at some queues."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._all = trio.Event()

    @property
    def over(self) -> bool:
        """They have been looked at."""
        return self._left <= 0

    def one_less(self) -> None:
        """One of them has been."""
        self._left -= 1
        if self.over:
            self._all.set()

    async def wait(self) -> None:
        """Wait for all."""
        await self._all.wait()
