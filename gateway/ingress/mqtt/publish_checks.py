"""What a PUBLISH must not ask for, beyond what its packet type must not: it depends on the listener, or on
the body.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from gateway.broker.mqtt.system import SYS
from gateway.errors import RemoteProtocolError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.protocols.mqtt.octets import is_utf8
from gateway.protocols.mqtt.packets import PublishRow
from gateway.protocols.mqtt.spec import ReasonCode

UTF8: Final = b"\x01\x01"  # the payload format indicator, where it stands; elsewhere by chance
NOT_TEXT: Final = Outcome(Verdict.REJECTED, Reason.MALFORMED, "the body is not the UTF-8 that it says it is")
FORBIDDEN: Final = Outcome(Verdict.REJECTED, Reason.NOT_AUTHORIZED, "the gateway's own topic")
NOT_ALLOWED: Final = Outcome(Verdict.REJECTED, Reason.NOT_AUTHORIZED, "no rule allows to publish there")
TOO_DEEP: Final = Outcome(Verdict.REJECTED, Reason.NAME_INVALID, "more levels than limits.topic_levels_max")
TOO_LARGE: Final = Outcome(Verdict.REJECTED, Reason.TOO_LARGE, "the body exceeds limits.message_bytes_max")
CONNECTION: Final = [SYS, "broker", "connection"]  # below it bridges say how they are


class Offer(NamedTuple):
    """What a client may publish with, beside its topics: as listener, roles and namespace have it."""

    qos_max: int = 2
    retain: bool = True


WHOLE_OFFER: Final = Offer()


def check_publish(rows: list[PublishRow], offer: Offer) -> None:
    """Publishing with what is not offered ends the connection (5: 3.2.2.3.4, 3.2.2.3.5)."""
    for flags, *_ in rows:
        if flags >> 1 & 3 > offer.qos_max:
            raise RemoteProtocolError("the QoS is too high here", reason=ReasonCode.QOS_NOT_SUPPORTED)
        if flags & 1 and not offer.retain:
            raise RemoteProtocolError("nothing is retained here", reason=ReasonCode.RETAIN_NOT_SUPPORTED)


def is_what_it_says(message: Message) -> bool:
    """A body whose format indicator says so must be UTF-8 (5: 3.3.2.3.2)."""
    return not message.property_set.properties.utf8 or is_utf8(message.body)


def topic_refusal(name: str, levels_max: int) -> Outcome | None:
    """Why nothing may be published to a topic, whoever it is that wants to."""
    if name.count("/") >= levels_max:
        return TOO_DEEP
    return FORBIDDEN if name.startswith(SYS) and _is_own(name) else None


def _is_own(topic: str) -> bool:
    """Whether only the gateway may publish there."""
    levels = topic.split("/", 5)
    if levels[0] != SYS:
        return False
    return len(levels) != 5 or levels[:3] != CONNECTION or levels[4] != "state"
