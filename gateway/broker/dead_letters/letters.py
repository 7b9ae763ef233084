"""Storage of dead letters: messages that no route, limit or target accepted, with the reason.

With a store they are written there, and a source is informed only when they are on disk, because a dead
letter is an accepted message. Messages that no route and no subscriber wanted (no route, NO_ROUTE) are only
held in memory: a device without subscribers is no loss, and must not wear out the disk. A message that a
queue had accepted before is a loss, and is written: its queue deletes it in the same transaction. Without a
store all of them are in memory. In both places there are limits, and every dead letter is counted by its
reason. At a limit, or beyond its user's part of the limit, a message stays with a source that can keep it;
without such a source the oldest dead letters of a user who has more than an equal part of the limit are
deleted. Replicas that share a cluster have common dead letters there; a store has those from before, and
those that no source waits for.

A dead letter has the message as its source sent it, or as its route built it for the target (`crossed`). In
the latter case CROSSED follows the name of the route in the store, because no name contains it. A dead letter
that does not have the whole message names the lost part at the end of its outcome's text (`with_loss`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.containment import contained
from gateway.model.message import Message, weight_of
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.shares import UserEntries, UserShares
from gateway.model.spooled_bodies import Spooled, is_lost
from gateway.model.times import WallTime
from gateway.store.letters import StoredDeadLetter
from gateway.store.store import Store

CROSSED: Final = ">"
BODY_LOST: Final = "the body was not stored"
PROPERTIES_LOST: Final = "the properties were not stored"
LOST_PARTS: Final = (BODY_LOST, PROPERTIES_LOST, "the message was not stored")
MEMORY: Final = "m"  # prefix of the ids of dead letters in memory
BODY_BYTES_MAX: Final = 16 * 1024 * 1024  # of a dead letter whose message had its body on disk
PAGE_LETTERS: Final = 200  # read at a time when all are searched
READ_BYTES_MAX: Final = (
    8 * 1024 * 1024
)  # of messages read from the store for one result, and one message more

Forward = Callable[[list[Message], str, Outcome, WallTime], None]

log = structlog.get_logger(limited=True)


class Letter(NamedTuple):
    """Dead letter: message, route ("" if none), outcome, and time in POSIX seconds.

    `crossed` is True if the message is as its route has built it for the target, and False if it is as
    received.
    """

    id: str
    message: Message
    route: str
    outcome: Outcome
    utc: WallTime
    crossed: bool

    @property
    def lost_part(self) -> str:
        """Text that names the part of the message that could not be stored; "" if it is complete."""
        return next((part for part in LOST_PARTS if self.outcome.text.endswith(f"; {part}")), "")


def with_loss(part: str, outcome: Outcome) -> Outcome:
    """Return `outcome` with a text that says which part of the message could not be stored.

    `part` is BODY_LOST or PROPERTIES_LOST.
    """
    return outcome._replace(text=f"{outcome.text}; {part}")


Letters = list[Letter]


class LocalLettersCallback(Protocol):
    """Callback that gets dead letters. `is_full` is True if a limit of bytes has ended the list early."""

    def __call__(self, letters: Letters, /, *, is_full: bool) -> None:
        """Accept the dead letters; with `is_full` there may be more."""


LETTERS_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "the limit on dead letters is reached: redrive or purge some"
)


class CommonLetters(Protocol):
    """Dead letters that all replicas of a cluster share."""

    shares: UserShares

    def has_room(self, messages: list[Message]) -> bool:
        """Return True if these messages fit into the total and per-user limits without deleting others."""

    def __len__(self) -> int:
        """Return the number of dead letters."""

    def add(
        self,
        messages: Iterable[Message],
        route: str,
        outcome: Outcome,
        *,
        crossed: bool,
        then: Callable[[], None] | None,
    ) -> None:
        """Store `messages` as dead letters. `then` is called when they are stored safely.

        `crossed` is True if the messages are as the route has built them for its target.
        """

    def is_letter_id(self, id: str) -> bool:
        """Return True if `id` can be the id of a shared dead letter. It need not exist."""

    def newest(
        self, count: int, route: str | None, bytes_max: int, then: Callable[[list[Letter]], None]
    ) -> None:
        """Call `then` with at most `count` dead letters, newest first.

        `route` selects those of one route; None means all. They end early with the one by which they reach
        `bytes_max` bytes.
        """

    def ids(self, route: str | None, then: Callable[[list[tuple[WallTime, str]]], None]) -> None:
        """Call `then` with times and ids of all dead letters of a route (None: of all), oldest first."""

    def find(self, ids: Iterable[str], bytes_max: int, then: Callable[[list[Letter]], None]) -> None:
        """Call `then` with those of the dead letters that exist, in this order.

        They end early with the one by which they reach `bytes_max` bytes.
        """

    def existing(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Call `then` with those of these ids whose dead letters exist, in this order."""

    def claim(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Claim dead letters, so that no other replica redrives them.

        Calls `then` with the ids of those that are claimed now.
        """

    def release_claims(self, ids: Iterable[str]) -> None:
        """Release the claim of this replica on these dead letters."""

    def delete(self, ids: Iterable[str], then: Callable[[], None]) -> None:
        """Delete dead letters. `then` is called when their deletion is stored safely."""

    def purge(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Delete dead letters, except those that another replica is redriving.

        `then` is called with the ids of the dead letters that were not deleted.
        """


def _shares_of(resource: str, letters: DeadLetters) -> UserShares:
    return UserShares(resource, count_max=letters.messages_max, bytes_max=letters.bytes_max)


def _is_unwanted(route: str, outcome: Outcome, was_accepted: bool) -> bool:
    """Return True if no route and no subscriber ever wanted the message, so that nothing is lost.

    `was_accepted` is True if a queue had accepted the message before.
    """
    return not route and not was_accepted and outcome.reason is Reason.NO_ROUTE


def _load_message(message: Message, *, is_last: bool) -> tuple[Message, bool] | None:
    """Return (message, True) with the body in memory, or another result if the body cannot be read.

    If the body is too large or lost, return (message with an empty body, False). If the body cannot be read
    now, return None, but with `is_last` (message with an empty body, False).
    """
    body = message.body
    if not isinstance(body, Spooled):
        return message, True
    data, why = b"", "larger than the maximum size of a dead letter"
    if body.size <= BODY_BYTES_MAX:
        try:
            data = body.data()
        except OSError as error:
            if not is_last and not is_lost(error):
                return None
            why = str(error)
    if not data:
        log.warning(
            "dead letter body not stored", client=message.sender.client, body_bytes=body.size, why=why
        )
    return message.with_body(data), bool(data)


def _after(count: int, then: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `then` when it has been called `count` times."""
    remaining = count

    def count_down() -> None:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            then()

    return count_down


class DeadLetters:
    """Storage of the newest dead letters of this gateway.

    Results are passed to callbacks, because they may have to be read from disk. `forward` is called with each
    new dead letter, to publish a copy. It is not called for unwanted messages (see `_is_unwanted`), which are
    in memory only.
    """

    def __init__(
        self,
        *,
        messages_max: int = 10_000,
        bytes_max: int = 64 * 1024 * 1024,
        store: Store | None = None,
        forward: Forward | None = None,
        common: CommonLetters | None = None,
        shares: UserShares | None = None,
    ) -> None:
        """Create the storage, which uses `common` or else `store`; without either it is in memory only.

        `messages_max` and `bytes_max` limit the unwanted messages, and the dead letters in memory. If there
        is neither a store nor `common`, `shares` replaces the limits of dead letters, and has limits for each
        user, too. The store and `common` have limits of their own.
        """
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.counted: Counter[tuple[str, str]] = Counter()  # (route, reason)
        self.refused = 0  # messages that stayed with their source, because there was no space
        self._forward = forward
        self._store = store
        self._common = common
        self._letters: dict[str, Letter] = {}  # in memory, the oldest first
        self._wanted: UserEntries[str] = UserEntries(shares or _shares_of("dead letters", self))
        self._unwanted: UserEntries[str] = UserEntries(_shares_of("unwanted messages", self))
        self._last = 0
        self._logged_refused = 0
        self._waiting: list[Callable[[], None]] = []  # called when the disk accepts dead letters again
        self._unread: list[Callable[..., None]] = []  # add letters whose bodies could not be read yet

    def __len__(self) -> int:
        common = 0 if self._common is None else len(self._common)
        return len(self._letters) + common + (0 if self._store is None else self._store.letters_count)

    @property
    def evicted_count(self) -> int:
        """Number of dead letters that were deleted because newer ones needed their space.

        Deleted messages that no route and no subscriber wanted are not counted.
        """
        common = 0 if self._common is None else self._common.shares.evicted_count
        stored = 0 if self._store is None else self._store.letters_crowded_out
        return self._wanted.shares.evicted_count + common + stored

    @property
    def unwanted_count(self) -> int:
        """Number of messages stored in memory that no route and no subscriber wanted."""
        return len(self._unwanted)

    def has_room_for(self, messages: list[Message], *, is_awaited: bool = True) -> bool:
        """Return True if these messages fit into the total and per-user limits without deleting others.

        `is_awaited` is False if their source settles them at once, without waiting until they are stored.
        """
        common = self._common_for(is_awaited=is_awaited)
        if common is not None:
            return common.has_room(messages)
        if self._store is not None:
            return self._store.has_room_for_letters(messages)
        return self._wanted.shares.has_room_for(messages)

    def _common_for(self, *, is_awaited: bool) -> CommonLetters | None:
        """Return the dead letters shared by replicas if messages must be stored there, otherwise None.

        With a store, messages whose source does not wait (`is_awaited` is False) are stored locally: the
        source settles them in the same transaction, so that they cannot be lost with the process.
        """
        return self._common if is_awaited or self._store is None else None

    @property
    def byte_count(self) -> int:
        """Size of all dead letters in bytes."""
        common = 0 if self._common is None else self._common.shares.total
        stored_count = self._wanted.shares.total + self._unwanted.shares.total
        return stored_count + common + (0 if self._store is None else self._store.letters_bytes)

    def add(
        self,
        messages: list[Message],
        route: str,
        outcome: Outcome,
        then: Callable[[], None] | None = None,
        *,
        crossed: bool = False,
        full: Callable[[Outcome], None] | None = None,
        was_accepted: bool = False,
    ) -> None:
        """Store `messages` as dead letters. `then` is called when they are stored safely.

        `crossed` is True if they are as the route has built them for its target, and `was_accepted` if a
        queue had accepted them, so that they would be lost otherwise. If there is no space, `full` is called
        instead with LETTERS_FULL, and the source keeps its messages. Without `full` the oldest dead letters
        are deleted.
        """
        unwanted = _is_unwanted(route, outcome, was_accepted)
        is_awaited = then is not None
        if full is not None and not unwanted and not self.has_room_for(messages, is_awaited=is_awaited):
            self.refused += len(messages)
            full(LETTERS_FULL)
            return
        self.counted[route, outcome.reason.value] += len(messages)
        self._add_with_bodies(messages, route, outcome, then, crossed=crossed, unwanted=unwanted)

    def _add_with_bodies(
        self,
        messages: list[Message],
        route: str,
        outcome: Outcome,
        then: Callable[[], None] | None,
        *,
        crossed: bool,
        unwanted: bool,
        is_last: bool = False,
    ) -> None:
        """Read the bodies of messages into memory, and store the messages as dead letters.

        Messages whose body cannot be read now are retried at the next tick; with `is_last` they are stored
        with an empty body instead. `unwanted` is the result of `_is_unwanted`; the other parameters are those
        of `add`.
        """
        whole: list[Message] = []
        bodiless: list[Message] = []
        unread: list[Message] = []
        for message in messages:
            held = _load_message(message, is_last=is_last)
            if held is None:
                unread.append(message)
            else:
                (whole if held[1] else bodiless).append(held[0])
        count = bool(whole) + bool(bodiless) + bool(unread)
        if count > 1 and then is not None:
            then = _after(count, then)
        add = partial(self._add_with_bodies, unread, route, outcome, then, crossed=crossed, unwanted=unwanted)
        if unread:
            self._unread.append(add)
        if whole or not count:
            self._add(whole, route, outcome, then, crossed=crossed, unwanted=unwanted)
        if bodiless:
            why = with_loss(BODY_LOST, outcome)
            self._add(bodiless, route, why, then, crossed=crossed, unwanted=unwanted)

    def _add(
        self,
        messages: list[Message],
        route: str,
        outcome: Outcome,
        then: Callable[[], None] | None,
        *,
        crossed: bool,
        unwanted: bool,
    ) -> None:
        """Store messages as dead letters, and forward copies. The parameters are those of `_add_with_bodies`.

        The bodies are in memory, or were lost.
        """
        is_awaited = then is not None
        utc = clock.utc()
        if self._forward is not None and not unwanted:
            try:
                self._forward(messages, route, outcome, utc)
            except Exception as error:  # the dead letters are stored nevertheless
                contained("message", error, route=route)
        common = self._common_for(is_awaited=is_awaited)
        if common is not None and not unwanted:
            common.add(messages, route, outcome, crossed=crossed, then=then)
            return
        if self._store is None or unwanted:
            entries = self._unwanted if unwanted else self._wanted
            self._store_in_memory(entries, messages, route, outcome, utc, crossed=crossed)
            if then is not None:
                then()
            return
        self._store.add_letters(messages, route + CROSSED if crossed else route, outcome)
        if then is not None:
            self._when_safe(then)

    def _store_in_memory(
        self,
        entries: UserEntries[str],
        messages: list[Message],
        route: str,
        outcome: Outcome,
        utc: WallTime,
        *,
        crossed: bool,
    ) -> None:
        """Store dead letters in memory, listed in `entries`. Delete others if a limit is exceeded."""
        for message in messages:
            self._last += 1
            id, user = f"{MEMORY}{self._last}", message.sender.user
            self._letters[id] = Letter(id, message, route, outcome, utc, crossed)
            entries.add(id, user, message.byte_count)
            while (crowded_out := entries.entry_to_evict(user)) is not None:
                self._forget(crowded_out)

    def _forget(self, id: str) -> None:
        """Delete a dead letter in memory, if there is one with this id."""
        if self._letters.pop(id, None) is not None and not self._wanted.discard(id):
            self._unwanted.discard(id)

    def _when_safe(self, then: Callable[[], None]) -> None:
        """Call `then` when the dead letters are on disk. If the disk fails, `tick` tries again."""
        assert self._store is not None

        def on_outcome(outcome: Outcome) -> None:
            if outcome is ACCEPTED:
                then()
            else:
                self._waiting.append(then)

        self._store.after_commit(on_outcome)

    def tick(self) -> None:
        """Retry what has failed: storing messages with unread bodies, and commits that sources wait for.

        Also logs how many messages were refused since the last log line.
        """
        self._add_unread(is_last=False)
        if self.refused > self._logged_refused:
            refused, self._logged_refused = self.refused - self._logged_refused, self.refused
            log.warning("messages left with sources, dead letters full", messages=refused)
        if self._waiting and self._store is not None and self._store.healthy:
            callbacks, self._waiting = self._waiting, []
            for then in callbacks:
                self._when_safe(then)

    def stop(self) -> None:
        """Store messages whose bodies could not be read, with empty bodies: the gateway is shutting down."""
        self._add_unread(is_last=True)

    def _add_unread(self, *, is_last: bool) -> None:
        unread, self._unread = self._unread, []
        for add in unread:
            add(is_last=is_last)

    # What is read.

    def newest(self, count: int, then: Callable[[Letters], None], *, route: str | None = None) -> None:
        """Call `then` with at most `count` dead letters, newest first.

        `route` selects those of one route; None means all. The result ends early with the dead letter from
        the store, or of all replicas, by which the result reaches READ_BYTES_MAX bytes.
        """
        common = self._common

        def on_own(own: Letters, *, is_full: bool) -> None:
            def on_shared(shared: Letters) -> None:
                # Each side that is full may have newer ones than these.
                ends = [own[-1].utc] if is_full else []
                ends += [shared[-1].utc] if _reaches_limit(shared) else []
                found = _newest_of(shared, own, count)
                then([letter for letter in found if letter.utc >= max(ends)] if ends else found)

            if common is None:
                then(own)
            else:
                common.newest(count, route, READ_BYTES_MAX, on_shared)

        self._newest_local(count, route, on_own)

    def _newest_local(self, count: int, route: str | None, then: LocalLettersCallback) -> None:
        """Call `then` with the newest dead letters that are stored by this process only.

        Its argument `is_full` is True if the result was ended early by READ_BYTES_MAX.
        """
        local_letters = [
            letter for letter in reversed(self._letters.values()) if route is None or letter.route == route
        ]
        if self._store is None:
            then(local_letters[:count], is_full=False)
            return

        def on_stored(stored: Letters, *, is_full: bool) -> None:
            nonlocal local_letters
            if is_full:
                local_letters = [letter for letter in local_letters if letter.utc >= stored[-1].utc]
            then(_newest_of(stored, local_letters, count), is_full=is_full)

        self._pages([], route, None, count, on_stored)

    def _pages(
        self, found: Letters, route: str | None, before: int | None, count: int, then: LocalLettersCallback
    ) -> None:
        """Read dead letters from the store, newest first, until `found` has `count` of the route.

        Reading begins with the newest one that is older than the id `before`; None begins with the newest of
        all. `route` None accepts all routes. Calls `then` with the result, and with `is_full`, which is True
        if it has READ_BYTES_MAX bytes.
        """
        store = self._store
        assert store is not None
        bytes_max = READ_BYTES_MAX - weight_of([letter.message for letter in found])
        if bytes_max <= 0 or len(found) >= count:
            then(found[:count], is_full=bytes_max <= 0)
            return

        def read(letters: list[StoredDeadLetter]) -> None:
            made = [_letter(one) for one in letters]
            found.extend(one for one in made if route is None or one.route == route)
            if letters:
                self._pages(found, route, letters[-1].id, count, then)
            else:
                then(found, is_full=False)

        store.newest_letters(PAGE_LETTERS, read, before=before, bytes_max=bytes_max)
        store.flush()

    def ids(self, route: str | None, then: Callable[[list[str]], None]) -> None:
        """Call `then` with the ids of all dead letters of a route (None: of all), oldest first."""
        common = self._common
        found = [
            (letter.utc, letter.id)
            for letter in self._letters.values()
            if route is None or letter.route == route
        ]

        def on_shared(shared: list[tuple[WallTime, str]]) -> None:
            then([id for _, id in sorted((*found, *shared), key=lambda one: one[0])])

        def on_stored(stored: list[tuple[int, WallTime, str]]) -> None:
            found.extend(
                (utc, str(id))
                for id, utc, its_route in stored
                if route is None or its_route.removesuffix(CROSSED) == route
            )
            if common is None:
                on_shared([])
            else:
                common.ids(route, on_shared)

        if self._store is None:
            on_stored([])
        else:
            self._store.letter_routes(on_stored)
            self._store.flush()

    def find(self, ids: Iterable[str], then: Callable[[Letters], None]) -> None:
        """Call `then` with the existing dead letters of these ids, in this order.

        The result ends early with the dead letter from the store, or of all replicas, by which it reaches
        READ_BYTES_MAX bytes.
        """
        requested_ids = list(ids)
        by_id = dict(self._letters)
        stored, common = _stored(requested_ids), self._common

        def on_found(letters: Letters) -> None:
            by_id.update((letter.id, letter) for letter in letters)
            if is_full(letters):
                del requested_ids[requested_ids.index(letters[-1].id) + 1 :]
            then([by_id[id] for id in requested_ids if id in by_id])

        def on_stored(letters: list[StoredDeadLetter]) -> None:
            by_id.update((str(one.id), _letter(one)) for one in letters)
            if is_full(letters):
                del requested_ids[requested_ids.index(str(letters[-1].id)) + 1 :]
            if common is None or not (shared := self._shared(requested_ids)):
                on_found([])
            else:
                common.find(shared, READ_BYTES_MAX, on_found)

        if self._store is None or not stored:
            on_stored([])
        else:
            self._store.find_letters(stored, on_stored, bytes_max=READ_BYTES_MAX)
            self._store.flush()

    def existing(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """Call `then` with those of these ids whose dead letters exist, in this order; no message is read."""
        requested_ids = list(ids)
        found, common = set(self._letters), self._common

        def on_shared(shared: list[str]) -> None:
            found.update(shared)
            then([id for id in requested_ids if id in found])

        def on_stored(stored: list[tuple[int, WallTime, str]]) -> None:
            found.update(str(id) for id, _, _ in stored)
            if common is None or not (shared := self._shared(requested_ids)):
                on_shared([])
            else:
                common.existing(shared, on_shared)

        if self._store is None or not _stored(requested_ids):
            on_stored([])
        else:
            self._store.letter_routes(on_stored)
            self._store.flush()

    def claim(self, letters: Letters, then: Callable[[Letters, Letters], None]) -> None:
        """Claim dead letters before they are redriven, so that no other replica redrives them.

        Calls `then` with two lists: the dead letters that are claimed now, and those that another replica
        redrives or has redriven. A claim ends when the dead letter is deleted, or when `release_claims` is
        called.
        """
        shared, common = self._shared(letter.id for letter in letters), self._common
        if common is None or not shared:
            then(letters, [])
            return

        def on_claimed(got: list[str]) -> None:
            lost = set(shared).difference(got)
            then(
                [letter for letter in letters if letter.id not in lost],
                [letter for letter in letters if letter.id in lost],
            )

        common.claim(shared, on_claimed)

    def release_claims(self, ids: Iterable[str]) -> None:
        """Release claimed dead letters that are no longer being redriven."""
        if self._common is not None:
            self._common.release_claims(self._shared(ids))

    def _shared(self, ids: Iterable[str]) -> list[str]:
        return [] if self._common is None else [id for id in ids if self._common.is_letter_id(id)]

    def delete(self, ids: Iterable[str], then: Callable[[Outcome], None] | None = None) -> None:
        """Delete the dead letters with these ids.

        `then` is called with the outcome when the deletion is on disk or has failed.
        """
        removed_ids = set(ids)
        shared = self._shared(removed_ids)
        if shared and self._common is not None:
            removed_ids.difference_update(shared)
            self._common.delete(shared, partial(self._delete, removed_ids, then))
        else:
            self._delete(removed_ids, then)

    def purge(self, ids: Iterable[str], then: Callable[[Outcome, list[str]], None]) -> None:
        """Delete the dead letters with these ids, except those that another replica is redriving.

        `then` is called with the outcome, when the deletion is on disk or has failed, and with the ids of the
        dead letters that were not deleted.
        """
        removed_ids = set(ids)
        shared = self._shared(removed_ids)

        def purged(stay: list[str]) -> None:
            self._delete(removed_ids.difference(shared), lambda outcome: then(outcome, stay))

        if shared and self._common is not None:
            self._common.purge(shared, purged)
        else:
            purged([])

    def _delete(self, removed_ids: set[str], then: Callable[[Outcome], None] | None) -> None:
        for id in removed_ids:
            self._forget(id)
        if self._store is not None and (stored := _stored(removed_ids)):
            self._store.delete_letters(stored)
            if then is not None:
                self._store.after_commit(then)
                self._store.flush()  # a caller waits; perhaps outside a pass of the event loop
        elif then is not None:
            then(ACCEPTED)


def _newest_of(some: Letters, others: Letters, count: int) -> Letters:
    """Return the `count` newest dead letters of both lists, newest first."""
    return sorted((*some, *others), key=lambda letter: -letter.utc)[:count]


def is_full(letters: Sequence[Letter | StoredDeadLetter]) -> bool:
    """Return True if READ_BYTES_MAX may have ended a result of `DeadLetters.newest` or `find` early."""
    return _reaches_limit(letters)


def _reaches_limit(letters: Sequence[Letter | StoredDeadLetter]) -> bool:
    return weight_of([letter.message for letter in letters]) >= READ_BYTES_MAX


def _stored(ids: Iterable[str]) -> list[int]:
    """Return those ids that can be ids of dead letters in the store, as numbers."""
    return [int(id) for id in ids if id.isascii() and id.isdigit() and len(id) < 19 and str(int(id)) == id]


def _letter(stored: StoredDeadLetter) -> Letter:
    crossed = stored.route.endswith(CROSSED)
    route = stored.route.removesuffix(CROSSED)
    return Letter(str(stored.id), stored.message, route, stored.outcome, stored.utc, crossed)
