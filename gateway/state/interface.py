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
    """Identity of an MQTT session: a client identifier within the namespace `domain`."""

    domain: str
    client: str


class Owner(NamedTuple):
    """Incarnation (run) of a replica that owns a session, and the epoch in which it opened the session."""

    replica: str
    epoch: int


class WillRecord(NamedTuple):
    """Encoded will message, to be published `delay_secs` seconds after the client has been lost.

    `byte_count` is the size of the will for limits.
    """

    message: bytes
    delay_secs: float
    byte_count: int = 0


class Weight(NamedTuple):
    """Size of a session for limits: the number of its subscriptions, and a number of bytes.

    The bytes are those of the subscriptions and of the client identifier.
    """

    subscriptions: int = 0
    byte_count: int = 0


class Packet(NamedTuple):
    """Stored state of one packet identifier of a QoS 2 exchange.

    `number` identifies the message: the replica process that published it, and its number there; None if the
    message has no such identity. `released` is True once PUBREC was received: PUBREL must be sent next.
    """

    number: Number | None
    released: bool = False


@dataclass(slots=True)
class Contents:
    """Subscriptions and QoS 2 state of a session.

    `subscriptions` maps filters to encoded options. `packets` is by direction and packet identifier.
    `received` records the messages that the client has received: by replica process and chunk of 64 message
    numbers, with a bit for each number. `unbindings` has the binding keys from which the session's queue
    still has to be unbound, because their subscriptions have ended.
    """

    subscriptions: dict[str, bytes] = field(default_factory=dict)
    packets: dict[tuple[int, int], Packet] = field(default_factory=dict)
    received: dict[tuple[bytes, int], int] = field(default_factory=dict)
    unbindings: set[str] = field(default_factory=set)

    def copy(self) -> Contents:
        """Return a copy that later changes of this object do not affect."""
        return Contents(
            dict(self.subscriptions), dict(self.packets), dict(self.received), set(self.unbindings)
        )

    def clear(self) -> None:
        """Remove all subscriptions, unbindings and the QoS 2 state."""
        self.subscriptions.clear()
        self.unbindings.clear()
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
    """Reply to an operation or query; `value` is its result, and None unless `verdict` is DONE."""

    verdict: OperationOutcome
    value: T_co | None = None


FENCED: Final[Reply[None]] = Reply(OperationOutcome.FENCED)
UNAVAILABLE: Final[Reply[None]] = Reply(OperationOutcome.UNAVAILABLE)
REFUSED: Final[Reply[None]] = Reply(OperationOutcome.REFUSED)
DONE: Final[Reply[None]] = Reply(OperationOutcome.DONE)


class Operation(Generic[T]):
    """Change of the state that replicas share; the `value` of its reply has the type T."""

    __slots__ = ()

    @property
    def subject(self) -> object:
        """Object that the operation changes, such as a session's key.

        Operations with equal subjects are committed in the order in which they were submitted.
        """
        raise NotImplementedError


class Query(Generic[T]):
    """Read access to the state that replicas share; the `value` of its reply has the type T.

    `is_report` is True if the query may read a whole table: then it runs apart from the queries that clients
    wait for.
    """

    __slots__ = ()
    is_report: ClassVar[bool] = True

    @property
    def subject(self) -> object:
        """Object that the query is about, such as a session's key, or None.

        A query with a subject sees all operations on that subject that were submitted before it, and is fast,
        because it uses an index. A query without a subject may run before any earlier operation, and may take
        long.
        """
        return None


# Sessions.


class EarlierSession(NamedTuple):
    """Session that a client already had when it connected: its user, and its size with its wills.

    Wills that are being published do not count. `is_here` is True if the client was connected to the replica
    that now opens the session. `is_accepted` is False if no replica has accepted a client with the session
    yet: then it needs capacity like a new one.
    """

    user: str
    weight: Weight
    is_here: bool
    is_accepted: bool = True


class OpenedSession(NamedTuple):
    """Value of the reply to OpenSession: the session as its new owner finds it in the database.

    If `refused` is True, nothing was changed: the session belongs to another user (`user`), or, if `user` is
    that of the operation, the will exceeds its `will_room`. Otherwise:

    - `epoch` is the epoch of this opening; `present` is True if an earlier session is resumed, with
      `contents`.
    - `before` is an earlier owner that may still consume `queue` or, of a session that is not resumed,
      `ended_queue`; None if there is none. `given_back` has the fingerprints of messages that an earlier
      owner stored with ReleaseSession.
    - `ended_queue` is the queue of an earlier session that has ended. Without `before`, the caller deletes it
      and submits ForgetQueue.
    - `wills` has epoch and message of each will of an earlier connection that was claimed for the caller, who
      publishes it and submits SettleWill.
    - `earlier` is the session that the client already had, or None.
    - `has_delayed_will` is True if an earlier connection has left a delayed will. It becomes void when the
      client is accepted (ChangeSession).
    - `has_claimed_will` is True if another replica still publishes a will of an earlier connection.
    - `expiry_secs` is the expiry of the stored session until the client is accepted; 0 for a new session.
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
    has_delayed_will: bool = False
    has_claimed_will: bool = False
    expiry_secs: float = 0.0

    @property
    def is_held(self) -> bool:
        """True if `before` may still consume `queue`."""
        return self.present and self.before is not None


class LeftSession(NamedTuple):
    """Value of the reply to LeaveSession: what the caller has to do after the client has disconnected.

    If `ended` is True, the session was deleted: the caller deletes its queue and submits ForgetQueue. If
    `publish_will` is True, the caller publishes the will and submits SettleWill.
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
    """Make `replica` the owner of a session, in a new epoch, because the client has connected there.

    An earlier session is resumed unless `clean` is True or the session has expired. `queue` is the queue for
    a new session. `expiry_secs` (0: the session ends with the connection) and `will` replace those of the
    earlier session, the expiry once a ChangeSession stores that the client is accepted. If `only_own` is
    True, a session of another `user` is refused. `byte_count` is the size of the client identifier in bytes.
    `opening` is a unique name of this operation, for CancelOpening. The opening is refused if the will has
    more than `will_room` bytes more than the user's earlier wills of this client that are not being
    published; None means no limit. If `reclaims_wills` is False, wills that another replica has claimed
    remain its own even if the claims have run out, as in Reap.
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
    will_room: int | None = None
    reclaims_wills: bool = True


@dataclass(frozen=True, slots=True)
class CancelOpening(OfSession, Operation[LeftSession]):
    """Disconnect the client that an OpenSession has connected, because it was not accepted.

    The client's will is deleted. A session that the OpenSession has created ends; an earlier one continues
    with its own expiry. The session is unchanged if it was opened again since, or if the OpenSession was not
    committed.
    """

    opened: OpenSession


@dataclass(frozen=True, slots=True)
class ChangeSession(OfSession, Operation[None]):
    """Store the changes of a session since its last ChangeSession.

    In the mappings, a value of None removes the entry. `unbindings` maps binding keys to True if the
    session's queue still has to be unbound from the key, and to False if not. `weight` is the size of the
    session after the change, or None if it has not changed. The reply is FENCED if the session has another
    epoch.

    `expiry_secs` is the new expiry of the session, or None to keep it. The caller submits it just before it
    accepts the client by CONNACK: from then on the client's will is valid, and delayed wills of its earlier
    connections are deleted. Before, a new session ends with its connection, and an earlier one keeps its
    expiry.
    """

    epoch: int
    subscriptions: Mapping[str, bytes | None] = field(default_factory=dict)
    packets: Mapping[tuple[int, int], Packet | None] = field(default_factory=dict)
    received: Mapping[tuple[bytes, int], int | None] = field(default_factory=dict)
    expiry_secs: float | None = None
    weight: Weight | None = None
    unbindings: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaveSession(OfSession, Operation[LeftSession]):
    """Record that the client of a session has disconnected.

    The session ends after `expiry_secs` seconds. The will is deleted if `discard_will` is True or the client
    was never accepted; otherwise it becomes due after its delay. Nothing is changed if the disconnection is
    recorded already.
    """

    epoch: int
    expiry_secs: float
    discard_will: bool


@dataclass(frozen=True, slots=True)
class ReleaseSession(OfSession, Operation[str]):
    """Record that an owner no longer consumes the session's queue.

    `epoch` is that of the owner, which may be an earlier one. `given_back` has fingerprints by which the next
    owner recognises the messages that this owner has requeued. Nothing is changed if another owner consumes
    the queue. The reply is never FENCED; its value is the name of the session's present queue, or "" if the
    session has no queue or has ended.
    """

    epoch: int
    given_back: bytes = b""


@dataclass(frozen=True, slots=True)
class SettleWill(OfSession, Operation[None]):
    """Delete the will that a session got in `epoch`, because it was published or must not be published."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EndSession(OfSession, Operation[None]):
    """Delete an expired session whose queue has been deleted.

    The reply is FENCED if the session was opened again, or does not exist.
    """

    epoch: int


class ClaimedWork(NamedTuple):
    """Work that the operation Reap has claimed for its caller, for CLAIM_SECS seconds.

    With a `will`, the caller publishes it and submits SettleWill. Without a will, the session `key` has
    expired: the caller deletes `queue` and submits EndSession. Without `key` as well, the session is already
    deleted: the caller deletes `queue` and submits ForgetQueue.
    """

    key: SessionKey | None
    epoch: int
    queue: str
    will: bytes | None


@dataclass(frozen=True, slots=True)
class ForgetQueue(Operation[None]):
    """Record that the queue of an ended session was deleted.

    Until this is recorded, each Reap may return the queue again.
    """

    queue: str

    @property
    def subject(self) -> object:
        """Name of the queue."""
        return "queue", self.queue


@dataclass(frozen=True, slots=True)
class Reap(Operation[list[ClaimedWork]]):
    """Claim due wills, expired sessions and queues of ended sessions, at most `limit` of each.

    First, other replicas that have sent no heartbeat for `silent_secs` seconds are declared dead, and their
    sessions lose their owners; None declares no replica dead. As the database's clock may have been set, none
    is declared dead if its time differs by more than half of `silent_secs` from `heard_at`, the database's
    time at the last heartbeat of `replica`, the caller (None: not compared). Several replicas may run this
    operation and share the work. It also deletes expired identifiers and retained messages and, after a day,
    dead replicas.

    If `reclaims_wills` is False, wills whose claims have run out are left: after an outage of the database
    the replica that has published such a will could not settle it yet.
    """

    silent_secs: float | None
    limit: int = 1_000
    replica: str = ""
    heard_at: float | None = None
    reclaims_wills: bool = True

    @property
    def subject(self) -> object:
        """Common value of all Reap operations, so that a replica runs one at a time."""
        return "reaper"


class SessionView(NamedTuple):
    """Stored session without its contents.

    `expires_in` is in seconds, and None while the client is connected. `holder` is the owner that may still
    consume the queue, or None. `given_back` has the fingerprints of requeued messages that the last
    ReleaseSession stored. `has_claimed_will` is True while a replica publishes a will of an earlier
    connection.
    """

    owner: Owner
    holder: Owner | None
    connected: bool
    user: str
    place: str
    queue: str
    expires_in: float | None
    given_back: bytes
    has_claimed_will: bool = False


@dataclass(frozen=True, slots=True)
class FindSession(Query[SessionView | None]):
    """Query of one session; the value of its reply is None if the session does not exist."""

    key: SessionKey

    @property
    def subject(self) -> object:
        """Key of the session."""
        return self.key


@dataclass(frozen=True, slots=True)
class FindSuperseded(Query[list[tuple[SessionKey, int]]]):
    """Query of the sessions that `replica` must release, because they were opened again in a later epoch.

    The reply has the keys of these sessions, and the epochs in which `replica` opened them; it may still
    consume their queues. The query is repeated periodically, because notices of such sessions may be lost.
    """

    replica: str
    limit: int = 1_000

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


class Owned(NamedTuple):
    """Session whose client is, according to the database, connected to the replica that runs the query."""

    key: SessionKey
    epoch: int
    expiry_secs: float
    queue: str


@dataclass(frozen=True, slots=True)
class FindOwned(Query[list[Owned]]):
    """Query of a page of the sessions whose clients are connected to `replica`, sorted by key.

    The page has at most `limit` sessions, and begins after the key `after`.
    """

    replica: str
    after: SessionKey
    limit: int

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


class AbsentSession(NamedTuple):
    """Session whose client is not connected to any replica.

    `subscriptions` maps filters to encoded options.
    """

    key: SessionKey
    epoch: int
    user: str
    queue: str
    subscriptions: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class FindAbsent(Query[list[AbsentSession]]):
    """Query of a page of the sessions whose clients are connected to no replica, sorted by key.

    The page has at most `limit` sessions, and begins after the key `after`.
    """

    after: SessionKey
    limit: int


class UserSessions(NamedTuple):
    """Totals over sessions of one user: sessions, subscriptions, and bytes with those of wills."""

    sessions: int = 0
    subscriptions: int = 0
    byte_count: int = 0


class SessionCounts(NamedTuple):
    """Value of the reply to WeighSessions: the number of all sessions, and totals by user.

    The totals cover only sessions that are not connected to the replica of the query and have been accepted,
    with their wills, and wills that outlive their sessions.
    """

    total: int
    elsewhere: dict[str, UserSessions]


@dataclass(frozen=True, slots=True)
class WeighSessions(Query[SessionCounts]):
    """Query of the number of all sessions, and of totals by user.

    The totals cover the sessions whose clients are not connected to `replica`. Sessions whose first client is
    not accepted yet are not included.
    """

    replica: str


@dataclass(frozen=True, slots=True)
class SharedFilters(Query[list[str]]):
    """Query of a page of the shared-subscription filters in all sessions, sorted and without duplicates.

    The page begins after the filter `after`.
    """

    after: str = ""
    limit: int = SHARED_FILTERS_MAX


# Replicas and leases.


@dataclass(frozen=True, slots=True)
class OfReplica:
    """Base of the operations on one incarnation (run) of a replica."""

    replica: str

    @property
    def subject(self) -> object:
        """Incarnation of the replica."""
        return self.replica


@dataclass(frozen=True, slots=True)
class JoinReplica(OfReplica, Operation[float]):
    """Add an incarnation of a replica to the table of replicas.

    `name` is the configured name, `address` the address to which clients are referred. The value of the reply
    is the database's time in UTC seconds.
    """

    name: str
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class Heartbeat(OfReplica, Operation[float]):
    """Record that the incarnation is alive.

    The reply is FENCED if the incarnation was declared dead; then a new incarnation must join. Otherwise its
    value is the database's time in UTC seconds.
    """


@dataclass(frozen=True, slots=True)
class QuitReplica(OfReplica, Operation[None]):
    """Mark the incarnation as ended, because its process stops; its sessions then lose their owner."""


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
        """Common value of all ListReplicas queries.

        With a subject, the query runs in a thread that commits operations. The list is short, so it does not
        delay them.
        """
        return "replicas"


class Lease(NamedTuple):
    """Value of the reply to AcquireLease: the present holder of the lease.

    `epoch` increases with each change of `holder`, and when a lease is acquired again after it has expired.
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
    """Release a lease. The reply is FENCED if this replica does not hold the lease."""

    name: str
    replica: str

    @property
    def subject(self) -> object:
        """Name of the lease."""
        return "lease", self.name


# Retained messages.


class RetainedCapacity(NamedTuple):
    """Remaining capacity for retained messages, in messages and in bytes.

    The first two numbers are for all users together, the others for the user of the new message.
    """

    messages: int
    byte_count: int
    user_messages: int
    user_bytes: int


class Retention(NamedTuple):
    """Value of the reply to Retain.

    If `stored` is False, the topic is unchanged, because there was no capacity or the topic did not retain
    the expected message. `before` has the user and the size (bytes, with overhead) of the message that the
    topic retained before, or is None.
    """

    stored: bool
    before: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class Retain(Operation[Retention]):
    """Retain a message for a topic; a `message` of None or b"" removes the retained message.

    `user` sent the message, which expires after `lifetime_secs` seconds (None: never). `weight` is its size
    in bytes, with overhead. Unless the message fits into the remaining capacity `room` (None: no limit), it
    is not stored. If `expected` is given, nothing changes unless the topic retains exactly that message.

    `client`, `domain` and `epoch` identify the session in which it was published (epoch 0: none). The reply
    is FENCED if the same client has set or cleared the topic in a later session. To detect this, a cleared
    topic is stored for CLEARED_SECS, unless `remembered` is False.
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
    """Query of a page of the retained messages that match an MQTT topic filter, sorted by topic.

    The page begins after the topic `after`. It ends when it has `limit` messages or at least `byte_count`
    bytes; a page that reaches neither is the last one.
    """

    is_report: ClassVar[bool] = False  # a client waits for it
    topic_filter: str
    after: str = ""
    limit: int = 1_000
    byte_count: int = 1_048_576

    def is_last(self, found: Sequence[Retained]) -> bool:
        """Return True if the page `found`, the result of this query, is the last one."""
        return len(found) < self.limit and sum(len(one.message) for one in found) < self.byte_count


@dataclass(frozen=True, slots=True)
class WeighRetained(Query[dict[str, tuple[int, int]]]):
    """Query of the number and size (bytes, with overhead) of the retained messages of each user."""


# Identifiers of deduplicating routes.


class Claim(Enum):
    """Result of ClaimIds for one identifier: claimed by the caller or another replica, or accepted.

    A message with an accepted identifier has already passed the route.
    """

    OURS = "ours"
    OPEN = "open"  # another replica has claimed it
    ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class OfRoute:
    """Base of the operations on identifiers by which a deduplicating route recognises messages."""

    route: str
    ids: tuple[bytes, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Name of the route."""
        return "route", self.route


@dataclass(frozen=True, slots=True)
class ClaimIds(OfRoute, Operation[list[Claim]]):
    """Claim message identifiers for `replica` before their messages are sent through the route.

    The reply has a Claim for each identifier, in order. A claim ends when the identifier is accepted or
    freed, or when the replica is dead. The reply is FENCED if `replica` is dead.
    """


@dataclass(frozen=True, slots=True)
class AcceptIds(OfRoute, Operation[None]):
    """Record that the target of the route has accepted messages with these identifiers.

    For `window_secs` seconds, further messages with them are duplicates.
    """

    window_secs: float


@dataclass(frozen=True, slots=True)
class FreeIds(OfRoute, Operation[None]):
    """End the claims of `replica` to message identifiers, because the messages were not accepted.

    A deduplicating route recognises repeated messages by these identifiers. A message with one of them may
    then be sent again.
    """


# Dead letters.


class DeadLetter(NamedTuple):
    """Stored dead letter.

    `reason` and `message` are encoded. `user` sent the message, and `weight` is its size in bytes (with
    overhead), which counts toward limits. `at` is the time at which the dead letter was added, in UTC seconds
    of the database's clock.
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

    `is_repeated` is True if the same operation was submitted before and may have been committed. Then the
    dead letter is not stored again if it was deleted within the last DELETED_SECS seconds.
    """

    letter: DeadLetter
    is_repeated: bool = False

    @property
    def subject(self) -> object:
        """Common value of all dead letters, so that they are stored in the order of their addition."""
        return "letters"


@dataclass(frozen=True, slots=True)
class OfLetters:
    """Base of the operations on the dead letters with given ids."""

    ids: tuple[str, ...]
    replica: str

    @property
    def subject(self) -> object:
        """Common value of all operations on dead letters, so that they are committed in order."""
        return "letters"


@dataclass(frozen=True, slots=True)
class ClaimLetters(OfLetters, Operation[list[str]]):
    """Claim dead letters for redriving by `replica`, or renew its claims, for CLAIM_SECS seconds.

    The reply has the ids that `replica` has claimed now. The other dead letters do not exist, or another
    replica has claimed them.
    """


@dataclass(frozen=True, slots=True)
class FreeLetters(OfLetters, Operation[None]):
    """End the claims of `replica` to redrive these dead letters."""


@dataclass(frozen=True, slots=True)
class DeleteLetters(OfLetters, Operation[list[str]]):
    """Delete dead letters, even if another replica has claimed them.

    The reply has the ids that existed. The ids are recorded, so that a repeated AddLetter does not store the
    dead letters again, unless they are deleted for lack of capacity (`make_room`).
    """

    make_room: bool = False


@dataclass(frozen=True, slots=True)
class PurgeLetters(OfLetters, Operation[list[str]]):
    """Delete dead letters, except those that another replica has claimed.

    The reply has the ids that were not deleted, because another replica has claimed them.
    """


@dataclass(frozen=True, slots=True)
class ListLetters(Query[list[DeadLetter]]):
    """Query of a page of dead letters, sorted by time. In the reply `reason` and `message` are empty.

    `route` and `user` restrict the list; None means all. `after` has time and id of the dead letter after
    which the page begins; None requests the first page.
    """

    route: str | None = None
    user: str | None = None
    newest_first: bool = False
    after: tuple[float, str] | None = None
    limit: int = 1_000


@dataclass(frozen=True, slots=True)
class FindLetters(Query[list[DeadLetter]]):
    """Query of the dead letters that have these ids; the reply is in any order.

    If `has_contents` is False, `reason` and `message` are empty in the reply.
    """

    ids: tuple[str, ...]
    has_contents: bool = True


@dataclass(frozen=True, slots=True)
class WeighLetters(Query[dict[str, tuple[int, int]]]):
    """Query of the number and size (bytes, with overhead) of the dead letters of each user."""


# The store.


class NoticeSubject(Enum):
    """Change that a notice reports."""

    TAKEN = "taken"  # a session of this replica has another owner
    RELEASED = "released"  # the queue of a session of this replica is free
    MISSED = "missed"  # notices may have been lost: query everything that they report


class Notice(NamedTuple):
    """Hint from the database that a replica should run a query, because something has changed.

    Notices may be lost, and correctness never depends on them: the same queries run periodically. `key` is
    the session that has changed, or None if the notice concerns no single session.
    """

    event: NoticeSubject
    key: SessionKey | None = None


class Health(NamedTuple):
    """Condition of the store.

    `failure` is why the database cannot be used, or "". `pending` is the number of operations and queries
    without a reply.
    """

    failure: str
    pending: int


class StateStore(ABC):
    """Store for the state that replicas share, with the same interface for both databases.

    The event loop calls all methods except `stop`.
    """

    pending_max: ClassVar[int] = 100_000  # operations that may wait for the database

    @abstractmethod
    def start(
        self, call_soon: Callable[[Callable[[], None]], None], on_notice: Callable[[Notice], None]
    ) -> None:
        """Start the store's threads.

        `call_soon` makes the event loop call a function; `on_notice` is called with each notice.
        """

    @abstractmethod
    def stop(self) -> None:
        """Commit the submitted operations as far as possible within some seconds, and end the threads.

        The method blocks: call it in another thread than that of the event loop.
        """

    @abstractmethod
    def submit(self, operation: Operation[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue an operation; `done` is called once with its reply, in the event loop."""

    @abstractmethod
    def query(self, query: Query[T], done: Callable[[Reply[T]], None]) -> None:
        """Queue a query; `done` is called once with its reply, in the event loop."""

    @abstractmethod
    def tick(self) -> None:
        """Reply UNAVAILABLE to operations that have waited too long.

        The event loop calls this method several times per second.
        """

    @abstractmethod
    def listen(self, replica: str) -> None:
        """Start to deliver the notices for the incarnation `replica`."""

    @property
    @abstractmethod
    def health(self) -> Health:
        """Reason why the database cannot be used, or "", and number of waiting operations and queries."""
