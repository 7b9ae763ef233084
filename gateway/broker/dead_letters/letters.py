"""Messages that no route, limit or target would take, kept with the reason.

With a store they are written there, and a source is told only when they are on disk: a dead letter has been
accepted. What no route and no subscriber wanted (no route, NO_ROUTE) is held in memory only: a device that
nobody listens to is no loss, and must not wear out the disk. Without a store all of them are in memory. In
either place there are limits, and every one is counted by its reason. At a limit, or beyond its user's share,
a message stays with the source that can keep it; where there is no such source the oldest letters of a user
who has more than an equal part go. Replicas that share a
cluster have theirs in common, on that; a store has those from before.

A letter holds the message as it came from its source, or as its route had made it for the target; `crossed`
tells which. In the store's column for the route the latter has CROSSED behind the name, where no name has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.containment import contained
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.shares import UserEntries, UserShares
from gateway.model.spooled import Spooled
from gateway.model.times import WallTime
from gateway.store.letters import DeadLetter
from gateway.store.store import Store

CROSSED: Final = ">"
MEMORY: Final = "m"  # the ids of letters in memory begin with it
BODY_OCTETS_MAX: Final = 16 * 1024 * 1024  # of one whose message had its body on disk
PAGE_LETTERS: Final = 200  # read at a time when all are looked through

Forward = Callable[[list[Message], str, Outcome, WallTime], None]

log = structlog.get_logger(limited=True)


class Letter(NamedTuple):
    """A message, the route that it took ("" when none), what was said of it, and when (UTC seconds)."""

    id: str
    message: Message
    route: str
    outcome: Outcome
    utc: WallTime
    crossed: bool


Letters = list[Letter]
LETTERS_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "there are as many dead letters as may be: redrive or purge some"
)


class CommonLetters(Protocol):
    """Letters that replicas have in common."""

    shares: UserShares

    def has_room(self, messages: list[Message]) -> bool:
        """Return True if no letter has to go for these, and no user exceeds its share."""

    def __len__(self) -> int:
        """How many there are."""

    def add(
        self,
        messages: Iterable[Message],
        route: str,
        outcome: Outcome,
        *,
        crossed: bool,
        then: Callable[[], None] | None,
    ) -> None:
        """Keep `messages`; `then` is called when they are safe."""

    def is_one(self, id: str) -> bool:
        """Whether this is the id of such a letter, be it there or not."""

    def newest(self, count: int, route: str | None, then: Callable[[list[Letter]], None]) -> None:
        """Call `then` with at most `count` letters, newest first, of one route, or all."""

    def ids(self, route: str | None, then: Callable[[list[tuple[WallTime, str]]], None]) -> None:
        """Call `then` with the times and ids of all letters of a route (None: of all), the oldest first."""

    def find(self, ids: Iterable[str], then: Callable[[list[Letter]], None]) -> None:
        """Call `then` with those of these letters that there are, in any order."""

    def claim(self, ids: Iterable[str], then: Callable[[list[str]], None]) -> None:
        """`then` hears which of them are this replica's to redrive now."""

    def free(self, ids: Iterable[str]) -> None:
        """They are so no longer."""

    def delete(self, ids: Iterable[str], then: Callable[[], None]) -> None:
        """Forget letters; `then` is called when that is safe."""


def _shares_of(what: str, letters: DeadLetters) -> UserShares:
    return UserShares(what, count_max=letters.messages_max, octets_max=letters.octets_max)


def _unwanted(route: str, outcome: Outcome) -> bool:
    """No route and no subscriber wanted it: that is no loss."""
    return not route and outcome.reason is Reason.NO_ROUTE


def _held(message: Message) -> Message:
    """A message that is on disk, in memory; of one that is too large for that, its properties."""
    body = message.body
    assert isinstance(body, Spooled)
    octets, why = b"", "larger than a dead letter may be"
    if body.size <= BODY_OCTETS_MAX:
        try:
            octets = body.octets()
        except OSError as error:
            why = str(error)
    if not octets:
        log.warning(
            "the body of a dead letter is not kept", client=message.sender.client, octets=body.size, why=why
        )
    return message.holding(octets)


class DeadLetters:
    """The newest dead letters. What is read of them comes to a function, for the disk may have to be asked.

    `forward` is given what becomes a dead letter, for a copy elsewhere; not what is in memory only because
    nobody wanted it.
    """

    def __init__(
        self,
        *,
        messages_max: int = 10_000,
        octets_max: int = 64 * 1024 * 1024,
        store: Store | None = None,
        forward: Forward | None = None,
        common: CommonLetters | None = None,
        shares: UserShares | None = None,
    ) -> None:
        """The limits are those in memory: of letters, which `shares` has instead if there is neither a store
        nor `common`, and of what nobody wanted. The store has its own, and what replicas have in `common`."""
        self.messages_max = messages_max
        self.octets_max = octets_max
        self.counted: Counter[tuple[str, str]] = Counter()  # (route, reason)
        self.refused = 0  # messages that stayed with their source, since there was no room
        self._forward = forward
        self._store = store
        self._common = common
        self._letters: dict[str, Letter] = {}  # in memory, the oldest first
        self._wanted: UserEntries[str] = UserEntries(shares or _shares_of("dead letters", self))
        self._unwanted: UserEntries[str] = UserEntries(_shares_of("unwanted messages", self))
        self._last = 0
        self._told_refused = 0
        self._owed: list[Callable[[], None]] = []  # told when the disk takes letters again

    def __len__(self) -> int:
        common = 0 if self._common is None else len(self._common)
        return len(self._letters) + common + (0 if self._store is None else self._store.letters_count)

    @property
    def crowded_out(self) -> int:
        """Letters that newer ones have taken the place of, for good; without those that nobody had wanted."""
        common = 0 if self._common is None else self._common.shares.pushed_out
        stored = 0 if self._store is None else self._store.letters_crowded_out
        return self._wanted.shares.pushed_out + common + stored

    @property
    def unwanted(self) -> int:
        """Messages among those in memory that no route and no subscriber wanted."""
        return len(self._unwanted)

    def has_room_for(self, messages: list[Message]) -> bool:
        """Return True if no letter that somebody wanted has to go for these, and no user who sent them has
        more than its share then."""
        if self._common is not None:
            return self._common.has_room(messages)
        if self._store is not None:
            return self._store.has_room_for_letters(messages)
        return self._wanted.shares.has_room_for(messages)

    @property
    def octets(self) -> int:
        """What all letters weigh."""
        common = 0 if self._common is None else self._common.shares.total
        held = self._wanted.shares.total + self._unwanted.shares.total
        return held + common + (0 if self._store is None else self._store.letters_octets)

    def add(
        self,
        messages: list[Message],
        route: str,
        outcome: Outcome,
        then: Callable[[], None] | None = None,
        *,
        crossed: bool = False,
        full: Callable[[Outcome], None] | None = None,
    ) -> None:
        """Keep `messages`. `then` is called when they are safe.

        `crossed`: they are as the route made them for its target. `full` is called instead, with
        LETTERS_FULL, when there is no room: the source keeps its messages. Without it the oldest letters
        make room.
        """
        unwanted = _unwanted(route, outcome)
        if full is not None and not unwanted and not self.has_room_for(messages):
            self.refused += len(messages)
            full(LETTERS_FULL)
            return
        self.counted[route, outcome.reason.value] += len(messages)
        messages = [_held(message) if isinstance(message.body, Spooled) else message for message in messages]
        utc = clock.utc()
        if self._forward is not None and not unwanted:
            try:
                self._forward(messages, route, outcome, utc)
            except Exception as error:  # the letters are kept all the same
                contained("message", error, route=route)
        if self._common is not None and not unwanted:
            self._common.add(messages, route, outcome, crossed=crossed, then=then)
            return
        if self._store is None or unwanted:
            self._hold(messages, route, outcome, utc, crossed=crossed)
            if then is not None:
                then()
            return
        self._store.add_letters(messages, route + CROSSED if crossed else route, outcome)
        if then is not None:
            self._when_safe(then)

    def _hold(
        self, messages: list[Message], route: str, outcome: Outcome, utc: WallTime, *, crossed: bool
    ) -> None:
        entries = self._unwanted if _unwanted(route, outcome) else self._wanted
        for message in messages:
            self._last += 1
            id, user = f"{MEMORY}{self._last}", message.sender.user
            self._letters[id] = Letter(id, message, route, outcome, utc, crossed)
            entries.add(id, user, message.octets)
            while (gone := entries.crowded_out(user)) is not None:
                self._forget(gone)

    def _forget(self, id: str) -> None:
        """Forget a letter in memory, if there is one with this id."""
        if self._letters.pop(id, None) is not None and not self._wanted.discard(id):
            self._unwanted.discard(id)

    def _when_safe(self, then: Callable[[], None]) -> None:
        """Letters outlast a full disk in memory, but their sources wait until they are on it."""
        assert self._store is not None

        def told(outcome: Outcome) -> None:
            if outcome is ACCEPTED:
                then()
            else:
                self._owed.append(then)

        self._store.after_commit(told)

    def tick(self) -> None:
        """Once a second: confirm letters to their sources when the disk takes letters again, and log how many
        messages had to stay with their sources."""
        if self.refused > self._told_refused:
            refused, self._told_refused = self.refused - self._told_refused, self.refused
            log.warning("dead letters are full, sources keep their messages", times=refused)
        if self._owed and self._store is not None and self._store.healthy:
            owed, self._owed = self._owed, []
            for then in owed:
                self._when_safe(then)

    # What is read.

    def newest(self, count: int, then: Callable[[Letters], None], *, route: str | None = None) -> None:
        """`then` gets at most `count` letters, newest first; of one route, or all."""
        common = self._common
        if common is None:
            self._own(count, route, then)
            return

        def found(own: Letters) -> None:
            def merged(shared: Letters) -> None:
                then(sorted((*shared, *own), key=lambda letter: -letter.utc)[:count])

            common.newest(count, route, merged)

        self._own(count, route, found)

    def _own(self, count: int, route: str | None, then: Callable[[Letters], None]) -> None:
        """Return the same of the letters that are this process's alone."""
        held = [
            letter for letter in reversed(self._letters.values()) if route is None or letter.route == route
        ]
        if self._store is None:
            then(held[:count])
            return

        def merged(stored: Letters) -> None:
            then(sorted((*stored, *held[:count]), key=lambda letter: -letter.utc)[:count])

        self._pages([], route, None, count, merged)

    def _pages(
        self,
        found: Letters,
        route: str | None,
        before: int | None,
        count: int,
        then: Callable[[Letters], None],
    ) -> None:
        """Read on, older than the letter with id `before`, until `count` have been found."""
        store = self._store
        assert store is not None

        def read(letters: list[DeadLetter]) -> None:
            made = [_letter(one) for one in letters]
            found.extend(one for one in made if route is None or one.route == route)
            if len(letters) < PAGE_LETTERS or len(found) >= count:
                then(found[:count])
            else:
                self._pages(found, route, letters[-1].id, count, then)

        store.newest_letters(PAGE_LETTERS, read, before=before)
        store.flush()

    def ids(self, route: str | None, then: Callable[[list[str]], None]) -> None:
        """`then` gets the ids of all letters of a route (None: of all), the oldest first."""
        common = self._common

        def found(own: Letters) -> None:
            ours = [(letter.utc, letter.id) for letter in reversed(own)]

            def merged(shared: list[tuple[WallTime, str]]) -> None:
                then([id for _, id in sorted((*ours, *shared), key=lambda one: one[0])])

            if common is None:
                merged([])
            else:
                common.ids(route, merged)

        stored = 0 if self._store is None else self._store.letters_count
        self._own(len(self._letters) + stored, route, found)

    def find(self, ids: Iterable[str], then: Callable[[Letters], None]) -> None:
        """`then` gets the letters with these ids that there are, in this order."""
        wanted = list(ids)
        known = dict(self._letters)
        stored, shared, common = _stored(wanted), self._shared(wanted), self._common

        def found(letters: Letters) -> None:
            known.update((letter.id, letter) for letter in letters)
            then([known[id] for id in wanted if id in known])

        def merged(letters: list[DeadLetter]) -> None:
            known.update((str(one.id), _letter(one)) for one in letters)
            if common is None or not shared:
                found([])
            else:
                common.find(shared, found)

        if self._store is None or not stored:
            merged([])
        else:
            self._store.find_letters(stored, merged)
            self._store.flush()

    def claim(self, letters: Letters, then: Callable[[Letters, Letters], None]) -> None:
        """Before letters are redriven: `then` gets those that may be, and those that another replica has on
        their way, or is done with. What is not deleted then has to be freed."""
        shared, common = self._shared(letter.id for letter in letters), self._common
        if common is None or not shared:
            then(letters, [])
            return

        def claimed(got: list[str]) -> None:
            lost = set(shared).difference(got)
            then(
                [letter for letter in letters if letter.id not in lost],
                [letter for letter in letters if letter.id in lost],
            )

        common.claim(shared, claimed)

    def free(self, ids: Iterable[str]) -> None:
        """Letters that were claimed are not on their way any more, and stay."""
        if self._common is not None:
            self._common.free(self._shared(ids))

    def _shared(self, ids: Iterable[str]) -> list[str]:
        return [] if self._common is None else [id for id in ids if self._common.is_one(id)]

    def delete(self, ids: Iterable[str], then: Callable[[Outcome], None] | None = None) -> None:
        """Forget the letters with these ids. `then` hears when that is on disk, or the disk refuses."""
        gone = set(ids)
        shared = self._shared(gone)
        if shared and self._common is not None:
            gone.difference_update(shared)
            self._common.delete(shared, partial(self._delete, gone, then))
        else:
            self._delete(gone, then)

    def _delete(self, gone: set[str], then: Callable[[Outcome], None] | None) -> None:
        for id in gone:
            self._forget(id)
        if self._store is not None and (stored := _stored(gone)):
            self._store.delete_letters(stored)
            if then is not None:
                self._store.after_commit(then)
                self._store.flush()  # somebody waits; this may not be within a wake-up
        elif then is not None:
            then(ACCEPTED)


def _stored(ids: Iterable[str]) -> list[int]:
    """The ids that can be of letters in the store."""
    return [int(id) for id in ids if id.isascii() and id.isdigit() and len(id) < 19]


def _letter(stored: DeadLetter) -> Letter:
    crossed = stored.route.endswith(CROSSED)
    route = stored.route.removesuffix(CROSSED)
    return Letter(str(stored.id), stored.message, route, stored.outcome, stored.utc, crossed)
