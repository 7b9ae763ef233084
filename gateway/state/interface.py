"""Operations on state, their results, and the store that takes them.

The event loop never waits for a database. `StateStore.submit` queues an operation; a thread commits all that
have gathered as one group and has the loop call `done` with a reply. Operations with the same `subject` (one
session, one topic, one lease …) are committed in the order in which they were submitted.

A session belongs to the *epoch* of its latest OpenSession. Operations of an owner carry its epoch and are
fenced once another epoch is current: nothing is changed, and the owner must not send anything to its client
any more. Only the clock of the database counts: no operation carries a point in time, only durations.

An operation that was answered with UNAVAILABLE has been committed or not. Repeating any of them is harmless:
each sets a state, and none adds to one. Only a repeated OpenSession gets a new epoch.

Wills, options of subscriptions, messages and reasons of dead letters are opaque bytes of the caller.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

SHARED_FILTERS_MAX: Final = 10_000  # that are listed at once
UNSERVED_SECS: Final = 2.0  # after which a will is published whose client may have been let in
CLAIM_SECS: Final = 20.0  # after which another replica may do what was claimed and not settled
OUTGOING: Final = 0  # packets to the client
INCOMING: Final = 1  # packets from the client

Number = tuple[bytes, int]
"""Identity of a message: the incarnation of the replica that published it, and a count."""


class SessionKey(NamedTuple):
    """Names a session: `domain` is the namespace of client identifiers."""

    domain: str
    client: str


class Owner(NamedTuple):
    """A replica (its incarnation) and the epoch in which it opened the session."""

    replica: str
    epoch: int


class Will(NamedTuple):
    """A message to publish when the client is lost for longer than `delay_secs`."""

    message: bytes
    delay_secs: float


class Packet(NamedTuple):
    """QoS 2 state of one packet identifier. `released`: PUBREC was received, PUBREL is due."""

    number: Number | None
    released: bool = False


@dataclass(slots=True)
class Contents:
    """What a session holds besides its row.

    `packets`: by direction and packet identifier. `received`: by incarnation and chunk of 64 numbers, a bit
    for each number that the client has received.
    """

    subscriptions: dict[str, bytes] = field(default_factory=dict)
    packets: dict[tuple[int, int], Packet] = field(default_factory=dict)
    received: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def copy(self) -> Contents:
        """Return contents that do not change with these."""
        return Contents(dict(self.subscriptions), dict(self.packets), dict(self.received))

    def clear(self) -> None:
        """Forget everything."""
        self.subscriptions.clear()
        self.packets.clear()
        self.received.clear()


class Verdict(Enum):
    """What became of an operation."""

    DONE = "done"
    FENCED = "fenced"  # it is not the caller's any more; nothing was changed
    UNAVAILABLE = "unavailable"  # the database is away; it may have been committed
    REFUSED = "refused"  # the database rejects the values; nothing was changed


@dataclass(frozen=True, slots=True)
class Reply(Generic[T_co]):
    """A verdict; `value` is None unless it is DONE."""

    verdict: Verdict
    value: T_co | None = None


FENCED: Final[Reply[None]] = Reply(Verdict.FENCED)
UNAVAILABLE: Final[Reply[None]] = Reply(Verdict.UNAVAILABLE)
REFUSED: Final[Reply[None]] = Reply(Verdict.REFUSED)
DONE: Final[Reply[None]] = Reply(Verdict.DONE)


class Operation(Generic[T]):
    """A change; its reply carries a T."""

    __slots__ = ()

    @property
    def subject(self) -> object:
        """Return the value that orders operations: equal subjects, one order."""
        raise NotImplementedError


class Query(Generic[T]):
    """Something to read; its reply carries a T. A query sees all that was done before it was submitted.

    `is_report`: it may read a whole table, and does not wait for those that clients wait for, or they for it.
    """

    __slots__ = ()
    is_report: ClassVar[bool] = True

    @property
    def subject(self) -> object:
        """Return the subject of the operations that it follows, and then it is read by an index; None: it
        follows none, and may take long."""
        return None


# Sessions.


class Opened(NamedTuple):
    """A session as its new owner finds it.

    `present`: an earlier session goes on, with `contents`. `before`: who may still consume its queue, unless
    nobody does. `ended_queue`: the queue of an earlier session that ended; the caller deletes it, then
    ForgetQueue.
    `given_back`: what an earlier owner stored with ReleaseSession. `refused`: it belongs to another `user`;
    then nothing was changed. `wills`: epochs and messages of earlier connections' wills that the caller has
    claimed: it publishes them and submits SettleWill.
    """

    epoch: int
    contents: Contents
    present: bool = False
    refused: bool = False
    queue: str = ""
    before: Owner | None = None
    ended_queue: str = ""
    given_back: bytes = b""
    user: str = ""
    wills: tuple[tuple[int, bytes], ...] = ()


class Left(NamedTuple):
    """A session after its client has gone.

    `ended`: its row is gone; the caller deletes its queue, then ForgetQueue. `publish_will`: the caller has
    claimed the will, publishes it and submits SettleWill.
    """

    ended: bool
    publish_will: bool


@dataclass(frozen=True, slots=True)
class OfSession:
    """An operation on one session."""

    key: SessionKey

    @property
    def subject(self) -> object:
        """Return the session."""
        return self.key


@dataclass(frozen=True, slots=True)
class OpenSession(OfSession, Operation[Opened]):
    """A client has connected to `replica`: make that the owner, with a new epoch.

    An earlier session goes on unless `clean`, or its time is over. `queue` is for a new one. `expiry_secs`
    (0: it ends with the connection) and `will` replace those of the earlier session. `only_own`: refuse a
    session of another `user`.
    """

    replica: str
    user: str
    place: str
    clean: bool
    expiry_secs: float
    queue: str = ""
    will: Will | None = None
    only_own: bool = False


@dataclass(frozen=True, slots=True)
class ChangeSession(OfSession, Operation[None]):
    """What has become of a session since its last change; without any: check the epoch. None removes.

    `served`: the client is about to be let in. Before that nobody publishes its will at once: whoever opens
    the session next leaves its replica UNSERVED_SECS to say that the client never was.
    """

    epoch: int
    subscriptions: Mapping[str, bytes | None] = field(default_factory=dict)
    packets: Mapping[tuple[int, int], Packet | None] = field(default_factory=dict)
    received: Mapping[tuple[bytes, int], int | None] = field(default_factory=dict)
    served: bool = False


@dataclass(frozen=True, slots=True)
class LeaveSession(OfSession, Operation[Left]):
    """The client has gone. The session ends after `expiry_secs`; its will is discarded, or due."""

    epoch: int
    expiry_secs: float
    discard_will: bool


@dataclass(frozen=True, slots=True)
class ReleaseSession(OfSession, Operation[None]):
    """The owner of `epoch`, current or not, does not consume the session's queue any more.

    `given_back`: what the next owner should know of messages that were requeued. Never fenced.
    """

    epoch: int
    given_back: bytes = b""


@dataclass(frozen=True, slots=True)
class SettleWill(OfSession, Operation[None]):
    """The will of `epoch` was published, or is void."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EndSession(OfSession, Operation[None]):
    """The queue of an expired session was deleted: delete the session. Fenced if it was opened again."""

    epoch: int


class Due(NamedTuple):
    """Work that the reaper has claimed for CLAIM_SECS.

    With `will`: publish it, then SettleWill. Without: delete `queue`, then EndSession; without a `key`, too:
    the session is gone already, so delete `queue`, then ForgetQueue.
    """

    key: SessionKey | None
    epoch: int
    queue: str
    will: bytes | None


@dataclass(frozen=True, slots=True)
class ForgetQueue(Operation[None]):
    """The queue of a session that has ended was deleted. Until then the reaper returns it again."""

    queue: str

    @property
    def subject(self) -> object:
        """Return the queue."""
        return "queue", self.queue


@dataclass(frozen=True, slots=True)
class Reap(Operation[list[Due]]):
    """Claim wills that are due and sessions that have expired, `limit` of each at most.

    Replicas that were silent for `silent_secs` (None: no replica) are declared dead before, but never
    `replica`, which asks; their sessions lose their owners. Several replicas share the work. Also removes
    what has expired of everything else.
    """

    silent_secs: float | None
    limit: int = 1_000
    replica: str = ""

    @property
    def subject(self) -> object:
        """Return one subject for all: a replica reaps once at a time."""
        return "reaper"


class SessionView(NamedTuple):
    """The row of a session. `expires_in` (seconds): None while its client is connected."""

    owner: Owner
    holder: Owner | None
    connected: bool
    user: str
    place: str
    queue: str
    expires_in: float | None
    given_back: bytes


@dataclass(frozen=True, slots=True)
class FindSession(Query[SessionView | None]):
    """Read the row of a session; None: there is none."""

    key: SessionKey

    @property
    def subject(self) -> object:
        """Return the session."""
        return self.key


@dataclass(frozen=True, slots=True)
class FindTaken(Query[list[tuple[SessionKey, int]]]):
    """Find sessions that `replica` may still consume and that have another epoch now, with the old epoch.

    The query behind the notices: one that was lost costs the time until the next query.
    """

    replica: str
    limit: int = 1_000

    @property
    def subject(self) -> object:
        """Return the incarnation."""
        return self.replica


class Owned(NamedTuple):
    """A session whose client is connected, as the database has it."""

    key: SessionKey
    epoch: int
    expiry_secs: float
    queue: str


@dataclass(frozen=True, slots=True)
class FindOwned(Query[list[Owned]]):
    """List the sessions of clients that are connected to `replica`, in the order of their keys, from behind
    `after`: at most `limit`."""

    replica: str
    after: SessionKey
    limit: int

    @property
    def subject(self) -> object:
        """Return the incarnation."""
        return self.replica


@dataclass(frozen=True, slots=True)
class CountSessions(Query[int]):
    """Count the sessions of all domains."""


@dataclass(frozen=True, slots=True)
class SharedFilters(Query[list[str]]):
    """List the filters of shared subscriptions that sessions have, each once."""

    limit: int = SHARED_FILTERS_MAX


# Replicas and leases.


@dataclass(frozen=True, slots=True)
class OfReplica:
    """An operation on one incarnation of a replica."""

    replica: str

    @property
    def subject(self) -> object:
        """Return the incarnation."""
        return self.replica


@dataclass(frozen=True, slots=True)
class JoinReplica(OfReplica, Operation[None]):
    """An incarnation begins. `name` is the configured one, `address` what clients are referred to."""

    name: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class Heartbeat(OfReplica, Operation[None]):
    """The incarnation lives. Fenced once it was declared dead: then another one must begin."""


@dataclass(frozen=True, slots=True)
class QuitReplica(OfReplica, Operation[None]):
    """The incarnation ends. Sessions that it still owns lose their owner."""


class ReplicaView(NamedTuple):
    """A replica that lives; `silent_secs` is the time since its last heartbeat."""

    replica: str
    name: str
    address: str
    version: str
    silent_secs: float


@dataclass(frozen=True, slots=True)
class ListReplicas(Query[list[ReplicaView]]):
    """List the replicas that are not dead."""

    @property
    def subject(self) -> object:
        """Return one subject for all: a list of few."""
        return "replicas"


class Lease(NamedTuple):
    """A lease after AcquireLease. `epoch` grows with each change of `holder`."""

    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AcquireLease(Operation[Lease]):
    """Take or renew a lease for `secs`, unless another replica holds it."""

    name: str
    replica: str
    secs: float

    @property
    def subject(self) -> object:
        """Return the lease."""
        return "lease", self.name


@dataclass(frozen=True, slots=True)
class ReleaseLease(Operation[None]):
    """Give up a lease. Fenced if another replica holds it."""

    name: str
    replica: str

    @property
    def subject(self) -> object:
        """Return the lease."""
        return "lease", self.name


# Retained messages.


class Room(NamedTuple):
    """By how much number and bytes of retained messages may grow: of all users, and of one."""

    messages: int
    octets: int
    user_messages: int
    user_octets: int


class Retention(NamedTuple):
    """What became of Retain. Not `stored`: there was no room, and the topic is as it was.

    `before`: user and weight of the message that the topic had; None: it had none.
    """

    stored: bool
    before: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Retain(Operation[Retention]):
    """Retain a message for a topic, for `lifetime_secs` if given; None, or no bytes: retain nothing.

    `user` sent the message, `weight` is its size in bytes as limits count it. It is stored if the growth fits
    into `room`; None: it is stored in any case.
    """

    topic: str
    message: bytes | None
    lifetime_secs: float | None = None
    user: str = ""
    weight: int = 0
    room: Room | None = None

    @property
    def subject(self) -> object:
        """Return the topic."""
        return "topic", self.topic


class Retained(NamedTuple):
    """A retained message; `expires_in` (seconds): None if it does not expire. `user` sent it."""

    topic: str
    message: bytes
    expires_in: float | None
    user: str = ""


@dataclass(frozen=True, slots=True)
class MatchRetained(Query[list[Retained]]):
    """Find retained messages by an MQTT filter, in the order of topics, from behind the topic `after`.

    At most `limit`, and no more once they have `octets` bytes: fewer of both means that these are the last.
    """

    is_report: ClassVar[bool] = False  # a client waits for it
    topic_filter: str
    after: str = ""
    limit: int = 1_000
    octets: int = 1_048_576

    def is_last(self, found: Sequence[Retained]) -> bool:
        """Return True if nothing matches behind these, which were found."""
        return len(found) < self.limit and sum(len(one.message) for one in found) < self.octets


@dataclass(frozen=True, slots=True)
class WeighRetained(Query[dict[str, tuple[int, int]]]):
    """Return the number and the weight of the retained messages of each user."""


# Identifiers of deduplicating routes.


class Claim(Enum):
    """What ClaimIds found of an identifier."""

    OURS = "ours"
    OPEN = "open"  # another replica has it on its way
    ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class OfRoute:
    """An operation on identifiers of one route."""

    route: str
    ids: tuple[bytes, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Return the route."""
        return "route", self.route


@dataclass(frozen=True, slots=True)
class ClaimIds(OfRoute, Operation[list[Claim]]):
    """Claim identifiers before their messages cross; one claim for each, in order.

    A claim counts until it is accepted or freed, or its replica is dead.
    """


@dataclass(frozen=True, slots=True)
class AcceptIds(OfRoute, Operation[None]):
    """The target has accepted these: remember them for `window_secs`."""

    window_secs: float


@dataclass(frozen=True, slots=True)
class FreeIds(OfRoute, Operation[None]):
    """These were not accepted: whoever has one next may try."""


# Dead letters.


class DeadLetter(NamedTuple):
    """A dead letter; `at` is when it was added, in UTC seconds of the database.

    `user` sent the message, `weight` is its size in bytes as limits count it.
    """

    id: str
    route: str
    reason: bytes
    message: bytes
    user: str = ""
    weight: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class AddLetter(Operation[None]):
    """Store a dead letter."""

    letter: DeadLetter

    @property
    def subject(self) -> object:
        """Return one subject for all letters: they are stored in the order in which they were added."""
        return "letters"


@dataclass(frozen=True, slots=True)
class OfLetters:
    """An operation on dead letters."""

    ids: tuple[str, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Return the subject of all letters."""
        return "letters"


@dataclass(frozen=True, slots=True)
class ClaimLetters(OfLetters, Operation[list[str]]):
    """Claim, or go on claiming, letters to redrive for CLAIM_SECS. Returns those that are the caller's."""


@dataclass(frozen=True, slots=True)
class FreeLetters(OfLetters, Operation[None]):
    """End claims."""


@dataclass(frozen=True, slots=True)
class DeleteLetters(OfLetters, Operation[list[str]]):
    """Delete letters, whoever has claimed them. Returns those that were there."""


@dataclass(frozen=True, slots=True)
class ListLetters(Query[list[DeadLetter]]):
    """List dead letters of a route and of a user (None: of all), the oldest or the newest first.

    `after` is the time and id of the letter behind which the list begins; None: it begins with the first.
    """

    route: str | None = None
    user: str | None = None
    newest_first: bool = False
    after: tuple[float, str] | None = None
    limit: int = 1_000


@dataclass(frozen=True, slots=True)
class FindLetters(Query[list[DeadLetter]]):
    """Find dead letters by their ids, in any order."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeighLetters(Query[dict[str, tuple[int, int]]]):
    """Return the number and the weight of the dead letters of each user."""


# The store.


class Event(Enum):
    """What a notice is about."""

    TAKEN = "taken"  # a session of this replica has another owner
    RELEASED = "released"  # the queue of a session of this replica is free
    MISSED = "missed"  # notices may have been lost: read everything that they would have told


class Notice(NamedTuple):
    """A hint that something should be read. Correctness never depends on it: notices may be lost."""

    event: Event
    key: SessionKey | None = None


class Health(NamedTuple):
    """`failure`: why the database is away; empty: it is not. `pending`: operations that wait."""

    failure: str
    pending: int


class StateStore(ABC):
    """State behind either database. All methods are for the event loop."""

    pending_max: ClassVar[int] = 100_000  # operations that may wait for the database

    @abstractmethod
    def start(
        self, call_soon: Callable[[Callable[[], None]], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Start the threads. `call_soon` is called by them; it has the event loop run a function."""

    @abstractmethod
    def stop(self) -> None:
        """Commit what was submitted, as far as the database takes it in some seconds, and end the threads.
        In another thread than that of the event loop."""

    @abstractmethod
    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue an operation; `done` is called once, in the event loop."""

    @abstractmethod
    def query(self, query: Query[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue a query; `done` is called once, in the event loop."""

    @abstractmethod
    def tick(self) -> None:
        """Answer what has waited for too long with UNAVAILABLE: called several times a second."""

    @abstractmethod
    def listen(self, replica: str) -> None:
        """Deliver the notices for this incarnation from now on."""

    @property
    @abstractmethod
    def health(self) -> Health:
        """Return how the database does."""
