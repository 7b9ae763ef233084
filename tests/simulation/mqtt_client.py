"""MQTT clients of a simulation: the project's own client machine on a wire, with a session that survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    Event,
    Suback,
    Subscription,
    Will,
)
from gateway.protocols.mqtt.properties import PropertyMap, encode_list
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import FAILURE, PacketType, Property, Version
from tests.simulation.ledger import LATE_SECS, NEVER, Destination, Publication
from tests.simulation.simulated_client import PADDING_BYTES, SimulatedClient, Site

OUTGOING_MAX: Final = 12
SUBSCRIBES: Final = 65_000  # packet id of SUBSCRIBE


@dataclass
class Wish:
    """A subscription: a filter, a QoS, and the destination that it makes."""

    filter: str
    qos: int
    destination: Destination


@dataclass
class Unfinished:
    """A publish that is not complete: before PUBREC, or after it."""

    publication: Publication
    is_received: bool = False


class MqttClient(SimulatedClient[Event]):
    """One device. With `expiry_secs` its session outlives its connections."""

    LISTENER: ClassVar[str] = "mqtt"
    OPENING_SECS_MAX: ClassVar[float] = 8.0

    def __init__(
        self,
        site: Site,
        name: str,
        *,
        expiry_secs: int = 0,
        wishes: Sequence[Wish] = (),
        receive_max: int = 10,
        version: Version = Version.V5,
        heirs: Sequence[Destination] = (),
        will_delay_secs: int = 0,
    ) -> None:
        """`heirs` get the will of this device: it has one if there are any."""
        super().__init__(site, name)
        self.outgoing: dict[int, Unfinished] = {}
        self.wishes = list(wishes)
        self.expiry_secs = expiry_secs
        self._receive_max = receive_max
        self._version = version
        self._heirs = list(heirs)
        self._will: Publication | None = None  # of the connection
        self._will_delay_secs = will_delay_secs
        self._is_seen = True  # its last connection was lost in a way that the gateway notices
        self._left_will: Publication | None = None  # of the last connection, while its delay may not be over
        self._machine = ClientConnection(packet_bytes_max=268_435_455)
        self._packet_id = 0
        self._unacknowledged: list[tuple[PacketType, int]] = []
        self._unread: dict[int, tuple[Destination, bytes]] = {}  # QoS 1 without PUBACK, by packet id
        self._once: set[int] = set()  # QoS 2 ids that have been received
        self.has_session = False  # the gateway has confirmed it, and nothing has ended it
        self.is_subscribed = False
        self._away_since = 0.0
        self._connects_at = 0.0
        self._wants_clean = False

    # What the simulation has it do.

    def connect(self, *, clean: bool = False) -> None:
        """Open a connection; an old one is given up."""
        site = self._site
        self.give_up()
        self._connects_at = site.now
        self._wants_clean = clean or not self.expiry_secs
        if self._wants_clean:
            self.end_session()
        self._connect()
        self._machine = ClientConnection(packet_bytes_max=268_435_455)
        properties: PropertyMap = {}
        if self._version is Version.V5:
            properties = {
                Property.SESSION_EXPIRY_INTERVAL: self.expiry_secs,
                Property.RECEIVE_MAXIMUM: self._receive_max,
            }
        self._will = will = None
        if self._heirs:
            self._will = site.ledger.publish(self.name, f"w/{self.name}", 1, self._heirs, site.now)
            delay: PropertyMap = {Property.WILL_DELAY_INTERVAL: self._will_delay_secs}
            will = Will(
                self._will.address, self._will.body(), 1, properties=delay if self._will_delay_secs else {}
            )
        packet = Connect(self.name, self._version, self._wants_clean, 0, will, properties=properties)
        self._machine.connect(packet, 0.0)
        self._flush()
        site.trace(self.name, "connects", "clean" if clean else "")

    def _transport(self) -> ClientConnection:
        return self._machine

    def _say_goodbye(self) -> None:
        self._machine.disconnect()

    def give_up(self) -> None:
        """Forget the connection, which the gateway may believe in."""
        if self.wire is not None:
            self._away_since = self._site.now
        super().give_up()

    def _forget(self) -> None:
        for destination, body in self._unread.values():
            self._site.ledger.owe(destination, body)
        self._unread.clear()
        self._unacknowledged.clear()

    def _note_vanished(self, how: str) -> None:
        if self._will is not None and self.is_open and how != "disconnect":
            self._site.ledger.accept(self._will)
            self._left_will = self._will if self._will_delay_secs else None
            self._is_seen = how != "half-open"

    def _came_back(self) -> None:
        """Note that the session was resumed: a delayed will is not published any more, unless it was due.

        CONNECT ends the delay, and CONNACK may come much later from a slow disk.
        """
        will, delay = self._left_will, self._will_delay_secs
        was_due = self._is_seen and self._connects_at - self._away_since > delay + LATE_SECS
        if will is not None and not was_due:
            will.is_accepted = False
            will.is_void = self._site.now - self._away_since < delay and self._site.ledger.is_clock_steady
        self._left_will = None

    def end_session(self) -> None:
        """Note that the session ends, or that nobody knows if there is one."""
        self.has_session = self.is_subscribed = False
        for wish in self.wishes:
            if not wish.destination.name.startswith("$share"):
                self._site.ledger.end(wish.destination)

    def publish(
        self,
        address: str,
        qos: int,
        wanted: Sequence[Destination],
        *,
        ttl_secs: int = 0,
        **more: Any,
    ) -> bool:
        """Publish a message. Return False if too many are on their way.

        `more` are other fields of the publication.
        """
        site = self._site
        if not self.is_open or len(self.outgoing) >= OUTGOING_MAX:
            return False
        padding = site.random.choice(PADDING_BYTES)
        one = site.ledger.publish(
            self.name,
            address,
            qos,
            wanted if qos else (),
            site.now,
            ttl_secs=ttl_secs or NEVER,
            padding=padding,
            **more,
        )
        one.is_unsafe = self._version is not Version.V5
        packet_id = self._new_id() if qos else 0
        if qos:
            self.outgoing[packet_id] = Unfinished(one)
        self._send(one, packet_id, dup=False)
        site.trace(self.name, "publishes", one.id, address, qos)
        return True

    def _new_id(self) -> int:
        while True:
            self._packet_id = self._packet_id % 60_000 + 1
            if self._packet_id not in self.outgoing:
                return self._packet_id

    def _send(self, one: Publication, packet_id: int, *, dup: bool) -> None:
        properties = b""
        if one.ttl_secs != NEVER:
            left = max(int(one.ttl_secs), 1)
            properties = encode_list({Property.MESSAGE_EXPIRY_INTERVAL: left}, PacketType.PUBLISH)
        self._machine.publish(
            one.address.encode(),
            one.body(),
            one.qos,
            retain=one.is_retained,
            dup=dup,
            packet_id=packet_id,
            properties=properties,
        )
        self._flush()

    # What happens to it.

    def _take(self, event: Event) -> None:
        if isinstance(event, Connack):
            self._opened(event)
        elif isinstance(event, Suback):
            self._subscribed(event)
        elif isinstance(event, Publishes):
            self._received(event)
        elif isinstance(event, Acks):
            for packet_id, reason in event.rows:
                self._acknowledged(event.kind, packet_id, reason)
        elif isinstance(event, Disconnect):
            self._site.trace(self.name, "is disconnected", event.reason)

    def acknowledge(self) -> None:
        """Send the acknowledgements that are due."""
        due, self._unacknowledged = self._unacknowledged, []
        self._unread.clear()
        for kind, packet_id in due:
            self._machine.send(Ack(kind, packet_id))

    def _opened(self, connack: Connack) -> None:
        site = self._site
        site.trace(self.name, "connack", connack.reason, connack.session_present)
        if connack.reason >= FAILURE:
            self.give_up()
            return
        present = connack.session_present
        if present:
            self._came_back()
        if self._machine.state is not State.OPEN:  # a DISCONNECT came with it
            return
        self.is_open = True
        if self.has_session and not present:
            away = site.now - self._away_since
            if away < self.expiry_secs:
                site.ledger.faults.append(f"{self.name}: its session is lost after {away:.1f} s")
            self.end_session()
        if not present:
            self._once.clear()
        self.has_session = self.expiry_secs > 0
        if self.wishes and not (present and all(one.destination.exists for one in self.wishes)):
            asked = [Subscription(one.filter, one.qos) for one in self.wishes]
            self._machine.subscribe(SUBSCRIBES, asked)
        for packet_id, one in list(self.outgoing.items()):
            one.publication.attempts += 1
            if one.is_received:
                if present:
                    self._machine.send(Ack(PacketType.PUBREL, packet_id))
                else:
                    del self.outgoing[packet_id]
                continue
            one.publication.is_unsafe |= not present
            self._send(one.publication, packet_id, dup=present)

    def _subscribed(self, suback: Suback) -> None:
        self.is_subscribed = any(reason < FAILURE for reason in suback.reasons)
        for wish, reason in zip(self.wishes, suback.reasons, strict=True):
            if reason < FAILURE:
                wish.destination.exists = self.expiry_secs > 0
            self._site.trace(self.name, "suback", wish.filter, reason)

    def _received(self, publishes: Publishes) -> None:
        site = self._site
        for flags, topic, packet_id, _, body in publishes.rows:
            qos = flags >> 1 & 3
            data = bytes(body)
            site.trace(self.name, "gets", data[:12], qos, packet_id, flags >> 3)
            if qos == 2 and packet_id in self._once:
                self._unacknowledged.append((PacketType.PUBREC, packet_id))
                continue
            # What clears a retained message has no body by which to know it.
            destination = self._note(topic.decode(), data, flags) if data else None
            if qos == 1:
                if destination is not None:
                    self._unread[packet_id] = destination, data
                self._unacknowledged.append((PacketType.PUBACK, packet_id))
            elif qos == 2:
                self._once.add(packet_id)
                self._unacknowledged.append((PacketType.PUBREC, packet_id))

    def _note(self, topic: str, body: bytes, flags: int) -> Destination | None:
        site, qos, is_retained, is_repeat = self._site, flags >> 1 & 3, flags & 1, flags & 8 > 0
        for wish in self.wishes:
            if fits(wish.filter, topic):
                if is_retained:
                    site.ledger.see_retained(wish.destination, body)
                    return wish.destination
                by = self.name if wish.destination.name.startswith("$share") else ""
                site.ledger.receive(wish.destination, body, by, qos=qos, is_repeat=is_repeat, now=site.now)
                return wish.destination
        site.ledger.faults.append(f"{self.name}: {topic} fits none of its subscriptions")
        return None

    def _acknowledged(self, kind: PacketType, packet_id: int, reason: int) -> None:
        site = self._site
        if kind is PacketType.PUBREL:
            self._once.discard(packet_id)
            self._unacknowledged.append((PacketType.PUBCOMP, packet_id))
            return
        one = self.outgoing.get(packet_id)
        site.trace(self.name, kind.name.lower(), packet_id, reason)
        if one is None:
            return
        if kind is PacketType.PUBCOMP:
            del self.outgoing[packet_id]
        elif reason >= FAILURE:
            site.ledger.refuse(one.publication)
            del self.outgoing[packet_id]
        else:
            site.ledger.accept(one.publication)
            if kind is PacketType.PUBACK:
                del self.outgoing[packet_id]
            else:
                one.is_received = True
                self._machine.send(Ack(PacketType.PUBREL, packet_id))

    @property
    def destinations(self) -> list[Destination]:
        """Return what its subscriptions make."""
        return [one.destination for one in self.wishes]

    def waits_for(self) -> str:
        """Return what is on its way, for reports."""
        return f"open {self.is_open}, outgoing {sorted(self.outgoing)}, unacknowledged {self._unacknowledged}"

    @property
    def is_quiet(self) -> bool:
        """True if nothing of it is on its way."""
        return self.is_open and not self.outgoing and not self._unacknowledged


def fits(topic_filter: str, address: str) -> bool:
    """Return True if a filter of a simulation, which ends in #, matches an address."""
    if topic_filter.startswith("$share/"):
        topic_filter = topic_filter.split("/", 2)[2]
    return address.startswith(topic_filter.removesuffix("#"))
