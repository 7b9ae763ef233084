"""Columns of settled messages, gathered on the event loop until they fill a block.

The values of the columns and the bytes of bodies are copied out of the messages at once; of messages that
differ only in their bodies only the first one is examined. A message can therefore be freed once it is
delivered. If a few thousand messages were stored until their block is encoded, they would fill the
processor's caches, and later messages would be created in memory that is not cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final, NamedTuple

from gateway.model.address import Address
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import PropertySet
from gateway.model.spooled_bodies import Spooled
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.format import Bytes
from gateway.store.journal.runs import RUN_ALIKE, Runs, alike_in, lengths_of, runs_of
from gateway.store.journal.wires import NOWHERE_ENTRY, Entered, address_entries, set_entries

MEMORY_BYTES: Final = 1_048_576
# Size of a memory at which it is flushed, so that the next part most likely fits.
NEARLY_FULL: Final = MEMORY_BYTES - MEMORY_BYTES // 8
# Of a waiting block; a smaller content is copied instead of keeping its memory.
COPIED_BYTES: Final = MEMORY_BYTES // 16
MEMORIES_MAX: Final = 16  # that wait to be reused; more may be in use
NOWHERE: Final[Runs[Address]] = Runs([], None)
NO_SETS: Final[Runs[PropertySet]] = Runs([], None)


class RowLabels(NamedTuple):
    """Values of the journal's columns that are equal for all messages of one recipient.

    `route` is "" for messages that were not routed elsewhere. `endpoint` and `protocol` are the target's.
    `reshapes` is True if the route may change assurance (QoS), durable or retain.
    """

    route: str
    mapping_version: str
    endpoint: str
    protocol: str
    reshapes: bool = True


class SettledMessages(NamedTuple):
    """Messages that were settled together with one outcome, as the journal records them.

    - `messages`: as they were sent to the target, or None if a route refused `sources`.
    - `sources`: as they were received, or None if they are equal to `messages`.
    - `origins`: the source addresses if the route changed only the address and the hop count; then `sources`
      is None.
    - `slots`: positions of the messages in the batch in which they were received; None means 0, 1, 2 and so
      on.
    - `bursts`: the same messages, if all of them were received in bursts (messages that were read together
      and differ only in their bodies).

    The times are in microseconds UTC.
    """

    labels: RowLabels
    messages: list[Message] | None
    sources: list[Message] | None
    outcome: Outcome
    received_us: int
    settled_us: int
    slots: Sequence[int] | None = None
    origins: list[Address] | None = None
    bursts: Bursts | None = None

    @property
    def heads(self) -> list[Message]:
        """Messages from which most columns are encoded: `sources`, or `messages` if there are no `sources`.

        So they are as received, but if there are `origins` they have the delivered address and hop count.
        """
        return self.sources or self.messages or []


class Guarantees(NamedTuple):
    """Columns assurance (QoS 0, 1, 2), durable and retain of messages, one byte for each value.

    `lengths` has the number of rows for which each value stands; None means one row each.
    """

    columns: tuple[bytes, bytes, bytes]
    lengths: Sequence[int] | None


class Heads(NamedTuple):
    """Columns of assurance, durable, retain, hop count and expiry of messages, with equal run lengths.

    The run lengths are those of `guarantees`. `expires` is None if no message expires.
    """

    guarantees: Guarantees
    hops: bytes
    expires: list[float] | None


class SettledRows(NamedTuple):
    """Columns of one `SettledMessages`, for `rows` rows.

    `protocol` is that of the source addresses. `heads`, `sets` (property sets) and `sources` are as received.
    `targets` are the target addresses: None if they equal the sources, NOWHERE if there is no target. `went`
    has assurance, durable and retain as delivered, or is None if they are as received. `sizes` are the sizes
    of the bodies in bytes; `whole` says which bodies are recorded, or is None if all or none are. Property
    sets and addresses are empty here if the Gathering has encoded them already.
    """

    labels: RowLabels
    outcome: Outcome
    received_us: int
    settled_us: int
    rows: int
    slots: Sequence[int] | None
    protocol: str
    heads: Heads
    sets: Runs[PropertySet]
    senders: Runs[Sender]
    sources: Runs[Address]
    targets: Runs[Address] | None
    went: Guarantees | None
    sizes: Runs[int]
    whole: list[bool] | None


class Memories:
    """Pool of blocks of memory for the bytes of journal blocks.

    New pages from the system cost as much as encoding a journal block, so memory is reused. One thread may
    take memory that another returns.
    """

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Return a block of memory of MEMORY_BYTES bytes, from the pool if it has one."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap(-1, MEMORY_BYTES, MAP_PRIVATE | MAP_ANONYMOUS))

    def give_back(self, memory: memoryview) -> None:
        """Return to the pool a block of memory that is no longer in use."""
        if len(self._free) < MEMORIES_MAX:
            self._free.append(memory)


class ByteColumn:
    """Buffer of consecutive bytes in a block of memory, and in bytes objects when that is full."""

    __slots__ = ("_more", "memory", "used_bytes")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.used_bytes = 0
        self._more: list[bytes] = []

    def put(self, data: bytes) -> None:
        """Append `data` to the buffer."""
        begin = self.used_bytes
        self.used_bytes = end = begin + len(data)
        if end <= MEMORY_BYTES:
            self.memory[begin:end] = data
        else:
            self._more.append(data)

    @property
    def lent(self) -> bool:
        """True if `data` returns a view of the buffer's memory; otherwise it returns a copy.

        Small amounts are copied, so that small journal blocks that wait while the disk is full do not keep
        that memory in use.
        """
        return self.used_bytes > COPIED_BYTES and not self._more

    def data(self) -> Bytes:
        """Return all bytes of the buffer, as a view of its memory if `lent` is True."""
        if self.lent:
            return self.memory[: self.used_bytes]
        byte_count = self.used_bytes - sum(map(len, self._more))
        return b"".join([self.memory[:byte_count], *self._more])


class UnsharedColumns(NamedTuple):
    """Flags of the columns whose values are encoded without looking them up in a dictionary.

    Most of their values are new, so a look-up would not help. Such a column has an encoded value of its own
    for each row or run of rows.
    """

    sets: bool = False
    sources: bool = False
    targets: bool = False


TOGETHER: Final = UnsharedColumns()


class OwnEntries:
    """Encoded values (addresses or property sets) of a column that has no shared dictionary.

    There is one for each row or run of rows. The bytes are copied at once, while they are in the processor's
    caches, so that the messages can be freed.
    """

    __slots__ = ("_forms", "_lengths", "column", "sizes")

    def __init__(self, memory: memoryview) -> None:
        self.column = ByteColumn(memory)
        self.sizes: list[int] = []
        self._forms: list[bytes] = []
        self._lengths: list[tuple[Sequence[int] | None, int]] = []

    def add(self, entered: Entered, lengths: Sequence[int] | None) -> None:
        """Add encoded values with their encodings, `entered`.

        `lengths` has the number of rows for which each value stands; None means one row each.
        """
        forms, data = entered
        self._forms.append(forms)
        self._lengths.append((lengths, len(forms)))
        self.sizes += map(len, data)
        self.column.put(b"".join(data))

    @property
    def forms(self) -> bytes:
        """Encodings of the values, as one byte each: the protocol's number (format.py), or 0 for texts."""
        return b"".join(self._forms)

    @property
    def lengths(self) -> Sequence[int] | None:
        """Number of rows for which each encoded value stands; None if each stands for one row."""
        return lengths_of(self._lengths)


class Gathering:
    """Rows of a future block of the journal, collected until the block is encoded.

    Bodies of up to `body_bytes_max` bytes are recorded; 0 records none. `apart` names the columns that have
    no shared dictionary: their encoded values are in `sets`, `sources` and `targets`, which are otherwise
    None. `memories` is the pool from which memory is taken.
    """

    __slots__ = ("bodies", "body_bytes_max", "byte_count", "parts", "rows", "sets", "sources", "targets")

    def __init__(self, memories: Memories, *, body_bytes_max: int, apart: UnsharedColumns = TOGETHER) -> None:
        self.bodies = ByteColumn(memories.take())
        """Bodies that are recorded."""
        self.sets = OwnEntries(memories.take()) if apart.sets else None
        self.sources = OwnEntries(memories.take()) if apart.sources else None
        self.targets = OwnEntries(memories.take()) if apart.targets else None
        self.parts: list[SettledRows] = []
        self.rows = 0
        self.byte_count = 0
        """Size of all bodies in bytes, recorded or not."""
        self.body_bytes_max = body_bytes_max

    @property
    def _byte_columns(self) -> list[ByteColumn]:
        own = (self.sets, self.sources, self.targets)
        return [self.bodies, *[entries.column for entries in own if entries is not None]]

    def memories(self, *, lent: bool) -> list[memoryview]:
        """Return the blocks of memory to which the encoded block refers (`lent` True), or the others (False).

        The former may be returned to the pool when the encoded block is written, the latter at once: their
        bytes were copied.
        """
        return [held.memory for held in self._byte_columns if held.lent is lent]

    @property
    def nearly_full(self) -> bool:
        """True if the memory for encoded property sets or addresses is nearly full."""
        return any(held.used_bytes > NEARLY_FULL for held in self._byte_columns[1:])

    def add(self, settled: SettledMessages) -> None:
        """Add rows for one or more settled messages.

        If the messages have `bursts`, only the first message of each burst is examined.
        """
        labels, messages, sources, outcome, received_us, settled_us, slots, origins, bursts = settled
        went: Guarantees | None = None
        targets: Runs[Address] | None
        if bursts is not None:
            heads, bodies = Runs(bursts.firsts, bursts.lengths), bursts.bodies
            came = addresses_of(heads)
            targets = Runs(bursts.targets, bursts.lengths) if labels.route else None  # they stayed
            origins = None
        else:
            looked_at = settled.heads
            heads, bodies = alike_in(looked_at), [message.body for message in looked_at]
            came, targets = addresses_of(heads), None
            if messages is None:
                targets = NOWHERE
            elif origins is not None:
                came, targets = runs_of(origins), came
            elif sources is not None:
                firsts = alike_in(messages)
                targets = addresses_of(firsts)
                if labels.reshapes:
                    went = _guarantees(firsts)
        protocol = came.objects[0].protocol
        came, targets = self._addresses(came, targets, len(bodies))
        sizes, whole = self._copy_bodies(bodies)
        self.parts.append(
            SettledRows(
                *(labels, outcome, received_us, settled_us, len(bodies), slots, protocol),
                *(_heads(heads, hop=origins is not None), self._sets(heads), _senders_of(heads)),
                *(came, targets, went),
                *(sizes, whole),
            )
        )
        self.rows += len(bodies)

    def _addresses(
        self, came: Runs[Address], targets: Runs[Address] | None, rows: int
    ) -> tuple[Runs[Address], Runs[Address] | None]:
        """Encode the addresses of columns without a shared dictionary; return source and target addresses.

        In the result, addresses that are encoded now are empty. `came` are the source addresses; `targets` is
        None if the target addresses are the same, in the result as well. `rows` is the number of rows.
        """
        if self.sources is not None:
            self.sources.add(address_entries(came.objects), came.lengths)
        if self.targets is not None:
            addresses = came if targets is None else targets
            if addresses.objects:
                self.targets.add(address_entries(addresses.objects), addresses.lengths)
            else:
                self.targets.add(NOWHERE_ENTRY, [rows])
            targets = None if targets is None else NOWHERE
        if self.sources is not None and (targets is not None or self.targets is not None):
            came = NOWHERE
        return came, targets

    def _sets(self, runs: Runs[Message]) -> Runs[PropertySet]:
        """Return the property sets of messages as runs.

        If the column has no shared dictionary, the property sets are encoded now, and the result is empty.
        """
        messages, lengths = runs
        first = messages[0].property_set
        sets = [first]
        for one in messages:
            if one.property_set is not first:
                sets = [message.property_set for message in messages]
                break
        else:
            lengths = _whole_length(runs)
        if self.sets is not None:
            self.sets.add(set_entries(sets), lengths)
            return NO_SETS
        return Runs(sets, lengths)

    def _copy_bodies(self, bodies: list[bytes]) -> tuple[Runs[int], list[bool] | None]:
        """Copy the bodies that are to be recorded; return the sizes of all, and which ones are recorded.

        The second value is None if all or none are recorded. Bodies that are in files are never recorded.
        """
        most = self.body_bytes_max
        sizes = list(map(len, bodies))
        count, largest = len(sizes), sizes[0]
        if sizes.count(largest) == count:
            total, runs = largest * count, Runs(sizes[:1], [count])
        else:
            total, largest, runs = sum(sizes), max(sizes), Runs(sizes, None)
        self.byte_count += total
        if not most:
            return runs, None
        if largest <= most:
            data = b"".join(bodies)
            if (
                len(data) == total
            ):  # otherwise one of them is a file (model/spooled_bodies.py), which is not read
                self.bodies.put(data)
                return runs, None
        whole = [len(body) <= most and not isinstance(body, Spooled) for body in bodies]
        self.bodies.put(b"".join([body for body, taken in zip(bodies, whole, strict=True) if taken]))
        return runs, whole


def _whole_length(runs: Runs[Message]) -> list[int]:
    return [len(runs.objects) if runs.lengths is None else sum(runs.lengths)]


def _heads(runs: Runs[Message], *, hop: bool) -> Heads:
    """Return the columns of assurance, durable, retain, hop count and expiry of messages, as received.

    `hop` is True if the messages are as delivered: then their hop count is reduced by one.
    """
    if len(runs.objects) > 1 and _alike(runs.objects):
        runs = Runs(runs.objects[:1], _whole_length(runs))
    messages = runs.objects
    hops = _small([one.hops for one in messages])
    expires = [one.expires for one in messages]
    never = expires.count(NEVER) == len(expires)
    return Heads(_guarantees(runs), hops.translate(_ONE_LESS) if hop else hops, None if never else expires)


def _senders_of(runs: Runs[Message]) -> Runs[Sender]:
    """Return the senders of messages as runs, or one sender for each message if the runs are short.

    The connections of one pass of the event loop are read one after the other, so their messages form runs.
    """
    messages, lengths = runs
    if lengths is not None:
        return Runs([message.sender for message in messages], lengths)
    last = messages[0].sender
    senders, counts = [last], []
    count = 0
    for one in messages:
        sender = one.sender
        if sender is not last:
            senders.append(sender)
            counts.append(count)
            last, count = sender, 0
        count += 1
    counts.append(count)
    if len(senders) * RUN_ALIKE > len(messages):
        return Runs([message.sender for message in messages], None)
    return Runs(senders, counts)


def _guarantees(runs: Runs[Message]) -> Guarantees:
    messages = runs.objects
    return Guarantees(
        (
            bytes([message.assurance for message in messages]),
            bytes([message.durable for message in messages]),
            bytes([message.retain for message in messages]),
        ),
        runs.lengths,
    )


def _alike(messages: list[Message]) -> bool:
    """Return True if all messages have the same assurance (QoS), durable, retain, hop count and expiry.

    Most messages of one device are equal in these. Comparing all of them costs a fraction of encoding the
    columns.
    """
    first = messages[0]
    assurance, durable, retain = first.assurance, first.durable, first.retain
    hops, expires = first.hops, first.expires
    for one in messages:
        if (
            one.assurance != assurance
            or one.durable != durable
            or one.retain != retain
            or one.hops != hops
            or one.expires != expires
        ):
            return False
    return True


_ONE_LESS: Final = bytes((0, *range(255)))


def _small(numbers: list[int]) -> bytes:
    """Encode each of `numbers`, hop counts that peers may have sent, as one byte; above 255 as 255."""
    try:
        return bytes(numbers)
    except ValueError:
        return bytes([min(number, 255) for number in numbers])


def addresses_of(runs: Runs[Message]) -> Runs[Address]:
    """Return the addresses of messages, with the same run lengths."""
    return Runs([message.address for message in runs.objects], runs.lengths)
