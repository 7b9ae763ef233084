"""What the event loop leaves of settled messages until there are enough of them for a block.

What their columns have is taken out of the messages at once, and the octets of bodies are copied; of those
that differ in nothing else only the first is looked at. So a message can go when it has been delivered. Kept
until their block is made, a few thousand messages fill the caches, and each that comes after them has to be
made in cold memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final, NamedTuple

from gateway.model.address import Address
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import PropertySet
from gateway.model.spooled import Spooled
from gateway.store.journal.bursts import Bursts
from gateway.store.journal.format import Octets
from gateway.store.journal.runs import RUN_ALIKE, Runs, alike_in, lengths_of, runs_of
from gateway.store.journal.wires import NOWHERE_ENTRY, Entered, address_entries, set_entries

MEMORY_OCTETS: Final = 1_048_576
NEARLY_FULL: Final = MEMORY_OCTETS - MEMORY_OCTETS // 8  # a memory, so that what comes next most likely fits
COPIED_OCTETS: Final = MEMORY_OCTETS // 16  # of a block that waits; for so few no memory is kept
MEMORIES_MAX: Final = 16  # that wait to be used again; more may be in use
NOWHERE: Final[Runs[Address]] = Runs([], None)
NO_SETS: Final[Runs[PropertySet]] = Runs([], None)


class RowLabels(NamedTuple):
    """What a recipient says about every message that takes it. `route`: "" when they stayed in their own
    world. `endpoint` and `protocol` are the target's. `reshapes`: the route may change assurance, durable or
    retain.
    """

    route: str
    mapping_version: str
    endpoint: str
    protocol: str
    reshapes: bool = True


class Settled(NamedTuple):
    """Messages that were settled together, all of them in one way.

    `messages` are as they were handed to the sink; None: a route refused `sources`. `sources` are as they
    came in; None: they are `messages`. The times are UTC in microseconds. `slots`: places in what was
    received together; None: from 0 on. `origins`: where `messages` came from when nothing else changed but
    the count of hops; then there are no `sources`. `bursts`: the same messages again, in their order, when
    all of them came so.
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
        """They as they came in, but for their addresses and hops if `origins` say where from."""
        return self.sources or self.messages or []


class Guarantees(NamedTuple):
    """Assurance, durable and retain of messages, an octet each, and for how many rows each of them stands;
    None: for one."""

    columns: tuple[bytes, bytes, bytes]
    lengths: Sequence[int] | None


class Heads(NamedTuple):
    """What messages say besides address, properties and body, for as many rows each as `guarantees` stand
    for. `expires` None: none of them does."""

    guarantees: Guarantees
    hops: bytes
    expires: list[float] | None


class SettledRows(NamedTuple):
    """What is left of `Settled`, for `rows` rows.

    `protocol` is that of `sources`, where they came from. `heads` and `sets` are as they came in. `targets`
    is where they went, None: nowhere else, NOWHERE: nowhere at all; `went` is as they went out, None: as they
    came in. `sizes` are of the bodies; `whole` says which of these are recorded, None: all of them, or none
    at all. Of sets and addresses whose entries are written nothing is left.
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
    """Memory for the octets of blocks, used again and again: pages that are new come from the system, which
    costs as much as it does to make the block. One thread takes, another may give back."""

    __slots__ = ("_free",)

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """Memory of MEMORY_OCTETS."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(mmap(-1, MEMORY_OCTETS, MAP_PRIVATE | MAP_ANONYMOUS))

    def give_back(self, memory: memoryview) -> None:
        """Nobody reads it any more."""
        if len(self._free) < MEMORIES_MAX:
            self._free.append(memory)


class Held:
    """Octets, one behind the other, in memory as far as they fit there."""

    __slots__ = ("_more", "memory", "taken")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.taken = 0
        self._more: list[bytes] = []

    def put(self, octets: bytes) -> None:
        """The next ones."""
        begin = self.taken
        self.taken = end = begin + len(octets)
        if end <= MEMORY_OCTETS:
            self.memory[begin:end] = octets
        else:
            self._more.append(octets)

    @property
    def lent(self) -> bool:
        """Whether `octets` are the memory itself. While the disk is full a quiet gateway makes a small block
        a second: if each kept its memories there would be no end to them."""
        return self.taken > COPIED_OCTETS and not self._more

    def octets(self) -> Octets:
        """All of them."""
        if self.lent:
            return self.memory[: self.taken]
        held = self.taken - sum(map(len, self._more))
        return b"".join([self.memory[:held], *self._more])


class Apart(NamedTuple):
    """Of what most likely differs from row to row, so that it is written as often."""

    sets: bool = False
    sources: bool = False
    targets: bool = False


TOGETHER: Final = Apart()


class OwnEntries:
    """The entries of a column whose rows, or runs of these, have one each. They are copied at once, while the
    processor has them in its caches, and what they come from can go."""

    __slots__ = ("_forms", "_lengths", "held", "sizes")

    def __init__(self, memory: memoryview) -> None:
        self.held = Held(memory)
        self.sizes: list[int] = []
        self._forms: list[bytes] = []
        self._lengths: list[tuple[Sequence[int] | None, int]] = []

    def add(self, entered: Entered, lengths: Sequence[int] | None) -> None:
        """Entries, and for how many rows each stands."""
        forms, octets = entered
        self._forms.append(forms)
        self._lengths.append((lengths, len(forms)))
        self.sizes += map(len, octets)
        self.held.put(b"".join(octets))

    @property
    def forms(self) -> bytes:
        """An octet each."""
        return b"".join(self._forms)

    @property
    def lengths(self) -> Sequence[int] | None:
        """For how many rows each stands."""
        return lengths_of(self._lengths)


class Gathering:
    """The rows of a block to be. Bodies of up to `body_bytes_max` octets are recorded; 0: none. `sets`,
    `sources` and `targets` are what is written of those that are `apart`."""

    __slots__ = ("body_bytes_max", "held", "octets", "parts", "rows", "sets", "sources", "targets")

    def __init__(self, memories: Memories, *, body_bytes_max: int, apart: Apart = TOGETHER) -> None:
        self.held = Held(memories.take())
        """The bodies that are recorded."""
        self.sets = OwnEntries(memories.take()) if apart.sets else None
        self.sources = OwnEntries(memories.take()) if apart.sources else None
        self.targets = OwnEntries(memories.take()) if apart.targets else None
        self.parts: list[SettledRows] = []
        self.rows = 0
        self.octets = 0
        """Of all bodies: they are held when their messages are."""
        self.body_bytes_max = body_bytes_max

    @property
    def _held(self) -> list[Held]:
        own = (self.sets, self.sources, self.targets)
        return [self.held, *[entries.held for entries in own if entries is not None]]

    def memories(self, *, lent: bool) -> list[memoryview]:
        """Those that are to be given back when the block is written, or those that may be at once."""
        return [held.memory for held in self._held if held.lent is lent]

    @property
    def nearly_full(self) -> bool:
        """Whether there is soon no room for what is written of properties, or of addresses."""
        return any(held.taken > NEARLY_FULL for held in self._held[1:])

    def add(self, settled: Settled) -> None:
        """Messages, one at least. Those that came in bursts are not looked at again."""
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
                gone = alike_in(messages)
                targets = addresses_of(gone)
                if labels.reshapes:
                    went = _guarantees(gone)
        protocol = came.objects[0].protocol
        came, targets = self._addresses(came, targets, len(bodies))
        sizes, whole = self._take(bodies)
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
        """What is left of them when their entries are written, if they are apart."""
        if self.sources is not None:
            self.sources.add(address_entries(came.objects), came.lengths)
        if self.targets is not None:
            gone = came if targets is None else targets
            if gone.objects:
                self.targets.add(address_entries(gone.objects), gone.lengths)
            else:
                self.targets.add(NOWHERE_ENTRY, [rows])
            targets = None if targets is None else NOWHERE
        if self.sources is not None and (targets is not None or self.targets is not None):
            came = NOWHERE
        return came, targets

    def _sets(self, runs: Runs[Message]) -> Runs[PropertySet]:
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

    def _take(self, bodies: list[bytes]) -> tuple[Runs[int], list[bool] | None]:
        """Copy what is recorded of them."""
        most = self.body_bytes_max
        sizes = list(map(len, bodies))
        count, largest = len(sizes), sizes[0]
        if sizes.count(largest) == count:
            total, runs = largest * count, Runs(sizes[:1], [count])
        else:
            total, largest, runs = sum(sizes), max(sizes), Runs(sizes, None)
        self.octets += total
        if not most:
            return runs, None
        if largest <= most:
            octets = b"".join(bodies)
            if len(octets) == total:  # or one of them is a file (model/spooled.py), and not looked at
                self.held.put(octets)
                return runs, None
        whole = [len(body) <= most and not isinstance(body, Spooled) for body in bodies]
        self.held.put(b"".join([body for body, taken in zip(bodies, whole, strict=True) if taken]))
        return runs, whole


def _whole_length(runs: Runs[Message]) -> list[int]:
    return [len(runs.objects) if runs.lengths is None else sum(runs.lengths)]


def _heads(runs: Runs[Message], *, hop: bool) -> Heads:
    """`hop`: they have come one hop further."""
    if len(runs.objects) > 1 and _alike(runs.objects):
        runs = Runs(runs.objects[:1], _whole_length(runs))
    messages = runs.objects
    hops = _small([one.hops for one in messages])
    expires = [one.expires for one in messages]
    never = expires.count(NEVER) == len(expires)
    return Heads(_guarantees(runs), hops.translate(_ONE_LESS) if hop else hops, None if never else expires)


def _senders_of(runs: Runs[Message]) -> Runs[Sender]:
    """Of messages that came one by one, their runs, unless these are short: the connections of one wake-up
    are read one after the other."""
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
    """Whether all have the same guarantees, hops and time to live, as most of what devices send has. One look
    at all of it costs a fraction of what columns cost, and the first difference ends it."""
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
    """An octet each; a peer may claim more hops than fit."""
    try:
        return bytes(numbers)
    except ValueError:
        return bytes([min(number, 255) for number in numbers])


def addresses_of(runs: Runs[Message]) -> Runs[Address]:
    """Their addresses."""
    return Runs([message.address for message in runs.objects], runs.lengths)
