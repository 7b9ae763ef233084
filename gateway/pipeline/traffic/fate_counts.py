"""Counting of messages by their fates (results of a mapping), in two passes over Arrow batches.

A journal has a row for each delivery, but whole messages are compared. The first pass, where rows are read,
computes five numbers for each row: a key that all rows of a message share, a hash of the candidate's result,
a hash of the recorded result, and the place of the row (two numbers). Only combinations that a task has not
seen are routed; routes with conditions on the message are evaluated for each message. The texts behind the
hashes are sent beside the numbers, once by each task. The second pass, where rows with the same key are
together, counts how many messages have each combination of results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gateway.mapping.reply_routes import ANSWERS
from gateway.pipeline.traffic.fates import (
    CandidateMapping,
    Fate,
    Fates,
    decides_by_message,
    encode_fates,
    fates_of,
)
from gateway.pipeline.traffic.rows import message_of
from gateway.pipeline.workers import freeze_imports

Numbers = Any  # A numpy array.
IDENTITY: Final = ("shard", "source_endpoint", "received", "slot", "sequence")
WHO: Final = ("client", "user")
WHENCE: Final = (
    *("source_endpoint", "source_protocol", "source_scope", "source_name"),
    *("assurance", "durable", "retain", "hops", "route"),
)
WHITHER: Final = (
    *("route", "target_endpoint", "target_address"),
    *("delivered_assurance", "delivered_durable", "delivered_retain", "reason"),
)
CONTENT: Final = ("properties", "body", "message_id", "expires", *WHO)
FIRST: Final = pa.schema(
    [(name, pa.int64()) for name in ("key", "fate", "recipient", "shard", "sequence")]
    + [("texts", pa.string())]
)
FIRST_SQL: Final = "key long, fate long, recipient long, shard long, sequence long, texts string"
SECOND: Final = pa.schema(
    [
        *(("fate", pa.int64()), ("recipients", pa.list_(pa.int64())), ("messages", pa.int64())),
        *(("shard", pa.int64()), ("sequence", pa.int64()), ("texts", pa.string())),
    ]
)
SECOND_SQL: Final = (
    "fate long, recipients array<long>, messages long, shard long, sequence long, texts string"
)
NO_LANE: Final = 0
COMBINED_MAX: Final = 1 << 40  # Limit of a code before it is compacted.
KNOWN_MAX: Final = 200_000  # Combinations that one task caches.
LOT_ROWS: Final = 262_144  # Rows counted at a time, by key; sorting needs several times their memory.


def columns_for(candidates: Sequence[CandidateMapping]) -> list[str]:
    """Return the names of the journal columns that the first pass (`FirstPass`) needs for these mappings.

    The first pass computes the result of each message.
    """
    names = [*IDENTITY, *WHENCE, *WHITHER]
    if any(candidate.per_body for candidate in candidates):
        names += CONTENT
    elif any(candidate.per_sender for candidate in candidates):
        names += WHO
    return list(dict.fromkeys(names))


def number_of(text: str) -> int:
    """Return a signed 64-bit hash of a text. It is never 0, and in practice unique within a job."""
    found = int.from_bytes(
        blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little", signed=True
    )
    return found or 1


class Texts:
    """Hashes of routing results, which are texts, in one Spark task.

    The object also has the texts that were not sent to the second pass yet.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._news: list[str] = []

    def number(self, text: str) -> int:
        """Return the hash of a text. A new text is stored until `new_texts` returns it."""
        found = self._numbers.get(text)
        if found is None:
            if len(self._numbers) >= KNOWN_MAX:
                self._numbers.clear()
            found = self._numbers[text] = number_of(text)
            self._news.append(text)
        return found

    def new_texts(self) -> str | None:
        """Return the texts that are new since the last call, one per line, or None if there are none."""
        if not self._news:
            return None
        texts, self._news = "\n".join(self._news), []
        return texts


class FirstPass:
    """First pass of a backtest over the journal's rows, as a function for Spark's `mapInArrow`.

    It computes hashes for the routing results of `candidate`, and of a reference: the mapping `against`, or
    the recorded results if that is None.
    """

    def __init__(self, candidate: CandidateMapping, against: CandidateMapping | None) -> None:
        self._candidate = candidate
        self._against = against
        self._senders = candidate.per_sender or (against is not None and against.per_sender)

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield five numbers for each row of the batches, and the texts whose hashes are new in this task.

        The numbers are the key of the row's message, the hashes of the candidate's and of the reference's
        result, the hash of the row's shard, and the row's sequence number. The texts are in the first row of
        a batch.
        """
        freeze_imports()
        texts = Texts()
        fates = FateCache(self._candidate, texts)
        reference = None if self._against is None else FateCache(self._against, texts)
        recipients = _Recipients(texts)
        for batch in batches:
            if not batch.num_rows:
                continue
            names = (*WHENCE, *WHO) if self._senders else WHENCE
            codes, firsts = combinations([batch.column(name) for name in names])
            fate = fates.numbers(batch, codes, firsts)
            recipient = (
                recipients.numbers(batch) if reference is None else reference.numbers(batch, codes, firsts)
            )
            columns = [
                _keys(batch),
                fate,
                recipient,
                _texts_numbers(batch, "shard", texts),
                _int64(batch, "sequence"),
            ]
            arrays = [pa.array(column) for column in columns]
            news: list[str | None] = [None] * batch.num_rows
            news[0] = texts.new_texts()
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(news, pa.string())], schema=FIRST)


class FateCache:
    """Cache of the results of routing messages by one mapping, as hashes.

    The key consists of the address and all other recorded columns on which the routing depends.
    """

    def __init__(self, candidate: CandidateMapping, texts: Texts) -> None:
        self._candidate = candidate
        self._texts = texts
        self._cache: dict[tuple[Any, ...], int | None] = {}  # None: each message is routed.

    def numbers(self, batch: Any, codes: Numbers, firsts: Numbers) -> Numbers:
        """Return, for each row of `batch`, the hash of the candidate's result for its message.

        `codes` and `firsts` are the result of `combinations`: the number of each row's combination of routing
        columns, and the index of one row of each combination.
        """
        names = [name for name in (*WHENCE, *WHO) if name in batch.schema.names]
        samples = batch.take(pa.array(firsts)).select(names).to_pylist()
        found = [self._number(sample) for sample in samples]
        numbers = np.array([number or 0 for number in found], dtype=np.int64)[codes]
        undecided = np.flatnonzero(np.array([number is None for number in found])[codes])
        if len(undecided):
            rows = batch.take(pa.array(undecided)).to_pylist()
            numbers[undecided] = [self._texts.number(encode_fates(self._fates(row))) for row in rows]
        return numbers

    def _number(self, sample: dict[str, Any]) -> int | None:
        key = tuple(sample.values())
        if key in self._cache:
            return self._cache[key]
        if len(self._cache) >= KNOWN_MAX:
            self._cache.clear()
        message = message_of(sample)
        resolved_routes = self._candidate.resolve(
            message.sender.endpoint, message.address, sample["route"] or ""
        )
        number = None
        if not decides_by_message(resolved_routes):
            number = self._texts.number(encode_fates(fates_of(resolved_routes, message)))
        self._cache[key] = number
        return number

    def _fates(self, row: dict[str, Any]) -> Fates:
        message = message_of(row)
        resolved_routes = self._candidate.resolve(
            message.sender.endpoint, message.address, row["route"] or ""
        )
        return fates_of(resolved_routes, message)


class _Recipients:
    """Hashes of the recorded results (route, target and outcome) in journal rows.

    The hash is NO_LANE, for no result, in rows without a route and in rows for replies to return addresses.
    """

    def __init__(self, texts: Texts) -> None:
        self._texts = texts
        self._cache: dict[tuple[Any, ...], int] = {}

    def numbers(self, batch: Any) -> Numbers:
        codes, firsts = combinations([batch.column(name) for name in WHITHER])
        samples = batch.take(pa.array(firsts)).select(list(WHITHER)).to_pylist()
        return np.array([self._number(sample) for sample in samples], dtype=np.int64)[codes]

    def _number(self, sample: dict[str, Any]) -> int:
        if not sample["route"] or sample["route"].endswith(ANSWERS):  # See CandidateMapping.resolve.
            return NO_LANE
        key = tuple(sample.values())
        number = self._cache.get(key)
        if number is None:
            if len(self._cache) >= KNOWN_MAX:
                self._cache.clear()
            route, endpoint, address, assurance, durable, retain, reason = key
            refused = reason if address is None else ""
            fate = (
                Fate(route, endpoint, None, 0, False, False, refused)
                if address is None
                else Fate(route, endpoint, address, assurance, durable, retain)
            )
            number = self._cache[key] = self._texts.number(encode_fates((fate,)))
        return number


def coded(column: Any) -> tuple[Numbers, Any]:
    """Return the dictionary index of each row's value, and the dictionary of the column.

    The index of null is the length of the dictionary. A column that is dictionary-encoded already is not
    encoded again.
    """
    found = column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)
    places = found.indices.fill_null(len(found.dictionary)) if found.null_count else found.indices
    return places.to_numpy(zero_copy_only=False), found.dictionary


def combinations(columns: Sequence[Any]) -> tuple[Numbers, Numbers]:
    """Assign a number to each combination of values in `columns`, Arrow columns of equal length.

    Return the number of each row's combination, and for each combination the index of its first row.
    """
    codes: Numbers = np.zeros(len(columns[0]), dtype=np.int64)
    size = 1
    for column in columns:
        places, values = coded(column)
        count = len(values) + 1
        if count == 2 and not column.null_count:
            continue
        if size * count > COMBINED_MAX:
            kinds, codes = np.unique(codes, return_inverse=True)
            size = len(kinds)
        codes = codes * count + places
        size *= count
    # By hashing, since np.unique would sort all rows.
    found = pc.dictionary_encode(pa.array(codes))
    codes = found.indices.to_numpy()
    firsts = np.empty(len(found.dictionary), dtype=np.int64)
    firsts[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    return codes, firsts


def _keys(batch: Any) -> Numbers:
    """Return a hash for each row, equal for rows of the same message and different for other messages."""
    with np.errstate(over="ignore"):
        found = _int64(batch, "received").astype(np.uint64)
        for more in (
            _int64(batch, "slot"),
            _plain_numbers(batch, "shard"),
            _plain_numbers(batch, "source_endpoint"),
        ):
            found = _mixed(found) ^ more.astype(np.uint64)
        return _mixed(found).view(np.int64)


def _mixed(numbers: Numbers) -> Numbers:
    """Hash 64-bit integers by the finalizer of SplitMix64, and return the hashes.

    Every bit of a result depends on every bit of the input.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _int64(batch: Any, name: str) -> Numbers:
    column = batch.column(name)
    if column.null_count:
        column = column.fill_null(0)
    return column.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _plain_numbers(batch: Any, name: str) -> Numbers:
    places, values = coded(batch.column(name))
    numbers = np.array([number_of(text or "") for text in (*values.to_pylist(), None)], dtype=np.int64)
    return numbers[places]


def _texts_numbers(batch: Any, name: str, texts: Texts) -> Numbers:
    places, values = coded(batch.column(name))
    known_texts = values.to_pylist() if not batch.column(name).null_count else (*values.to_pylist(), None)
    numbers = np.array([texts.number(text or "") for text in known_texts], dtype=np.int64)
    return numbers[places]


def second_pass(batches: Iterable[Any]) -> Iterator[Any]:
    """Count the messages for each combination of routing results, and yield the counts.

    This is a function for Spark's `mapInArrow` on the output of `FirstPass`. Rows with the same key must be
    in one partition.
    """
    freeze_imports()
    parts: list[list[Numbers]] = []
    new_texts: list[str] = []
    for batch in batches:
        parts.append([batch.column(at).to_numpy(zero_copy_only=False) for at in range(5)])
        new_texts += [text for text in batch.column(5).to_pylist() if text is not None]
    if parts:
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        parts.clear()  # Frees the memory of the batches.
        lots = -(-len(columns[0]) // LOT_ROWS)
        lot_of = columns[0] % lots
        for lot in range(lots):
            chosen = lot_of == lot
            yield from _count_fates(*(column[chosen] for column in columns))
    if new_texts:
        texts = "\n".join(dict.fromkeys("\n".join(new_texts).split("\n")))
        yield pa.RecordBatch.from_pylist([{"texts": texts}], schema=SECOND)


def _count_fates(
    keys: Numbers, fates: Numbers, recipients: Numbers, shards: Numbers, sequences: Numbers
) -> Iterator[Any]:
    """Yield a batch with the number of messages, and the position of one, for each combination of results.

    The parameters are columns: the message key of each row, the hash of the candidate's result (`fates`),
    that of the reference's result (`recipients`), the hash of the shard, and the sequence number.
    """
    order = np.lexsort((recipients, keys))
    keys, fates, recipients, shards, sequences = (
        column[order] for column in (keys, fates, recipients, shards, sequences)
    )
    begins = np.concatenate(([True], keys[1:] != keys[:-1]))
    fresh = begins | np.concatenate(([True], recipients[1:] != recipients[:-1]))
    starts = np.flatnonzero(begins)
    message = np.cumsum(begins) - 1
    # Recipients of each message, side by side; most have one.
    counted = np.cumsum(fresh)
    place = (counted - counted[starts][message])[fresh]
    wide = np.full((len(starts), int(place.max()) + 1), NO_LANE, dtype=np.int64)
    wide[message[fresh], place] = recipients[fresh]
    table = np.column_stack((fates[starts], wide))
    _, first, codes = np.unique(_rows_as_one(table), return_index=True, return_inverse=True)
    counts = np.bincount(codes.ravel())
    rows = [
        {
            "fate": int(table[at, 0]),
            "recipients": [int(recipient) for recipient in table[at, 1:] if recipient != NO_LANE],
            "messages": int(count),
            "shard": int(shards[starts[at]]),
            "sequence": int(sequences[starts[at]]),
            "texts": None,
        }
        for at, count in zip(first, counts, strict=True)
    ]
    yield pa.RecordBatch.from_pylist(rows, schema=SECOND)


def _rows_as_one(table: Numbers) -> Numbers:
    """Return each row of a two-dimensional array as one opaque value, since numpy compares these faster."""
    table = np.ascontiguousarray(table)
    return table.view(np.dtype((np.void, table.dtype.itemsize * table.shape[1]))).ravel()
