"""Which topic filters a link has subscribed to.

`said` is what our last words about a filter amount to on this session; `granted` is what the broker has
confirmed, and therefore what it still knows when it resumes the session. A refused filter is asked for again,
after a wait that doubles: permissions change while a gateway runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.packets import Subscription
from gateway.protocols.mqtt.spec import FAILURE, WORD_MAX, Version

FIRST_ID: Final = 65_001  # below are the packet ids of PUBLISH, see mqtt_outgoing.PACKET_IDS
FILTERS_PER_PACKET: Final = 8  # some hosted brokers take no more
RETRY_SECS_MIN: Final = 1.0
RETRY_SECS_MAX: Final = 60.0
NEW_ONLY: Final = 1  # retain handling: retained messages for a new subscription only (5: 3.8.3.1)

log = structlog.get_logger()


class Filters:
    """The subscriptions of one link. `refusals` counts what the broker would not grant."""

    def __init__(self, link: str, qos: int) -> None:
        self.qos = qos
        self.wanted: tuple[str, ...] = ()
        self.granted: set[str] = set()
        self.refusals = 0
        self._link = link
        self._machine: ClientConnection | None = None
        self._said: set[str] = set()
        self._asked: dict[int, tuple[str, ...]] = {}
        self._attempts: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._next_id = FIRST_ID
        self._version: Version | None = None  # in which the granted filters were asked for

    def want(self, filters: tuple[str, ...]) -> None:
        """Have exactly these; the difference is said at once if the link is up."""
        self.wanted = filters
        self._attempts.clear()
        self._due.clear()
        if self._machine is not None:
            self._unsubscribe([one for one in self._said if one not in filters])
            self._subscribe([one for one in filters if one not in self._said])

    def attach(self, machine: ClientConnection, *, present: bool) -> None:
        """A connection is usable; `present`: on a session that the broker kept.

        MQTT 5 repeats every subscription, which does no harm there. Before it, that would bring all retained
        messages again, so a kept session is trusted. After a change of the version each subscription is made
        anew: Mosquitto keeps the options of one that is only repeated, and what we publish would come back.
        """
        self._machine = machine
        self._asked.clear()
        self._attempts.clear()
        self._due.clear()
        if not present:
            self.granted.clear()
        changed = machine.version is not self._version
        self._version = machine.version
        self._said = set(self.granted)
        self._unsubscribe([one for one in self.granted if changed or one not in self.wanted])
        repeats = machine.version is Version.V5
        self._subscribe([one for one in self.wanted if repeats or one not in self._said])

    def detach(self) -> None:
        """The connection is gone."""
        self._machine = None

    def answered(self, packet_id: int, reasons: tuple[int, ...], now: float) -> None:
        """SUBACK: a granted QoS or a refusal for each filter of the packet."""
        for one, reason in zip(self._asked.pop(packet_id, ()), reasons, strict=False):
            if reason >= FAILURE:
                self._refused(one, f"{reason:#04x}", now)
                continue
            if one in self._said:
                self.granted.add(one)
            self._attempts.pop(one, None)
            if reason < self.qos:
                log.warning("subscription with a lower qos", link=self._link, filter=one, qos=reason)

    def tick(self, now: float) -> None:
        """Ask again for refused filters whose time has come."""
        due = [one for one, at in self._due.items() if at <= now]
        if due and self._machine is not None:
            for one in due:
                del self._due[one]
            self._subscribe(due)

    def _refused(self, one: str, reason: str, now: float) -> None:
        self.refusals += 1
        self._said.discard(one)
        self.granted.discard(one)
        if one not in self.wanted:
            return
        attempts = self._attempts[one] = self._attempts.get(one, 0) + 1
        wait = min(RETRY_SECS_MIN * 2 ** min(attempts - 1, 6), RETRY_SECS_MAX)
        self._due[one] = now + wait
        log.warning(
            "subscription refused", link=self._link, filter=one, reason=reason, retry_in_secs=round(wait, 1)
        )

    def _subscribe(self, filters: list[str]) -> None:
        machine = self._machine
        assert machine is not None
        for chunk in _chunks(filters):
            packet_id = self._take_id()
            self._asked[packet_id] = chunk
            self._said.update(chunk)
            if not machine.subscribe(packet_id, [self._subscription(one) for one in chunk]):
                del self._asked[packet_id]
                self._said.difference_update(chunk)
                if len(chunk) > 1:
                    for one in chunk:
                        self._subscribe([one])
                else:
                    self.refusals += 1
                    log.error("topic filter too long for the broker", link=self._link, filter=chunk[0])

    def _unsubscribe(self, filters: list[str]) -> None:
        machine = self._machine
        assert machine is not None
        for one in filters:
            self._said.discard(one)
            self.granted.discard(one)
            machine.unsubscribe(self._take_id(), [one])

    def _subscription(self, one: str) -> Subscription:
        shared = one.startswith("$share/")  # 5: 3.8.3.1 forbids no_local there
        return Subscription(one, self.qos, not shared, True, NEW_ONLY)

    def _take_id(self) -> int:
        """An id for SUBSCRIBE or UNSUBSCRIBE; their answers come in order, long before the ids run out."""
        taken = self._next_id
        self._next_id = taken + 1 if taken < WORD_MAX else FIRST_ID
        return taken


def _chunks(filters: list[str]) -> Iterable[tuple[str, ...]]:
    for at in range(0, len(filters), FILTERS_PER_PACKET):
        yield tuple(filters[at : at + FILTERS_PER_PACKET])
