"""Deduplication of messages by identifiers that all replicas share in the database.

A message with an identifier is sent through the route when the claim of its identifier is committed: of two
replicas with the same identifier at the same moment one gets the claim. An accepted identifier is committed
before the source receives its acknowledgement. So a message crosses once while replicas live. It may cross
twice when its replica is lost between the target's confirm and the commit: the sender was not acknowledged,
and sends it again.

Claims of a replica that was declared dead do not count. A replica that was frozen for that long and resumes
may deliver messages that another replica has delivered meanwhile.

Messages of one client keep their order: those that arrive behind a message that waits for its claim wait,
too, with or without an identifier.

An identifier is a hash of 16 bytes. Identifiers accepted here are also in memory, so that a repeat costs no
query; the memory uses the monotonic clock, and the window itself the clock of the database.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby
from typing import Final

from gateway import clock
from gateway.broker.deduplication import UNSETTLED, Deduplication, ForwardedSource, Guard, RouteEnd, owners_of
from gateway.broker.poison import outcome_of_error
from gateway.engine.membership import Membership
from gateway.engine.repeats import Repeats
from gateway.engine.retain_queue import client_of
from gateway.errors import RemoteProtocolError
from gateway.model.batch import Batch, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.state.interface import AcceptIds, Claim, ClaimIds, FreeIds, Reply, StateStore
from gateway.state.interface import OperationOutcome as Committed

ID_BYTES: Final = 16
IDS_MAX: Final = 1_000  # in one operation
UNFREED_MAX: Final = 10_000  # ids that wait to be freed; beyond that none is claimed

AWAY: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the database of this route's message ids is unreachable"
)


class WaitingClaim:
    """Message of a deduplicating route that waits until its identifier is claimed in the database.

    `at` is its position in `sub_batch`, and `id` its identifier in hexadecimal. A message without an
    identifier (`id` is "") waits only for earlier messages of its client. `is_over` is True once the claim
    has succeeded or failed, and from the start without an identifier. If the claim has failed, the message is
    settled and `sub_batch` is None.
    """

    __slots__ = ("at", "client", "guard", "id", "is_over", "message", "sub_batch")

    def __init__(self, guard: SharedGuard, sub_batch: SubBatch, at: int, id: str) -> None:
        self.guard = guard
        self.sub_batch: SubBatch | None = sub_batch
        self.at = at
        self.id = id
        self.message = message = sub_batch.messages[at]
        self.client = client_of(message)
        self.is_over = not id


Lines = dict[tuple[str, str], deque[WaitingClaim]]
"""Waiting messages of one route by client, in the order of their arrival."""


class SharedIds(Deduplication):
    """Message identifiers of all deduplicating routes, in the database that replicas share."""

    def __init__(self, state: StateStore, membership: Membership) -> None:
        super().__init__(None, clock.now)
        self.is_shared = True
        self._state = state
        self._membership = membership
        self._repeats = Repeats(state)
        self._lines: dict[str, Lines] = {}
        # Claims by route and id whose release has failed, because the database was unavailable.
        self._unfreed: dict[tuple[str, str], None] = {}
        self._repeated_count = 0  # claims whose release was submitted again and has no reply yet

    def lines(self, route: str) -> Lines:
        """Return the messages of a route that wait for claims, by client.

        Reloading the mapping does not change them.
        """
        return self._lines.setdefault(route, {})

    @property
    def is_ready(self) -> bool:
        """True while this replica can claim message identifiers.

        It must have joined the other replicas, and fewer than UNFREED_MAX claims may wait to be deleted in
        the database.
        """
        return (
            not self._membership.unavailable_reason
            and len(self._unfreed) + self._repeated_count < UNFREED_MAX
        )

    def guard(self, end: RouteEnd) -> SharedGuard:
        """Return a guard that deduplicates the messages of a route before they are sent to its targets.

        `end` is the route with its targets.
        """
        return SharedGuard(self, end)

    def tick(self) -> None:
        """Run the timer: forget identifiers when their deduplication window ends; repeat failed operations.

        Operations fail while the database is unavailable.
        """
        super().tick()
        self._repeats.tick()
        unfreed, self._unfreed = self._unfreed, {}
        by_route: dict[str, list[str]] = {}
        for route, id in unfreed:
            by_route.setdefault(route, []).append(id)
        for route, ids in by_route.items():
            self.end_claims(route, ids, is_repeated=True)

    def claim(self, route: str, ids: list[str], done: Callable[[list[Claim] | None], None]) -> None:
        """Claim message identifiers of a route. `done` is called with a Claim for each, in order.

        `done` is called with None if the database is unavailable, or if this replica was declared dead
        meanwhile.
        """
        incarnation = self._membership.incarnation

        def on_claimed(reply: Reply[list[Claim]]) -> None:
            if reply.verdict is Committed.DONE and incarnation == self._membership.incarnation:
                done(reply.value)
            else:  # the claims may have been committed
                done(None)
                self.end_claims(route, ids)

        self._state.submit(ClaimIds(route, _raw(ids), incarnation), on_claimed)

    def accept(self, route: str, ids: list[str], window_secs: float, then: Callable[[], None]) -> None:
        """Store identifiers for `window_secs`, because the target of a route has accepted their messages.

        `then` is called when they are committed, possibly much later.
        """
        operation = AcceptIds(route, _raw(ids), self._membership.incarnation, window_secs)
        self._repeats.submit(operation, lambda reply: then())

    def end_claims(self, route: str, ids: Iterable[str], *, is_repeated: bool = False) -> None:
        """End the claims of message identifiers, because the messages were not accepted.

        Messages with these identifiers can be sent again then. Claims that cannot be ended because the
        database is unavailable are submitted again at the next tick, with `is_repeated` True.
        """
        free_ids = [id for id in ids if id not in self.of(route).open]
        for start in range(0, len(free_ids), IDS_MAX):
            some = free_ids[start : start + IDS_MAX]
            count = len(some) if is_repeated else 0
            self._repeated_count += count
            operation = FreeIds(route, _raw(some), self._membership.incarnation)
            self._state.submit(operation, partial(self._freed, route, some, count))

    def _freed(self, route: str, ids: list[str], repeated_count: int, reply: Reply[None]) -> None:
        self._repeated_count -= repeated_count
        if reply.verdict is Committed.UNAVAILABLE:
            self._unfreed.update(((route, id), None) for id in ids)


class SharedGuard(Guard):
    """Guard in front of a route's targets, which claims the identifier of a message before sending it."""

    def __init__(self, shared: SharedIds, end: RouteEnd) -> None:
        super().__init__(shared, end)
        self._shared = shared
        self._lines = shared.lines(end.route.name)

    def publish(self, sub_batch: SubBatch) -> None:
        """Send messages without an identifier to the targets, and claim the identifiers of the others.

        A message without an identifier waits if earlier messages of its client wait. Repeated messages are
        settled.
        """
        ids, shared, lines = self.ids, self._shared, self._lines
        now = shared.utc()
        batch = sub_batch.batch.forwarded_batch(ForwardedSource(self, sub_batch))
        waiting_claims: list[WaitingClaim] = []
        repeats: list[int] = []
        for at, message in enumerate(sub_batch.messages):
            try:
                message_id = message.properties.message_id
            except RemoteProtocolError as error:
                sub_batch.settle_at((at,), Outcome(Verdict.REJECTED, Reason.MALFORMED, str(error)))
                continue
            if not message_id:
                if lines and client_of(message) in lines:
                    self._queue_message(sub_batch, at, "")
                else:
                    self._add_to_batch(batch, sub_batch, at, "", message)
                continue
            id = blake2b(message_id.encode("utf-8", "surrogatepass"), digest_size=ID_BYTES).hexdigest()
            if id in ids.open:
                sub_batch.settle_at((at,), UNSETTLED)
            elif ids.accepted.get(id, 0.0) > now:
                repeats.append(at)
            elif not shared.is_ready:
                sub_batch.settle_at((at,), AWAY)
            else:
                ids.open.add(id)
                waiting_claims.append(self._queue_message(sub_batch, at, id))
        self._repeated(sub_batch, repeats)
        batch.send()
        for start in range(0, len(waiting_claims), IDS_MAX):
            some = waiting_claims[start : start + IDS_MAX]
            shared.claim(
                self.route.name, [one.id for one in some], partial(self._apply_claims, sub_batch, some)
            )

    def _queue_message(self, sub_batch: SubBatch, at: int, id: str) -> WaitingClaim:
        """Queue the message at position `at` of a sub-batch behind the waiting ones of its client.

        `id` is its identifier in hexadecimal, "" for none.
        """
        one = WaitingClaim(self, sub_batch, at, id)
        self._lines.setdefault(one.client, deque()).append(one)
        return one

    def _apply_claims(
        self, sub_batch: SubBatch, waiting_claims: list[WaitingClaim], claims: list[Claim] | None
    ) -> None:
        """Settle the messages whose claims have failed, and send the others to the targets.

        `claims` has the result for each of `waiting_claims`, or is None if the database is unavailable.
        """
        settled: dict[Outcome, list[int]] = {}
        for at, one in enumerate(waiting_claims):
            claim = None if claims is None else claims[at]
            one.is_over = True
            if claim is not Claim.OURS:
                outcome = AWAY if claim is None else ACCEPTED if claim is Claim.ACCEPTED else UNSETTLED
                one.sub_batch = None
                self.ids.open.discard(one.id)
                settled.setdefault(outcome, []).append(one.at)
        self._repeated(sub_batch, settled.pop(ACCEPTED, []))
        for outcome, positions in settled.items():
            sub_batch.settle_at(positions, outcome)
        self._release(waiting_claims)

    def _release(self, changed: Sequence[WaitingClaim]) -> None:
        """Send the messages that need not wait for a claim any more to the targets.

        `changed` are those whose claims have just succeeded or failed.
        """
        found: list[WaitingClaim] = []
        for client in dict.fromkeys(one.client for one in changed):
            line = self._lines[client]
            while line and line[0].is_over:
                found.append(line.popleft())
            if not line:
                del self._lines[client]
        passing = [(one.guard, one.sub_batch, one) for one in found if one.sub_batch is not None]
        for (guard, sub_batch), some in groupby(passing, key=lambda row: row[:2]):
            batch = sub_batch.batch.forwarded_batch(ForwardedSource(guard, sub_batch))
            for *_, one in some:
                guard._add_to_batch(batch, sub_batch, one.at, one.id, one.message)
            batch.send()

    def _add_to_batch(self, batch: Batch, sub_batch: SubBatch, at: int, id: str, message: Message) -> None:
        """Add a message to the batch for the targets; end the claim of its identifier if no target gets it.

        `at` is the message's position in `sub_batch`, `id` its identifier in hexadecimal ("" for none).
        """
        try:
            recipients = self._recipients_for(sub_batch, at, message)
        except Exception as error:
            recipients = ()
            sub_batch.settle_at((at,), outcome_of_error(error, route=self.route.name))
        if recipients:
            pairs = [(recipient, message) for recipient in recipients]
            batch.add_from(sub_batch.slots[at], (at, id), pairs)
        else:
            self._free([id])

    def _free(self, ids: Iterable[str]) -> None:
        message_ids = [id for id in ids if id]
        self.ids.open.difference_update(message_ids)
        self._shared.end_claims(self.route.name, message_ids)

    def settle_messages(
        self, sub_batch: SubBatch, rows: list[tuple[int, str]], outcome: Outcome, local: bool
    ) -> None:
        """Settle messages with the targets' outcome; accepted ones when their identifiers are committed.

        `rows` has the position in `sub_batch` and the identifier ("" for none) of each message. `local` is
        ignored: it concerns the store's transaction, and the identifiers are never part of it.
        """
        positions = [at for at, _ in rows]
        message_ids = [id for _, id in rows if id]
        if outcome is not ACCEPTED:
            self._free(message_ids)
            sub_batch.settle_at(positions, outcome)
        elif not message_ids:
            sub_batch.settle_at(positions)
        else:
            expires_at = self._shared.utc() + self._window
            owners = owners_of(sub_batch, rows)
            written = partial(self._accept, sub_batch, positions, owners, expires_at, ACCEPTED)
            self._shared.accept(self.route.name, message_ids, self._window, written)


def _raw(ids: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, ids))
