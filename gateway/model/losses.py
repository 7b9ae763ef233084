"""Named losses of translation: what one protocol cannot express of another one's message, for counting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Loss(NamedTuple):
    """Part of a message that a protocol cannot express: `subject`, if `condition` is true.

    `policy` is what the translation does instead: `encode` writes the part in another field, `downgrade`
    writes it with less meaning, `drop` omits it.
    """

    name: str
    subject: str
    condition: str
    policy: Literal["encode", "downgrade", "drop"]


def reported_losses(losses: Iterable[Loss]) -> frozenset[str]:
    """Return the names of those `losses` that are reported: all whose policy is not `encode`.

    With the policy `encode` no information is lost.
    """
    return frozenset(loss.name for loss in losses if loss.policy != "encode")
