"""A transaction of one AMQP channel: publishes and acknowledgements that wait for tx.commit.

What is published was routed when it came; what is acknowledged is out of the client's hands at once, but not
settled. At the commit all of it goes into the queues together, and the client is told when every queue, and
the disk, has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gateway.broker.switch import Entry
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome

if TYPE_CHECKING:
    from gateway.ingress.amqp091.channel import AmqpChannel, Touched, Unacknowledged
    from gateway.ingress.amqp091.connection import Content

IN_TRANSACTION = -1  # stands for the confirm number in the receipts of a transaction


class Transaction:
    """What a channel has said since its last commit or rollback."""

    def __init__(self, channel: AmqpChannel) -> None:
        self._channel = channel
        self._publishes: list[tuple[Entry, Message, Content | None]] = []
        self.octets = 0  # of what is published
        self._settlements: list[tuple[list[tuple[int, Unacknowledged]], bool | None]] = []
        self._open = 0  # of a commit: what has not been heard of yet
        self._failed = False
        self._then: Callable[[bool], None] | None = None

    def publish(self, entry: Entry, message: Message, content: Content | None) -> tuple[int, int]:
        """Keep a message for the commit; returns how many are kept, and what they weigh."""
        self._publishes.append((entry, message, content))
        self.octets += message.octets
        return len(self._publishes), self.octets

    def settle(self, tag: int, multiple: bool, requeue: bool | None) -> bool:
        """Keep the settling of deliveries (`requeue` None: acknowledged). False: the tag is unknown."""
        taken = self._channel.tagged(tag, multiple)
        if taken:
            self._settlements.append((taken, requeue))
        return bool(taken) or (multiple and tag == 0)

    def rollback(self) -> None:
        """Forget it all; what was acknowledged is unacknowledged again."""
        self._publishes.clear()
        self.octets = 0
        settlements, self._settlements = self._settlements, []
        self._channel.untake([one for taken, _ in settlements for one in taken])

    def commit(self, then: Callable[[bool], None]) -> None:
        """Put it all into effect; `then` hears, now or later, whether everything has been."""
        ingress = self._channel.connection.ingress
        publishes, self._publishes = self._publishes, []
        self.octets = 0
        self._then = then
        self._failed = False
        self._open = len(publishes) + 1
        self._channel.connection.unsettled += len(publishes)
        for entry, message, content in publishes:
            receipt = (self._channel, IN_TRANSACTION, content)
            if not ingress.switch.publish(ingress.batch, entry, message, receipt):
                ingress.unclaimed(entry, message, receipt)
        ingress.turn_done()
        if self._settle() and ingress.store is not None:
            ingress.store.after_commit(self._on_disk)
        else:
            self.told(True)

    def _settle(self) -> bool:
        """Settle the deliveries; True: there were some, which may be on disk, or their letters."""
        settlements, self._settlements = self._settlements, []
        touched: Touched = {}
        for taken, requeue in settlements:
            self._channel.settle([one for _, one in taken], requeue, touched)
        for one in touched:
            one.dispatch()
        return bool(touched)

    def _on_disk(self, outcome: Outcome) -> None:
        self.told(outcome is ACCEPTED)

    def told(self, accepted: bool) -> None:
        """One part of the commit is done."""
        self._failed |= not accepted
        self._open -= 1
        if not self._open and self._then is not None:
            then, self._then = self._then, None
            then(not self._failed)
