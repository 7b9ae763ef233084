"""Operations on the shared state, their results, and the store that runs them.

The event loop never waits for a database. `StateStore.submit` queues an operation; a thread commits all
collected operations as one group and has the loop call `done` with a reply. Operations with the same
`subject` (one session, one topic, one lease …) are committed in the order in which they were submitted.

A session belongs to the *epoch* of its latest OpenSession. Operations of an owner carry its epoch and are
fenced once another epoch is current: nothing is changed, and the owner must not send anything to its client
any more. Only the clock of the database counts: no operation carries a point in time, only durations.

An operation with the reply UNAVAILABLE has been committed or not. Repeating any operation is harmless,
because each sets a state and none adds to one. Only a repeated OpenSession gets a new epoch.

Wills, options of subscriptions, messages and reasons of dead letters are bytes that the caller has encoded.
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
    """Identity of a session: a client identifier and the namespace `domain` that it belongs to."""

    domain: str
    client: str


class Owner(NamedTuple):
    """Incarnation of a replica that owns a session, and the epoch in which it opened the session."""

    replica: str
    epoch: int


class WillRecord(NamedTuple):
    """Encoded will, which is published when the client has been lost for `delay_secs`."""

    message: bytes
    delay_secs: float


class Weight(NamedTuple):
    """Size of a session: number of its subscriptions, and bytes of these and of the client identifier."""

    subscriptions: int = 0
    byte_count: int = 0


class Packet(NamedTuple):
    """QoS 2 state of one packet identifier, with the number of its message (None if it has none).

    `released` is True once PUBREC was received: PUBREL must be sent next.
    """

    number: Number | None
    released: bool = False


@dataclass(slots=True)
class Contents:
    """Subscriptions and QoS 2 state of a session.

    `subscriptions` has their encoded options by filter. `packets` are by direction and packet identifier.
    `received` has, by replica process and chunk of 64 message numbers, a bit for each number that the client
    has received.
    """

    subscriptions: dict[str, bytes] = field(default_factory=dict)
    packets: dict[tuple[int, int], Packet] = field(default_factory=dict)
    received: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def copy(self) -> Contents:
        """Return a copy that later changes of this object do not affect."""
        return Contents(dict(self.subscriptions), dict(self.packets), dict(self.received))

    def clear(self) -> None:
        """Remove all subscriptions and the QoS 2 state."""
        self.subscriptions.clear()
        self.packets.clear()
        self.received.clear()


class OperationOutcome(Enum):
    """Outcome of an operation or query."""

    DONE = "done"
    FENCED = "fenced"  # the caller is no longer the owner; nothing was changed
    UNAVAILABLE = "unavailable"  # the database has not replied; it may have been committed
    REFUSED = "refused"  # the database rejects the values; nothing was changed


@dataclass(frozen=True, slots=True)
class Reply(Generic[T_co]):
    """Reply to an operation or query; `value` is None unless `verdict` is DONE."""

    verdict: OperationOutcome
    value: T_co | None = None


FENCED: Final[Reply[None]] = Reply(OperationOutcome.FENCED)
UNAVAILABLE: Final[Reply[None]] = Reply(OperationOutcome.UNAVAILABLE)
REFUSED: Final[Reply[None]] = Reply(OperationOutcome.REFUSED)
DONE: Final[Reply[None]] = Reply(OperationOutcome.DONE)


class Operation(Generic[T]):
    """Change of the shared state. The value of its reply has the type T."""

    __slots__ = ()

    @property
    def subject(self) -> object:
        """Object that the operation changes. Operations with equal subjects are committed in order."""
        raise NotImplementedError


class Query(Generic[T]):
    """Read access to the shared state. The value of its reply has the type T.

    A query with a subject sees the earlier operations on that subject. `is_report` is True if the query may
    read a whole table: then it runs apart from the queries that clients wait for.
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
    """Session that a client had when it was opened again: its user, and its size.

    The session may have been resumed or replaced. `is_here` is True if its client was connected to the
    replica that has opened it now.
    """

    user: str
    weight: Weight
    is_here: bool


class OpenedSession(NamedTuple):
    """Reply to OpenSession: the session as its new owner finds it in the database.

    `present`: an earlier session is resumed, with `contents`. `before`: the owner that may still consume the
    queue, or None. `ended_queue`: the queue of an earlier session that has ended; the caller deletes it, then
    submits ForgetQueue. `given_back`: the fingerprints that an earlier owner stored with ReleaseSession.
    `refused`: the session belongs to another user (`user`); then nothing was changed. `wills`: epochs and
    messages of earlier connections' wills that the caller has claimed: it publishes them and submits
    SettleWill. `earlier`: the session that the client had, if any.
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
    """Reply to LeaveSession: the state of a session after its client has disconnected.

    `ended`: the session was deleted; the caller deletes its queue, then submits ForgetQueue. `publish_will`:
    the caller has claimed the will; it publishes the will and submits SettleWill.
    """

    ended: bool
    publish_will: bool


@dataclass(frozen=True, slots=True)
class OfSession:
    """Base of the operations on one session."""

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
    """Store the changes of a session since its last ChangeSession; None as a value removes an entry.

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

    `given_back` has the fingerprints of the messages that it has requeued, for the next owner. The operation
    is never fenced.
    """

    epoch: int
    given_back: bytes = b""


@dataclass(frozen=True, slots=True)
class SettleWill(OfSession, Operation[None]):
    """Delete the will of `epoch`, because it was published or is void."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EndSession(OfSession, Operation[None]):
    """Delete an expired session whose queue was deleted. Fenced if the session was opened again."""

    epoch: int


class ClaimedWork(NamedTuple):
    """Due will, expired session or left-over queue that the reaper has claimed for CLAIM_SECS.

    With `will`: the caller publishes it, then submits SettleWill. Without: it deletes `queue`, then submits
    EndSession. Without `key`, too, the session is deleted already: the caller deletes `queue`, then submits
    ForgetQueue.
    """

    key: SessionKey | None
    epoch: int
    queue: str
    will: bytes | None


@dataclass(frozen=True, slots=True)
class ForgetQueue(Operation[None]):
    """Record that the queue of an ended session was deleted. Until then Reap returns it repeatedly."""

    queue: str

    @property
    def subject(self) -> object:
        """Name of the queue."""
        return "queue", self.queue


@dataclass(frozen=True, slots=True)
class Reap(Operation[list[ClaimedWork]]):
    """Claim due wills, expired sessions and queues of ended sessions, at most `limit` of each.

    First, replicas that have sent no heartbeat for `silent_secs` (None: no replica) are declared dead, but
    never the calling `replica`; their sessions lose their owners. No replica is declared dead if the
    database's time differs by more than half of `silent_secs` from `heard_at`, the database's time at the
    caller's last heartbeat (None: not compared). Several replicas share the work. The operation also deletes
    expired identifiers and retained messages and, after a day, dead replicas and unused lanes.
    """

    silent_secs: float | None
    limit: int = 1_000
    replica: str = ""
    heard_at: float | None = None

    @property
    def subject(self) -> object:
        """Subject of all Reap operations: a replica runs one at a time."""
        return "reaper"


class SessionView(NamedTuple):
    """Stored session without its contents. `expires_in` (seconds) is None while its client is connected.

    `holder` is the owner that may still consume the queue, or None. `given_back` has the fingerprints of
    ReleaseSession.
    """

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
    """Query of one session; its reply has None if the session does not exist."""

    key: SessionKey

    @property
    def subject(self) -> object:
        """Key of the session."""
        return self.key


@dataclass(frozen=True, slots=True)
class FindSuperseded(Query[list[tuple[SessionKey, int]]]):
    """Query of the sessions whose queues `replica` may still consume although their epochs have changed.

    The reply has keys and the epochs in which `replica` has opened them. The query is repeated because the
    notices that report the same may be lost.
    """

    replica: str
    limit: int = 1_000

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


class Owned(NamedTuple):
    """Session whose client is connected, by the database, to the replica that queries it."""

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
    """Session whose client is not connected. `subscriptions` has the encoded options by filter."""

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
    """Sum over sessions of one user: number of sessions, number of their subscriptions, and bytes."""

    sessions: int = 0
    subscriptions: int = 0
    byte_count: int = 0


class SessionCounts(NamedTuple):
    """Number of all sessions, and sums by user of those that are not connected to the querying replica."""

    total: int
    elsewhere: dict[str, UserSessions]


@dataclass(frozen=True, slots=True)
class WeighSessions(Query[SessionCounts]):
    """Query of the number of all sessions, and of each user's sessions whose clients are elsewhere.

    Elsewhere means: not connected to `replica`.
    """

    replica: str


@dataclass(frozen=True, slots=True)
class SharedFilters(Query[list[str]]):
    """Query of a page of the filters of shared subscriptions in all sessions, sorted, each once.

    The page begins after the filter `after`.
    """

    after: str = ""
    limit: int = SHARED_FILTERS_MAX


# Replicas and leases.


@dataclass(frozen=True, slots=True)
class OfReplica:
    """Base of the operations on one incarnation of a replica."""

    replica: str

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


@dataclass(frozen=True, slots=True)
class JoinReplica(OfReplica, Operation[float]):
    """Add an incarnation of a replica.

    `name` is the configured name, `address` the one to which clients are referred. The reply has the time of
    the database (UTC seconds).
    """

    name: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class Heartbeat(OfReplica, Operation[float]):
    """Record that the incarnation is alive. Fenced if it was declared dead: then a new one must join.

    The reply has the time of the database (UTC seconds).
    """


@dataclass(frozen=True, slots=True)
class QuitReplica(OfReplica, Operation[None]):
    """End the incarnation because its process stops. Its sessions lose their owner."""


class ReplicaView(NamedTuple):
    """Incarnation that is not dead; `silent_secs` is the time since its last heartbeat."""

    replica: str
    name: str
    address: str
    version: str
    silent_secs: float


@dataclass(frozen=True, slots=True)
class ListReplicas(Query[list[ReplicaView]]):
    """Query of the incarnations that are not dead."""

    @property
    def subject(self) -> object:
        """Subject of all such queries. The list is short, so the query needs no reader of its own."""
        return "replicas"


class Lease(NamedTuple):
    """Reply to AcquireLease: the present holder of the lease.

    `epoch` grows with each change of `holder`, and when a lease is acquired again after its end.
    """

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
    """Remaining capacity for retained messages, in number and bytes: of all users, and of one user."""

    messages: int
    byte_count: int
    user_messages: int
    user_bytes: int


class Retention(NamedTuple):
    """Reply to Retain.

    If `stored` is False the topic is unchanged, because there was no capacity, or it did not have the
    expected message. `before` has user and weight of the message that the topic had, None if it had none.
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
    """Query of a page of the retained messages that match an MQTT filter, sorted by topic.

    The page begins after the topic `after`. It ends with the message number `limit`, or with the one that
    reaches `byte_count` bytes in total; a page that reaches neither is the last one.
    """

    is_report: ClassVar[bool] = False  # a client waits for it
    topic_filter: str
    after: str = ""
    limit: int = 1_000
    byte_count: int = 1_048_576

    def is_last(self, found: Sequence[Retained]) -> bool:
        """Return True if no messages follow the page `found`."""
        return len(found) < self.limit and sum(len(one.message) for one in found) < self.byte_count


@dataclass(frozen=True, slots=True)
class WeighRetained(Query[dict[str, tuple[int, int]]]):
    """Query of the number and weight (bytes) of the retained messages of each user."""


# Identifiers of deduplicating routes.


class Claim(Enum):
    """Result of ClaimIds for one identifier: claimed by the caller or another replica, or accepted."""

    OURS = "ours"
    OPEN = "open"  # another replica has claimed it
    ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class OfRoute:
    """Base of the operations on message identifiers of one deduplicating route."""

    route: str
    ids: tuple[bytes, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Name of the route."""
        return "route", self.route


@dataclass(frozen=True, slots=True)
class ClaimIds(OfRoute, Operation[list[Claim]]):
    """Claim identifiers for `replica` before their messages are sent through the route.

    The reply has a Claim for each identifier, in order. A claim ends when the identifier is accepted or
    freed, or when its replica is dead. Fenced if `replica` is dead.
    """


@dataclass(frozen=True, slots=True)
class AcceptIds(OfRoute, Operation[None]):
    """Record for `window_secs` that the target of the route has accepted messages with these identifiers."""

    window_secs: float


@dataclass(frozen=True, slots=True)
class FreeIds(OfRoute, Operation[None]):
    """Release claims of identifiers whose messages were not accepted, so that they can be sent again."""


# Dead letters.


class DeadLetter(NamedTuple):
    """Dead letter as it is stored.

    `reason` and `message` are encoded. `user` sent the message, and `weight` is its size in bytes as limits
    count it. `at` is when the dead letter was added, in UTC seconds of the database.
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

    `is_repeated` is True if an earlier attempt may have been committed. Then a dead letter that was deleted
    within the last DELETED_SECS is not stored again.
    """

    letter: DeadLetter
    is_repeated: bool = False

    @property
    def subject(self) -> object:
        """Subject of all dead letters: they are stored in the order in which they were added."""
        return "letters"


@dataclass(frozen=True, slots=True)
class OfLetters:
    """Base of the operations on dead letters that are named by their ids."""

    ids: tuple[str, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Subject of all operations on dead letters, which are committed in order."""
        return "letters"


@dataclass(frozen=True, slots=True)
class ClaimLetters(OfLetters, Operation[list[str]]):
    """Claim dead letters for redriving by `replica`, or renew its claims, for CLAIM_SECS.

    The reply has the ids that it has claimed; another replica has the others, or they do not exist.
    """


@dataclass(frozen=True, slots=True)
class FreeLetters(OfLetters, Operation[None]):
    """Release claims of `replica` to dead letters."""


@dataclass(frozen=True, slots=True)
class DeleteLetters(OfLetters, Operation[list[str]]):
    """Delete dead letters, even if another replica has claimed them. The reply has the ids that existed.

    The ids are recorded, so that a repeated AddLetter does not store them again, unless the dead letters are
    deleted only to `make_room` for others.
    """

    make_room: bool = False


@dataclass(frozen=True, slots=True)
class PurgeLetters(OfLetters, Operation[list[str]]):
    """Delete dead letters, except those that another replica has claimed. The reply has the ids of these."""


@dataclass(frozen=True, slots=True)
class ListLetters(Query[list[DeadLetter]]):
    """Query of a page of dead letters, sorted by time, of one route and one user (None: of all).

    The page begins after the dead letter whose time and id are `after`; None for the first page.
    """

    route: str | None = None
    user: str | None = None
    newest_first: bool = False
    after: tuple[float, str] | None = None
    limit: int = 1_000


@dataclass(frozen=True, slots=True)
class FindLetters(Query[list[DeadLetter]]):
    """Query of the dead letters that have these ids; the reply is in any order."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WeighLetters(Query[dict[str, tuple[int, int]]]):
    """Query of the number and weight (bytes) of the dead letters of each user."""


# The store.


class NoticeSubject(Enum):
    """Change that a notice reports."""

    TAKEN = "taken"  # a session of this replica has another owner
    RELEASED = "released"  # the queue of a session of this replica is free
    MISSED = "missed"  # notices may have been lost: query everything that they report


class Notice(NamedTuple):
    """Hint of the database that a replica should query something. Notices may be lost.

    `key` is the session that has changed, None for no single one. Correctness never depends on notices,
    because the same changes are queried periodically.
    """

    event: NoticeSubject
    key: SessionKey | None = None


class Health(NamedTuple):
    """Condition of the store.

    `failure` is the reason why the database cannot be used, or "". `pending` is the number of waiting
    operations and queries.
    """

    failure: str
    pending: int


class StateStore(ABC):
    """Store of the shared state, with the same interface for both databases.

    All methods except `stop` are called by the event loop.
    """

    pending_max: ClassVar[int] = 100_000  # operations that may wait for the database

    @abstractmethod
    def start(
        self, call_soon: Callable[[Callable[[], None]], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Start the threads. `call_soon` has the event loop call a function; `on_notice` gets each notice."""

    @abstractmethod
    def stop(self) -> None:
        """Commit the submitted operations, as far as possible within some seconds, and end the threads.

        The method blocks, so it is called in a thread other than that of the event loop.
        """

    @abstractmethod
    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue an operation; `done` is called once with its reply, in the event loop."""

    @abstractmethod
    def query(self, query: Query[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue a query; `done` is called once with its reply, in the event loop."""

    @abstractmethod
    def tick(self) -> None:
        """Run the timer: reply UNAVAILABLE to operations that have waited too long.

        Called several times per second.
        """

    @abstractmethod
    def listen(self, replica: str) -> None:
        """Deliver the notices for this incarnation from now on."""

    @property
    @abstractmethod
    def health(self) -> Health:
        """Reason why the database cannot be used, if any, and number of waiting operations and queries."""
