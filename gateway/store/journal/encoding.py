"""Parts of batches -> the buffers of one block.

What repeats is written once in a dictionary and by number in the rows: senders, addresses and property sets
by row, routes and outcomes by part. Those of the rows live on from block to block, so that traffic which
repeats itself finds its numbers (and the dictionary's octets) ready. A message costs a few list
comprehensions and look-ups; there is no function call and no tuple per row.

A message that crossed was two: the one that came in, which a backtest needs, and the one that went out.
Content and guarantees are recorded of the first, `delivered_*` and `target_*` of the second.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from itertools import chain, groupby
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.model.address import Address, AmqpAddress, MqttAddress
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import PropertySet
from gateway.model.spooled import Spooled
from gateway.store.journal.columns import ADDRESS, COLUMNS, LANE, OUTCOME, SENDER
from gateway.store.journal.entries import NUMBER, Entries, bitmap, even_offsets, octets_of, offsets
from gateway.store.journal.format import (
    VERSION,
    Buffer,
    Draft,
    Header,
    Octets,
    Repeated,
    encode_columns,
    expanded,
)
from gateway.store.journal.runs import Runs, alike_in, chained, repeated, runs_of
from gateway.store.properties import encode_properties

PROPERTIES_OCTETS_MAX: Final = 65_536  # of one set; more is recorded as {"omitted": octets}
BODIES_OCTETS: Final = 1_048_576  # memory for the bodies of a block, used again and again
FORM: Final = "journal"  # the key in PropertySet.forms
SECOND: Final = 1_000_000  # in microseconds
LATEST: Final = 9e12  # UTC seconds that still fit as microseconds in 64 bits; a peer may claim more
ROWS_USUAL: Final = 4_096  # of a part; the places of more are written each time
_FIRST_PLACES: Final = struct.pack(f"<{ROWS_USUAL}I", *range(ROWS_USUAL))
_TIME: Final = struct.Struct("<q").pack


class Facts(NamedTuple):
    """What a lane says about every message that takes it. `route`: "" when they stayed in their own world.
    `endpoint` and `protocol` are the target's. `reshapes`: the route may change assurance, durable or retain.
    """

    route: str
    mapping_version: str
    endpoint: str
    protocol: str
    reshapes: bool = True


class Look(NamedTuple):
    """What every message has to be looked at for: which are `alike`, and the bodies."""

    alike: Runs[Message]
    bodies: list[bytes]


def look_at(messages: Sequence[Message]) -> Look:
    """Look at messages as they came in. Soon after they have come this costs half of what it does later, when
    other messages have taken their place in the caches.
    """
    return Look(alike_in(messages), [message.body for message in messages])


class Stashed(NamedTuple):
    """A part, or some of its messages, as the event loop leaves it for the journal.

    `messages` are as they were handed to the sink; None: a route refused `sources`. `sources` are as they
    came in; None: they are `messages`. The times are UTC in microseconds. `slots`: places in what was
    received together; None: from 0 on. `origins`: where `messages` came from when nothing else changed but
    the count of hops; then there are no `sources`. `look`: at all of them; None: the encoder will.
    """

    facts: Facts
    messages: list[Message] | None
    sources: Sequence[Message] | None
    outcome: Outcome
    received_us: int
    settled_us: int
    slots: Sequence[int] | None = None
    origins: Sequence[Address] | None = None
    look: Look | None = None


_LaneKey = tuple[Facts, str]
"""And the protocol that its messages came in."""
_COLUMNS: Final = encode_columns(COLUMNS)


class Encoder:
    """Makes blocks; keeps what they have in common.

    `body_bytes_max`: bodies up to this size are recorded, larger ones are null; 0: none are recorded.
    """

    def __init__(self, shard: int, *, body_bytes_max: int) -> None:
        self._shard = shard
        self._body_max = body_bytes_max
        self._senders = Entries(len(SENDER))
        self._sender_numbers: dict[int, bytes] = {}  # by identity, which is cheaper than the hash of a tuple
        self._kept: list[Sender] = []  # those senders, so that an identity keeps its meaning
        self._addresses = Entries(len(ADDRESS), nulls=True)
        self._address_numbers: dict[str, dict[bytes, bytes]] = {}  # by protocol, then by wire
        self._nowhere = b""
        self._sets = Entries(2, nulls=True)
        self._set_numbers: dict[PropertySet, bytes] = {}
        self._memory = BytesIO(bytes(BODIES_OCTETS))

    def afresh(self) -> Encoder:
        """One that remembers nothing."""
        return Encoder(self._shard, body_bytes_max=self._body_max)

    def encode(self, base: int, parts: Sequence[Stashed]) -> Draft:
        """The block of `parts`, whose first row is number `base`."""
        looks = [part.look or look_at(_heads(part)) for part in parts]
        alike = [look.alike for look in looks]
        kinds = chained(alike)
        bodies = list(chain.from_iterable([look.bodies for look in looks]))
        rows = len(bodies)
        by_part = _by_part(parts)
        senders = self._sender_indices(kinds, rows)
        sources, targets = self._address_indices(parts, alike, rows)
        # What is the same in all rows is encoded once and repeated.
        like, lengths = Runs(kinds.objects[:1], [rows]) if _alike(kinds.objects) else kinds
        sets = self._set_indices([message.property_set for message in like], rows)
        flags = [repeated(column, 1, lengths) for column in _guarantees(like)]
        hops = _before_crossing(_small([one.hops for one in like]), lengths, parts)
        buffers = [
            *by_part.rows,
            _slots(parts),
            senders,
            sources,
            targets,
            repeated(sets, 4, lengths),
            *(*flags, hops),
            *_delivered(parts, flags),
            *_expiries([message.expires for message in like], lengths),
            *self._bodies(bodies),
            *self._senders.end(rows),
            *by_part.entries,
            *self._addresses.end(rows),
            *self._sets.end(rows),
        ]
        came = [part.received_us for part in parts]
        header = Header(VERSION, 0, self._shard, 0, base, rows, min(came), max(came), len(COLUMNS), 0, 0, 0)
        return Draft(header, _COLUMNS, buffers)

    def _sender_indices(self, kinds: Runs[Message], rows: int) -> Buffer:
        numbers = self._sender_numbers
        if self._senders.begin(rows):
            numbers.clear()
            self._kept.clear()
        senders, lengths = Runs([message.sender for message in kinds.objects], kinds.lengths)
        if lengths is None:
            senders, lengths = runs_of(senders)
        try:
            return _indices(Runs([numbers[id(sender)] for sender in senders], lengths))
        except KeyError:
            fresh = {id(sender): sender for sender in senders if id(sender) not in numbers}
            self._kept += fresh.values()
            texts = [list(map(octets_of, sender)) for sender in fresh.values()]
            numbers.update(zip(fresh, self._senders.add_all(texts), strict=True))
            return _indices(Runs([numbers[id(sender)] for sender in senders], lengths))

    def _address_indices(
        self, parts: Sequence[Stashed], alike: Sequence[Runs[Message]], rows: int
    ) -> tuple[Buffer, Buffer]:
        """Where the rows came from and went to; one and the same object when nothing crossed."""
        if self._addresses.begin(rows):
            self._address_numbers.clear()
            self._nowhere = b""
        heads = [_addresses(*one) for one in alike]
        sources = self._numbered(
            [
                run if part.origins is None else Runs(part.origins, None)
                for part, run in zip(parts, heads, strict=True)
            ]
        )
        if all(part.sources is None and part.origins is None for part in parts):
            return sources, sources
        gone = [
            run if part.sources is None else _addresses(part.messages or ())
            for part, run in zip(parts, heads, strict=True)
        ]
        return sources, self._numbered(gone, parts)

    def _numbered(self, runs: Sequence[Runs[Address]], parts: Sequence[Stashed] = ()) -> Buffer:
        """The numbers of all these addresses. Those of a part are of one protocol; without any it went
        nowhere."""
        found: list[Runs[bytes]] = []
        # One look-up table for each protocol, for wires of two may be equal.
        at = 0
        for protocol, same in groupby(runs, _protocol_of):
            some = list(same)
            if protocol:
                found.append(self._numbered_of(protocol, chained(some)))
            else:
                if not self._nowhere:
                    self._nowhere = self._addresses.add(None, None, None)
                count = sum(len(_heads(part)) for part in parts[at : at + len(some)])
                found.append(Runs([self._nowhere], [count]))
            at += len(some)
        return _indices(chained(found))

    def _numbered_of(self, protocol: str, runs: Runs[Address]) -> Runs[bytes]:
        addresses, lengths = runs if runs.lengths is not None else runs_of(runs.objects)
        numbers = self._address_numbers.get(protocol)
        if numbers is None:
            numbers = self._address_numbers[protocol] = {}
        try:
            return Runs([numbers[one.wire] for one in addresses], lengths)
        except KeyError:
            fresh = {address.wire: address for address in addresses if address.wire not in numbers}
            words = [words_of(address) for address in fresh.values()]
            numbers.update(zip(fresh, self._addresses.add_all(words), strict=True))
            return Runs([numbers[one.wire] for one in addresses], lengths)

    def _set_indices(self, sets: list[PropertySet], rows: int) -> bytes:
        numbers = self._set_numbers
        if self._sets.begin(rows):
            numbers.clear()
        try:
            return b"".join([numbers[one] for one in sets])
        except KeyError:
            fresh = [one for one in dict.fromkeys(sets) if one not in numbers]
            numbers.update(zip(fresh, self._sets.add_all(list(map(recorded, fresh))), strict=True))
            return b"".join([numbers[one] for one in sets])

    def _bodies(self, bodies: list[bytes]) -> tuple[Buffer, bytes, bytes, Octets]:
        """Sizes, validity, offsets, octets."""
        most = self._body_max
        sizes = list(map(len, bodies))
        count, largest = len(sizes), sizes[0]
        lengths: Buffer
        even = sizes.count(largest) == count
        if even:
            total, lengths = largest * count, Repeated(NUMBER(largest), 4, [count])
        else:
            total, largest = sum(sizes), max(sizes)
            lengths = struct.pack(f"<{count}I", *sizes)
        if not most:
            return lengths, b"", b"", b""
        if largest <= most:
            octets = self._together(bodies) if total <= BODIES_OCTETS else b"".join(bodies)
            if len(octets) == total:  # or one of them is a file (model/spooled.py), and not looked at
                places = even_offsets(largest, count) if even else offsets(sizes)
                return lengths, b"", places, octets
        whole = [len(body) <= most and not isinstance(body, Spooled) for body in bodies]
        kept = [body if taken else b"" for body, taken in zip(bodies, whole, strict=True)]
        valid = bitmap(whole)
        return lengths, valid, offsets(list(map(len, kept))), b"".join(kept)

    def _together(self, bodies: list[bytes]) -> Octets:
        """The octets of bodies, no more than BODIES_OCTETS, in memory that is used again when the block has
        been laid out: new memory of that size costs ten times as much, for its pages come from the system."""
        memory = self._memory
        try:
            memory.seek(0)
            memory.writelines(bodies)
        except BufferError:  # the block before is still needed
            return b"".join(bodies)
        return memory.getbuffer()[: memory.tell()]


def _indices(numbers: Runs[bytes]) -> Buffer:
    return repeated(b"".join(numbers.objects), 4, numbers.lengths)


def _heads(part: Stashed) -> Sequence[Message]:
    """Its messages as they came in, but for their addresses and hops if `origins` say where from."""
    return part.sources or part.messages or ()


def _addresses(messages: Sequence[Message], lengths: Sequence[int] | None = None) -> Runs[Address]:
    return Runs([message.address for message in messages], lengths)


class _ByPart(NamedTuple):
    """Buffers of the rows and of the dictionaries."""

    rows: list[Buffer]
    entries: list[bytes]


def _by_part(parts: Sequence[Stashed]) -> _ByPart:
    """The columns that are the same in all rows of a part. Their dictionaries are the block's own."""
    lanes: dict[_LaneKey, bytes] = {}
    outcomes: dict[Outcome, bytes] = {}
    received, settled, lane, result, counts = [], [], [], [], []
    for facts, messages, sources, outcome, received_us, settled_us, _, origins, _ in parts:
        heads = sources or messages
        assert heads
        key = (facts, (origins[0] if origins else heads[0].address).protocol)
        number = lanes.get(key)
        if number is None:
            number = lanes[key] = NUMBER(len(lanes))
        told = outcomes.get(outcome)
        if told is None:
            told = outcomes[outcome] = NUMBER(len(outcomes))
        received.append(_TIME(received_us))
        settled.append(_TIME(settled_us))
        lane.append(number)
        result.append(told)
        counts.append(len(heads))
    rows = [
        repeated(b"".join(column), len(column[0]), counts) for column in (received, settled, lane, result)
    ]
    return _ByPart(rows, [*_lane_entries(tuple(lanes)), *_outcome_entries(tuple(outcomes))])


# Most blocks have the same few lanes and outcomes.
@lru_cache(maxsize=16)
def _lane_entries(keys: tuple[_LaneKey, ...]) -> list[bytes]:
    entries = Entries(len(LANE))
    entries.add_all([(protocol.encode(), *map(octets_of, facts[:4])) for facts, protocol in keys])
    return entries.end(0)


@lru_cache(maxsize=16)
def _outcome_entries(outcomes: tuple[Outcome, ...]) -> list[bytes]:
    entries = Entries(len(OUTCOME))
    entries.add_all(
        [
            (verdict.name.lower().encode(), reason.value.encode(), octets_of(text))
            for verdict, reason, text in outcomes
        ]
    )
    return entries.end(0)


def recorded(found: PropertySet) -> tuple[bytes, bytes | None]:
    """What the journal writes of a property set, JSON and message id; remembered in its `forms`."""
    form: tuple[bytes, bytes | None] | None = found.forms.get(FORM)
    if form is None:
        form = found.forms[FORM] = _recorded(found)
    return form


def _recorded(found: PropertySet) -> tuple[bytes, bytes | None]:
    try:
        properties = found.properties
    except RemoteProtocolError:
        return b'{"malformed":true}', None
    made = encode_properties(properties) or b"{}"
    if len(made) > PROPERTIES_OCTETS_MAX:
        made = b'{"omitted":%d}' % len(made)
    name = properties.message_id
    return made, None if name is None else octets_of(name)


def _protocol_of(runs: Runs[Address]) -> str:
    """ "" when there are none."""
    return runs.objects[0].protocol if runs.objects else ""


def words_of(address: Address) -> tuple[bytes, bytes | None, bytes]:
    """An address as the journal has it: as one text, its exchange or service type, and its name."""
    if isinstance(address, MqttAddress):
        return address.wire, None, address.wire
    pair = (
        (address.exchange, address.routing_key)
        if isinstance(address, AmqpAddress)
        else (address.service, address.destination)
    )
    scope, name = map(octets_of, pair)
    return scope + b":" + name, scope, name


def _delivered(parts: Sequence[Stashed], flags: list[Buffer]) -> Sequence[Buffer]:
    """Assurance, durable and retain as they went out; the sources' own buffers when nothing changed them."""
    if all(part.sources is None or part.messages is None or not part.facts.reshapes for part in parts):
        return flags
    return _guarantees(list(chain.from_iterable(part.messages or _heads(part) for part in parts)))


def _guarantees(messages: Sequence[Message]) -> list[bytes]:
    """Assurance, durable and retain."""
    return [
        bytes([message.assurance for message in messages]),
        bytes([message.durable for message in messages]),
        bytes([message.retain for message in messages]),
    ]


def _slots(parts: Sequence[Stashed]) -> bytes:
    return b"".join([_places(part.slots, len(_heads(part))) for part in parts])


def _places(slots: Sequence[int] | None, count: int) -> bytes:
    if slots is None and count <= ROWS_USUAL:
        return _FIRST_PLACES[: 4 * count]
    return struct.pack(f"<{count}I", *(range(count) if slots is None else slots))


def _alike(messages: Sequence[Message]) -> bool:
    """Whether nothing but address, sender and body differs, as it is with most of what devices send. One look
    at all of it costs half of what columns cost, and the first difference ends it."""
    first = messages[0]
    assurance, durable, retain, found = first.assurance, first.durable, first.retain, first.property_set
    hops, expires = first.hops, first.expires
    for one in messages:
        if (
            one.assurance is not assurance
            or one.durable is not durable
            or one.retain is not retain
            or one.property_set is not found
            or one.hops is not hops
            or one.expires != expires
        ):
            return False
    return True


_ONE_LESS: Final = bytes((0, *range(255)))


def _before_crossing(hops: bytes, lengths: Sequence[int] | None, parts: Sequence[Stashed]) -> Buffer:
    """The hops of messages as they came in, of those that crossed from `origins` one less than they have."""
    crossed = [part.origins is not None for part in parts]
    if not any(crossed):
        return repeated(hops, 1, lengths)
    if all(crossed):
        return repeated(hops.translate(_ONE_LESS), 1, lengths)
    hops = hops if lengths is None else expanded(hops, 1, lengths)
    found, at = [], 0
    for part in parts:
        end = at + len(_heads(part))
        found.append(hops[at:end] if part.origins is None else hops[at:end].translate(_ONE_LESS))
        at = end
    return b"".join(found)


def _small(numbers: list[int]) -> bytes:
    """An octet each; a peer may claim more hops than fit."""
    try:
        return bytes(numbers)
    except ValueError:
        return bytes([min(number, 255) for number in numbers])


def _expiries(expires: list[float], lengths: Sequence[int] | None) -> tuple[bytes, Buffer]:
    """Validity and values; nothing when no row expires."""
    never = expires.count(NEVER)
    if never == len(expires):
        return b"", b""
    values = array("q", [int(min(moment, LATEST) * SECOND) for moment in expires]).tobytes()
    present = bytes([moment != NEVER for moment in expires])
    if lengths is not None:
        present = expanded(present, 1, lengths)
    return bitmap(present) if never else b"", repeated(values, 8, lengths)
