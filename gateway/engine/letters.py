"""Dead letters of all replicas, in the database.

Any replica lists, redrives and purges them. A source is acknowledged when the database has stored its dead
letter. While the database is unavailable dead letters wait in memory, within the limits; beyond these the
oldest one of a user with more than an equal part of the limit is lost, counted and logged. The usage of each
user is read from the database every second, so each replica knows if there is capacity; replicas that add
dead letters in the same second may together exceed the limits. A replica that adds a dead letter although the
limits are reached deletes the oldest ones beyond them.

A replica that redrives a dead letter claims it first: of two replicas one gets the claim. The claim lasts for
CLAIM_SECS, and is renewed until the message is settled. The claim of a replica that is killed runs out, and
the dead letter still exists: if the target had accepted the message by then, the target gets it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import orjson
import structlog

from gateway import clock
from gateway.broker.dead_letters import Letter
from gateway.containment import contained
from gateway.engine.claims import is_ending
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.membership import INCARNATION_BYTES, Membership
from gateway.engine.repeats import Repeats
from gateway.model.message import Message, weight_of
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserEntries, UserShares
from gateway.model.times import Monotonic, WallTime
from gateway.state.interface import (
    AddLetter,
    ClaimLetters,
    DeadLetter,
    DeleteLetters,
    FindLetters,
    FreeLetters,
    ListLetters,
    PurgeLetters,
    Reply,
    StateStore,
    WeighLetters,
)
from gateway.state.interface import OperationOutcome as Committed
from gateway.store.messages import MessageReader, encode_sound

log = structlog.get_logger(limited=True)

RENEW_SECS: Final = 5.0
WEIGH_SECS: Final = 1.0
WEIGH_SECS_MAX: Final = 10.0
RESTS: Final = 10  # multiple of a query's duration that passes until the next, at least
IDS_MAX: Final = 1_000  # in one operation
PAGE_LETTERS: Final = 1_000  # in one query, without their messages
PREFIX_CHARS: Final = 2 * INCARNATION_BYTES  # of an id
Then = Callable[[], None]
Weights = dict[str, tuple[int, int]]


class UnsavedLetter(NamedTuple):
    """Dead letter that is not confirmed by the database, and the callback for its confirmation."""

    letter: DeadLetter
    then: Then
    evicts_others: bool  # True if the limits were reached when it was added


class SharedLetters:
    """Dead letters of all replicas, in the database that the replicas share.

    `shares` has the limits of the dead letters, and the number and bytes of each user's dead letters.
    """

    def __init__(
        self, state: StateStore, membership: Membership, shares: UserShares, time: ClusterClock
    ) -> None:
        self.shares = shares
        self._state = state
        self._membership = membership
        self._time = time
        self._repeats = Repeats(state)
        self._reader = MessageReader()
        self._last = 0
        self._unsaved: dict[str, UnsavedLetter] = {}
        # Ids of unsaved dead letters by user, within the limits of all dead letters.
        waiting = UserShares(shares.resource, count_max=shares.count_max, bytes_max=shares.bytes_max)
        self._waiting: UserEntries[str] = UserEntries(waiting)
        self._unsubmitted: dict[str, None] = {}  # ids of unsaved ones that must be submitted again
        self._added: list[DeadLetter] = []  # stored while the usage is queried
        self._mine: dict[str, None] = {}  # ids of dead letters that are being redriven here
        self._is_weighing = self._is_pushing = False
        self._crowding: str | None = None  # the user whose dead letter exceeded the limits
        self._weigh_at = self._renew_at = Monotonic(0.0)

    # Interface for the dead letter code of the broker.

    def has_room(self, messages: list[Message]) -> bool:
        """Return True if `messages` fit into the limits, those for all dead letters and those for each user.

        Dead letters that are not stored yet are counted.
        """
        return self.shares.has_room_for(messages)

    def __len__(self) -> int:
        return self.shares.count

    def add(
        self,
        messages: Iterable[Message],
        route: str,
        outcome: Outcome,
        *,
        crossed: bool,
        then: Then | None,
    ) -> None:
        """Store messages as dead letters of a route, with `outcome` as the reason.

        `crossed` is True if the route has translated the messages. `then` is called, without a result, when
        the database has stored all of them, except those that are lost because they exceed the limits.
        """
        message_list = list(messages)
        remaining = len(message_list)

        def on_stored() -> None:
            nonlocal remaining
            remaining -= 1
            if remaining <= 0 and then is not None:
                then()

        if not message_list:
            on_stored()
        reason = _encode(outcome, crossed)
        crowds = not self.has_room(message_list)
        for message in message_list:
            self._last += 1
            id = f"{self._membership.incarnation}-{self._last:08}"
            byte_count = message.byte_count
            letter = DeadLetter(
                id,
                _storable(route),
                reason,
                encode_sound(message, -self._time.correction),
                _storable(message.sender.user),
                byte_count,
            )
            self.shares.add(letter.user, byte_count)
            self._unsaved[id] = UnsavedLetter(letter, on_stored, crowds)
            self._waiting.add(id, letter.user, byte_count)
            self._submit(letter)
            while (crowded_out := self._waiting.entry_to_evict(letter.user)) is not None:
                self._drop(crowded_out)

    def _submit(self, letter: DeadLetter, *, is_repeated: bool = False) -> None:
        self._state.submit(AddLetter(letter, is_repeated), partial(self._handle_stored, letter))

    def _handle_stored(self, letter: DeadLetter, reply: Reply[None]) -> None:
        """Process the reply to an AddLetter.

        If the dead letter is stored, forget it here; while the database is unavailable, submit it again at
        the next tick; if the database rejects it, log that it is lost.
        """
        if letter.id not in self._unsaved:
            return  # it was dropped before
        if reply.verdict is Committed.UNAVAILABLE:
            self._unsubmitted[letter.id] = None
        elif reply.verdict is Committed.REFUSED:
            log.error("dead letter lost, rejected by database", route=letter.route)
            self._drop(letter.id)
        else:
            crowds = self._unsaved[letter.id].evicts_others
            if self._is_weighing:
                self._added.append(letter)
            self._forget(letter.id)
            if crowds:
                self._crowding = letter.user
                self._query_usage()

    def _drop(self, id: str) -> None:
        """Discard a dead letter that the database has not stored. Its callback is called nevertheless."""
        letter = self._unsaved[id].letter
        self.shares.evicted_count += 1
        self.shares.last_user = letter.user
        self.shares.remove(letter.user, letter.weight)
        self._forget(id)

    def _forget(self, id: str) -> None:
        """Forget an unsaved dead letter, and call its callback."""
        unsaved = self._unsaved.pop(id)
        self._unsubmitted.pop(id, None)
        self._waiting.discard(id)
        try:
            unsaved.then()
        except Exception as error:  # it concerns one dead letter
            contained("batch", error)

    def is_letter_id(self, id: str) -> bool:
        """Return True if `id` has the form of the ids that this class assigns to dead letters.

        A dead letter with that id need not exist.
        """
        return len(id) > PREFIX_CHARS and id[PREFIX_CHARS] == "-"

    def newest(
        self, count: int, route: str | None, bytes_max: int, then: Callable[[list[Letter]], None]
    ) -> None:
        """Read at most `count` dead letters of a route (None: of all routes), newest first.

        Reading ends early with the dead letter whose size makes the total reach `bytes_max` bytes. `then` is
        called with those that were read. No method that reads calls its callback while the database is
        unavailable.
        """
        self._list([], count, route, lambda listed: self._read(listed, [], bytes_max, then))

    def ids(self, route: str | None, then: Callable[[list[tuple[WallTime, str]]], None]) -> None:
        """Read the times and ids of the dead letters of a route (None: of all routes).

        `then` is called with them, oldest first.
        """

        def on_found(letters: list[DeadLetter]) -> None:
            then([(WallTime(letter.at), letter.id) for letter in reversed(letters)])

        self._list([], None, route, on_found)

    def _list(
        self,
        found: list[DeadLetter],
        count: int | None,
        route: str | None,
        then: Callable[[list[DeadLetter]], None],
    ) -> None:
        """Append pages of dead letters to `found`, newest first, until it has `count` (None: all).

        `then` is called with `found`; the dead letters in it have no message contents. `route` as in
        `newest`.
        """
        limit = PAGE_LETTERS if count is None else min(PAGE_LETTERS, count - len(found))
        if limit <= 0:
            then(found)
            return
        after = (found[-1].at, found[-1].id) if found else None

        def read(reply: Reply[list[DeadLetter]]) -> None:
            if reply.value is None:
                return
            found.extend(reply.value)
            if len(reply.value) < limit:
                then(found)
            else:
                self._list(found, count, route, then)

        self._state.query(ListLetters(route, newest_first=True, after=after, limit=limit), read)

    def find(self, ids: Iterable[str], bytes_max: int, then: Callable[[list[Letter]], None]) -> None:
        """Read the dead letters with these ids. `then` is called with those that exist, in the same order.

        Reading ends early with the dead letter whose size makes the total reach `bytes_max` bytes.
        """
        self._look_up(tuple(ids), lambda listed: self._read(listed, [], bytes_max, then))

    def existing(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Query which of these dead letters exist. `then` is called with their ids, in the order of `ids`."""
        self._look_up(tuple(ids), lambda listed: then([one.id for one in listed]))

    def _look_up(self, ids: tuple[str, ...], then: Callable[[list[DeadLetter]], None]) -> None:
        """Read the dead letters with these ids, without message contents.

        `then` is called with those that exist, in the order of `ids`.
        """

        def on_found(reply: Reply[list[DeadLetter]]) -> None:
            if reply.value is not None:
                by_id = {letter.id: letter for letter in reply.value}
                then([by_id[id] for id in ids if id in by_id])

        self._state.query(FindLetters(ids, has_contents=False), on_found)

    def _read(
        self,
        listed: list[DeadLetter],
        found: list[Letter],
        bytes_max: int,
        then: Callable[[list[Letter]], None],
    ) -> None:
        """Read the contents of the dead letters in `listed`, which lack them, and append these to `found`.

        Reading ends early with the dead letter whose size makes the total of `found` reach `bytes_max` bytes.
        Then `then` is called with `found`.
        """
        remaining = bytes_max - weight_of([letter.message for letter in found])
        if remaining <= 0 or not listed:
            then(found)
            return
        count = 0
        while count < len(listed) and remaining > 0:
            remaining -= listed[count].weight
            count += 1
        ids = tuple([letter.id for letter in listed[:count]])

        def read(reply: Reply[list[DeadLetter]]) -> None:
            if reply.value is not None:
                by_id = {letter.id: letter for letter in self._decoded(reply.value)}
                found.extend(by_id[id] for id in ids if id in by_id)
                self._read(listed[count:], found, bytes_max, then)

        self._state.query(FindLetters(ids), read)

    def claim(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Claim dead letters so that only this replica redrives them. `then` is called with the claimed ids.

        Dead letters that do not exist, or that another replica has claimed, are left out.
        """
        letter_ids, requested_at = tuple(ids), clock.lease_time()

        def on_claimed(reply: Reply[list[str]]) -> None:
            got = reply.value or []
            # No reply, or a late one: the claims may run out while they are used.
            if reply.value is None or is_ending(requested_at):
                self._release(letter_ids)
                got = []
            self._mine.update(dict.fromkeys(got))
            then(got)

        self._state.submit(ClaimLetters(letter_ids, self._membership.incarnation), on_claimed)

    def release_claims(self, ids: Iterable[str]) -> None:
        """Release this replica's claims to the dead letters with these ids."""
        freed = [id for id in ids if id in self._mine]
        for id in freed:
            del self._mine[id]
        self._release(freed)

    def _release(self, ids: Iterable[str]) -> None:
        """End claims to dead letters in the database, unless this replica has claimed them again."""
        for some in _split_ids(id for id in ids if id not in self._mine):
            self._state.submit(FreeLetters(some, self._membership.incarnation), partial(self._released, some))

    def _released(self, ids: tuple[str, ...], reply: Reply[None]) -> None:
        if reply.verdict is Committed.UNAVAILABLE:
            self._repeats.call_later(partial(self._release, ids))

    def delete(self, ids: Iterable[str], then: Then) -> None:
        """Delete the dead letters with these ids, even if another replica has claimed them.

        `then` is called when the database has deleted them, possibly much later.
        """
        letter_ids = list(ids)
        for id in letter_ids:
            self._mine.pop(id, None)
        self._delete(DeleteLetters, letter_ids, lambda _: then())

    def purge(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Delete the dead letters with these ids, except those that another replica is redriving.

        `then` is called with the ids of the dead letters that were not deleted, when the database has deleted
        the others, possibly much later.
        """
        self._delete(PurgeLetters, ids, then)

    def _delete(
        self,
        operation: type[DeleteLetters] | type[PurgeLetters],
        ids: Iterable[str],
        then: Callable[[list[str]], None],
    ) -> None:
        """Submit deletions of dead letters, at most IDS_MAX per operation.

        `then` is called with the ids in the replies to all operations: those that were not deleted.
        """
        parts = list(_split_ids(ids))
        remaining, found = len(parts), list[str]()
        if not parts:
            then(found)

        def deleted(reply: Reply[list[str]]) -> None:
            nonlocal remaining
            remaining -= 1
            found.extend(reply.value or ())
            if not remaining:
                self._query_usage()
                then(found)

        for some in parts:
            self._repeats.submit(operation(some, self._membership.incarnation), deleted)

    # Interface for the shared state.

    def tick(self, now: Monotonic) -> None:
        """Run the timer; `now` is in loop-clock seconds.

        The timer repeats operations that have failed, renews claims to dead letters, and queries the number
        and bytes of each user's dead letters.
        """
        self._repeats.tick()
        unsubmitted, self._unsubmitted = self._unsubmitted, {}
        for id in unsubmitted:
            self._submit(self._unsaved[id].letter, is_repeated=True)
        if now >= self._weigh_at:
            self._weigh_at = now + WEIGH_SECS
            self._query_usage()
        if now >= self._renew_at:
            self._renew_at = now + RENEW_SECS
            for some in _split_ids(self._mine):
                self._state.submit(ClaimLetters(some, self._membership.incarnation), lambda reply: None)

    def stop(self) -> None:
        """Release all claims to dead letters of this replica, so that other replicas may redrive them."""
        self.release_claims(list(self._mine))

    # Limits.

    def _query_usage(self) -> None:
        """Query the number and bytes of each user's dead letters, unless such a query is pending."""
        if not self._is_weighing:
            self._is_weighing = True
            self._added.clear()
            self._state.query(WeighLetters(), partial(self._apply_usage, clock.now()))

    def _apply_usage(self, requested_at: Monotonic, reply: Reply[Weights]) -> None:
        """Process the reply to `_query_usage`; delete the oldest dead letters if a limit is exceeded.

        `requested_at` is when the query was submitted. The longer it has taken, because there are many dead
        letters, the later it is repeated.
        """
        self._is_weighing = False
        if reply.value is None:
            return
        now = clock.now()
        rest = min(RESTS * (now - requested_at), WEIGH_SECS_MAX)
        self._weigh_at = max(self._weigh_at, Monotonic(now + rest))
        self.shares.replace(reply.value)
        # Dead letters stored meanwhile may be included already: for one second they may count twice.
        for letter in (*self._added, *(one.letter for one in self._unsaved.values())):
            self.shares.add(letter.user, letter.weight)
        if self._crowding is not None and not self._is_pushing:
            self._delete_oldest(reply.value, self._crowding)

    def _delete_oldest(self, weights: Weights, crowding: str) -> None:
        """Delete the oldest dead letters of one user until the limits of all dead letters are met.

        The user is `crowding`, whose dead letter exceeded the limits, if it has more than an equal part;
        otherwise the user with the most dead letters or bytes. `weights` has the number and bytes of each
        user's dead letters. At most PAGE_LETTERS are deleted at once; then the numbers are queried again.
        """
        shares = self.shares
        exact = UserShares(shares.resource, count_max=shares.count_max, bytes_max=shares.bytes_max)
        exact.replace(weights)
        if not exact.is_exceeded:
            if not self._added:
                self._crowding = None
            return
        user = exact.user_to_evict(crowding)
        self._is_pushing = True

        def listed(reply: Reply[list[DeadLetter]]) -> None:
            removed_ids = []
            for letter in reply.value or ():
                if not exact.is_exceeded or exact.user_to_evict(crowding) != user:
                    break
                exact.remove(user, letter.weight)
                removed_ids.append(letter.id)
            self._state.submit(DeleteLetters(tuple(removed_ids), self._membership.incarnation, True), deleted)

        def deleted(reply: Reply[list[str]]) -> None:
            self._is_pushing = False
            if reply.value is not None:
                shares.evicted_count += len(reply.value)
                shares.last_user = user
                self._query_usage()

        self._state.query(ListLetters(user=user, limit=PAGE_LETTERS), listed)

    # Encoding.

    def _decoded(self, letters: Iterable[DeadLetter]) -> Iterator[Letter]:
        """Yield the decoded dead letters. Those that cannot be decoded are logged and left out."""
        self._reader.ahead_secs = -self._time.correction
        for one in letters:
            try:
                why: dict[str, Any] = orjson.loads(one.reason)
                outcome = Outcome(Verdict(why["verdict"]), Reason(why["reason"]), why["text"])
                message = self._reader.decode_one(one.message)
                yield Letter(one.id, message, one.route, outcome, WallTime(one.at), bool(why["crossed"]))
            except Exception as error:
                contained("message", error, letter=one.id)


def _encode(outcome: Outcome, crossed: bool) -> bytes:
    verdict, reason, text = outcome
    return orjson.dumps(
        {"verdict": int(verdict), "reason": reason.value, "text": _storable(text), "crossed": crossed}
    )


def _storable(text: str) -> str:
    """Return a text of a peer without the characters that a database rejects."""
    return text.encode(errors="replace").decode().replace("\0", "")


def _split_ids(ids: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Split ids of dead letters into tuples of at most IDS_MAX, for one database operation each."""
    every = tuple(ids)
    for start in range(0, len(every), IDS_MAX):
        yield every[start : start + IDS_MAX]
