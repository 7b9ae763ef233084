"""Redriving: dead letters are published again on request of an operator.

A dead letter whose message its route had built goes directly to the route's present target; so does a reply
that its route had built. A dead letter with the message as received takes its route again. A dead letter
without a route, and a reply as its responder sent it, is published again for the current routes and
subscribers, as far as that needs no rights of its sender (`redriven_entry`). Deduplication is skipped,
because the first attempt would count.

If the message is refused again, the dead letter stays unchanged, with its first reason; so does a dead letter
whose body or properties were not stored. A dead letter is deleted when its message was accepted, however
late. A dead letter that replicas share is claimed first, so that only one of them redrives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway import clock
from gateway.broker.dead_letters import DeadLetters, Letter
from gateway.broker.dispatcher import (
    UNROUTED,
    Dispatcher,
    RouteRecipient,
    StagedRecipient,
    protocol_mismatch,
    sinks_of,
)
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.poison import outcome_of_error
from gateway.broker.publish_permission import PublishRefused, redriven_entry
from gateway.mapping.routes import Route
from gateway.model.batch import Batch, Recipient, Sink
from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.times import Monotonic

BUSY: Final = Outcome(Verdict.RELEASED, Reason.QUOTA, "the dead letter is already being redriven")
ELSEWHERE: Final = Outcome(
    Verdict.RELEASED, Reason.QUOTA, "another replica redrives the dead letter, or has redriven it"
)
STALE: Final = Outcome(
    Verdict.REJECTED, Reason.EXPIRED, "the message has expired, so its target would drop it"
)

LetterOutcomeCallback = Callable[[str, Outcome], None]
Receipt = tuple[str, LetterOutcomeCallback]


class Redriving:
    """Publisher of dead letters that operators redrive (send again).

    `_open` has the ids of dead letters that were published again and are not settled.
    """

    def __init__(self, dispatcher: Dispatcher, dead_letters: DeadLetters) -> None:
        self._dispatcher = dispatcher
        self._dead_letters = dead_letters
        self._open: set[str] = set()

    def is_redriving(self, id: str) -> bool:
        """Return True if this dead letter's message was published again and is not settled yet."""
        return id in self._open

    def redrive(self, letters: list[Letter], on_outcome: LetterOutcomeCallback) -> None:
        """Publish the dead letters again. `on_outcome` is called with the id and the outcome of each."""
        free: list[Letter] = []
        for letter in letters:
            if letter.id in self._open:
                on_outcome(letter.id, BUSY)
            else:
                self._open.add(letter.id)
                free.append(letter)

        def on_claimed(ours: list[Letter], others: list[Letter]) -> None:
            self._open.difference_update([letter.id for letter in others])
            for letter in others:
                on_outcome(letter.id, ELSEWHERE)
            self._send(ours, on_outcome)

        self._dead_letters.claim(free, on_claimed)

    def _send(self, letters: list[Letter], on_outcome: LetterOutcomeCallback) -> None:
        """Publish dead letters again: at the target of their route, or as new messages if they have none."""
        # A batch has either published messages or messages for recipients: so the journal can distinguish
        # them.
        now = clock.now()
        placed, published = self._dispatcher.batch(self, now), self._dispatcher.batch(self, now)
        placed.has_dead_letters = published.has_dead_letters = True
        recipients: dict[tuple[Sink, str], Recipient] = {}
        refused: list[tuple[str, Outcome]] = []
        for letter in letters:
            if self._dispatcher.memory.short:
                refused.append((letter.id, LOW_ON_MEMORY))
                continue
            try:
                outcome = self._add_to_batch(placed, published, recipients, letter, on_outcome)
            except Exception as error:
                outcome = outcome_of_error(error, route=letter.route)
            if outcome is not None:
                refused.append((letter.id, outcome))
        self._mark_closed([id for id, _ in refused])
        for id, outcome in refused:
            on_outcome(id, outcome)
        placed.send()
        published.send()

    def _add_to_batch(
        self,
        placed: Batch,
        published: Batch,
        recipients: dict[tuple[Sink, str], Recipient],
        letter: Letter,
        on_outcome: LetterOutcomeCallback,
    ) -> Outcome | None:
        """Add the message of a dead letter to a batch. Return None, or the outcome if that is not possible.

        A dead letter of a route is added to `placed`, for the route's target. If it has no route, or is a
        reply that is as received, it is added to `published` and routed again. `recipients` caches the
        recipients of routes.
        """
        receipt: Receipt = (letter.id, on_outcome)
        if letter.lost_part:
            return _no(letter.lost_part)
        if NEVER < letter.message.expires <= clock.utc():
            return STALE
        router = self._dispatcher.router
        is_reply = any(one.name == letter.route for one in router.answers)
        if not letter.route or (is_reply and not letter.crossed):
            return self._publish(published, letter.message, receipt, is_reply=is_reply)
        named = router.answers if is_reply else router.routes
        route = next((one for one in named if one.name == letter.route), None)
        if route is None:
            return _no(f"route {letter.route!r} is in no mapping")
        made = self._deliverable_message(route, letter)
        if isinstance(made, Outcome):
            return made
        end = self._dispatcher.end(route)
        if end is None:
            return _no(f"endpoint {route.target_endpoint!r} is not configured")
        sinks = sinks_of(end, made)
        retained = end.retained if made.retain else None
        if not sinks and retained is None:
            return UNROUTED
        staged = any(self._dispatcher.is_staged(route, sink) for sink in sinks)
        kind = StagedRecipient if staged else RouteRecipient
        found = [recipients.setdefault((sink, route.name), kind(sink, route, None)) for sink in sinks]
        if retained is not None:
            found.append(recipients.setdefault((retained, ""), Recipient(retained)))
        placed.add(receipt, [(recipient, made) for recipient in found])
        return None

    def _deliverable_message(self, route: Route, letter: Letter) -> Message | Outcome:
        """Return the message in the form that the route delivers, or the outcome if that is impossible."""
        message = letter.message
        if letter.crossed:
            return protocol_mismatch(route, message) or message
        protocol = route.pattern.dialect.name
        if message.address.protocol != protocol:
            return _no(f"route {route.name!r} now has a source of protocol {protocol}")
        queue = route.pattern.queue or ""
        captures = route.pattern.match(message.address, queue)
        resolved = None
        if captures is not None:
            resolved = route.resolve(message.address, captures, queue, message.hops + 1)
        crossed = None if resolved is None else self._dispatcher.router.identified(resolved).cross(message)
        return _no(f"route {route.name!r} no longer matches the message") if crossed is None else crossed

    def _publish(self, batch: Batch, message: Message, receipt: Receipt, *, is_reply: bool) -> Outcome | None:
        """Add a dead letter to `batch` as if its sender published it again at the same endpoint.

        Return None, or the outcome that refuses the message. `is_reply` is True if a route of replies has
        refused the message before.
        """
        dispatcher = self._dispatcher
        endpoint = message.sender.endpoint
        namespace = dispatcher.namespaces.get(endpoint)
        if namespace is None:
            return _no(f"endpoint {endpoint!r}, from which the message came, is not configured")
        local = None if endpoint in dispatcher.links else namespace
        try:
            entry = redriven_entry(dispatcher, endpoint, local, message.address, is_reply=is_reply)
        except PublishRefused as refused:
            return _no(str(refused))
        return None if dispatcher.publish(batch, entry, message, receipt) else UNROUTED

    # Interface of a batch's source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return [] because nothing is paused: the messages' senders are no longer connected."""
        return []

    def settle(
        self, receipts: list[Receipt], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Delete dead letters whose messages were accepted, and report all outcomes when that is stored."""
        outcomes = [(refused or {}).get(at, ACCEPTED) for at in range(len(receipts))]
        rows = list(zip(receipts, outcomes, strict=True))
        self._mark_closed([id for (id, _), outcome in rows if outcome is not ACCEPTED])
        accepted_ids = [id for (id, _), outcome in rows if outcome is ACCEPTED]

        def report_outcomes(_: Outcome) -> None:
            self._open.difference_update(accepted_ids)
            for (id, on_outcome), outcome in rows:
                on_outcome(id, outcome)

        self._dead_letters.delete(accepted_ids, report_outcomes)

    def _mark_closed(self, ids: list[str]) -> None:
        """Record that these dead letters are no longer being redriven, and release their claims."""
        self._open.difference_update(ids)
        self._dead_letters.release_claims(ids)


def _no(text: str) -> Outcome:
    return Outcome(Verdict.REJECTED, Reason.NO_ROUTE, text)
