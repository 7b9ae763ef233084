"""What the log says of sessions: the same at every replica, for all apply the same records in the same order.

A session has an owner, the record that opened it last. Changes that name another owner come from a replica
that has lost the session and does not know it yet: they count for nothing. It has a keeper, too: the life of
a replica that sees to its end, and to its will, when its client is away. That is the owner's life, until
another one inherits what was a dead one's. What a dead life says later is not heard.

A session that has long stood in the log is written again as a whole. Such a record counts if nothing has
changed since its writer knew it; otherwise the session remains due.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from typing import Final, NamedTuple, Protocol

from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.engine.envelope import Number
from gateway.engine.names import readable
from gateway.engine.once import Recent
from gateway.engine.records import (
    Changed,
    Ended,
    Freed,
    Gone,
    Inherited,
    Left,
    Opened,
    Options,
    Owner,
    Record,
    Snapshot,
    Willed,
    WillSaid,
    decode_record,
    encode_record,
)
from gateway.store.store import Store

ENDED_MAX: Final = 16_384  # sessions of which it is remembered where the log has their end
DEAD_MAX: Final = 1_024  # lives that are over
HALF: Final = 0.5
SPREAD: Final = 0.25
AGAIN_MAX: Final = 500  # sessions that are written again at once


class SessionState:
    """One session. `queue` is "" for one that ends with its connection, of which only the will has to be
    known; `consumer` is the owner who may still consume it, if there is one. `placed` and `written` (seconds
    UTC): where and since when the log has it whole."""

    __slots__ = (
        "attached",
        "changed_at",
        "client",
        "consumer",
        "expiry_secs",
        "keeper",
        "owner",
        "place",
        "placed",
        "queue",
        "recent",
        "released",
        "sent",
        "subscribed",
        "taken",
        "user",
        "utc",
        "will",
        "will_at",
        "written",
    )

    def __init__(self, client: str, owner: Owner, offset: int, recent: Recent) -> None:
        self.client = client
        self.owner = owner
        self.keeper = owner[0]
        self.queue = ""
        self.consumer: Owner | None = owner
        self.attached = True
        self.utc = 0.0  # when its client last came or went
        self.expiry_secs = 0.0
        self.user = ""
        self.place = ""
        self.will: WillSaid | None = None
        self.will_at = 0.0  # UTC; 0: its client is here, or there is no will
        self.subscribed: dict[str, SubscriptionOptions] = {}
        self.sent: dict[int, Number | None] = {}
        self.released: dict[int, None] = {}
        self.taken: dict[int, Number] = {}
        self.recent = recent
        self.changed_at = offset
        self.placed = offset
        self.written = 0.0

    @property
    def ends_at(self) -> float:
        """When its time is over, UTC; of a client that is away."""
        return self.utc + self.expiry_secs

    def resumable(self, utc: float) -> bool:
        """A client that comes back then finds it."""
        return self.expiry_secs > 0 and (self.attached or utc < self.ends_at)

    def leave(self, utc: float) -> None:
        """Its client has gone, and nobody has said what becomes of its will."""
        self.attached = False
        self.utc = utc
        delay = 0 if self.will is None else self.will.delay_secs
        self.will_at = 0.0 if self.will is None else utc + min(delay, self.expiry_secs)

    def change(self, record: Changed) -> None:
        """Apply what has become of it."""
        for topic_filter, options in record.subscribed.items():
            if options is None:
                self.subscribed.pop(topic_filter, None)
            else:
                self.subscribed[topic_filter] = SubscriptionOptions(*options)
        for packet_id in record.completed:
            self.released.pop(packet_id, None)
            self._had(self.sent.pop(packet_id, None))
        self.sent.update(record.sent)
        for packet_id in record.released:
            self.released[packet_id] = None
            self._had(self.sent.get(packet_id))
        for packet_id in record.freed:
            self.taken.pop(packet_id, None)
        self.taken.update(record.taken)

    def _had(self, number: Number | None) -> None:
        if number is not None:
            self.recent.add(number)

    def snapshot(self, life: str, number: int, as_of: int) -> Snapshot:
        """All of it."""
        return Snapshot(
            self.client,
            life,
            number,
            as_of,
            self.owner,
            self.keeper,
            self.queue,
            self.attached,
            self.utc,
            self.expiry_secs,
            self.user,
            self.place,
            self.will,
            self.will_at,
            {topic_filter: said(options) for topic_filter, options in self.subscribed.items()},
            self.sent,
            tuple(self.released),
            self.taken,
            self.recent.lives(),
        )


def said(options: SubscriptionOptions) -> Options:
    """Options as a record has them."""
    found: Options = astuple(options)
    return found


def state_of(record: Snapshot, offset: int, recent: Recent) -> SessionState:
    """The session that a record says whole, but for what is `recent`."""
    state = SessionState(record.client, record.owner, offset, recent)
    state.keeper, state.queue, state.attached = record.keeper, record.queue, record.attached
    state.consumer = record.owner if record.attached else None
    state.utc, state.expiry_secs = record.utc, record.expiry_secs
    state.user, state.place = record.user, record.place
    state.will, state.will_at = record.will, record.will_at
    state.subscribed = {name: SubscriptionOptions(*options) for name, options in record.subscribed.items()}
    state.sent, state.released = dict(record.sent), dict.fromkeys(record.released)
    state.taken = dict(record.taken)
    state.changed_at = record.as_of
    return state


class Heard(Protocol):
    """Whoever acts on what the table has learnt."""

    def came(self, record: Opened, arrival: Arrival) -> None:
        """A client has been opened at some replica."""

    def let_go(self, client: str, owner: Owner, given_back: Sequence[int]) -> None:
        """An owner has freed the queue of a session, which was given back messages with these prints."""

    def letting_go(self, client: str, owner: Owner) -> None:
        """An owner is about to free the queue of a session."""

    def is_over(self, state: SessionState, record: Record) -> None:
        """A session has ended by that record."""

    def buried(self, life: str) -> None:
        """A life is over, and others have what it had."""


class Arrival(NamedTuple):
    """What a client has found: its `state`, if anything has to be known of it; whether it is an earlier one;
    the owner who has to let go of it; an earlier one that has ended by that; or that it is another user's."""

    state: SessionState | None
    resumed: bool = False
    before: Owner | None = None
    ended: SessionState | None = None
    refused: bool = False


class SessionTable:
    """All sessions that outlive their connections, and all wills."""

    def __init__(
        self,
        namespace: str,
        heard: Heard,
        store: Store | None,
        clock: Callable[[], float],
        utc: Callable[[], float],
        recent_chunks: int,
    ) -> None:
        """What is in `store`, which has not been started, is there at once. `clock`: monotonic; `utc`: the
        cluster's;        `recent_chunks`: see `Recent`."""
        self.states: dict[str, SessionState] = {}
        self._heard = heard
        self._clock = clock
        self._utc = utc
        self._recent_chunks = recent_chunks
        self._keepers: dict[str, dict[str, None]] = {}  # clients, by life
        self._ended: dict[str, int] = {}  # offsets
        self._dead: dict[str, None] = {}
        self._gone: dict[str, None] = {}
        self._lives: dict[str, float] = {}  # when they were last heard of, monotonic
        self._kind = f"engine session {namespace}"
        self._kept_in = store
        self._unsaved: dict[str, None] = {}
        for _, octets in () if store is None else store.things(self._kind):
            assert isinstance(octets, bytes)
            record = decode_record(octets)
            if isinstance(record, Snapshot):
                state = self._state_of(record, record.number)
                state.written = 0.0  # nobody knows
                self._put(state)

    def __len__(self) -> int:
        return len(self.states)

    def _state_of(self, record: Snapshot, offset: int) -> SessionState:
        state = state_of(record, offset, Recent(self._recent_chunks, record.had))
        state.written = self._utc()
        return state

    def _put(self, state: SessionState) -> None:
        self._drop(state.client)
        self.states[state.client] = state
        self._keepers.setdefault(state.keeper, {})[state.client] = None

    def _drop(self, client: str) -> SessionState | None:
        state = self.states.pop(client, None)
        if state is not None:
            self._unkeep(state)
        return state

    def _unkeep(self, state: SessionState) -> None:
        kept = self._keepers.get(state.keeper)
        if kept is not None:
            kept.pop(state.client, None)
            if not kept:
                del self._keepers[state.keeper]

    def _keep(self, state: SessionState, keeper: str) -> None:
        self._unkeep(state)
        state.keeper = keeper
        self._keepers.setdefault(keeper, {})[state.client] = None

    def _remember_end(self, client: str, offset: int) -> None:
        self._ended.pop(client, None)
        self._ended[client] = offset
        if len(self._ended) > ENDED_MAX:
            del self._ended[next(iter(self._ended))]

    # What the log says.

    def apply(self, record: Record, offset: int) -> bool:
        """A record at `offset`. False: it counts for nothing."""
        if record.life in self._dead:
            return False
        self._lives[record.life] = self._clock()
        if isinstance(record, Opened):
            return self._opened(record, offset)
        if isinstance(record, Gone):
            return self._life_gone(record, offset)
        if isinstance(record, Inherited):
            return self._inherited(record, offset)
        if isinstance(record, Snapshot):
            return self._take_snapshot(record, offset)
        if isinstance(record, Left):
            self._heard.letting_go(record.client, record.owner)
        if isinstance(record, Left | Changed | Ended | Willed):
            state = self.states.get(record.client)
            if state is not None and state.owner == record.owner:
                state.changed_at = offset
                self._unsaved[record.client] = None
                counts = self._of_session(record, state, offset)
            else:
                counts = False
            return counts
        if isinstance(record, Freed):
            self._free(record.client, record.owner, record.given_back)
        return True

    def _free(self, client: str, owner: Owner, given_back: Sequence[int] = ()) -> None:
        state = self.states.get(client)
        if state is not None and state.consumer == owner:
            state.consumer = None
        self._heard.let_go(client, owner, given_back)

    def _opened(self, record: Opened, offset: int) -> bool:
        client = record.client
        before = self.states.get(client)
        if before is not None and record.only_own and before.user != record.user:
            self._heard.came(record, Arrival(before, refused=True))
            return False
        self._unsaved[client] = None
        if before is not None and not record.clean and before.resumable(record.utc):
            self._keep(before, record.life)
            arrival = Arrival(before, True, before.consumer)
            before.changed_at = offset
        else:
            self._drop(client)
            if before is not None:
                self._remember_end(client, offset)
            recent = Recent(self._recent_chunks)
            found = SessionState(client, record.owner, offset, recent) if record.lasting else None
            if found is not None:
                found.written = self._utc()
                if record.expiry_secs > 0:
                    found.queue = f"{readable(client)}.{record.life}.{record.number}"
                self._put(found)
            arrival = Arrival(found, False, None, before)
        state = arrival.state
        if state is not None:
            state.owner, state.attached, state.utc = record.owner, True, record.utc
            state.consumer = record.owner
            state.expiry_secs, state.user, state.place = record.expiry_secs, record.user, record.place
            state.will, state.will_at = record.will, 0.0
        self._heard.came(record, arrival)
        return True

    def _of_session(self, record: Left | Changed | Ended | Willed, state: SessionState, offset: int) -> bool:
        if isinstance(record, Changed):
            state.change(record)
        elif isinstance(record, Left):
            state.attached = False
            state.utc, state.expiry_secs, state.will_at = record.utc, record.expiry_secs, record.will_at
            if not state.will_at:
                state.will = None
            if state.expiry_secs <= 0:
                self._end(state, record, offset)
        elif isinstance(record, Willed):
            state.will, state.will_at = None, 0.0
            if not state.queue:
                self._end(state, record, offset)
        elif state.attached:
            return False
        else:
            self._end(state, record, offset)
        return True

    def _end(self, state: SessionState, record: Record, offset: int) -> None:
        self._drop(state.client)
        self._remember_end(state.client, offset)
        self._heard.is_over(state, record)

    def _life_gone(self, record: Gone, offset: int) -> bool:
        self._gone[record.life] = None
        if len(self._gone) > DEAD_MAX:
            del self._gone[next(iter(self._gone))]
        self._leave_all(record.life, record.utc, offset)
        return True

    def _leave_all(self, life: str, utc: float, offset: int) -> None:
        for client in self._keepers.get(life, ()):
            state = self.states[client]
            if state.attached:
                state.leave(utc)
                state.changed_at = offset
                self._unsaved[client] = None
            self._free(client, state.owner)

    def _inherited(self, record: Inherited, offset: int) -> bool:
        if record.of in self._dead:
            return False
        self._dead[record.of] = None
        if len(self._dead) > DEAD_MAX:
            del self._dead[next(iter(self._dead))]
        self._lives.pop(record.of, None)
        self._leave_all(record.of, record.utc, offset)
        for client in list(self._keepers.get(record.of, ())):
            self._keep(self.states[client], record.life)
            self.states[client].changed_at = offset
            self._unsaved[client] = None
        self._heard.buried(record.of)
        return True

    def _take_snapshot(self, record: Snapshot, offset: int) -> bool:
        before = self.states.get(record.client)
        latest = self._ended.get(record.client, -1) if before is None else before.changed_at
        if latest > record.as_of:
            return False
        if before is None:
            self._put(self._state_of(record, offset))
        else:
            before.placed, before.written = offset, self._utc()
        self._unsaved[record.client] = None
        return True

    # What is asked of it.

    def kept_by(self, life: str) -> Iterator[SessionState]:
        """Sessions that a life sees to, and whose clients are away."""
        for client in list(self._keepers.get(life, ())):
            state = self.states.get(client)
            if state is not None and not state.attached:
                yield state

    def silent(self, besides: str, since: float, known: float) -> list[str]:
        """Lives that have sessions, and have not been heard of after `since`, or are gone; `known` is since
        when the log has been followed (both monotonic)."""
        return [
            life
            for life in self._keepers
            if life != besides and (life in self._gone or self._lives.get(life, known) <= since)
        ]

    def due(self, state_secs: float, oldest_offset: Callable[[float], float]) -> list[SessionState]:
        """Sessions that have to be written again; half of what the log keeps may be behind them."""
        share = HALF - SPREAD * random.random()
        limit = self._utc() - state_secs * share
        oldest = oldest_offset(share)
        found = [one for one in self.states.values() if one.written <= limit or one.placed <= oldest]
        return found[:AGAIN_MAX]

    def subscribed(self, topic_filter: str) -> bool:
        """Some session has it."""
        return any(topic_filter in state.subscribed for state in self.states.values())

    # On disk.

    def note(self, position: int) -> None:
        """The wake-up is over: what has changed goes to disk with what was read."""
        if self._kept_in is None or not self._unsaved:
            self._unsaved.clear()
            return
        for client in self._unsaved:
            state = self.states.get(client)
            if state is None:
                self._kept_in.delete(self._kind, client.encode())
            else:
                octets = encode_record(state.snapshot(state.keeper, state.placed, position))
                self._kept_in.put(self._kind, client.encode(), octets)
        self._unsaved.clear()

    def begin_anew(self) -> None:
        """The log is read from its beginning."""
        self.states.clear()
        self._keepers.clear()
        self._ended.clear()
        self._unsaved.clear()
        if self._kept_in is not None:
            self._kept_in.delete_all(self._kind)
