"""Encoding of a run of messages as bytes, by columns.

Devices send the same values again and again, so the distinct addresses, property sets and senders of a run
are written once, in a dictionary each. Each message has its numbers in these dictionaries and a few other
numbers; then the bodies follow, joined. What is equal in all messages is written once. No Python code runs
for each message, only C loops over whole lists. A message whose body is a file of its own
(model/spooled_bodies.py) is a run of one, in version BY_REFERENCE, with the file's name and size as a text in
place of the body.

Little-endian. CRC-32 of all that follows (u32), version (u8), count of messages (u32), then the columns:

| column | element |
|---|---|
| offset: position of the message in its run, which has gaps if some were settled before | u16 |
| number of the address, of the property set, of the sender | u16 each |
| assurance (2 bits), durable (1), retain (1), hops (28), from the lowest bit | u32 |
| expires, POSIX seconds, 0 is never | f64 |
| bytes of the body | u32 |

A column is a mark (u8) and: 0, one element that holds for all; 1, an element for each; 2, nothing: 0, 1, 2...
Then the dictionaries of addresses, property sets and senders, and the bodies, joined. A dictionary is the
number of its entries (u32), their lengths (u32 each), and the entries, joined. An entry of the first two is
the length of the protocol's name (u8), the name, and the wire or raw bytes; for protocol `model` those are
JSON, see properties.py. A sender is endpoint, client, user and address, each after its length (u32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from struct import Struct, calcsize, pack, unpack_from
from typing import Any, Final, TypeVar
from zlib import crc32

from gateway.containment import contained
from gateway.errors import StoreError
from gateway.model.address import Address
from gateway.model.message import NEVER, Message, Sender
from gateway.model.properties import NO_PROPERTIES, PropertySet, property_set
from gateway.model.spooled_bodies import Spooled
from gateway.protocols import DIALECTS
from gateway.store.properties import decode_properties, encode_properties

VERSION: Final = 1
BY_REFERENCE: Final = 2
VERSIONS: Final = f"{VERSION} and {BY_REFERENCE}"
MESSAGES_MAX: Final = 65_536  # of one run, whose numbers are u16
MODEL: Final = "model"
REMEMBERED_MAX: Final = 10_000  # cached addresses, senders and model sets that runs share
REMEMBERED_BYTES_MAX: Final = 1_024  # bytes; a longer one rarely repeats

SAME: Final = 0
EACH: Final = 1
COUNTING: Final = 2

HOPS_SHIFT: Final = 4
_HEAD: Final = Struct("<BI")
_CRC: Final = Struct("<I")
_NEVER: Final = pack("<Bd", SAME, 0.0)

MakeBody = Callable[[str, int], Spooled]
"""Function that returns the body in the file of a name and a size in bytes.

Raises StoreError if it is missing.
"""


def encode_messages(
    messages: Sequence[Message], offsets: Sequence[int] | None = None, ahead_secs: float = 0.0
) -> bytes:
    """Encode 1 to MESSAGES_MAX messages as the bytes of one row of the store.

    `offsets` are the positions of the messages, counted from the row's first position; None means 0, 1, 2 and
    so on. The expiry of a message is stored as its time plus `ahead_secs` seconds (timeline.py).
    """
    return b"".join(encode_parts(messages, offsets, ahead_secs))


def encode_parts(
    messages: Sequence[Message], offsets: Sequence[int] | None = None, ahead_secs: float = 0.0
) -> list[bytes]:
    """Encode messages as `encode_messages` does, but return the bytes in pieces, without copying bodies."""
    count = len(messages)
    bodies = [message.body for message in messages]
    version = VERSION
    if count == 1 and isinstance(bodies[0], Spooled):
        version, bodies = BY_REFERENCE, [f"{bodies[0].file.name} {bodies[0].size}".encode()]
    address_ids = [id(message.address) for message in messages]
    set_ids = [id(message.property_set) for message in messages]
    sender_ids = [id(message.sender) for message in messages]
    expires = [message.expires for message in messages]
    if ahead_secs:
        expires = [at + ahead_secs if at else NEVER for at in expires]
    marks = [
        message.assurance | message.durable << 2 | message.retain << 3 | message.hops << HOPS_SHIFT
        for message in messages
    ]
    addresses, with_address = _numbers(address_ids, messages)
    sets, with_set = _numbers(set_ids, messages)
    senders, with_sender = _numbers(sender_ids, messages)
    parts = (
        b"".join(
            (
                _HEAD.pack(version, count),
                bytes((COUNTING,)) if offsets is None else _column("H", offsets),
                addresses,
                sets,
                senders,
                _column("I", marks),
                _column("d", expires) if any(expires) else _NEVER,
                _column("I", list(map(len, bodies))),
                _dictionary(
                    [_name(message.address.protocol) + message.address.wire for message in with_address]
                ),
                _dictionary([_set_bytes(message.property_set) for message in with_set]),
                _dictionary([_sender_bytes(message.sender) for message in with_sender]),
            )
        ),
        *bodies,
    )
    checksum = 0
    for part in parts:
        checksum = crc32(part, checksum)
    return [_CRC.pack(checksum), *parts]


def _numbers(ids: list[int], messages: Sequence[Message]) -> tuple[bytes, list[Message]]:
    """Return the encoded column with each message's number of its address, property set or sender.

    Numbers count the distinct objects, of which `ids` has the identities (`id()`) by message. The second
    result has a message with each of them, in order. Equal objects are not merged: most are shared, and
    comparing them would cost more than to store a copy.
    """
    if ids.count(ids[0]) == len(ids):
        return _FIRST, [messages[0]]
    found = dict(zip(ids, messages, strict=True))
    places = dict(zip(found, range(len(found)), strict=True))
    return _column("H", list(map(places.__getitem__, ids))), list(found.values())


def _column(code: str, values: Sequence[int] | Sequence[float]) -> bytes:
    """Encode one number for each message as a column; `code` is the struct format of a number.

    If all messages have the same number, it is written once.
    """
    first = values[0]
    count = len(values)
    if values.count(first) == count:
        return pack("<B" + code, SAME, first)
    return pack(f"<B{count}{code}", EACH, *values)


_FIRST: Final = pack("<BH", SAME, 0)


@lru_cache(maxsize=64)
def _name(protocol: str) -> bytes:
    data = protocol.encode()
    return bytes((len(data),)) + data


def _set_bytes(one: PropertySet) -> bytes:
    return _name(one.protocol) + (_model_bytes(one) if one.protocol == MODEL else one.raw)


@lru_cache(maxsize=1_024)
def _model_bytes(one: PropertySet) -> bytes:
    return encode_properties(one.properties)


@lru_cache(maxsize=REMEMBERED_MAX)
def _sender_bytes(sender: Sender) -> bytes:
    texts = [text.encode("utf-8", "surrogatepass") for text in sender.names]
    return b"".join(chain.from_iterable((pack("<I", len(text)), text) for text in texts))


def _dictionary(entries: list[bytes]) -> bytes:
    if len(entries) == 1:
        return pack("<II", 1, len(entries[0])) + entries[0]
    return pack(f"<I{len(entries)}I", len(entries), *map(len, entries)) + b"".join(entries)


def encode_sound(message: Message, ahead_secs: float = 0.0) -> bytes:
    """Encode one message; if it cannot be encoded, encode it without its properties and sender."""
    return b"".join(sound_parts((message,), ahead_secs=ahead_secs))


def sound_parts(
    messages: Sequence[Message], offsets: Sequence[int] | None = None, ahead_secs: float = 0.0
) -> list[bytes]:
    """Encode messages as `encode_parts` does.

    A message that cannot be encoded is stored without its properties and sender, so that it does not prevent
    the other messages from being stored.
    """
    try:
        return encode_parts(messages, offsets, ahead_secs)
    except Exception as error:
        contained("store", error)
        return encode_parts([_storable(message) for message in messages], offsets, ahead_secs)


def _storable(message: Message) -> Message:
    """Return the message itself, or a copy without properties and sender if it cannot be encoded."""
    try:
        encode_message(message)
    except Exception:
        return Message(
            message.address,
            message.body,
            assurance=message.assurance,
            durable=message.durable,
            retain=message.retain,
            expires=message.expires,
        )
    return message


def encode_message(message: Message, ahead_secs: float = 0.0) -> bytes:
    """Encode one message. Raises an exception if it cannot be encoded."""
    return encode_messages((message,), ahead_secs=ahead_secs)


def _no_body(name: str, size: int) -> Spooled:
    """Raise StoreError, because a reader without `make_body` does not know the folder of the body files.

    `name` and `size` are those of the file.
    """
    raise StoreError(f"the location of the body {name} is unknown")


class MessageReader:
    """Decoder of the bytes that `encode_messages` returned.

    Equal addresses, property sets and senders are decoded to one shared object. `ahead_secs` seconds are
    subtracted from each expiry. `make_body` gets the name and size in bytes of a body file, and returns the
    body.
    """

    def __init__(self, make_body: MakeBody = _no_body) -> None:
        self.make_body = make_body
        self.ahead_secs = 0.0
        self._addresses: dict[bytes, Address] = {}
        self._sets: dict[bytes, PropertySet] = {}
        self._senders: dict[bytes, Sender] = {}

    def decode(self, data: bytes) -> tuple[Sequence[int], list[Message]]:
        """Return the messages in the bytes of a row, with their offsets from the row's first position.

        Raises StoreError if the bytes are damaged, or in a version that this gateway does not know.
        """
        if len(data) <= _CRC.size or _CRC.unpack_from(data)[0] != crc32(memoryview(data)[_CRC.size :]):
            raise StoreError("stored messages are damaged: wrong checksum")
        if data[_CRC.size] not in (VERSION, BY_REFERENCE):
            raise StoreError(
                f"stored messages have format {data[_CRC.size]}, but this gateway reads {VERSIONS}"
            )
        try:
            return self._decode(data)
        except Exception as error:  # whatever the bytes are, this gateway did not write them
            raise StoreError(f"stored messages cannot be read: {error!r}") from error

    def heads(self, data: bytes) -> list[tuple[int, Message]]:
        """Decode the bytes of a damaged row as far as possible: offsets, and messages without their bodies.

        The checksum is not verified, so any field may be wrong. Return [] if the bytes cannot be decoded.
        """
        try:
            if data[_CRC.size] != VERSION:
                return []
            offsets, messages = self._decode(data)
            return [(at, message.with_body(b"")) for at, message in zip(offsets, messages, strict=True)]
        except Exception:  # the heads are damaged too; the caller reports the row
            return []

    def decode_one(self, data: bytes) -> Message:
        """Return the only message in `data`. Raises StoreError if the bytes cannot be decoded."""
        return self.decode(data)[1][0]

    def _decode(self, data: bytes) -> tuple[Sequence[int], list[Message]]:
        """Decode the bytes of a row as `decode` does, without verifying checksum and version."""
        _, count = _HEAD.unpack_from(data, _CRC.size)
        at = _CRC.size + _HEAD.size
        columns = []
        for code in ("H", "H", "H", "H", "I", "d", "I"):
            values, at = _values(code, data, at, count)
            columns.append(values)
        offsets, of_addresses, of_sets, of_senders, marks, expires, lengths = columns
        if self.ahead_secs:  # an expiry of exactly 0 would be none
            expires = [(expiry - self.ahead_secs or -1.0) if expiry else NEVER for expiry in expires]
        entries, at = _entries(data, at)
        addresses = [_shared(self._addresses, entry, _address) for entry in entries]
        entries, at = _entries(data, at)
        sets = [_shared(self._sets, entry, self._set) for entry in entries]
        entries, at = _entries(data, at)
        senders = [_shared(self._senders, entry, _sender) for entry in entries]
        bodies = [data[start:end] for start, end in pairwise(accumulate(lengths, initial=at))]
        if data[_CRC.size] == BY_REFERENCE:
            name, size = bodies[0].decode().split()
            bodies = [self.make_body(name, int(size))]
        messages = [
            Message(
                addresses[address],
                body,
                sets[one],
                mark & 3,
                mark & 4 != 0,
                mark & 8 != 0,
                expiry,
                mark >> HOPS_SHIFT,
                senders[sender],
            )
            for address, body, one, mark, expiry, sender in zip(
                of_addresses, bodies, of_sets, marks, expires, of_senders, strict=True
            )
        ]
        return offsets, messages

    def _set(self, entry: bytes) -> PropertySet:
        protocol, raw = _split(entry)
        if protocol != MODEL:
            return DIALECTS[protocol].property_set(raw)
        return property_set(decode_properties(raw)) if raw else NO_PROPERTIES


def _values(code: str, data: bytes, at: int, count: int) -> tuple[Sequence[Any], int]:
    """Decode the column that begins at byte `at`; `code` is the struct format of a number.

    Return its `count` numbers, and the position behind the column.
    """
    mark = data[at]
    if mark == COUNTING:
        return range(count), at + 1
    if mark == SAME:
        return unpack_from("<" + code, data, at + 1) * count, at + 1 + calcsize("<" + code)
    form = f"<{count}{code}"
    return unpack_from(form, data, at + 1), at + 1 + calcsize(form)


def _entries(data: bytes, at: int) -> tuple[list[bytes], int]:
    """Decode a list of byte strings that begins at byte `at`. Return it, and the position behind it."""
    (number,) = unpack_from("<I", data, at)
    lengths = unpack_from(f"<{number}I", data, at + 4)
    ends = list(accumulate(lengths, initial=at + 4 + 4 * number))
    return [data[start:end] for start, end in pairwise(ends)], ends[-1]


T = TypeVar("T")


def _shared(remembered: dict[bytes, T], entry: bytes, make: Callable[[bytes], T]) -> T:
    """Return the cached object for the encoded form `entry`; if there is none, create and cache it.

    `make` decodes the entry. `remembered` is the cache.
    """
    found = remembered.get(entry)
    if found is None:
        found = make(entry)
        if len(entry) <= REMEMBERED_BYTES_MAX:
            if len(remembered) >= REMEMBERED_MAX:
                remembered.clear()
            remembered[entry] = found
    return found


def _split(entry: bytes) -> tuple[str, bytes]:
    """Split an encoded address or property set into its protocol's name and the bytes behind it."""
    end = 1 + entry[0]
    return entry[1:end].decode(), entry[end:]


def _address(entry: bytes) -> Address:
    protocol, wire = _split(entry)
    return DIALECTS[protocol].read_address(wire)


def _sender(entry: bytes) -> Sender:
    texts = []
    at = 0
    while at < len(entry):
        start = at + 4
        at = start + unpack_from("<I", entry, at)[0]
        texts.append(entry[start:at].decode("utf-8", "surrogatepass"))
    endpoint, client, user, address = texts
    return Sender(endpoint, client, user, address)
