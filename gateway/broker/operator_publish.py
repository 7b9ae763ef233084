"""Publishing of messages by an operator, as if a client of an endpoint had published them.

The outcome of each message is reported to a callback.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway import clock
from gateway.broker.dispatcher import UNROUTED, Dispatcher
from gateway.broker.memory import LOW_ON_MEMORY
from gateway.broker.routing import RoutingEntry
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.times import Monotonic

OutcomeCallback = Callable[[Outcome], None]


class Publishing:
    """Source of the messages that operators publish."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher

    def publish(self, endpoint: str, message: Message, on_outcome: OutcomeCallback) -> None:
        """Publish a message of an operator at an endpoint.

        If the endpoint is a listener, the message is routed as if a client of the listener had published it;
        if it is a link, as if the link had consumed it from its broker. `on_outcome` is called with the
        outcome.
        """
        dispatcher = self.dispatcher
        local = None if endpoint in dispatcher.links else dispatcher.namespaces[endpoint]
        self.publish_by(dispatcher.entry(endpoint, local, message.address), message, on_outcome)

    def publish_by(self, entry: RoutingEntry, message: Message, on_outcome: OutcomeCallback) -> None:
        """Publish a message by a routing entry that the caller has checked in this event-loop pass.

        `on_outcome` is called with the outcome, which may be at once.
        """
        dispatcher = self.dispatcher
        if dispatcher.memory.short:
            on_outcome(LOW_ON_MEMORY)
            return
        batch = dispatcher.batch(self, clock.now())
        if not dispatcher.publish(batch, entry, message, on_outcome):
            dispatcher.record_unrouted(entry, message, UNROUTED, batch.received)
            on_outcome(UNROUTED)
        batch.send()

    # Interface of a batch's source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return [] because nothing is paused: operators publish single messages."""
        return []

    def settle(
        self, receipts: list[OutcomeCallback], refused: dict[int, Outcome] | None, received: Monotonic
    ) -> None:
        """Call each of `receipts`, which are callbacks, with the outcome of its message."""
        for at, on_outcome in enumerate(receipts):
            on_outcome((refused or {}).get(at, ACCEPTED))
