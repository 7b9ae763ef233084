"""Topic filters that a link has subscribed to.

`_requested_filters` are those that were requested on this session and not refused or cancelled; `granted` are
those that the broker has confirmed, and that it therefore still knows when it resumes the session.
`_known_filters` are all that it may know: a SUBSCRIBE was sent, and no UNSUBACK has followed. When a session
is resumed, those of them that the mapping no longer needs are cancelled again, because SUBACK or UNSUBSCRIBE
may have been lost with the connection. Otherwise a member of a group would be sent messages that another
member has routes for.

A refused filter is requested again after a wait that doubles, as permissions change while a gateway runs. A
filter that the broker's CONNACK or packet limit excludes is not requested on that connection, which would
violate the protocol (5: 3.2.2.3.11, 3.2.2.3.13).

With a group, the filters are sent as `$share/GROUP/FILTER`: the members of the group, for instance the
replicas of a gateway, share the messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import structlog

from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.packets import Subscription
from gateway.protocols.mqtt.spec import FAILURE, WORD_MAX, Version, reason_name
from gateway.telemetry.stats import LinkStats

FIRST_ID: Final = 65_001  # lower ones are packet ids of PUBLISH, see mqtt_outgoing.PACKET_IDS
FILTERS_PER_PACKET: Final = 8  # some hosted brokers accept no more
RETRY_SECS_MIN: Final = 1.0
RETRY_SECS_MAX: Final = 60.0
SHARE: Final = "$share/"
WILDCARDS: Final = frozenset("+#")
NEW_ONLY: Final = 1  # retain handling: retained messages for a new subscription only (5: 3.8.3.1)

log = structlog.get_logger(limited=True)


class Filters:
    """Subscriptions of one link; `stats.filters_refused` counts the filters that the broker now refuses."""

    def __init__(self, link: str, qos: int, stats: LinkStats, share: str | None = None) -> None:
        self.qos = qos
        self.topic_filters: tuple[str, ...] = ()
        self.granted: set[str] = set()
        self._link = link
        self._stats = stats
        self._group = "" if share is None else f"{SHARE}{share}/"
        self._refused: set[str] = set()
        self._machine: ClientConnection | None = None
        self._requested_filters: set[str] = set()
        self._known_filters: set[str] = set()
        self._unanswered: dict[int, tuple[str, ...]] = {}
        self._cancelled: dict[int, str] = {}  # filters without UNSUBACK, by packet id
        self._attempts: dict[str, int] = {}
        self._retry_times: dict[str, float] = {}
        self._next_id = FIRST_ID
        self._version: Version | None = None  # of the connection on which the granted filters were requested

    def set_filters(self, filters: tuple[str, ...]) -> None:
        """Set the filters to subscribe to. The changes are sent at once if the link is connected."""
        filters = self.topic_filters = tuple(self._group + one for one in filters)
        self._clear_refusals()
        self._attempts.clear()
        self._retry_times.clear()
        if self._machine is not None:
            self._unsubscribe([one for one in self._requested_filters if one not in filters])
            self._subscribe([one for one in filters if one not in self._requested_filters])

    def attach(self, machine: ClientConnection, *, present: bool) -> None:
        """Subscribe on a new connection. `present` is True if the broker resumed the session.

        With MQTT 5 every subscription is repeated. With earlier versions the broker would then send all
        retained messages again, so filters of a resumed session are not repeated. If the MQTT version differs
        from that of the previous connection, each filter is unsubscribed first: Mosquitto does not change the
        options of a repeated subscription, so messages that the link itself publishes would be returned to
        it.
        """
        self._machine = machine
        self._clear_refusals()
        self._unanswered.clear()
        self._cancelled.clear()
        self._attempts.clear()
        self._retry_times.clear()
        if not present:
            self.granted.clear()
            self._known_filters.clear()
        changed = machine.version is not self._version
        self._version = machine.version
        self._requested_filters = set(self.granted)
        self._unsubscribe([one for one in self._known_filters if changed or one not in self.topic_filters])
        repeats = machine.version is Version.V5
        self._subscribe([one for one in self.topic_filters if repeats or one not in self._requested_filters])

    def detach(self) -> None:
        """Forget the connection, which is lost."""
        self._machine = None

    def handle_suback(self, packet_id: int, reasons: tuple[int, ...], now: float) -> None:
        """Process SUBACK, which has a granted QoS or a refusal for each filter of the packet.

        `now` is in loop-clock seconds; a refused filter is requested again some time later.
        """
        for one, reason in zip(self._unanswered.pop(packet_id, ()), reasons, strict=False):
            if reason >= FAILURE:
                self._refuse(one)
                self._ask_again(one, reason_name(reason), now)
                continue
            if one in self._requested_filters:
                self.granted.add(one)
                self._refused.discard(one)
                self._stats.filters_refused = len(self._refused)
            self._attempts.pop(one, None)
            if reason < self.qos:
                log.warning("link subscription granted lower QoS", link=self._link, filter=one, qos=reason)

    def handle_unsuback(self, packet_id: int, reasons: tuple[int, ...]) -> None:
        """Process UNSUBACK: record that the broker has no subscription to the filter any more.

        A filter that was subscribed to again since is not affected. `reasons` is empty before MQTT 5.
        """
        one = self._cancelled.pop(packet_id, "")
        if one not in self._requested_filters and max(reasons, default=0) < FAILURE:
            self._known_filters.discard(one)

    def tick(self, now: float) -> None:
        """Subscribe again to refused filters whose wait is over. `now` is in loop-clock seconds."""
        due_filters = [one for one, at in self._retry_times.items() if at <= now]
        if due_filters and self._machine is not None:
            for one in due_filters:
                del self._retry_times[one]
            self._subscribe(due_filters)

    def _clear_refusals(self) -> None:
        self._refused.clear()
        self._stats.filters_refused = 0

    def _refuse(self, one: str) -> None:
        self._requested_filters.discard(one)
        self.granted.discard(one)
        if one in self.topic_filters:
            self._refused.add(one)
            self._stats.filters_refused = len(self._refused)

    def _refuse_for_good(self, one: str, why: str) -> None:
        """Record the filter `one` as refused until the next connection, for the reason `why`."""
        self._refuse(one)
        log.error("link subscription failed", link=self._link, filter=one, why=why)

    def _ask_again(self, one: str, reason: str, now: float) -> None:
        if one not in self.topic_filters:
            return
        attempts = self._attempts[one] = self._attempts.get(one, 0) + 1
        wait = min(RETRY_SECS_MIN * 2 ** min(attempts - 1, 6), RETRY_SECS_MAX)
        self._retry_times[one] = now + wait
        log.warning(
            "link subscription refused",
            link=self._link,
            filter=one,
            reason=reason,
            retry_in_secs=round(wait, 1),
        )

    def _subscribe(self, filters: list[str]) -> None:
        machine = self._machine
        assert machine is not None
        for chunk in _chunks([one for one in filters if self._possible(machine, one)]):
            packet_id = self._take_id()
            self._unanswered[packet_id] = chunk
            self._requested_filters.update(chunk)
            if machine.subscribe(packet_id, [self._subscription(one) for one in chunk]):
                self._known_filters.update(chunk)
            else:
                del self._unanswered[packet_id]
                self._requested_filters.difference_update(chunk)
                if len(chunk) > 1:
                    for one in chunk:
                        self._subscribe([one])
                else:
                    self._refuse_for_good(chunk[0], "longer than the broker's Maximum Packet Size")

    def _possible(self, machine: ClientConnection, one: str) -> bool:
        shared = one.startswith(SHARE)
        if shared and not machine.shares_available:
            self._refuse_for_good(one, "the broker does not support shared subscriptions")
        elif not machine.wildcards_available and not WILDCARDS.isdisjoint(one):
            self._refuse_for_good(one, "the broker does not support wildcard subscriptions")
        else:
            return True
        return False

    def _unsubscribe(self, filters: list[str]) -> None:
        machine = self._machine
        assert machine is not None
        for one in filters:
            self._requested_filters.discard(one)
            self.granted.discard(one)
            packet_id = self._take_id()
            self._cancelled[packet_id] = one
            machine.unsubscribe(packet_id, [one])

    def _subscription(self, one: str) -> Subscription:
        shared = one.startswith(SHARE)  # 5: 3.8.3.1 forbids no_local there
        return Subscription(one, self.qos, not shared, True, NEW_ONLY)

    def _take_id(self) -> int:
        """Return the next packet id for SUBSCRIBE or UNSUBSCRIBE, in a cycle.

        Their acknowledgements arrive in order, long before the cycle reaches the same id.
        """
        packet_id = self._next_id
        self._next_id = packet_id + 1 if packet_id < WORD_MAX else FIRST_ID
        return packet_id


def _chunks(filters: list[str]) -> Iterable[tuple[str, ...]]:
    for at in range(0, len(filters), FILTERS_PER_PACKET):
        yield tuple(filters[at : at + FILTERS_PER_PACKET])
