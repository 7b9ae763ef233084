"""Checks of PUBLISH packets that depend on the listener, on the client's rights or on the body.

They cover the highest QoS, RETAIN, UTF-8 bodies and the topics that no client may publish to. What depends on
the packet alone is checked by the protocol machine; permissions and routing are checked elsewhere.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.broker.mqtt.system import SYS
from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.data_types import is_utf8
from gateway.protocols.mqtt.runs import PublishRow
from gateway.protocols.mqtt.spec import ReasonCode

UTF8: Final = b"\x01\x01"  # payload format indicator 1, encoded; may also match other bytes
NOT_TEXT: Final = Outcome(
    Verdict.REJECTED, Reason.MALFORMED, "the payload is marked as UTF-8 but is not valid UTF-8"
)
FORBIDDEN: Final = Outcome(Verdict.REJECTED, Reason.NOT_AUTHORIZED, "the topic is reserved for the gateway")
NOT_ALLOWED: Final = Outcome(
    Verdict.REJECTED, Reason.NOT_AUTHORIZED, "no rule permits publishing to the topic"
)
TOO_DEEP: Final = Outcome(
    Verdict.REJECTED, Reason.NAME_INVALID, "the topic has more levels than limits.topic_levels_max"
)
TOO_LARGE: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "the body exceeds limits.message_bytes_max")
CONNECTION: Final = [SYS, "broker", "connection"]  # bridges publish their state below it


class ServerCapabilities(NamedTuple):
    """Highest QoS and retain availability for a client.

    The values depend on the listener, the client's roles and the namespace.
    """

    qos_max: int = 2
    retain: bool = True


WHOLE_OFFER: Final = ServerCapabilities()


def check_publish(rows: list[PublishRow], offer: ServerCapabilities) -> None:
    """Check the QoS and RETAIN of published messages (`rows`) against the client's capabilities (`offer`).

    Raises RemoteProtocolError if one is not available, which ends the connection (5: 3.2.2.3.4, 3.2.2.3.5).
    """
    for flags, *_ in rows:
        if flags >> 1 & 3 > offer.qos_max:
            raise RemoteProtocolError("the QoS exceeds qos_max", reason=ReasonCode.QOS_NOT_SUPPORTED)
        if flags & 1 and not offer.retain:
            raise RemoteProtocolError(
                "retained messages are not supported by this listener", reason=ReasonCode.RETAIN_NOT_SUPPORTED
            )


def has_valid_format(message: Message) -> bool:
    """Return False if the message is marked as UTF-8 and its body is not valid UTF-8 (5: 3.3.2.3.2)."""
    return not message.property_set.properties.utf8 or is_utf8(message.body)


def topic_refusal(name: str, levels_max: int) -> Outcome | None:
    """Return the outcome with which every publish to the topic `name` is refused, or None if it is not.

    A topic with more than `levels_max` levels is refused, and so are the gateway's own topics.
    """
    if name.count("/") >= levels_max:
        return TOO_DEEP
    return FORBIDDEN if name.startswith(SYS) and _is_own(name) else None


def _is_own(topic: str) -> bool:
    """Return True if only the gateway may publish to the topic."""
    levels = topic.split("/", 5)
    if levels[0] != SYS:
        return False
    return len(levels) != 5 or levels[:3] != CONNECTION or levels[4] != "state"
