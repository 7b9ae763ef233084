"""Bursts of a batch: messages that a connection sent together and that differ only in their bodies.

The publisher of a batch collects them. The journal then encodes a burst by its first message, without
examining the others.
"""

from __future__ import annotations

from gateway.model.address import Address
from gateway.model.message import Message


class Bursts:
    """Bursts of one batch; a burst is messages that were read together and differ only in their bodies.

    `firsts` (the first message of each burst, as received), `targets` (the address to which the burst is
    delivered) and `lengths` (the number of its messages) are parallel lists; `bodies` has the bodies of all
    messages in order. They are collected while the messages are in the processor's caches: reading each
    message again later would cost as much as recording it.
    """

    __slots__ = ("bodies", "firsts", "lengths", "targets")

    def __init__(self) -> None:
        self.firsts: list[Message] = []
        self.targets: list[Address] = []
        self.lengths: list[int] = []
        self.bodies: list[bytes] = []

    def add(self, messages: list[Message], target: Address) -> None:
        """Record one burst: messages that differ only in their bodies.

        `target` is the address to which they were delivered. Nothing else of them was changed.
        """
        self.firsts.append(messages[0])
        self.targets.append(target)
        self.lengths.append(len(messages))
        self.bodies += [message.body for message in messages]
