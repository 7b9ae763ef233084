"""Encoding of gathered rows as the buffers of one block.

Repeated values are written once in a dictionary, and as numbers in the rows. Senders, addresses and property
sets have a number in each row; routes and outcomes have one in each part (rows that were settled together).
The former dictionaries persist from block to block, so that repeated traffic finds its numbers (and the
dictionary's bytes) ready. A message costs a few list comprehensions and look-ups, without a function call or
a tuple for each row.

A message that crossed has two versions: the received one, which a backtest needs, and the delivered one.
Content and guarantees are recorded as received; the columns `delivered_*` and `target_*` are as delivered.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import Final, NamedTuple

from gateway.model.address import Address
from gateway.model.message import NEVER, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import PropertySet
from gateway.store.journal.column_buffers import (
    Gathering,
    Guarantees,
    Heads,
    OwnEntries,
    RowLabels,
    SettledRows,
    UnsharedColumns,
)
from gateway.store.journal.columns import COLUMNS, OUTCOME, RECIPIENT, SENDER
from gateway.store.journal.entries import NUMBER, BlockDictionary, bitmap, bytes_of, even_offsets, offsets
from gateway.store.journal.format import (
    BlockStatistics,
    Buffer,
    Bytes,
    Draft,
    Header,
    encode_columns,
    expanded,
)
from gateway.store.journal.runs import Runs, chained, lengths_of, repeat_values, runs_of, spread
from gateway.store.journal.wall import SECOND
from gateway.store.journal.wires import (
    NOWHERE_ENTRY,
    WireDictionary,
    address_entries,
    held_buffers,
    set_entries,
)

LATEST: Final = 9e12  # POSIX seconds that fit 64 bits as microseconds; a peer may claim more
ROWS_USUAL: Final = 4_096  # of a part; the places of more rows are encoded each time
_FIRST_PLACES: Final = struct.pack(f"<{ROWS_USUAL}I", *range(ROWS_USUAL))
_TIME: Final = struct.Struct("<q").pack


_LaneKey = tuple[RowLabels, str]
"""Labels of a recipient, and the protocol in which its messages were received."""
ENCODED_COLUMNS: Final = encode_columns(COLUMNS)


class Encoder:
    """Encoder of the journal blocks of a shard, with the dictionaries that persist from block to block."""

    def __init__(self, shard: int) -> None:
        self._shard = shard
        self._senders = BlockDictionary(len(SENDER))
        self._sender_numbers: dict[int, bytes] = {}  # by identity, which is faster than the hash of a tuple
        self._sender_refs: list[Sender] = []  # those senders, so that no identity is reused
        self._sources = _Addresses()
        self._targets = _Addresses()
        self._sets = WireDictionary()
        self._set_numbers: dict[PropertySet, bytes] = {}

    def afresh(self) -> Encoder:
        """Return a new encoder of the same shard, with empty dictionaries."""
        return Encoder(self._shard)

    def encode(self, base: int, gathering: Gathering) -> Draft:
        """Encode the rows in `gathering` as a block; the first row has sequence number `base`.

        Bodies are not copied: their memory may be reused only after the block is written.
        """
        parts, rows = gathering.parts, gathering.rows
        heads = [part.heads for part in parts]
        by_part = _by_part(parts)
        senders = self._sender_indices(chained([part.senders for part in parts]), rows)
        came = [part.sources for part in parts]
        sources = targets = self._sources.encoded(gathering.sources, came, gathering)
        if any(part.targets is not None for part in parts):
            target_parts = [part.sources if part.targets is None else part.targets for part in parts]
            targets = self._targets.encoded(gathering.targets, target_parts, gathering)
        elif gathering.targets is not None:
            self._targets.passed(rows)
        sets = self._encoded_sets(gathering)
        lengths = lengths_of([(head.guarantees.lengths, len(head.hops)) for head in heads])
        flags = _flags([head.guarantees for head in heads])
        hops = repeat_values(b"".join([head.hops for head in heads]), 1, lengths)
        buffers = [
            *by_part.rows,
            _slots(parts),
            senders,
            sources.indices,
            targets.indices,
            sets.indices,
            *(*flags, hops),
            *_delivered(parts, flags),
            *_expiries(heads, lengths),
            *_bodies(gathering),
            *self._senders.end(rows),
            *by_part.entries,
            *sources.entries,
            *targets.entries,
            *sets.entries,
        ]
        first, last = min([part.received_us for part in parts]), max([part.received_us for part in parts])
        header = Header(0, self._shard, 0, base, rows, first, last, len(COLUMNS), 0, 0, 0)
        done = [part.settled_us for part in parts]
        statistics = BlockStatistics(min(done), max(done), frozenset([part.labels.route for part in parts]))
        return Draft(header, ENCODED_COLUMNS, buffers, statistics)

    def _sender_indices(self, runs: Runs[Sender], rows: int) -> Buffer:
        """Return the dictionary index of each row's sender; add new senders to the dictionary."""
        numbers = self._sender_numbers
        if self._senders.begin(rows):
            numbers.clear()
            self._sender_refs.clear()
        senders, lengths = runs
        try:
            return _indices(Runs([numbers[id(sender)] for sender in senders], lengths))
        except KeyError:
            fresh = {id(sender): sender for sender in senders if id(sender) not in numbers}
            self._sender_refs += fresh.values()
            texts = [list(map(bytes_of, sender.names)) for sender in fresh.values()]
            numbers.update(zip(fresh, self._senders.add_all(texts), strict=True))
            return _indices(Runs([numbers[id(sender)] for sender in senders], lengths))

    @property
    def unshared_columns(self) -> UnsharedColumns:
        """Columns to encode without a dictionary in the next rows, because their values rarely repeat."""
        return UnsharedColumns(self._sets.differ, self._sources.differ, self._targets.differ)

    def _encoded_sets(self, gathering: Gathering) -> _Encoded:
        """Return the buffers of the block's property sets; add new property sets to the dictionary."""
        dictionary, numbers = self._sets, self._set_numbers
        parts, rows = gathering.parts, gathering.rows
        if gathering.sets is not None:
            dictionary.passed(rows)
            return _encode_entries(gathering.sets)
        lengths = lengths_of([(part.sets.lengths, part.rows) for part in parts])
        sets = list(chain.from_iterable([part.sets.objects for part in parts]))
        if dictionary.begin(rows):
            numbers.clear()
        fresh: list[PropertySet] = []
        try:
            indices = b"".join([numbers[one] for one in sets])
        except KeyError:
            fresh = [one for one in dict.fromkeys(sets) if one not in numbers]
            numbers.update(zip(fresh, dictionary.add_all(*set_entries(fresh)), strict=True))
            indices = b"".join([numbers[one] for one in sets])
        return _Encoded(repeat_values(indices, 4, lengths), dictionary.end(rows, len(fresh)))


class _Encoded(NamedTuple):
    """Buffers of columns that show texts of the same encoded addresses or property sets.

    `indices` has the dictionary index of each row, `entries` the buffers of the dictionary.
    """

    indices: Buffer
    entries: list[Buffer]


class _Addresses:
    """Dictionary of encoded addresses, for the sources or for the targets; persists from block to block."""

    def __init__(self) -> None:
        self._dictionary = WireDictionary()
        self._numbers: dict[str, dict[bytes, bytes]] = {}  # by protocol, then by wire
        self._nowhere = b""
        self._fresh = 0

    @property
    def differ(self) -> bool:
        """True if the next rows' addresses should be encoded without a look-up, because most were new."""
        return self._dictionary.differ

    def passed(self, rows: int) -> None:
        """Count rows whose addresses were encoded without a look-up in the dictionary."""
        self._dictionary.passed(rows)

    def encoded(
        self, own: OwnEntries | None, runs: Sequence[Runs[Address]], gathering: Gathering
    ) -> _Encoded:
        """Return the buffers of the addresses in a block.

        `own` has the addresses if they are encoded without a look-up. Otherwise they are in `runs`, one item
        for each part of the block (rows that were settled together), which has addresses of one protocol.
        `gathering` has the block's rows.
        """
        dictionary, parts, rows = self._dictionary, gathering.parts, gathering.rows
        if own is not None:
            dictionary.passed(rows)
            return _encode_entries(own)
        if dictionary.begin(rows):
            self._numbers.clear()
            self._nowhere = b""
        self._fresh = 0
        found: list[Runs[bytes]] = []
        # One look-up table for each protocol, because two protocols may have equal wires.
        at = 0
        for protocol, same in groupby(runs, _protocol_of):
            some = list(same)
            if protocol:
                found.append(self._numbered(protocol, chained(some)))
            else:
                if not self._nowhere:
                    (self._nowhere,) = dictionary.add_all(*NOWHERE_ENTRY)
                count = sum(part.rows for part in parts[at : at + len(some)])
                found.append(Runs([self._nowhere], [count]))
            at += len(some)
        indices = _indices(chained(found))
        return _Encoded(indices, dictionary.end(rows, self._fresh))

    def _numbered(self, protocol: str, runs: Runs[Address]) -> Runs[bytes]:
        """Return the dictionary indices of addresses of one protocol; add new addresses to the dictionary."""
        addresses, lengths = runs if runs.lengths is not None else runs_of(runs.objects)
        numbers = self._numbers.get(protocol)
        if numbers is None:
            numbers = self._numbers[protocol] = {}
        try:
            return Runs([numbers[one.wire] for one in addresses], lengths)
        except KeyError:
            fresh = {address.wire: address for address in addresses if address.wire not in numbers}
            self._fresh += len(fresh)
            made = self._dictionary.add_all(*address_entries(list(fresh.values())))
            numbers.update(zip(fresh, made, strict=True))
            return Runs([numbers[one.wire] for one in addresses], lengths)


def _encode_entries(entries: OwnEntries) -> _Encoded:
    lengths = entries.lengths
    places = b"" if lengths is None else _places(None, len(lengths))
    buffers = held_buffers(entries.forms, entries.sizes, entries.column.data())
    return _Encoded(repeat_values(places, 4, lengths), buffers)


def _indices(numbers: Runs[bytes]) -> Buffer:
    return repeat_values(b"".join(numbers.objects), 4, numbers.lengths)


def _bodies(gathering: Gathering) -> tuple[Buffer, bytes, bytes, Bytes]:
    """Return the buffers of the bodies: sizes, validity, offsets and bytes."""
    parts, rows = gathering.parts, gathering.rows
    runs = chained([part.sizes for part in parts])
    even = runs.lengths is not None and runs.objects.count(runs.objects[0]) == len(runs.objects)
    if even:
        runs = Runs(runs.objects[:1], [rows])
    sizes = repeat_values(struct.pack(f"<{len(runs.objects)}I", *runs.objects), 4, runs.lengths)
    if not gathering.body_bytes_max:
        return sizes, b"", b"", b""
    data = gathering.bodies.data()
    if any(part.whole for part in parts):
        whole = list(chain.from_iterable([part.whole or [True] * part.rows for part in parts]))
        stored_sizes = [size if taken else 0 for size, taken in zip(spread(runs), whole, strict=True)]
        return sizes, bitmap(whole), offsets(stored_sizes), data
    return sizes, b"", even_offsets(runs.objects[0], rows) if even else offsets(spread(runs)), data


class _ByPart(NamedTuple):
    """Buffers of the columns that have one value for all rows that were settled together.

    `rows` has the buffers of values, or of dictionary indices; `entries` has the buffers of the dictionaries.
    """

    rows: list[Buffer]
    entries: list[bytes]


def _by_part(parts: Sequence[SettledRows]) -> _ByPart:
    """Encode the columns that have one value for all rows that were settled together (one of `parts`).

    These are the times, the recipient (route and target) and the outcome. Their dictionaries are for this
    block alone.
    """
    recipients: dict[_LaneKey, bytes] = {}
    outcomes: dict[Outcome, bytes] = {}
    received, settled, recipient, result, counts = [], [], [], [], []
    for part in parts:
        labels, outcome, received_us, settled_us, count, *_ = part
        key = (labels, part.protocol)
        number = recipients.get(key)
        if number is None:
            number = recipients[key] = NUMBER(len(recipients))
        code = outcomes.get(outcome)
        if code is None:
            code = outcomes[outcome] = NUMBER(len(outcomes))
        received.append(_TIME(received_us))
        settled.append(_TIME(settled_us))
        recipient.append(number)
        result.append(code)
        counts.append(count)
    rows = [
        repeat_values(b"".join(column), len(column[0]), counts)
        for column in (received, settled, recipient, result)
    ]
    return _ByPart(rows, [*_lane_entries(tuple(recipients)), *_outcome_entries(tuple(outcomes))])


# Most blocks have the same few recipients and outcomes.
@lru_cache(maxsize=16)
def _lane_entries(keys: tuple[_LaneKey, ...]) -> list[bytes]:
    entries = BlockDictionary(len(RECIPIENT))
    entries.add_all([(protocol.encode(), *map(bytes_of, labels[:4])) for labels, protocol in keys])
    return entries.end(0)


@lru_cache(maxsize=16)
def _outcome_entries(outcomes: tuple[Outcome, ...]) -> list[bytes]:
    entries = BlockDictionary(len(OUTCOME))
    entries.add_all(
        [
            (verdict.name.lower().encode(), reason.value.encode(), bytes_of(text))
            for verdict, reason, text in outcomes
        ]
    )
    return entries.end(0)


def _protocol_of(runs: Runs[Address]) -> str:
    """Return the protocol of the addresses, or "" if there are none."""
    return runs.objects[0].protocol if runs.objects else ""


def _flags(parts: Sequence[Guarantees]) -> list[Buffer]:
    """Encode the columns assurance, durable and retain in `parts` as one buffer each."""
    lengths = lengths_of([(part.lengths, len(part.columns[0])) for part in parts])
    columns = zip(*[part.columns for part in parts], strict=True)
    return [repeat_values(b"".join(column), 1, lengths) for column in columns]


def _delivered(parts: Sequence[SettledRows], flags: list[Buffer]) -> Sequence[Buffer]:
    """Encode the columns assurance, durable and retain as delivered.

    Return `flags`, the buffers of these columns as received, if no route changed them.
    """
    if all(part.went is None for part in parts):
        return flags
    return _flags([part.heads.guarantees if part.went is None else part.went for part in parts])


def _slots(parts: Sequence[SettledRows]) -> bytes:
    return b"".join([_places(part.slots, part.rows) for part in parts])


def _places(slots: Sequence[int] | None, count: int) -> bytes:
    if slots is None and count <= ROWS_USUAL:
        return _FIRST_PLACES[: 4 * count]
    return struct.pack(f"<{count}I", *(range(count) if slots is None else slots))


def _expiries(heads: Sequence[Heads], lengths: Sequence[int] | None) -> tuple[bytes, Buffer]:
    """Return the validity and values buffers of the expiry times, both empty if no message expires.

    `lengths` has the number of rows for which each value stands; None means one row each.
    """
    if all(head.expires is None for head in heads):
        return b"", b""
    expires = list(
        chain.from_iterable(
            [[NEVER] * len(head.hops) if head.expires is None else head.expires for head in heads]
        )
    )
    values = array("q", [int(min(moment, LATEST) * SECOND) for moment in expires]).tobytes()
    present = bytes([moment != NEVER for moment in expires])
    if lengths is not None:
        present = expanded(present, 1, lengths)
    return bitmap(present) if NEVER in expires else b"", repeat_values(values, 8, lengths)
