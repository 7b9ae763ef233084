"""Reason codes of MQTT refusals: which one each packet carries, and what a remote broker's codes mean.

Each packet type may carry only some codes, so PUBACK and PUBREC, SUBACK, CONNACK and DISCONNECT have a table
each, keyed by the model's Reason. A refusal for which the model has no Reason, such as a missing client
identifier, has a constant. For clients before MQTT 5 the codec translates these codes.
"""

from __future__ import annotations

from typing import Final

from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.spec import ReasonCode

PUBLISH_REFUSED: Final = {
    Reason.NONE: ReasonCode.UNSPECIFIED_ERROR,
    Reason.NO_TAKER: ReasonCode.UNSPECIFIED_ERROR,
    Reason.NO_ROUTE: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.NOT_AUTHORIZED: ReasonCode.NOT_AUTHORIZED,
    Reason.NAME_INVALID: ReasonCode.TOPIC_NAME_INVALID,
    Reason.TOO_LARGE: ReasonCode.QUOTA_EXCEEDED,
    Reason.QUOTA: ReasonCode.QUOTA_EXCEEDED,
    Reason.TARGET_DOWN: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.TARGET_REFUSED: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.EXPIRED: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.HOPS: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.MALFORMED: ReasonCode.PAYLOAD_FORMAT_INVALID,
    Reason.LOST_PROPERTY: ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR,
    Reason.STORE: ReasonCode.QUOTA_EXCEEDED,
    Reason.INTERNAL: ReasonCode.UNSPECIFIED_ERROR,
}
"""Codes of PUBACK and PUBREC (5: 3.4.2.1, 3.5.2.1).

0x10, no matching subscribers, is a success; a message that the target of a route has no queue for is refused.
0x95, packet too large, is for DISCONNECT only: a message over one of our limits exceeds a quota. A target
that permanently refuses the message is 0x83 (valid, but not accepted); the reason string says why.
"""

FOR_NOW: Final = frozenset((Reason.TARGET_DOWN, Reason.TARGET_REFUSED))
"""Reasons of a target that may accept the same message later, if the message is released."""

SUBSCRIBE_REFUSED: Final = {
    Reason.NAME_INVALID: ReasonCode.TOPIC_FILTER_INVALID,
    Reason.NOT_AUTHORIZED: ReasonCode.NOT_AUTHORIZED,
    Reason.QUOTA: ReasonCode.QUOTA_EXCEEDED,
    Reason.STORE: ReasonCode.QUOTA_EXCEEDED,
}
"""Codes of SUBACK (5: 3.9.3)."""

CONNECT_REFUSED: Final = {
    Reason.NOT_AUTHORIZED: ReasonCode.NOT_AUTHORIZED,
    Reason.QUOTA: ReasonCode.QUOTA_EXCEEDED,
    Reason.STORE: ReasonCode.QUOTA_EXCEEDED,
    Reason.TARGET_DOWN: ReasonCode.SERVER_UNAVAILABLE,
    Reason.NAME_INVALID: ReasonCode.TOPIC_NAME_INVALID,
    Reason.TOO_LARGE: ReasonCode.PACKET_TOO_LARGE,
    Reason.MALFORMED: ReasonCode.PAYLOAD_FORMAT_INVALID,
}
"""Codes of CONNACK (5: 3.2.2.2); the last three are about the will."""
CLIENT_ID_REFUSED: Final = ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
WILL_QOS_REFUSED: Final = ReasonCode.QOS_NOT_SUPPORTED
WILL_RETAIN_REFUSED: Final = ReasonCode.RETAIN_NOT_SUPPORTED
METHOD_REFUSED: Final = ReasonCode.BAD_AUTHENTICATION_METHOD

LOGIN_REFUSED: Final = {
    "wrong": ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    "expired": ReasonCode.NOT_AUTHORIZED,
    "unavailable": ReasonCode.SERVER_UNAVAILABLE,
    "refused": ReasonCode.CONNECTION_RATE_EXCEEDED,
    "busy": ReasonCode.SERVER_BUSY,
}
"""Codes of CONNACK for a refused login, by the name of the `Denial`."""
PROOF_REFUSED: Final = LOGIN_REFUSED | {"wrong": ReasonCode.NOT_AUTHORIZED}
"""Codes of a refused enhanced authentication, where there need not be a password (5: 4.12)."""
REAUTHENTICATION_REFUSED: Final = PROOF_REFUSED | {"unavailable": ReasonCode.SERVER_BUSY}
"""Codes of the DISCONNECT after a failed re-authentication (5: 4.12.1), which may not carry 0x88."""


def publish_refused(outcome: Outcome) -> ReasonCode:
    """Return the reason code of the PUBACK or PUBREC for a message that was not accepted.

    `outcome` is the message's outcome. For a temporary refusal the code is 0x97: of the codes that these
    packets may carry, it is the one after which a bridge, or a link of this gateway, retries the message.
    """
    if outcome.verdict is Verdict.RELEASED and outcome.reason in FOR_NOW:
        return ReasonCode.QUOTA_EXCEEDED
    return PUBLISH_REFUSED[outcome.reason]


# Meaning of the codes of a remote broker.

NOT_NOW: Final[dict[int, Reason]] = {
    ReasonCode.QUOTA_EXCEEDED: Reason.QUOTA,
    ReasonCode.SERVER_UNAVAILABLE: Reason.TARGET_DOWN,
    ReasonCode.SERVER_BUSY: Reason.TARGET_DOWN,
    ReasonCode.MESSAGE_RATE_TOO_HIGH: Reason.QUOTA,
}
"""Codes with which a broker refuses a message temporarily."""

REFUSALS: Final[dict[int, Reason]] = {
    ReasonCode.NOT_AUTHORIZED: Reason.NOT_AUTHORIZED,
    ReasonCode.TOPIC_NAME_INVALID: Reason.NAME_INVALID,
    ReasonCode.PAYLOAD_FORMAT_INVALID: Reason.MALFORMED,
}


def refusal(code: int) -> Reason:
    """Return the Reason for `code`, the code (0x80 or above) with which a remote broker refused a PUBLISH."""
    return NOT_NOW.get(code) or REFUSALS.get(code, Reason.TARGET_REFUSED)


def outcome_of(code: int) -> Outcome:
    """Return the outcome of a PUBLISH that a remote broker has refused with `code` (0x80 or above)."""
    verdict = Verdict.RELEASED if code in NOT_NOW else Verdict.REJECTED
    return Outcome(verdict, refusal(code), f"the broker refused it with reason {code:#04x}")
