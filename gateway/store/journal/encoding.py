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
from collections.abc import Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from itertools import accumulate, chain, groupby
from operator import is_
from typing import Final, NamedTuple

from gateway.errors import RemoteProtocolError
from gateway.model.address import Address, AmqpAddress, MqttAddress
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import PropertySet
from gateway.model.spooled import Spooled
from gateway.store.journal.columns import ADDRESS, COLUMNS, LANE, OUTCOME, SENDER
from gateway.store.journal.format import VERSION, Draft, Header, Octets, encode_columns
from gateway.store.properties import encode_properties

ENTRIES_MAX: Final = 65_536  # of a dictionary; peers choose addresses and properties, so it has to end
ENTRIES_OCTETS_MAX: Final = 4 * 1_048_576
PROPERTIES_OCTETS_MAX: Final = 65_536  # of one set; more is recorded as {"omitted": octets}
BODIES_OCTETS: Final = 1_048_576  # memory for the bodies of a block, used again and again
# As long a run is looked up faster once than for each message (measured).
SENDERS_RUN: Final = 7
ADDRESSES_RUN: Final = 20
EVEN_OCTETS_MAX: Final = 4_096  # of a body, for offsets that are remembered
FORM: Final = "journal"  # the key in PropertySet.forms
SECOND: Final = 1_000_000  # in microseconds
LATEST: Final = 9e12  # UTC seconds that still fit as microseconds in 64 bits; a peer may claim more
_NUMBER: Final = struct.Struct("<I").pack
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


class Stashed(NamedTuple):
    """A part, or some of its messages, as the event loop leaves it for the journal.

    `messages` are as they were handed to the sink; None: a route refused `sources`. `sources` are as they
    came in; None: they are `messages`. The times are UTC in microseconds. `slots`: places in what was
    received together; None: from 0 on.
    """

    facts: Facts
    messages: list[Message] | None
    sources: list[Message] | None
    outcome: Outcome
    received_us: int
    settled_us: int
    slots: Sequence[int] | None = None


_COLUMNS: Final = encode_columns(COLUMNS)


def octets_of(text: str) -> bytes:
    """Valid UTF-8 of any text; a lone surrogate, which has none, becomes its escape."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def bitmap(present: Sequence[bool]) -> bytes:
    """A validity buffer: a bit for each element, least significant first."""
    digits = bytes(present).translate(_DIGITS)
    return int(digits[::-1], 2).to_bytes((len(digits) + 7) // 8, "little")


_DIGITS: Final = b"01" + bytes(254)


class Entries:
    """A dictionary of the block: for each entry its texts, one for each column that uses it."""

    __slots__ = ("_buffers", "_nulls", "_octets", "_stale", "_texts", "_were", "numbers")

    def __init__(self, columns: int, *, nulls: bool = False) -> None:
        self._texts: list[list[bytes | None]] = [[] for _ in range(columns)]
        self._nulls = nulls
        self._buffers: list[bytes] | None = None
        self._octets = 0
        self._stale = False
        self._were = 0

    def __len__(self) -> int:
        return len(self._texts[0])

    def add(self, *texts: bytes | None) -> bytes:
        """A new entry; returns its number as the rows hold it."""
        return self.add_all([texts])[0]

    def add_all(self, entries: Sequence[Sequence[bytes | None]]) -> list[bytes]:
        """New entries; returns their numbers."""
        first = len(self._texts[0])
        for column, texts in zip(self._texts, zip(*entries, strict=True), strict=True):
            column += texts
            self._octets += sum([len(text) for text in texts if text])
        self._buffers = None
        return [_NUMBER(first + place) for place in range(len(entries))]

    def begin(self, rows: int) -> bool:
        """A block of `rows` begins. True: start afresh, for most of what is here is not in use."""
        count = len(self)
        afresh = (
            self._stale or count > 2 * rows + 64 or count > ENTRIES_MAX or self._octets > ENTRIES_OCTETS_MAX
        )
        if afresh:
            for column in self._texts:
                column.clear()
            self._buffers = None
            self._octets = 0
        self._were = len(self)
        return afresh

    def end(self, rows: int) -> list[bytes]:
        """The buffers, when all rows of the block have their numbers."""
        # Entries that were mostly new beside old ones: traffic that does not repeat itself.
        self._stale = self._were > 0 and len(self) - self._were > rows // 2
        if self._buffers is None:
            made: list[tuple[list[bytes | None], list[bytes]]] = []
            for column in self._texts:
                # An MQTT topic is both address and name: equal columns are the same buffers.
                same = next((buffers for other, buffers in made if other == column), None)
                made.append((column, same or list(self._encoded(column))))
            self._buffers = [buffer for _, buffers in made for buffer in buffers]
        return self._buffers

    def _encoded(self, texts: list[bytes | None]) -> Iterable[bytes]:
        filled: list[bytes]
        if self._nulls and None in texts:
            yield bitmap([text is not None for text in texts])
            filled = [text or b"" for text in texts]
        else:
            if self._nulls:
                yield b""
            filled = texts  # type: ignore[assignment]  # None is not among them
        yield _offsets([len(text) for text in filled])
        yield b"".join(filled)


def _offsets(sizes: list[int]) -> bytes:
    """The offsets of values of these sizes: int32, one more than there are values."""
    count = len(sizes)
    if sizes[0] <= EVEN_OCTETS_MAX and sizes.count(sizes[0]) == count:
        return _even_offsets(sizes[0], 1 << count.bit_length())[: 4 * count + 4]
    return struct.pack(f"<{count + 1}i", *accumulate(sizes, initial=0))


@lru_cache(maxsize=16)
def _even_offsets(size: int, count: int) -> bytes:
    """The offsets of `count` values of one size; devices send bodies of a few sizes for ever."""
    return struct.pack(f"<{count + 1}i", *(size * place for place in range(count + 1)))


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
        heads = _joined([part.sources or part.messages or [] for part in parts])
        rows = len(heads)
        by_part = self._by_part(parts)
        senders = self._sender_indices(heads, rows)
        sources, targets = self._address_indices(parts, heads)
        sets = self._set_indices([message.property_set for message in heads], rows)
        flags = [
            bytes([message.assurance for message in heads]),
            bytes([message.durable for message in heads]),
            bytes([message.retain for message in heads]),
            _small([message.hops for message in heads]),
        ]
        buffers = [
            *by_part.rows,
            _slots(parts, rows),
            senders,
            sources,
            targets,
            sets,
            *flags,
            *_delivered(parts, flags),
            *_expiries([message.expires for message in heads]),
            *self._bodies([message.body for message in heads]),
            *self._senders.end(rows),
            *by_part.entries,
            *self._addresses.end(rows),
            *self._sets.end(rows),
        ]
        times = [part.received_us for part in parts]
        header = Header(VERSION, 0, self._shard, 0, base, rows, min(times), max(times), len(COLUMNS), 0, 0, 0)
        return Draft(header, _COLUMNS, buffers)

    def _by_part(self, parts: Sequence[Stashed]) -> _ByPart:
        """The columns that are the same in all rows of a part. Their dictionaries are the block's own."""
        lanes, outcomes = Entries(len(LANE)), Entries(len(OUTCOME))
        lane_numbers: dict[tuple[Facts, str], bytes] = {}
        outcome_numbers: dict[Outcome, bytes] = {}
        received, settled, lane, result = [], [], [], []
        for facts, messages, sources, outcome, received_us, settled_us, _ in parts:
            heads = sources or messages
            assert heads
            count = len(heads)
            key = (facts, heads[0].address.protocol)
            number = lane_numbers.get(key)
            if number is None:
                number = lane_numbers[key] = lanes.add(key[1].encode(), *map(octets_of, facts[:4]))
            told = outcome_numbers.get(outcome)
            if told is None:
                verdict, reason, text = outcome
                words = (verdict.name.lower().encode(), reason.value.encode(), octets_of(text))
                told = outcome_numbers[outcome] = outcomes.add(*words)
            received.append(_TIME(received_us) * count)
            settled.append(_TIME(settled_us) * count)
            lane.append(number * count)
            result.append(told * count)
        rows = [b"".join(column) for column in (received, settled, lane, result)]
        return _ByPart(rows, [*lanes.end(0), *outcomes.end(0)])

    def _sender_indices(self, heads: list[Message], rows: int) -> bytes:
        numbers = self._sender_numbers
        if self._senders.begin(rows):
            numbers.clear()
            self._kept.clear()
        senders = [message.sender for message in heads]
        try:
            return _sender_numbers(senders, numbers)
        except KeyError:
            fresh = {id(sender): sender for sender in senders if id(sender) not in numbers}
            self._kept += fresh.values()
            texts = [list(map(octets_of, sender)) for sender in fresh.values()]
            numbers.update(zip(fresh, self._senders.add_all(texts), strict=True))
            return _sender_numbers(senders, numbers)

    def _address_indices(self, parts: Sequence[Stashed], heads: list[Message]) -> tuple[bytes, bytes]:
        """Where the rows came from and went to; one and the same object when nothing crossed."""
        if self._addresses.begin(len(heads)):
            self._address_numbers.clear()
            self._nowhere = b""
        runs = [part.sources or part.messages or [] for part in parts]
        # One look-up table for each protocol, for wires of two may be equal.
        protocols = [(protocol, list(same)) for protocol, same in groupby(runs, _protocol_of)]
        if len(protocols) == 1:
            sources = self._numbered(heads, protocols[0][0])
        else:
            sources = b"".join([self._numbered(_joined(same), protocol) for protocol, same in protocols])
        if all(part.sources is None for part in parts):
            return sources, sources
        targets = []
        for protocol, some in groupby(parts, _target_protocol_of):
            if protocol:
                tails = _joined([part.messages or [] for part in some])
                targets.append(self._numbered(tails, protocol))
                continue
            if not self._nowhere:
                self._nowhere = self._addresses.add(None, None, None)
            targets.append(self._nowhere * sum(len(part.sources or ()) for part in some))
        return sources, b"".join(targets)

    def _numbered(self, messages: list[Message], protocol: str) -> bytes:
        numbers = self._address_numbers.get(protocol)
        if numbers is None:
            numbers = self._address_numbers[protocol] = {}
        addresses = [message.address for message in messages]
        try:
            return _address_numbers(addresses, numbers)
        except KeyError:
            fresh = {address.wire: address for address in addresses if address.wire not in numbers}
            words = [words_of(address) for address in fresh.values()]
            numbers.update(zip(fresh, self._addresses.add_all(words), strict=True))
            return _address_numbers(addresses, numbers)

    def _set_indices(self, sets: list[PropertySet], rows: int) -> bytes:
        numbers = self._set_numbers
        if self._sets.begin(rows):
            numbers.clear()
        first = sets[0]
        if sets.count(first) == rows:
            number = numbers.get(first)
            if number is None:
                number = numbers[first] = self._sets.add(*recorded(first))
            return number * rows
        try:
            return b"".join([numbers[one] for one in sets])
        except KeyError:
            fresh = [one for one in dict.fromkeys(sets) if one not in numbers]
            numbers.update(zip(fresh, self._sets.add_all(list(map(recorded, fresh))), strict=True))
            return b"".join([numbers[one] for one in sets])

    def _bodies(self, bodies: list[bytes]) -> tuple[bytes, bytes, bytes, Octets]:
        """Sizes, validity, offsets, octets."""
        most = self._body_max
        sizes = list(map(len, bodies))
        lengths = struct.pack(f"<{len(sizes)}I", *sizes)
        if not most:
            return lengths, b"", b"", b""
        if max(sizes) <= most:
            total = sum(sizes)
            octets = self._together(bodies) if total <= BODIES_OCTETS else b"".join(bodies)
            if len(octets) == total:  # or one of them is a file (model/spooled.py), and not looked at
                return lengths, b"", _offsets(sizes), octets
        whole = [len(body) <= most and not isinstance(body, Spooled) for body in bodies]
        kept = [body if taken else b"" for body, taken in zip(bodies, whole, strict=True)]
        valid = bitmap(whole)
        return lengths, valid, _offsets(list(map(len, kept))), b"".join(kept)

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


def _come_in_runs(objects: Sequence[object], length: int) -> bool:
    """Whether a sample says that runs of one and the same object have this length, as the messages of one
    connection in one wake-up may. Then a look-up for each run is worth its price."""
    sample = list(map(is_, objects[:-1:16], objects[1::16]))
    return length * sum(sample) > (length - 1) * len(sample)


def _sender_numbers(senders: list[Sender], numbers: dict[int, bytes]) -> bytes:
    if _come_in_runs(senders, SENDERS_RUN):
        return b"".join([numbers[id(one)] * len(list(run)) for one, run in groupby(senders)])
    return b"".join([numbers[id(one)] for one in senders])


def _address_numbers(addresses: list[Address], numbers: dict[bytes, bytes]) -> bytes:
    if _come_in_runs(addresses, ADDRESSES_RUN):
        return b"".join([numbers[one.wire] * len(list(run)) for one, run in groupby(addresses)])
    return b"".join([numbers[one.wire] for one in addresses])


def _joined(lists: Sequence[list[Message]]) -> list[Message]:
    return lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))


class _ByPart(NamedTuple):
    """Buffers of the rows and of the dictionaries."""

    rows: list[bytes]
    entries: list[bytes]


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


def _protocol_of(run: list[Message]) -> str:
    return run[0].address.protocol


def _target_protocol_of(part: Stashed) -> str:
    """ "" when the part went nowhere."""
    return part.messages[0].address.protocol if part.messages else ""


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


def _delivered(parts: Sequence[Stashed], flags: list[bytes]) -> list[bytes]:
    """Assurance, durable and retain as they went out; the sources' own buffers when nothing changed them."""
    if all(part.sources is None or part.messages is None or not part.facts.reshapes for part in parts):
        return flags[:3]
    tails = _joined([part.messages or part.sources or [] for part in parts])
    return [
        bytes([message.assurance for message in tails]),
        bytes([message.durable for message in tails]),
        bytes([message.retain for message in tails]),
    ]


def _slots(parts: Sequence[Stashed], rows: int) -> bytes:
    runs = [
        range(len(part.sources or part.messages or ())) if part.slots is None else part.slots
        for part in parts
    ]
    return struct.pack(f"<{rows}I", *(runs[0] if len(runs) == 1 else chain.from_iterable(runs)))


def _small(numbers: list[int]) -> bytes:
    """An octet each; a peer may claim more hops than fit."""
    try:
        return bytes(numbers)
    except ValueError:
        return bytes([min(number, 255) for number in numbers])


def _expiries(expires: list[float]) -> tuple[bytes, bytes]:
    """Validity and values; nothing when no row expires."""
    if expires.count(NEVER) == len(expires):
        return b"", b""
    values = array("q", [int(min(moment, LATEST) * SECOND) for moment in expires]).tobytes()
    return bitmap([moment != NEVER for moment in expires]), values
