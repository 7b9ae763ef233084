"""Forwarding of a copy of every dead letter to an address, with headers that give the reason.

A copy never causes another one: its outcome is only counted, it never becomes a dead letter, and a message
that has such a header already (a route returned the copy, and it failed again) is not forwarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from gateway import clock
from gateway.broker.dispatcher import sinks_of
from gateway.broker.routing import Namespace
from gateway.errors import RemoteProtocolError
from gateway.model.address import Address
from gateway.model.batch import Batch, Recipient
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import Properties, property_set, string
from gateway.model.times import Monotonic, WallTime

REASON: Final = "x-gateway-reason"
ROUTE: Final = "x-gateway-route"
TEXT: Final = "x-gateway-text"
TIME: Final = "x-gateway-time"


class Forwarding:
    """Publisher of copies of dead letters to `address` of the endpoint `endpoint`.

    `namespaces` has the namespaces of endpoints by name. `counted` has the number of copies by result;
    `absent` means that the endpoint or address has no recipient.
    """

    def __init__(
        self, namespaces: Mapping[str, Namespace], endpoint: str, address: Address, *, assurance: int = 1
    ) -> None:
        self.counted: Counter[str] = Counter()
        self._namespaces = namespaces
        self._endpoint = endpoint
        self._address = address
        self._assurance = assurance

    def forward(self, messages: list[Message], route: str, outcome: Outcome, utc: WallTime) -> None:
        """Publish copies of dead letters.

        `route`, `outcome` and `utc` (POSIX seconds) are those of the dead letters, and are put into headers.
        """
        namespace = self._namespaces.get(self._endpoint)
        batch = Batch(self, clock.now())
        recipients: dict[object, Recipient] = {}
        for message in messages:
            copy = self._copy(message, route, outcome, utc)
            if copy is None:
                self.counted["looped"] += 1
                continue
            sinks = () if namespace is None else sinks_of(namespace, copy)
            if not sinks:
                self.counted["absent"] += 1
                continue
            batch.add(None, [(recipients.setdefault(sink, Recipient(sink)), copy) for sink in sinks])
        batch.send()

    def _copy(self, message: Message, route: str, outcome: Outcome, utc: WallTime) -> Message | None:
        """Return the copy of a dead letter that is to be published.

        Return None if the dead letter is itself a copy of another dead letter, so that copies do not
        circulate.
        """
        try:
            properties = message.properties
        except RemoteProtocolError:  # that may be why it is a dead letter
            properties = Properties()
        if any(name == REASON for name, _ in properties.headers):
            return None
        when = datetime.fromtimestamp(utc, UTC).isoformat(timespec="milliseconds")
        why = (
            (REASON, string(outcome.reason.value)),
            (ROUTE, string(route)),
            (TEXT, string(outcome.text)),
            (TIME, string(when)),
        )
        return Message(
            self._address,
            message.body,
            property_set(replace(properties, headers=properties.headers + why)),
            self._assurance,
            DURABLE_AT_QOS[self._assurance],
            hops=message.hops + 1,
            sender=message.sender,
        )

    # Interface of a batch's source.

    def hold(self, senders: set[Sender]) -> list[Callable[[], None]]:
        """Return [] because nothing is paused: a full target refuses the copies."""
        return []

    def settle(self, receipts: list[None], refused: dict[int, Outcome] | None, received: Monotonic) -> None:
        """Count the outcomes of copies; the dead letters themselves stay."""
        failed = len(refused) if refused else 0
        self.counted["accepted"] += len(receipts) - failed
        self.counted["refused"] += failed
