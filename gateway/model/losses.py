"""What a protocol cannot say of a message of another one: named, so that it can be counted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Loss(NamedTuple):
    """What cannot be said, under which condition, and what is done instead: it is said in another place
    (encode), with less meaning (downgrade), or not at all (drop)."""

    name: str
    subject: str
    condition: str
    policy: Literal["encode", "downgrade", "drop"]


def losing(losses: Iterable[Loss]) -> frozenset[str]:
    """The names of those that cost something."""
    return frozenset(loss.name for loss in losses if loss.policy != "encode")
