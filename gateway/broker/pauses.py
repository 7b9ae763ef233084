"""Routes and links that an operator has paused.

Messages that a paused route would deliver wait in a PauseGate in front of its end, within HELD_MESSAGES_MAX
and HELD_BYTES_MAX. Beyond that its sources get the same outcome as for a link that is down. In an outbox
messages wait as they do for a link. Waiting messages are not accepted, so a gateway that is killed has
promised nothing. When the route resumes, they are delivered first, in order of arrival, some in each pass of
the event loop. One that expires meanwhile is rejected, because a queue or broker may deliver it at once. One
that a remote broker has delivered again meanwhile, after a lost connection, is dropped in favour of the later
copy.

The names are in the store, if there is one, so that a restart does not resume a paused route. A route that is
no longer in the mapping is no longer paused, and its waiting messages are delivered.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import structlog

from gateway import clock
from gateway.broker.poison import outcome_of_error
from gateway.broker.routing import OneSink
from gateway.broker.shares import UserQuotas
from gateway.mapping.routes import Route
from gateway.model.batch import Recipient, SubBatch
from gateway.model.message import NEVER, Message, Sender, weight_of
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic
from gateway.store.recovery import contain_failure
from gateway.store.store import Store

KIND: Final = "paused"  # kind of record in the store
HELD_MESSAGES_MAX: Final = 10_000  # of one route
HELD_BYTES_MAX: Final = 64 * 1024 * 1024
RELEASED_AT_ONCE: Final = 2_000

HELD_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the route is paused, and the limit on waiting messages is reached"
)

HELD_USER_FULL: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "the route is paused, and the user's share is used up (limits.user_share)"
)

EXPIRED: Final = Outcome(Verdict.REJECTED, Reason.EXPIRED, "the message expired while its route was paused")

REDELIVERED: Final = Outcome(
    Verdict.RELEASED, Reason.TARGET_DOWN, "the route was paused, and the broker delivers the message again"
)

RecipientsOf = Callable[[Route, Message], tuple[Recipient, ...]]

log = structlog.get_logger()


class PauseGate(OneSink):
    """Stage (namespace and sink) in which the messages of a paused route wait, in front of the route's end.

    `recipients_of` returns the recipients at the route's end, and `unrouted` the outcome of a message without
    a recipient. `open` is True while the route resumes. `quotas` limits the waiting messages of each user.
    """

    def __init__(
        self,
        route: Route,
        recipients_of: RecipientsOf,
        unrouted: Callable[[Route], Outcome],
        quotas: UserQuotas,
    ) -> None:
        super().__init__(self)
        self.route = route
        self.open = False
        self.messages = 0
        self.byte_count = 0
        self._recipients_of = recipients_of
        self._unrouted = unrouted
        self._shares = quotas.waiting_in(HELD_MESSAGES_MAX, HELD_BYTES_MAX)
        # Parts, and how many of the first messages of each wait.
        self._waiting: deque[tuple[SubBatch, int]] = deque()
        self._expires = NEVER  # no message that waits expires earlier

    def publish(self, sub_batch: SubBatch) -> None:
        """Hold the messages of a sub-batch until the route is resumed, as far as limits allow.

        Messages beyond the total limit, or beyond the limit of their user, are returned to their source, to
        be retried.
        """
        if beyond := self._shares.refuse_over_share(sub_batch.messages):
            self.route.failed += len(beyond)
            whole, sub_batch = sub_batch, sub_batch.without(set(beyond))
            whole.settle_at(beyond, HELD_USER_FULL)
        messages = sub_batch.messages
        fits = self._fitting_count(messages)
        if fits:
            self.messages += fits
            self.byte_count += weight_of(messages[:fits])
            self._shares.add_messages(messages[:fits])
            self._append(sub_batch, fits)
        if fits < len(messages):
            self.route.failed += len(messages) - fits
            sub_batch.settle_at(range(fits, len(messages)), HELD_FULL)

    def _append(self, sub_batch: SubBatch, count: int) -> None:
        self._waiting.append((sub_batch, count))
        for message in sub_batch.messages[:count]:
            if message.expires and (not self._expires or message.expires < self._expires):
                self._expires = message.expires

    def reject_expired(self) -> None:
        """Reject the waiting messages that have expired, which leaves capacity for others."""
        utc = clock.utc()
        if not NEVER < self._expires <= utc:
            return
        waiting, self._waiting, self._expires = self._waiting, deque(), NEVER
        rejected: list[tuple[SubBatch, list[int]]] = []
        for sub_batch, count in waiting:
            expired = [at for at in range(count) if NEVER < sub_batch.messages[at].expires <= utc]
            if expired:
                messages = [sub_batch.messages[at] for at in expired]
                self._count_out(messages)
                rejected.append((sub_batch, expired))
                sub_batch = sub_batch.without(set(expired))
            if count > len(expired):
                self._append(sub_batch, count - len(expired))
        for sub_batch, expired in rejected:
            self.route.failed += len(expired)
            sub_batch.settle_at(expired, EXPIRED)

    def _count_out(self, messages: list[Message]) -> None:
        self.messages -= len(messages)
        self.byte_count -= weight_of(messages)
        self._shares.remove_messages(messages)

    def _fitting_count(self, messages: list[Message]) -> int:
        room = min(len(messages), HELD_MESSAGES_MAX - self.messages)
        byte_count = self.byte_count
        for at, message in enumerate(messages[:room]):
            byte_count += message.byte_count
            if byte_count > HELD_BYTES_MAX:
                return at
        return room

    def drop_redelivered(self) -> None:
        """Return waiting messages to their sources, to be retried, if a remote broker delivers them again."""
        waiting, self._waiting = self._waiting, deque()
        dropped: list[tuple[SubBatch, int]] = []
        for sub_batch, count in waiting:
            again = all(sub_batch.is_redelivered(at) for at in range(count))
            (dropped if again else self._waiting).append((sub_batch, count))
        for sub_batch, count in dropped:
            self._count_out(sub_batch.messages[:count])
        for sub_batch, count in dropped:
            sub_batch.settle_at(range(count), REDELIVERED)

    def waiting_parts(self) -> Iterator[tuple[SubBatch, int]]:
        """Yield (sub-batch, count) for each sub-batch of which some messages wait.

        Its first `count` messages wait; the others were refused.
        """
        yield from self._waiting

    def release(self, most: int) -> None:
        """Deliver the sub-batches that have waited longest, until about `most` messages are delivered.

        The last sub-batch is delivered completely, so there may be some more.
        """
        remaining = most
        while self._waiting and remaining > 0:
            sub_batch, count = self._waiting.popleft()
            remaining -= count
            self._count_out(sub_batch.messages[:count])
            self._forward(sub_batch, count)

    def _forward(self, sub_batch: SubBatch, count: int) -> None:
        """Send the first `count` messages of a sub-batch to the recipients at the route's end."""
        batch = sub_batch.batch.forwarded_batch(HeldBatchSource(sub_batch))
        batch.redelivered = sub_batch.is_redelivered
        utc = clock.utc()
        for at, message in enumerate(sub_batch.messages[:count]):
            if sub_batch.is_redelivered(at):
                sub_batch.settle_at((at,), REDELIVERED)
                continue
            if NEVER < message.expires <= utc:
                self.route.failed += 1
                sub_batch.settle_at((at,), EXPIRED)
                continue
            try:
                recipients = self._recipients_of(self.route, message)
            except Exception as error:
                sub_batch.settle_at((at,), outcome_of_error(error, route=self.route.name))
                continue
            if recipients:
                batch.add_from(sub_batch.slots[at], at, [(recipient, message) for recipient in recipients])
            else:
                outcome = self._unrouted(self.route)
                self.route.failed += outcome is not ACCEPTED
                sub_batch.settle_at((at,), outcome)
        batch.send()


class HeldBatchSource:
    """Source of messages that a paused route has held and that are delivered now.

    A receipt is the index of a message in the sub-batch that was held.
    """

    __slots__ = ("_sub_batch",)

    def __init__(self, sub_batch: SubBatch) -> None:
        self._sub_batch = sub_batch

    def settle(self, receipts: list[int], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Settle the messages in the sub-batch that was held, with the outcomes of the target."""
        if refused is None:
            self._sub_batch.settle_at(receipts)
            return
        self._sub_batch.settle_at([receipt for at, receipt in enumerate(receipts) if at not in refused])
        for at, outcome in refused.items():
            self._sub_batch.settle_at((receipts[at],), outcome)

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Stop reading from the connections of `senders`. Return the functions that resume reading."""
        return self._sub_batch.batch.source.hold(senders)


class Pauses:
    """Names of the paused routes and links, and the gates in which messages of paused routes wait.

    Must be created before the store starts. `changed` is called when a route or link is paused or resumed,
    and when the last waiting message of a resumed route has been sent on.
    """

    def __init__(self, store: Store | None, changed: Callable[[], None] = lambda: None) -> None:
        self.routes: set[str] = set()
        self.links: set[str] = set()
        self.gates: dict[str, PauseGate] = {}
        self._releasing = False
        self._changed = changed
        self._store = store
        for key, _ in () if store is None else store.records(KIND):
            assert isinstance(key, str)
            with contain_failure(KIND, key):
                kind, _, name = key.partition("/")
                {"route": self.routes, "link": self.links}[kind].add(name)

    def pause(self, kind: str, name: str) -> None:
        """Pause a route or a link; `kind` is `route` or `link`. A repeated call has no effect."""
        (self.routes if kind == "route" else self.links).add(name)
        if self._store is not None:
            self._store.put(KIND, f"{kind}/{name}", b"")
        gate = self.gates.get(name)
        if kind == "route" and gate is not None:
            gate.open = False
        self._changed()
        log.warning("operator paused route or link", kind=kind, name=name)

    def resume(self, kind: str, name: str) -> None:
        """Resume a route or a link; `kind` is `route` or `link`.

        Messages that wait for the route are delivered before new ones.
        """
        (self.routes if kind == "route" else self.links).discard(name)
        if self._store is not None:
            self._store.delete(KIND, f"{kind}/{name}")
        gate = self.gates.get(name)
        if kind == "route" and gate is not None:
            gate.open = True
            self.tick()
        self._changed()
        log.info("operator resumed route or link", kind=kind, name=name)

    def drop_redelivered(self) -> None:
        """Drop waiting messages that a remote broker delivers again, because its link has reconnected."""
        for gate in list(self.gates.values()):
            gate.drop_redelivered()

    def use(self, routes: Iterable[Route]) -> None:
        """Set the routes in force, and resume paused ones that are not among them."""
        by_name = {route.name: route for route in routes}
        for name, gate in self.gates.items():
            gate.route = by_name.get(name, gate.route)
        for name in self.routes - by_name.keys():
            self.resume("route", name)

    def empty(self, name: str) -> None:
        """Deliver all messages that wait for the route `name`, because the route has got an outbox.

        New messages wait in the outbox from now on.
        """
        if name in self.gates:
            self._release(name, HELD_MESSAGES_MAX)

    def tick(self) -> None:
        """Deliver some waiting messages of routes that resume; called several times a second.

        Also rejects the expired ones of paused routes.
        """
        for name, gate in list(self.gates.items()):
            if gate.open:
                self._release(name, RELEASED_AT_ONCE)
            else:
                gate.reject_expired()

    def _release(self, name: str, most: int) -> None:
        gate = self.gates[name]
        self._releasing = True
        try:
            gate.release(most)
        finally:
            self._releasing = False
        if not gate.messages:
            del self.gates[name]
            self._changed()

    def is_releasing(self) -> bool:
        """Return True while messages that waited for a resumed route are being delivered.

        Local targets that accept them at once have them in memory only.
        """
        return self._releasing

    def waiting_by_sender(self) -> Counter[Sender]:
        """Return the number of messages of each sender that wait for paused routes.

        A message that waits for several routes is counted once.
        """
        found = {
            (id(sub_batch.batch), slot): message.sender.connection
            for gate in self.gates.values()
            for sub_batch, count in gate.waiting_parts()
            for message, slot in zip(sub_batch.messages[:count], sub_batch.slots[:count], strict=True)
        }
        return Counter(found.values())

    def waiting_by_route(self) -> dict[str, int]:
        """Return the number of messages that wait for each paused route, by route name."""
        names = (*sorted(self.routes), *(name for name in self.gates if name not in self.routes))
        return {name: self.gates[name].messages if name in self.gates else 0 for name in names}
