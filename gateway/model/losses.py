"""Named losses of translation: what one protocol cannot express of another one's message, for counting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Loss(NamedTuple):
    """Part of a message that a protocol cannot express: `subject` under `condition`.

    `policy` is the replacement: the part is written elsewhere (encode), with less meaning (downgrade), or
    omitted (drop).
    """

    name: str
    subject: str
    condition: str
    policy: Literal["encode", "downgrade", "drop"]


def reported_losses(losses: Iterable[Loss]) -> frozenset[str]:
    """Return the names of those `losses` of which something is really lost: whose policy is not `encode`."""
    return frozenset(loss.name for loss in losses if loss.policy != "encode")
