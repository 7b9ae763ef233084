"""Dead letters of all replicas: a log of letters, and of what becomes of them.

Every replica reads it, so each knows the same letters, the newest within `limits`, and any of them lists,
redrives and purges. A letter counts when its record has come back; before that its source is not told.

Whoever redrives says so first, and does it when the log has that: of two replicas the first one on the log
does. A claim holds for twenty seconds, and is renewed while the message is on its way; of a replica that is
killed in between it runs out, and the letter is still there. If the target had taken the message by then,
whoever redrives the letter again sends it twice.

The stream keeps so many octets of everything, be it purged by now. So a letter is written again before half
of them lie behind it, by whoever looks first; by its id it is known to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from struct import error as StructError
from typing import Any, Final

import orjson

from gateway.broker.dead_letters import Letter
from gateway.engine.logs import LIFE_CHARS, Record, SharedLog
from gateway.errors import StoreError
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import UserEntries, UserShares
from gateway.model.times import Monotonic, WallTime
from gateway.store.messages import MessageReader, encode_sound

CLAIM_SECS: Final = 20.0
RENEW_SECS: Final = 5.0
LOOK_SECS: Final = 60.0  # between two looks at what has to be written again
DELETED_MAX: Final = 100_000  # ids that are known to be gone, should their letters come again
IDS_MAX: Final = 1_000  # in one record
LETTER: Final = b"L"
DELETED: Final = b"D"
CLAIMED: Final = b"C"
FREED: Final = b"F"
SIZE: Final = Struct(">I")
Told = Callable[[], None]
Claimed = Callable[[list[str]], None]
"""Hears which of the letters are one's own to redrive."""


class SharedLetters:
    """The dead letters on the cluster, as this replica has read them."""

    def __init__(
        self,
        log: SharedLog,
        *,
        messages_max: int,
        octets_max: int,
        stream_octets_max: int,
        shares: UserShares | None = None,
    ) -> None:
        """`shares` has the limits as well, with the part that one user may have."""
        self.shares = shares or UserShares("dead letters", count_max=messages_max, octets_max=octets_max)
        self._entries: UserEntries[str] = UserEntries(self.shares)
        self._log = log
        self._messages_max = messages_max
        self._octets_max = octets_max
        self._stream_octets_max = stream_octets_max
        self._letters: dict[str, tuple[Letter, int]] = {}  # with how much of the log was behind it
        self._deleted: dict[str, None] = {}
        self._claims: dict[str, tuple[str, WallTime]] = {}  # who redrives which, until when
        self._mine: dict[str, None] = {}  # what is being redriven here
        self._asked: dict[int, Claimed] = {}  # by the number of the record
        self._lasts = 0
        self._renew_at = self._look_at = Monotonic(0.0)
        self._reader = MessageReader()

    def has_room(self, messages: list[Message]) -> bool:
        """Return True if no letter has to go for these, and no user exceeds its share, counting those that
        are not read back yet."""
        return self.shares.has_room_for(messages, self._log.unlogged_octets, len(self._log))

    def __len__(self) -> int:
        return len(self._letters)

    # What the dead letters ask.

    def add(
        self,
        messages: Iterable[Message],
        route: str,
        outcome: Outcome,
        utc: WallTime,
        *,
        crossed: bool,
        then: Told | None,
    ) -> None:
        """Keep `messages`; `then` is called when the cluster has them."""
        given = list(messages)
        for at, message in enumerate(given):
            self._lasts += 1
            letter = Letter(f"{self._log.life}-{self._lasts}", message, route, outcome, utc, crossed)
            self._log.put(_encode(letter), then if at == len(given) - 1 else None)
        while len(self._log) > self._messages_max or self._log.unlogged_octets > self._octets_max:
            if not self._log.drop(LETTER):
                break
            self.shares.pushed_out += 1

    def __iter__(self) -> Iterator[Letter]:
        """The oldest first."""
        return (letter for letter, _ in self._letters.values())

    def find(self, ids: Iterable[str]) -> list[Letter]:
        """Those of them that there are."""
        return [self._letters[id][0] for id in ids if id in self._letters]

    def is_one(self, id: str) -> bool:
        """Whether this is the id of such a letter, be it here or not."""
        return len(id) > LIFE_CHARS and id[LIFE_CHARS] == "-"

    def delete(self, ids: Iterable[str], then: Told) -> None:
        """Forget letters, at every replica; `then` is called when the cluster knows."""
        gone = list(ids)
        for id in gone:
            self._mine.pop(id, None)
        if not gone:
            then()
        for start in range(0, len(gone), IDS_MAX):
            some = gone[start : start + IDS_MAX]
            self._say(DELETED, some, then if start + IDS_MAX >= len(gone) else None)

    def claim(self, ids: Iterable[str], then: Claimed) -> None:
        """`then` hears which of them no other replica redrives, and are there."""
        self._asked[self._say(CLAIMED, list(ids))] = then

    def free(self, ids: Iterable[str]) -> None:
        """They are not on their way any more."""
        freed = [id for id in ids if id in self._mine]
        for id in freed:
            del self._mine[id]
        if freed:
            self._say(FREED, freed)

    def _say(self, kind: bytes, ids: list[str], then: Told | None = None) -> int:
        return self._log.put(kind + orjson.dumps(ids), then)

    # What the log asks.

    def begin_anew(self) -> None:
        """All is read again."""
        self._letters.clear()
        self._entries.clear()
        self._claims.clear()
        self._deleted.clear()

    def lost(self) -> None:
        """Who has asked something is answered when the cluster is there again."""

    def stop(self) -> None:
        """The process ends: others may redrive what it has not."""
        self.free(list(self._mine))

    def tick(self, now: Monotonic) -> None:
        """What is on its way stays claimed, and what is far behind is written again."""
        if now >= self._renew_at:
            self._renew_at = now + RENEW_SECS
            mine = list(self._mine)
            for start in range(0, len(mine), IDS_MAX):
                self._say(CLAIMED, mine[start : start + IDS_MAX])
        if now >= self._look_at:
            self._look_at = now + LOOK_SECS
            self._log.read_up(self._write_again)

    def _write_again(self) -> None:
        far = self._log.octets_read - self._stream_octets_max // 2
        for letter, behind in list(self._letters.values()):
            if behind < far:
                self._log.put(_encode(letter))

    def apply(self, record: Record) -> None:
        """Raises what a record that is none leads to; it costs that record alone."""
        kind, said = record.body[:1], record.body[1:]
        if kind == LETTER:
            self._take(record, said)
            return
        if kind not in (DELETED, CLAIMED, FREED):
            self._log.passed_over += 1
            return
        ids: list[str] = orjson.loads(said)
        if kind == DELETED:
            for id in ids:
                self._forget(id)
        elif kind == CLAIMED:
            self._claim(record, ids)
        else:
            for id in ids:
                if self._claims.get(id, ("",))[0] == record.life:
                    del self._claims[id]

    def _claim(self, record: Record, ids: list[str]) -> None:
        got: list[str] = []
        for id in ids:
            holder, until = self._claims.get(id, (record.life, record.utc))
            if id in self._letters and (holder == record.life or until <= record.utc):
                self._claims[id] = record.life, record.utc + CLAIM_SECS
                got.append(id)
        then = self._asked.pop(record.number, None) if record.life == self._log.life else None
        if then is None:
            return
        # The cluster was away: another replica may come next.
        if record.utc + CLAIM_SECS / 2 < self._log.time.utc():
            if got:
                self._say(FREED, got)
            got = []
        self._mine.update(dict.fromkeys(got))
        then(got)

    def _take(self, record: Record, said: bytes) -> None:
        letter = self._decode(said)
        known = self._letters.get(letter.id)
        if known is not None:
            self._letters[letter.id] = known[0], record.behind
            return
        if letter.id in self._deleted:
            return
        self._letters[letter.id] = letter, record.behind
        user = letter.message.sender.user
        self._entries.add(letter.id, user, letter.message.octets)
        while (gone := self._entries.crowded_out(user)) is not None:
            self._forget(gone)
            self.shares.pushed_out -= record.life != self._log.life  # counted by the replica that wrote it

    def _forget(self, id: str) -> None:
        self._letters.pop(id, None)
        self._entries.discard(id)
        self._claims.pop(id, None)
        self._deleted[id] = None
        if len(self._deleted) > DELETED_MAX:
            del self._deleted[next(iter(self._deleted))]

    def _decode(self, said: bytes) -> Letter:
        """Raises StoreError for what is no letter."""
        try:
            (size,) = SIZE.unpack_from(said)
            head: dict[str, Any] = orjson.loads(said[SIZE.size : SIZE.size + size])
            outcome = Outcome(Verdict(head["verdict"]), Reason(head["reason"]), head["text"])
            message = self._reader.decode_one(said[SIZE.size + size :])
            return Letter(
                head["id"], message, head["route"], outcome, WallTime(head["utc"]), bool(head["crossed"])
            )
        except (StructError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"a dead letter on the cluster cannot be read: {error}") from error


def _encode(letter: Letter) -> bytes:
    verdict, reason, text = letter.outcome
    head = orjson.dumps(
        {
            "id": letter.id,
            "utc": letter.utc,
            "route": letter.route,
            "verdict": int(verdict),
            "reason": reason.value,
            "text": text.encode(errors="replace").decode(),  # a peer may have had a hand in it
            "crossed": letter.crossed,
        }
    )
    return LETTER + SIZE.pack(len(head)) + head + encode_sound(letter.message)
