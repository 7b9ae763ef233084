"""Encoding of values that the shared database stores as bytes.

These are wills, options of subscriptions, and fingerprints of requeued messages. Two versions of the gateway
run side by side during an update. A later version may append bytes to the options of a subscription, and
fields to a will; an earlier version ignores them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any, ClassVar, Final

from pydantic import ConfigDict, TypeAdapter, ValidationError

from gateway.access.principal import Principal
from gateway.broker.mqtt.namespace import ConnectingClient
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.errors import StoreError
from gateway.model.message import Sender
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.properties import decode_list, encode_list
from gateway.protocols.mqtt.spec import WILL as WILL_LIST
from gateway.protocols.mqtt.spec import Property

OPTIONS: Final = Struct(">BBBBI")
FINGERPRINT: Final = Struct(">I")


def encode_options(options: SubscriptionOptions) -> bytes:
    """Return the encoding of a subscription's options for the database."""
    return OPTIONS.pack(
        options.qos,
        options.no_local,
        options.retain_as_published,
        options.retain_handling,
        options.identifier,
    )


def decode_options(data: bytes) -> SubscriptionOptions:
    """Decode the options of a subscription. Raises StoreError if there are too few bytes."""
    if len(data) < OPTIONS.size:
        raise StoreError(f"the stored options of a subscription have only {len(data)} bytes")
    qos, no_local, as_published, handling, identifier = OPTIONS.unpack_from(data)
    return SubscriptionOptions(qos, bool(no_local), bool(as_published), handling, identifier)


def encode_fingerprints(fingerprints: Sequence[int]) -> bytes:
    """Return the encoding of fingerprints (32 bits each) of requeued messages for the database."""
    return b"".join(map(FINGERPRINT.pack, fingerprints))


def decode_fingerprints(data: bytes) -> tuple[int, ...]:
    """Decode fingerprints of requeued messages; an incomplete one at the end is left out."""
    whole = data[: len(data) // FINGERPRINT.size * FINGERPRINT.size]
    return tuple(one for (one,) in FINGERPRINT.iter_unpack(whole))


@dataclass(frozen=True)
class StoredWill:
    """Will and its sender. `properties` is an encoded property list of MQTT 5.

    `principal` has the values of `Principal.to_dict`; an earlier version stored none.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    topic: str
    body: bytes
    qos: int
    retain: bool
    properties: bytes
    endpoint: str
    user: str
    address: str
    principal: dict[str, Any] | None = None


ADAPTER: Final = TypeAdapter(StoredWill)


def delay_of(will: Will) -> int:
    """Return the Will Delay Interval of a will in seconds, 0 without one (MQTT 5: 3.1.3.2.2)."""
    delay = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
    assert isinstance(delay, int)
    return delay


def encode_will(connecting: ConnectingClient) -> bytes:
    """Return the encoding of a connecting client's will for the database; the client must have one."""
    will, sender = connecting.will, connecting.sender
    assert will is not None
    return ADAPTER.dump_json(
        StoredWill(
            will.topic,
            will.body,
            will.qos,
            will.retain,
            encode_list(will.properties, WILL_LIST),
            sender.endpoint,
            sender.user,
            sender.address,
            connecting.principal.to_dict(),
        )
    )


def decode_will(client: str, data: bytes) -> tuple[Will, Sender, Principal]:
    """Return the will of a client, its sender and principal. Raises StoreError for malformed bytes."""
    try:
        stored = ADAPTER.validate_json(data)
    except ValidationError as error:
        raise StoreError(f"the will of {client!r} cannot be read: {error.error_count()} errors") from error
    will = Will(
        stored.topic, stored.body, stored.qos, stored.retain, decode_list(stored.properties, WILL_LIST)
    )
    sender = Sender(stored.endpoint, client, stored.user, stored.address)
    return will, sender, Principal.from_dict(stored.user, stored.principal)
