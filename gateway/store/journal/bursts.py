"""What a batch is made of, if it is bursts: messages that a connection sent together, and that differ in
nothing but their bodies."""

from __future__ import annotations

from gateway.model.address import Address
from gateway.model.message import Message


class Bursts:
    """The bursts of a batch, for a journal, which then need not look at each message: when the next ones have
    taken its place in the caches, that costs as much as all that is written of it.

    `firsts`, as they came in, `targets` (where a burst is delivered) and `lengths` are parallel; `bodies` is
    by slot, as far as the batch was published in bursts.
    """

    __slots__ = ("bodies", "firsts", "lengths", "targets")

    def __init__(self) -> None:
        self.firsts: list[Message] = []
        self.targets: list[Address] = []
        self.lengths: list[int] = []
        self.bodies: list[bytes] = []

    def add(self, messages: list[Message], target: Address) -> None:
        """A burst whose messages only change their address to `target`, or not even that."""
        self.firsts.append(messages[0])
        self.targets.append(target)
        self.lengths.append(len(messages))
        self.bodies += [message.body for message in messages]
