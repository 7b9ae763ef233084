"""Operations on state, their results, and the store that runs them.

The event loop never waits for a database. `StateStore.submit` queues an operation; a thread commits all
collected operations as one group and has the loop call `done` with a reply. Operations with the same
`subject` (one session, one topic, one lease …) are committed in the order in which they were submitted.

A session belongs to the *epoch* of its latest OpenSession. Operations of an owner carry its epoch and are
fenced once another epoch is current: nothing is changed, and the owner must not send anything to its client
any more. Only the clock of the database counts: no operation carries a point in time, only durations.

An operation with the reply UNAVAILABLE has been committed or not. Repeating any of them is harmless: each
sets a state, and none adds to one. Only a repeated OpenSession gets a new epoch.

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

SHARED_FILTERS_MAX: Final = 10_000  # filters in one page of a list, at most
CLEARED_SECS: Final = 60.0  # how long a cleared topic is fenced against older messages of the same client
CLAIM_SECS: Final = 20.0  # after which another replica may claim unsettled work
DELETED_SECS: Final = 86_400.0  # how long the id of a deleted dead letter is known
OUTGOING: Final = 0  # packets to the client
INCOMING: Final = 1  # packets from the client

Number = tuple[bytes, int]
"""Identity of a message: id of the replica process that published it, and its message counter."""


class SessionKey(NamedTuple):
    """Name of a session: a client identifier in the namespace `domain`."""

    domain: str
    client: str


class Owner(NamedTuple):
    """Replica (its incarnation) that owns a session, and the epoch in which it opened the session."""

    replica: str
    epoch: int


class WillRecord(NamedTuple):
    """Message to publish when the client is lost for longer than `delay_secs`."""

    message: bytes
    delay_secs: float


class Weight(NamedTuple):
    """Number of subscriptions of a session, and their size in bytes with that of the client identifier."""

    subscriptions: int = 0
    byte_count: int = 0


class Packet(NamedTuple):
    """QoS 2 state of one packet identifier. `released`: PUBREC was received, PUBREL is due."""

    number: Number | None
    released: bool = False


@dataclass(slots=True)
class Contents:
    """Contents of a session besides its row.

    `packets` are by direction and packet identifier. `received` has, by replica process and chunk of 64
    numbers, a bit for each number that the client has received.
    """

    subscriptions: dict[str, bytes] = field(default_factory=dict)
    packets: dict[tuple[int, int], Packet] = field(default_factory=dict)
    received: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def copy(self) -> Contents:
        """Return an independent copy."""
        return Contents(dict(self.subscriptions), dict(self.packets), dict(self.received))

    def clear(self) -> None:
        """Remove all contents."""
        self.subscriptions.clear()
        self.packets.clear()
        self.received.clear()


class OperationOutcome(Enum):
    """Outcome of an operation."""

    DONE = "done"
    FENCED = "fenced"  # the caller is no longer the owner; nothing was changed
    UNAVAILABLE = "unavailable"  # the database is away; it may have been committed
    REFUSED = "refused"  # the database rejects the values; nothing was changed


@dataclass(frozen=True, slots=True)
class Reply(Generic[T_co]):
    """Reply to an operation or query; `value` is None unless the verdict is DONE."""

    verdict: OperationOutcome
    value: T_co | None = None


FENCED: Final[Reply[None]] = Reply(OperationOutcome.FENCED)
UNAVAILABLE: Final[Reply[None]] = Reply(OperationOutcome.UNAVAILABLE)
REFUSED: Final[Reply[None]] = Reply(OperationOutcome.REFUSED)
DONE: Final[Reply[None]] = Reply(OperationOutcome.DONE)


class Operation(Generic[T]):
    """Change of the state; its reply carries a T."""

    __slots__ = ()

    @property
    def subject(self) -> object:
        """Value that orders operations: those with equal subjects are committed in order."""
        raise NotImplementedError


class Query(Generic[T]):
    """Read access to the state; its reply carries a T.

    A query with a subject sees the earlier operations on that subject.

    `is_report` is True if the query may read a whole table: then it does not delay queries that clients wait
    for, nor they it.
    """

    __slots__ = ()
    is_report: ClassVar[bool] = True

    @property
    def subject(self) -> object:
        """Subject of the operations after which the query must run, or None.

        A query with a subject is fast, because it uses an index. One without a subject follows no
        operation, and may take long.
        """
        return None


# Sessions.


class EarlierSession(NamedTuple):
    """Session of a client before it was opened again, resumed or not: its user, and its weight.

    `is_here` is True if its client was connected to the replica that has opened it now.
    """

    user: str
    weight: Weight
    is_here: bool


class OpenedSession(NamedTuple):
    """Session as its new owner finds it.

    `present`: an earlier session is resumed, with `contents`. `before`: the replica that may still consume
    the queue, or None. `ended_queue`: the queue of an earlier session that has ended; the caller deletes it,
    then submits ForgetQueue. `given_back`: what an earlier owner stored with ReleaseSession. `refused`: the
    session belongs to another `user`; then nothing was changed. `wills`: epochs and messages of earlier
    connections' wills that the caller has claimed: it publishes them and submits SettleWill. `earlier`: the
    session that the client had, if any.
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
    earlier: EarlierSession | None = None


class LeftSession(NamedTuple):
    """Session after its client has disconnected.

    `ended`: the session was deleted; the caller deletes its queue, then submits ForgetQueue. `publish_will`:
    the caller has claimed the will, publishes it and submits SettleWill.
    """

    ended: bool
    publish_will: bool


@dataclass(frozen=True, slots=True)
class OfSession:
    """Operation on one session."""

    key: SessionKey

    @property
    def subject(self) -> object:
        """Key of the session."""
        return self.key


@dataclass(frozen=True, slots=True)
class OpenSession(OfSession, Operation[OpenedSession]):
    """Make `replica` the owner of a session, with a new epoch, because the client has connected there.

    An earlier session is resumed unless `clean` is True or it has expired. `queue` is for a new one.
    `expiry_secs` (0: the session ends with the connection) and `will` replace those of the earlier session.
    `only_own`: refuse a session of another `user`. `byte_count`: size of the client identifier, as
    weights count it. `opening`: name of this operation, which no other one has, for CancelOpening.
    """

    replica: str
    user: str
    place: str
    clean: bool
    expiry_secs: float
    queue: str = ""
    will: WillRecord | None = None
    only_own: bool = False
    byte_count: int = 0
    opening: str = ""


@dataclass(frozen=True, slots=True)
class CancelOpening(OfSession, Operation[LeftSession]):
    """Leave the session that an OpenSession has opened, because its client was not accepted.

    A session that it has created ends; an earlier one continues. Nothing is changed if the session was opened
    again, or if the OpenSession was not committed. Its will is void in either case.
    """

    opened: OpenSession


@dataclass(frozen=True, slots=True)
class ChangeSession(OfSession, Operation[None]):
    """Store changes of a session since the last one; without any, check the epoch. None removes an entry.

    `served`: the client is about to be accepted. Until that is stored its will is void: the client gets no
    CONNACK if another replica opens the session first. `weight`: that of the session after the change, if it
    has changed.
    """

    epoch: int
    subscriptions: Mapping[str, bytes | None] = field(default_factory=dict)
    packets: Mapping[tuple[int, int], Packet | None] = field(default_factory=dict)
    received: Mapping[tuple[bytes, int], int | None] = field(default_factory=dict)
    served: bool = False
    weight: Weight | None = None


@dataclass(frozen=True, slots=True)
class LeaveSession(OfSession, Operation[LeftSession]):
    """Record that the client has disconnected.

    The session ends after `expiry_secs`; its will is discarded, or due if its client was accepted. If the
    database has recorded that already nothing is changed, and another replica publishes the will.
    """

    epoch: int
    expiry_secs: float
    discard_will: bool


@dataclass(frozen=True, slots=True)
class ReleaseSession(OfSession, Operation[None]):
    """Record that the owner of `epoch`, current or not, does not consume the session's queue any more.

    `given_back`: what the next owner must know of requeued messages. Never fenced.
    """

    epoch: int
    given_back: bytes = b""


@dataclass(frozen=True, slots=True)
class SettleWill(OfSession, Operation[None]):
    """Delete the will of `epoch`, because it was published or is void."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EndSession(OfSession, Operation[None]):
    """Delete an expired session whose queue was deleted. Fenced if it was opened again."""

    epoch: int


class ClaimedWork(NamedTuple):
    """Work that the reaper has claimed for CLAIM_SECS.

    With `will`: publish it, then submit SettleWill. Without: delete `queue`, then submit EndSession. Without
    `key`, too: the session is deleted already, so delete `queue`, then submit ForgetQueue.
    """

    key: SessionKey | None
    epoch: int
    queue: str
    will: bytes | None


@dataclass(frozen=True, slots=True)
class ForgetQueue(Operation[None]):
    """Record that the queue of an ended session was deleted. Until then the reaper returns it again."""

    queue: str

    @property
    def subject(self) -> object:
        """Name of the queue."""
        return "queue", self.queue


@dataclass(frozen=True, slots=True)
class Reap(Operation[list[ClaimedWork]]):
    """Claim due wills and expired sessions, at most `limit` of each.

    First, replicas that were silent for `silent_secs` (None: no replica) are declared dead, but never the
    calling `replica`; their sessions lose their owners. No replica is declared dead if the database's time
    differs by more than half of `silent_secs` from `heard_at`, the time of the caller's last heartbeat (None:
    not compared). Several replicas share the work. Also deletes expired identifiers and retained messages,
    and dead replicas and unused lanes after a day.
    """

    silent_secs: float | None
    limit: int = 1_000
    replica: str = ""
    heard_at: float | None = None

    @property
    def subject(self) -> object:
        """One subject for all: a replica reaps once at a time."""
        return "reaper"


class SessionView(NamedTuple):
    """Row of a session. `expires_in` (seconds) is None while its client is connected."""

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
    """Query of the row of a session; None if there is none."""

    key: SessionKey

    @property
    def subject(self) -> object:
        """Key of the session."""
        return self.key


@dataclass(frozen=True, slots=True)
class FindSuperseded(Query[list[tuple[SessionKey, int]]]):
    """Query of sessions that `replica` may still consume and that have another epoch now, with the old epoch.

    It backs up the notices: a lost notice costs the time until the next query.
    """

    replica: str
    limit: int = 1_000

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


class Owned(NamedTuple):
    """Session of a connected client, as the database has it."""

    key: SessionKey
    epoch: int
    expiry_secs: float
    queue: str


@dataclass(frozen=True, slots=True)
class FindOwned(Query[list[Owned]]):
    """Query of the sessions whose clients are connected to `replica`, in the order of their keys.

    The result has at most `limit` sessions, and begins after the key `after`.
    """

    replica: str
    after: SessionKey
    limit: int

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


class AbsentSession(NamedTuple):
    """Session whose client is not connected, and its subscriptions: their options by filter."""

    key: SessionKey
    epoch: int
    user: str
    queue: str
    subscriptions: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class FindAbsent(Query[list[AbsentSession]]):
    """Query of the sessions whose clients are connected to no replica, in the order of their keys.

    The result has at most `limit` sessions, and begins after the key `after`.
    """

    after: SessionKey
    limit: int


class UserSessions(NamedTuple):
    """Sessions of one user: their number, and the sums of their weights."""

    sessions: int = 0
    subscriptions: int = 0
    byte_count: int = 0


class SessionCounts(NamedTuple):
    """Number of all sessions, and by user those whose clients are not connected to the querying replica."""

    total: int
    elsewhere: dict[str, UserSessions]


@dataclass(frozen=True, slots=True)
class WeighSessions(Query[SessionCounts]):
    """Query of the number of sessions of all domains, and of users' sessions that are elsewhere.

    These are the sessions whose clients are not connected to `replica`.
    """

    replica: str


@dataclass(frozen=True, slots=True)
class SharedFilters(Query[list[str]]):
    """Query of a page of the filters of shared subscriptions that sessions have, each once and in order.

    The page begins after the filter `after`.
    """

    after: str = ""
    limit: int = SHARED_FILTERS_MAX


# Replicas and leases.


@dataclass(frozen=True, slots=True)
class OfReplica:
    """Operation on one incarnation of a replica."""

    replica: str

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


@dataclass(frozen=True, slots=True)
class JoinReplica(OfReplica, Operation[float]):
    """Add an incarnation. `name` is the configured one, `address` the one to which clients are referred.

    The reply has the time of the database (UTC seconds).
    """

    name: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class Heartbeat(OfReplica, Operation[float]):
    """Record that the incarnation is alive. Fenced once it was declared dead: then a new one must begin.

    The reply has the time of the database (UTC seconds).
    """


@dataclass(frozen=True, slots=True)
class QuitReplica(OfReplica, Operation[None]):
    """End the incarnation. Sessions that it still owns lose their owner."""


class ReplicaView(NamedTuple):
    """Replica that is not dead; `silent_secs` is the time since its last heartbeat."""

    replica: str
    name: str
    address: str
    version: str
    silent_secs: float


@dataclass(frozen=True, slots=True)
class ListReplicas(Query[list[ReplicaView]]):
    """Query of the replicas that are not dead."""

    @property
    def subject(self) -> object:
        """One subject for all: the list is short."""
        return "replicas"


class Lease(NamedTuple):
    """Lease after AcquireLease. `epoch` grows with each change of `holder`."""

    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class AcquireLease(Operation[Lease]):
    """Acquire or renew a lease for `secs` seconds, unless another replica holds it."""

    name: str
    replica: str
    secs: float

    @property
    def subject(self) -> object:
        """Name of the lease."""
        return "lease", self.name


@dataclass(frozen=True, slots=True)
class ReleaseLease(Operation[None]):
    """Release a lease. Fenced if this replica does not hold it."""

    name: str
    replica: str

    @property
    def subject(self) -> object:
        """Name of the lease."""
        return "lease", self.name


# Retained messages.


class RetainedCapacity(NamedTuple):
    """Remaining capacity for retained messages in number and bytes: of all users, and of one."""

    messages: int
    byte_count: int
    user_messages: int
    user_bytes: int


class Retention(NamedTuple):
    """Result of Retain. If not `stored`, the topic is unchanged: no capacity, or not the expected message.

    `before` has user and weight of the message that the topic had, or None if it had none.
    """

    stored: bool
    before: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Retain(Operation[Retention]):
    """Retain a message for a topic; a `message` of None or b"" removes the retained one.

    The message expires after `lifetime_secs`, or never if that is None. `user` sent the message, `weight` is
    its size in bytes as limits count it. The message is stored if the growth fits into `room`, or in any case
    if `room` is None. It came in the session of `client` of `domain` with this epoch (0: in no session): the
    operation is fenced if the same client has set or cleared the topic in a later session. A topic that was
    cleared is remembered for CLEARED_SECS for that, whether it had a message or not, unless `remembered` is
    False. With `expected` nothing changes unless the topic retains this message.
    """

    topic: str
    message: bytes | None
    lifetime_secs: float | None = None
    user: str = ""
    weight: int = 0
    room: RetainedCapacity | None = None
    client: str = ""
    epoch: int = 0
    domain: str = ""
    expected: bytes | None = None
    remembered: bool = True

    @property
    def subject(self) -> object:
        """Topic of the message."""
        return "topic", self.topic


class Retained(NamedTuple):
    """Retained message. `expires_in` (seconds) is None if it does not expire. `user` sent it."""

    topic: str
    message: bytes
    expires_in: float | None
    user: str = ""


@dataclass(frozen=True, slots=True)
class MatchRetained(Query[list[Retained]]):
    """Query of retained messages by an MQTT filter, in the order of topics, after the topic `after`.

    The result has at most `limit` messages, and ends with the one that reaches `byte_count` bytes in total.
    Fewer of both means that these are the last.
    """

    is_report: ClassVar[bool] = False  # a client waits for it
    topic_filter: str
    after: str = ""
    limit: int = 1_000
    byte_count: int = 1_048_576

    def is_last(self, found: Sequence[Retained]) -> bool:
        """Return True if nothing matches after the messages `found`."""
        return len(found) < self.limit and sum(len(one.message) for one in found) < self.byte_count


@dataclass(frozen=True, slots=True)
class WeighRetained(Query[dict[str, tuple[int, int]]]):
    """Query of the number and weight (bytes) of the retained messages of each user."""


# Identifiers of deduplicating routes.


class Claim(Enum):
    """Result of ClaimIds for one identifier."""

    OURS = "ours"
    OPEN = "open"  # another replica has claimed it
    ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class OfRoute:
    """Operation on identifiers of one route."""

    route: str
    ids: tuple[bytes, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Name of the route."""
        return "route", self.route


@dataclass(frozen=True, slots=True)
class ClaimIds(OfRoute, Operation[list[Claim]]):
    """Claim identifiers before their messages cross; one claim for each, in order.

    A claim counts until it is accepted or freed, or its replica is dead. Fenced if the replica is dead.
    """


@dataclass(frozen=True, slots=True)
class AcceptIds(OfRoute, Operation[None]):
    """Remember identifiers for `window_secs`, because the target has accepted their messages."""

    window_secs: float


@dataclass(frozen=True, slots=True)
class FreeIds(OfRoute, Operation[None]):
    """Release claims of identifiers that were not accepted, so that the next sender may try."""


# Dead letters.


class DeadLetter(NamedTuple):
    """Dead letter; `at` is when it was added, in UTC seconds of the database.

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
    """Store a dead letter.

    If this `is_repeated`, because the first attempt may have been committed, a letter that has been deleted
    in the last DELETED_SECS is not stored again.
    """

    letter: DeadLetter
    is_repeated: bool = False

    @property
    def subject(self) -> object:
        """One subject for all dead letters: they are stored in the order in which they were added."""
        return "letters"


@dataclass(frozen=True, slots=True)
class OfLetters:
    """Operation on dead letters."""

    ids: tuple[str, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Subject of all dead letters."""
        return "letters"


@dataclass(frozen=True, slots=True)
class ClaimLetters(OfLetters, Operation[list[str]]):
    """Claim dead letters for redriving, or renew claims, for CLAIM_SECS.

    The reply has the ids that are the caller's.
    """


@dataclass(frozen=True, slots=True)
class FreeLetters(OfLetters, Operation[None]):
    """Release claims of dead letters."""


@dataclass(frozen=True, slots=True)
class DeleteLetters(OfLetters, Operation[list[str]]):
    """Delete dead letters, even if another replica has claimed them. The reply has the ids that existed.

    The ids are remembered for repeated AddLetter, unless the letters only `make_room` for others.
    """

    make_room: bool = False


@dataclass(frozen=True, slots=True)
class PurgeLetters(OfLetters, Operation[list[str]]):
    """Delete dead letters, except those that another replica has claimed, which the reply has."""


@dataclass(frozen=True, slots=True)
class ListLetters(Query[list[DeadLetter]]):
    """Query of dead letters of a route and of a user (None: of all), oldest or newest first.

    `after` is the time and id of the dead letter after which the list begins; None for the first.
    """

    route: str | None = None
    user: str | None = None
    newest_first: bool = False
    after: tuple[float, str] | None = None
    limit: int = 1_000


@dataclass(frozen=True, slots=True)
class FindLetters(Query[list[DeadLetter]]):
    """Query of dead letters by their ids, in any order."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeighLetters(Query[dict[str, tuple[int, int]]]):
    """Query of the number and weight (bytes) of the dead letters of each user."""


# The store.


class NoticeSubject(Enum):
    """Subject of a notice."""

    TAKEN = "taken"  # a session of this replica has another owner
    RELEASED = "released"  # the queue of a session of this replica is free
    MISSED = "missed"  # notices may have been lost: query everything that they report


class Notice(NamedTuple):
    """Hint that something should be queried. Correctness never depends on it: notices may be lost."""

    event: NoticeSubject
    key: SessionKey | None = None


class Health(NamedTuple):
    """State of the store.

    `failure` is why the database is away, or "". `pending` is the number of waiting operations.
    """

    failure: str
    pending: int


class StateStore(ABC):
    """Store of the state behind either database. All methods are called by the event loop."""

    pending_max: ClassVar[int] = 100_000  # operations that may wait for the database

    @abstractmethod
    def start(
        self, call_soon: Callable[[Callable[[], None]], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Start the threads. They use `call_soon` to have the event loop call a function."""

    @abstractmethod
    def stop(self) -> None:
        """Commit the submitted operations, as far as possible within some seconds, and end the threads.

        Called in another thread than that of the event loop.
        """

    @abstractmethod
    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue an operation; `done` is called once, in the event loop."""

    @abstractmethod
    def query(self, query: Query[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue a query; `done` is called once, in the event loop."""

    @abstractmethod
    def tick(self) -> None:
        """Reply UNAVAILABLE to operations that have waited too long. Called several times per second."""

    @abstractmethod
    def listen(self, replica: str) -> None:
        """Deliver the notices for this incarnation from now on."""

    @property
    @abstractmethod
    def health(self) -> Health:
        """Failure of the database, if any, and number of waiting operations."""
