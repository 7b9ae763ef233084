"""Ids of deduplicating routes, which all replicas know: a log of whose is on its way, and what was accepted.

A message with an id that nobody is known to have had is claimed first, and crosses when the claim has come
back: of two replicas that get the same id in the same moment the first one on the log has it, and there is no
time in between. What was accepted is on the log before its source is told. So one id crosses once while
replicas live. Twice it may cross when its replica is lost between the target's confirm and the record of it:
as with one gateway, for the sender has heard nothing and sends again.

Claims of a replica that is not heard of count no longer: whoever has some says every few seconds that it
lives. One that was frozen for longer than that, and wakes, may deliver what another has delivered meanwhile.

Ids are on the log, and in memory, as hashes of 16 octets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from hashlib import blake2b
from struct import Struct
from typing import Final

from gateway import clock
from gateway.broker.deduplication import UNSETTLED, Deduplication, Guard, Ids, PassedBatch, RouteEnd
from gateway.broker.poison import poisoned
from gateway.engine.logs import Record, SharedLog
from gateway.errors import RemoteProtocolError
from gateway.mapping.routes import Route
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic

ID_OCTETS: Final = 16
ALIVE_SECS: Final = 5.0  # between signs of life, while there are claims
AGAIN_SECS: Final = 60.0  # after which claims are said again
SILENT_SECS: Final = 20.0  # besides the time that clients stay, after which claims count no longer
LIVES_MAX: Final = 1_024  # that are remembered; of more, the one that was heard of longest ago goes
IDS_MAX: Final = 10_000  # in one record
IDS_OF_OTHERS_MAX: Final = 1_000_000  # of a route that is in no mapping here
CLAIMED: Final = b"C"
TAKEN: Final = b"T"
FREED: Final = b"F"
ALIVE: Final = b"A"
GONE: Final = b"G"
HEAD: Final = Struct(">cdH")  # kind, until when (UTC), octets of the route's name

AWAY: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the cluster, which knows the ids of this route, is away"
)


class Answer(Enum):
    """What has become of a claim."""

    OURS = "ours"
    OPEN = "open"  # at another replica
    ACCEPTED = "accepted"
    UNKNOWN = "unknown"  # the cluster was lost before it was known


Claim = tuple[int, str, Message]
"""Position in the part, id, message."""


class SharedIds(Deduplication):
    """The ids of all routes, as this replica has read them."""

    def __init__(self, log: SharedLog, silent_secs: float, utc: Callable[[], float] = clock.utc) -> None:
        """`silent_secs`: how long clients of a replica stay that does not reach the cluster."""
        super().__init__(None, utc)
        self.log = log
        self._silent_secs = silent_secs + SILENT_SECS
        self._claims: dict[str, dict[str, str]] = {}  # by route: whose an id is
        self._heard: dict[str, float] = {}  # when of each life, in its own time
        self._asked: dict[int, Callable[[list[Answer]], None]] = {}  # by the number of the record
        self._limits: dict[str, int] = {}  # by route
        self.readable_secs = 0.0  # how far back the log says something that matters
        self._alive_at = self._again_at = Monotonic(0.0)

    def use(self, routes: Iterable[Route]) -> None:
        """These are in force."""
        rules = {route.name: route.rule.deduplicate for route in routes}
        windows = [rule.window_secs for rule in rules.values() if rule is not None]
        self._limits = {name: rule.ids_max for name, rule in rules.items() if rule is not None}
        self.readable_secs = max(windows) + 2 * AGAIN_SECS if windows else 0.0

    def guard(self, end: RouteEnd) -> SharedGuard:
        """In front of what a route leads to."""
        return SharedGuard(self, end)

    # What guards ask.

    def elsewhere(self, ids: Ids, id: str) -> bool:
        """Another replica has the id on its way."""
        holder = self._claims.get(ids.route, {}).get(id, self.log.life)
        return holder != self.log.life and self._lives(holder, self.utc())

    def claim(self, route: str, ids: Sequence[str], told: Callable[[list[Answer]], None]) -> None:
        """`told` hears what has become of each, when the log knows."""
        self._asked[self._say(CLAIMED, route, ids)] = told

    def accept(self, route: str, ids: Sequence[str], until: float, then: Callable[[], None]) -> None:
        """The target has them; `then` is called when the log has that."""
        self._say(TAKEN, route, ids, until, then)

    def free(self, route: str, ids: Sequence[str]) -> None:
        """They have not been accepted: whoever has one next may try."""
        if ids:
            self._say(FREED, route, ids)

    def _say(
        self,
        kind: bytes,
        route: str = "",
        ids: Sequence[str] = (),
        until: float = 0.0,
        then: Callable[[], None] | None = None,
    ) -> int:
        name = route.encode()
        octets = b"".join(map(bytes.fromhex, ids))
        return self.log.put(HEAD.pack(kind, until, len(name)) + name + octets, then)

    # What the log asks.

    def begin_anew(self) -> None:
        """All is read again."""
        self._claims.clear()
        self._heard.clear()
        for ids in self:
            ids.accepted.clear()

    def lost(self) -> None:
        """Whoever waits for a claim is told now: the sender sends again."""
        asked, self._asked = self._asked, {}
        for number, told in asked.items():
            self.log.withdraw(number)
            told([])

    def tick_log(self, now: Monotonic) -> None:
        """Say that we live, while that matters to anybody; and now and then what is claimed, for those that
        have begun since."""
        if now >= self._again_at:
            self._again_at = now + AGAIN_SECS
            for ids in self:
                claimed = list(ids.open)
                for start in range(0, len(claimed), IDS_MAX):
                    self._say(CLAIMED, ids.route, claimed[start : start + IDS_MAX])
        if now >= self._alive_at and any(ids.open for ids in self):
            self._alive_at = now + ALIVE_SECS
            self._say(ALIVE)

    def stop(self) -> None:
        """The process ends: what it had claimed is free."""
        if any(self.log.life in claims.values() for claims in self._claims.values()):
            self._say(GONE)

    def apply(self, record: Record) -> None:
        """Raises what a record that is none leads to; it costs that record alone."""
        kind, until, size = HEAD.unpack_from(record.body)
        at = HEAD.size + size
        route = record.body[HEAD.size : at].decode()
        octets = record.body[at:]
        ids = [octets[at : at + ID_OCTETS].hex() for at in range(0, len(octets), ID_OCTETS)]
        self._hear(record)
        claims = self._claims.setdefault(route, {})
        if kind == CLAIMED:
            self._claimed(record, route, claims, ids)
        elif kind == TAKEN:
            self._taken(record, route, claims, ids, until)
        elif kind == FREED:
            for id in ids:
                if claims.get(id) == record.life:
                    del claims[id]
        elif kind == GONE:
            self._heard[record.life] = 0.0
            for of_route in self._claims.values():
                for id in [id for id, holder in of_route.items() if holder == record.life]:
                    del of_route[id]
        elif kind != ALIVE:
            self.log.passed_over += 1
        if not claims:
            del self._claims[route]

    def _hear(self, record: Record) -> None:
        self._heard.pop(record.life, None)
        self._heard[record.life] = record.utc
        if len(self._heard) > LIVES_MAX:
            del self._heard[next(iter(self._heard))]

    def _lives(self, life: str, utc: float) -> bool:
        return utc - self._heard.get(life, 0.0) < self._silent_secs

    def _claimed(self, record: Record, route: str, claims: dict[str, str], ids: list[str]) -> None:
        accepted = self.of(route).accepted
        answers: list[Answer] = []
        for id in ids:
            holder = claims.get(id, record.life)
            if accepted.get(id, 0.0) > record.utc:
                answers.append(Answer.ACCEPTED)
            elif holder != record.life and self._lives(holder, record.utc):
                answers.append(Answer.OPEN)
            else:
                claims[id] = record.life
                answers.append(Answer.OURS)
        limit = self._limits.get(route, IDS_OF_OTHERS_MAX)
        while len(claims) > limit:
            del claims[next(iter(claims))]
        if record.life != self.log.life:
            return
        told = self._asked.pop(record.number, None)
        if told is not None:
            told(answers)
        else:  # it was given up while the cluster was away
            got = [id for id, answer in zip(ids, answers, strict=True) if answer is Answer.OURS]
            self.free(route, [id for id in got if id not in self.of(route).open])

    def _taken(
        self, record: Record, route: str, claims: dict[str, str], ids: Iterable[str], until: float
    ) -> None:
        known = self.of(route)
        for id in ids:
            claims.pop(id, None)
            known.accepted.pop(id, None)
            known.accepted[id] = until
        limit = self._limits.get(route, IDS_OF_OTHERS_MAX)
        while len(known.accepted) > limit:
            del known.accepted[next(iter(known.accepted))]
            known.forgotten += record.life == self.log.life


class IdsReader:
    """The reader of the log of ids: `SharedIds` has a `tick` of its own, for what all deduplication does."""

    def __init__(self, ids: SharedIds) -> None:
        self.begin_anew = ids.begin_anew
        self.apply = ids.apply
        self.lost = ids.lost
        self.tick = ids.tick_log
        self.stop = ids.stop


class SharedGuard(Guard):
    """In front of what a route leads to: asks the log before anything crosses."""

    def __init__(self, shared: SharedIds, end: RouteEnd) -> None:
        super().__init__(shared, end)
        self._shared = shared

    def publish(self, part: SubBatch) -> None:
        """Pass on what has no id; ask for the others."""
        ids, shared = self.ids, self._shared
        utc = shared.utc()
        batch = part.batch.onward(PassedBatch(self, part))
        claims: list[Claim] = []
        repeats: list[int] = []
        for at, message in enumerate(part.messages):
            try:
                given = message.properties.message_id
            except RemoteProtocolError as error:
                part.settle_at((at,), Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
                continue
            if not given:
                self._try(batch, part, (at, "", message))
                continue
            id = blake2b(given.encode("utf-8", "surrogatepass"), digest_size=ID_OCTETS).hexdigest()
            if id in ids.open or shared.elsewhere(ids, id):
                part.settle_at((at,), UNSETTLED)
            elif ids.accepted.get(id, 0.0) > utc:
                repeats.append(at)
            elif not shared.log.up:
                part.settle_at((at,), AWAY)
            else:
                ids.open.add(id)
                claims.append((at, id, message))
        self._repeated(part, repeats)
        batch.send()
        for start in range(0, len(claims), IDS_MAX):
            some = claims[start : start + IDS_MAX]
            shared.claim(self.route.name, [id for _, id, _ in some], partial(self._told, part, some))

    def _told(self, part: SubBatch, claims: list[Claim], answers: list[Answer]) -> None:
        """The log has answered; without `answers` the cluster was lost before."""
        answers = answers or [Answer.UNKNOWN] * len(claims)
        batch = part.batch.onward(PassedBatch(self, part))
        repeats: list[int] = []
        for claim, answer in zip(claims, answers, strict=True):
            at, id, _ = claim
            if answer is Answer.OURS:
                self._try(batch, part, claim)
                continue
            self.ids.open.discard(id)
            if answer is Answer.ACCEPTED:
                repeats.append(at)
            else:
                part.settle_at((at,), UNSETTLED if answer is Answer.OPEN else AWAY)
        self._repeated(part, repeats)
        batch.send()

    def _try(self, batch: Batch, part: SubBatch, claim: Claim) -> None:
        at, id, message = claim
        try:
            recipients = self._recipients_for(part, at, message)
        except Exception as error:
            recipients = ()
            part.settle_at((at,), poisoned(error, route=self.route.name))
        if recipients:
            batch.add_from(part.slots[at], (at, id), [(recipient, message) for recipient in recipients])
        else:
            self._free([id])

    def _free(self, ids: Iterable[str]) -> None:
        named = [id for id in ids if id]
        self.ids.open.difference_update(named)
        self._shared.free(self.route.name, named)

    def settled(self, part: SubBatch, rows: list[tuple[int, str]], outcome: Outcome) -> None:
        """The messages at these positions of `part`, with these ids, have this outcome."""
        positions = [at for at, _ in rows]
        named = [id for _, id in rows if id]
        if outcome is not ACCEPTED:
            self._free(named)
            part.settle_at(positions, outcome)
        elif not named:
            part.settle_at(positions)
        else:
            until = self._shared.utc() + self._window

            def written() -> None:
                self.ids.open.difference_update(named)
                part.settle_at(positions)

            self._shared.accept(self.route.name, named, until, written)
