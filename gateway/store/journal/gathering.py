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
from gateway.store.journal.runs import Runs, alike_in, runs_of
from gateway.store.journal.wires import Entered, set_entries

MEMORY_OCTETS: Final = 1_048_576
MEMORIES_MAX: Final = 16  # that wait to be used again; more may be in use
NOWHERE: Final[Runs[Address]] = Runs((), None)


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
    messages: Sequence[Message] | None
    sources: Sequence[Message] | None
    outcome: Outcome
    received_us: int
    settled_us: int
    slots: Sequence[int] | None = None
    origins: Sequence[Address] | None = None
    bursts: Bursts | None = None

    @property
    def heads(self) -> Sequence[Message]:
        """They as they came in, but for their addresses and hops if `origins` say where from."""
        return self.sources or self.messages or ()


class Guarantees(NamedTuple):
    """Assurance, durable and retain of messages, an octet each, and for how many rows each of them stands;
    None: for one."""

    columns: tuple[bytes, bytes, bytes]
    lengths: Sequence[int] | None


class Heads(NamedTuple):
    """What messages say besides address and body; `lengths` as above. `expires` None: none of them does.

    `sets` are their property sets, or `entries` what is written of these.
    """

    guarantees: Guarantees
    hops: bytes
    expires: list[float] | None
    sets: list[PropertySet]
    entries: Entered | None

    @property
    def lengths(self) -> Sequence[int] | None:
        """For how many rows each stands."""
        return self.guarantees.lengths


class SettledRows(NamedTuple):
    """What is left of `Settled`, for `rows` rows.

    `heads` are as they came in. `sources` is where they came from. `targets` is where they went, None:
    nowhere else, NOWHERE: nowhere at all; `went` is as they went out, None: as they came in. `sizes` are of
    the bodies; `whole` says which of these are recorded, None: all of them, or none at all.
    """

    labels: RowLabels
    outcome: Outcome
    received_us: int
    settled_us: int
    rows: int
    slots: Sequence[int] | None
    heads: Heads
    senders: Runs[Sender]
    sources: Runs[Address]
    targets: Runs[Address] | None
    went: Guarantees | None
    sizes: Runs[int]
    whole: list[bool] | None


class Memories:
    """Memory for the bodies of blocks, used again and again: pages that are new come from the system, which
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


class Gathering:
    """The rows of a block to be. Bodies of up to `body_bytes_max` octets are recorded; 0: none. `apart`: what
    is said of properties most likely differs from message to message, so it is written as often."""

    __slots__ = ("_more", "_taken", "apart", "body_bytes_max", "memory", "octets", "parts", "rows")

    def __init__(self, memory: memoryview, *, body_bytes_max: int, apart: bool = False) -> None:
        self.memory = memory
        self.apart = apart
        self.parts: list[SettledRows] = []
        self.rows = 0
        self.octets = 0
        """Of all bodies: they are held when their messages are."""
        self.body_bytes_max = body_bytes_max
        self._taken = 0  # octets of the bodies that are recorded
        self._more: list[bytes] = []  # behind what fits into the memory

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
                    went = _guarantees(gone.objects, gone.lengths)
        sizes, whole = self._take(bodies)
        self.parts.append(
            SettledRows(
                *(labels, outcome, received_us, settled_us, len(bodies), slots),
                *(self._heads(heads, hop=origins is not None), _senders_of(heads), came, targets, went),
                *(sizes, whole),
            )
        )
        self.rows += len(bodies)

    def _heads(self, runs: Runs[Message], *, hop: bool) -> Heads:
        """`hop`: they have come one hop further."""
        messages, lengths = runs
        if len(messages) > 1 and _alike(messages):
            messages, lengths = messages[:1], [len(messages) if lengths is None else sum(lengths)]
        hops = _small([one.hops for one in messages])
        expires = [one.expires for one in messages]
        never = expires.count(NEVER) == len(expires)
        sets = [one.property_set for one in messages]
        entries = None
        if self.apart:
            entries, sets = set_entries(sets), []
        return Heads(
            *(
                _guarantees(messages, lengths),
                hops.translate(_ONE_LESS) if hop else hops,
                None if never else expires,
            ),
            *(sets, entries),
        )

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
                self._put(octets)
                return runs, None
        whole = [len(body) <= most and not isinstance(body, Spooled) for body in bodies]
        self._put(b"".join([body for body, taken in zip(bodies, whole, strict=True) if taken]))
        return runs, whole

    def _put(self, octets: bytes) -> None:
        begin = self._taken
        self._taken = end = begin + len(octets)
        if end <= MEMORY_OCTETS:
            self.memory[begin:end] = octets
        else:
            self._more.append(octets)

    def bodies(self) -> Octets:
        """The octets of all bodies that are recorded, one behind the other."""
        if not self._more:
            return self.memory[: self._taken]
        held = self._taken - sum(map(len, self._more))
        return b"".join([self.memory[:held], *self._more])


def _senders_of(runs: Runs[Message]) -> Runs[Sender]:
    senders = [message.sender for message in runs.objects]
    return runs_of(senders) if runs.lengths is None else Runs(senders, runs.lengths)


def _guarantees(messages: Sequence[Message], lengths: Sequence[int] | None) -> Guarantees:
    return Guarantees(
        (
            bytes([message.assurance for message in messages]),
            bytes([message.durable for message in messages]),
            bytes([message.retain for message in messages]),
        ),
        lengths,
    )


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


def _small(numbers: list[int]) -> bytes:
    """An octet each; a peer may claim more hops than fit."""
    try:
        return bytes(numbers)
    except ValueError:
        return bytes([min(number, 255) for number in numbers])


def addresses_of(runs: Runs[Message]) -> Runs[Address]:
    """Their addresses."""
    return Runs([message.address for message in runs.objects], runs.lengths)
