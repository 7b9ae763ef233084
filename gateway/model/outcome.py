"""Outcomes of messages, as reported to their sources.

Verdicts are ordered by severity: the worst one wins when a message has several recipients.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple


class Verdict(IntEnum):
    """Result of delivering a message to one target.

    ACCEPTED: the target has the message. RELEASED: the target did not accept it now, and a retry may succeed.
    REJECTED: the target will never accept it.
    """

    ACCEPTED = 0
    RELEASED = 1
    REJECTED = 2


class Reason(Enum):
    """Reason why a message was not accepted or had no recipient; its value is also a metric label.

    Each protocol maps the reasons to its own codes.
    """

    NONE = "none"
    NO_ROUTE = "no_route"
    NO_TAKER = "no_taker"  # accepted, though no subscription, queue or route is there for it
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
    STORE = "store"  # the gateway's own disk is full or fails
    INTERNAL = "internal"  # an unexpected error in the gateway


class Outcome(NamedTuple):
    """Result of delivering a message: the verdict, its reason, and a text for people."""

    verdict: Verdict
    reason: Reason = Reason.NONE
    text: str = ""


FINAL: Final = frozenset(
    (
        *(Reason.EXPIRED, Reason.TOO_LARGE, Reason.HOPS),
        *(Reason.NAME_INVALID, Reason.MALFORMED, Reason.LOST_PROPERTY, Reason.INTERNAL),
    )
)
"""Reasons of refusals that another attempt cannot change."""

ACCEPTED: Final = Outcome(Verdict.ACCEPTED)
NO_TAKER: Final = Outcome(
    Verdict.ACCEPTED, Reason.NO_TAKER, "no subscription, queue or route matches the message"
)
INTERNAL: Final = Outcome(Verdict.REJECTED, Reason.INTERNAL, "internal error")


def worse_outcome(one: Outcome, other: Outcome) -> Outcome:
    """Return the outcome with the more severe verdict, or `one` if the verdicts are equal.

    The source of a message gets this outcome when two targets report different ones.
    """
    return one if one.verdict >= other.verdict else other
