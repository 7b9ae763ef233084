"""MQTT control packets as values: one frozen class for each packet type, for all protocol versions.

Fields are named as in MQTT 5. The encoder omits what an older version has no field for. Reasons are reason
codes of MQTT 5 throughout: the codec translates CONNACK return codes and granted QoS of 3.x. The frequent
packets have compact forms beside these, in runs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from gateway.protocols.mqtt.properties import NO_PROPERTIES, PropertyMap
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import PacketType, Version


def _none() -> PropertyMap:
    return NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Will:
    """Will message of a client, which the server publishes if the connection is lost (5: 3.1.2.5)."""

    topic: str
    body: bytes = b""
    qos: int = 0
    retain: bool = False
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Connect:
    """CONNECT packet (5: 3.1).

    `keep_alive` is in seconds. `bridge` is True if bit 0x80 of the protocol level is set. `tncomp` is True if
    a client of protocol level 2 requests compression.
    """

    kind: ClassVar = PacketType.CONNECT
    client_id: str = ""
    version: Version = Version.V5
    clean_start: bool = True
    keep_alive: int = 0
    will: Will | None = None
    user_name: str | None = None
    password: bytes | None = None
    properties: PropertyMap = field(default_factory=_none)
    bridge: bool = False
    tncomp: bool = False


@dataclass(frozen=True, slots=True)
class Connack:
    """CONNACK packet (5: 3.2)."""

    kind: ClassVar = PacketType.CONNACK
    session_present: bool = False
    reason: int = 0
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Publish:
    """PUBLISH packet (5: 3.3). `packet_id` is 0 at QoS 0."""

    kind: ClassVar = PacketType.PUBLISH
    topic: str
    body: bytes = b""
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Ack:
    """PUBACK, PUBREC, PUBREL or PUBCOMP packet, depending on `kind` (5: 3.4 to 3.7)."""

    kind: PacketType
    packet_id: int
    reason: int = 0
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic filter in a SUBSCRIBE, with its options (5: 3.8.3.1)."""

    filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUBSCRIBE packet (5: 3.8)."""

    kind: ClassVar = PacketType.SUBSCRIBE
    packet_id: int
    subscriptions: tuple[Subscription, ...]
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Suback:
    """SUBACK packet (5: 3.9). `reasons` has the granted QoS or a failure code for each filter."""

    kind: ClassVar = PacketType.SUBACK
    packet_id: int
    reasons: tuple[int, ...]
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """UNSUBSCRIBE packet (5: 3.10)."""

    kind: ClassVar = PacketType.UNSUBSCRIBE
    packet_id: int
    filters: tuple[str, ...]
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Unsuback:
    """UNSUBACK packet (5: 3.11). `reasons` is empty before MQTT 5."""

    kind: ClassVar = PacketType.UNSUBACK
    packet_id: int
    reasons: tuple[int, ...] = ()
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Pingreq:
    """PINGREQ packet (5: 3.12)."""

    kind: ClassVar = PacketType.PINGREQ


@dataclass(frozen=True, slots=True)
class Pingresp:
    """PINGRESP packet (5: 3.13)."""

    kind: ClassVar = PacketType.PINGRESP


@dataclass(frozen=True, slots=True)
class Disconnect:
    """DISCONNECT packet (5: 3.14)."""

    kind: ClassVar = PacketType.DISCONNECT
    reason: int = 0
    properties: PropertyMap = field(default_factory=_none)


@dataclass(frozen=True, slots=True)
class Auth:
    """AUTH packet (5: 3.15), of MQTT 5 only."""

    kind: ClassVar = PacketType.AUTH
    reason: int = 0
    properties: PropertyMap = field(default_factory=_none)


Packet = (
    Connect
    | Connack
    | Publish
    | Ack
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)


@dataclass(frozen=True, slots=True)
class Oversized:
    """Event for a skipped PUBLISH: it exceeds the size limit, and its MQTT version cannot refuse it.

    `publish` has no body; the `byte_count` bytes of its body were skipped.
    """

    kind: ClassVar = PacketType.PUBLISH

    publish: Publish
    byte_count: int


Event = (
    Publishes
    | Oversized
    | Acks
    | Connect
    | Connack
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
