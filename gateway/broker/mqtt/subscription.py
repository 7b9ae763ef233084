"""What a subscription asks for, and what a session gets of a topic by all that match it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gateway.model.batch import SubBatch

if TYPE_CHECKING:
    from gateway.broker.mqtt.session import Session

QOS: Final = 0x03
RETAIN_AS_PUBLISHED: Final = 0x04
RETAINED: Final = 0x08
SHARED: Final = 0x10
IDENTIFIER_OCTETS: Final = 4


@dataclass(frozen=True)
class SubscriptionOptions:
    """How a subscription wants its messages (MQTT 5 §3.8.3.1)."""

    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0
    identifier: int = 0


class Grant:
    """What one session gets of a topic: its matching subscriptions, merged. It is a sink."""

    __slots__ = ("identifiers", "no_local", "qos", "retain_as_published", "retained", "session", "shared")

    def __init__(
        self,
        session: Session,
        options: list[SubscriptionOptions],
        *,
        retained: bool = False,
        shared: str = "",
    ) -> None:
        self.session = session
        self.shared = shared  # the filter of the shared subscription that it is a part of; "": of none
        self.retained = retained  # a retained message for a new subscription: it says so (§3.3.1.3)
        self.qos = max(option.qos for option in options)
        self.no_local = all(option.no_local for option in options)
        self.retain_as_published = any(option.retain_as_published for option in options)
        self.identifiers = tuple(sorted({option.identifier for option in options if option.identifier}))

    def _key(self) -> tuple[object, ...]:
        options = (self.qos, self.no_local, self.retain_as_published, self.identifiers)
        return (self.session.client_id, self.shared, *options)

    def __eq__(self, other: object) -> bool:
        """Grants of one session with equal options are one recipient, whatever their topics."""
        return isinstance(other, Grant) and other.session is self.session and other._key() == self._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def publish(self, part: SubBatch) -> None:
        """The session owes the messages; it settles the part."""
        self.session.take(part, self)

    def encode(self) -> bytes:
        """What must be known of the grant when a stored message is sent.

        An octet (bits 0 and 1: QoS, bit 2: retain as published, bit 3: retained, bit 4: shared), then each
        subscription identifier in 4 octets, big-endian. Of a shared subscription it is one, 0 for none, and
        the filter follows in UTF-8.
        """
        first = self.qos | self.retain_as_published * RETAIN_AS_PUBLISHED | self.retained * RETAINED
        identifiers = [one.to_bytes(IDENTIFIER_OCTETS, "big") for one in self.identifiers]
        if self.shared:
            identifiers = identifiers or [bytes(IDENTIFIER_OCTETS)]
            return bytes((first | SHARED,)) + identifiers[0] + self.shared.encode()
        return bytes((first,)) + b"".join(identifiers)


def decode_grant(session: Session, octets: bytes) -> Grant:
    """The grant that `Grant.encode` wrote; what it passes over was left out before it was stored."""
    first = octets[0]
    as_published = bool(first & RETAIN_AS_PUBLISHED)
    shared = ""
    if first & SHARED:
        shared = octets[1 + IDENTIFIER_OCTETS :].decode()
        octets = octets[: 1 + IDENTIFIER_OCTETS]
    options = [
        SubscriptionOptions(first & QOS, retain_as_published=as_published, identifier=identifier)
        for at in range(1, len(octets), IDENTIFIER_OCTETS)
        if (identifier := int.from_bytes(octets[at : at + IDENTIFIER_OCTETS], "big"))
    ]
    options = options or [SubscriptionOptions(first & QOS, retain_as_published=as_published)]
    return Grant(session, options, retained=bool(first & RETAINED), shared=shared)
