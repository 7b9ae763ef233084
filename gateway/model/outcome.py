"""What became of a message, as its source is told. The order is the order of badness: the worst wins a
fan-out.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple


class Verdict(IntEnum):
    """ACCEPTED: the target has it. RELEASED: not now, try again. REJECTED: never."""

    ACCEPTED = 0
    RELEASED = 1
    REJECTED = 2


class Reason(Enum):
    """Why a message was not accepted; each protocol translates these to its own codes. Also a metric
    label.
    """

    NONE = "none"
    NO_ROUTE = "no_route"
    NOT_AUTHORIZED = "not_authorized"
    NAME_INVALID = "name_invalid"
    TOO_LARGE = "too_large"
    QUOTA = "quota"
    TARGET_DOWN = "target_down"
    TARGET_REFUSED = "target_refused"
    EXPIRED = "expired"
    HOPS = "hops"
    MALFORMED = "malformed"
    LOST_PROPERTY = "lost_property"
    STORE = "store"  # our own disk is full or fails
    INTERNAL = "internal"  # an error of ours that nobody foresaw


class Outcome(NamedTuple):
    """A verdict, its reason, and a text for people."""

    verdict: Verdict
    reason: Reason = Reason.NONE
    text: str = ""


FINAL: Final = frozenset(
    (
        *(Reason.EXPIRED, Reason.TOO_LARGE, Reason.HOPS),
        *(Reason.NAME_INVALID, Reason.MALFORMED, Reason.LOST_PROPERTY, Reason.INTERNAL),
    )
)
"""Refusals that another attempt cannot change."""

ACCEPTED: Final = Outcome(Verdict.ACCEPTED)
INTERNAL: Final = Outcome(Verdict.REJECTED, Reason.INTERNAL, "internal error")


def worse(one: Outcome, other: Outcome) -> Outcome:
    """The outcome that a source is told when two targets differ."""
    return one if one.verdict >= other.verdict else other
