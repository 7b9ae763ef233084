"""What a link session is asked that no route leads to."""

from __future__ import annotations

from gateway.mapping.router import Subscriptions, Targets
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message


class Unrouted:
    """The part of a link session that speaks for the gateway itself."""

    def forget_entries(self) -> None:
        """There are none."""

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """No route leads here."""
        return None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Never asked."""
        return ()

    @property
    def retained(self) -> None:
        """Nothing is."""

    def route(self, subscriptions: Subscriptions, targets: Targets) -> None:
        """No route leads here."""
