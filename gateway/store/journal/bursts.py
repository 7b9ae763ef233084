"""Bursts of a batch: messages that a connection sent together and that differ only in their bodies.

The publisher of a batch collects them, and the journal encodes a burst without examining each message.
"""

from __future__ import annotations

from gateway.model.address import Address
from gateway.model.message import Message


class Bursts:
    """Bursts of a batch for the journal, which then need not examine each message.

    When other messages have displaced them from the processor's caches, examining them costs as much as
    writing them. `firsts` (the first message of each burst, as received), `targets` (where it is delivered)
    and `lengths` are parallel; `bodies` is by slot, for the published part of the batch.
    """

    __slots__ = ("bodies", "firsts", "lengths", "targets")

    def __init__(self) -> None:
        self.firsts: list[Message] = []
        self.targets: list[Address] = []
        self.lengths: list[int] = []
        self.bodies: list[bytes] = []

    def add(self, messages: list[Message], target: Address) -> None:
        """Add a burst whose messages change at most their address, to `target`."""
        self.firsts.append(messages[0])
        self.targets.append(target)
        self.lengths.append(len(messages))
        self.bodies += [message.body for message in messages]
