"""Senders and receivers that speak MQTT, with a persistent session and a state of their own.

The client's half of the session is in these objects, which live as long as a run: a sender repeats PUBLISH
with DUP under the same packet identifier and PUBREL for what was received; a receiver of QoS 2 knows the
identifiers that it has not heard PUBREL for (5: 4.3.3, 4.4). A session that the broker has forgotten is noted
as a fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.packets import Ack, Connack, Connect, Disconnect, Event, Suback, Subscription
from gateway.protocols.mqtt.properties import decode_list, encode_property
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import DUP, FAILURE, QOS, PacketType, Property, Version
from gateway.protocols.mqtt.translate import FIELDS, decode_properties
from tests.chaos.checker import MARK, Carried, History, Id, body_of
from tests.chaos.workers.common import (
    SILENCE_SECS_MAX,
    WINDOW,
    Receiver,
    Sender,
    Worker,
    carried_in,
    readable,
)
from tests.ingress.clients import Mqtt

EXPIRY_SECS: Final = 400 * 24 * 3_600  # longer than any step of a clock
KEEP_ALIVE_SECS: Final = 2
IDS: Final = 65_535


class Device(Mqtt):
    """A connection whose events are fetched without waiting long."""

    def arrived(self) -> list[Event]:
        """What has come since. Raises ConnectionError when the broker has said goodbye."""
        events, self._events = self._events, []
        if data := readable(self.sock):
            events += self.machine.receive_data(data, 0.0)
        for event in events:
            if isinstance(event, Disconnect):
                raise ConnectionError(f"closed: {event.reason:#04x}")
        return events


def client_id_of(worker: Worker) -> str:
    """Return the client identifier of a worker."""
    return f"chaos-{worker.name}"


def opened(
    worker: Worker, version: Version, *, clean: bool = False, may_be_new: bool = False
) -> tuple[Device, Connack]:
    """A connection with the worker's session, or with `clean` a new one. Raises ConnectionError when it is
    refused. A session that is not there is noted, unless it `may_be_new`."""
    device = Device(worker.port)
    device.sock.settimeout(SILENCE_SECS_MAX)
    expiry = {Property.SESSION_EXPIRY_INTERVAL: EXPIRY_SECS} if version is Version.V5 else {}
    try:
        device.say(Connect(client_id_of(worker), version, clean, KEEP_ALIVE_SECS, properties=expiry))
        connack = device.next(Connack)
        if connack.reason >= FAILURE:
            raise ConnectionError(f"refused: {connack.reason:#04x}")
        if device.machine.state is not State.OPEN:
            raise ConnectionError("let in, and closed at once")
    except BaseException:
        device.cut()
        raise
    if not connack.session_present and worker.connects and not (clean or may_be_new):
        worker.notes.append(f"the session of {worker.name} was forgotten")
    worker.connected()
    return device, connack


def listed(carried: Carried) -> bytes:
    """Return the property list of a PUBLISH; no bytes of it reach a version without properties."""
    found = encode_property(Property.USER_PROPERTY, (FIELDS["message_id"], carried.message_id))
    if carried.content_type is not None:
        found += encode_property(Property.CONTENT_TYPE, carried.content_type)
    if carried.mark is not None:
        found += encode_property(Property.USER_PROPERTY, (MARK, carried.mark))
    if carried.life_secs is not None:
        found += encode_property(Property.MESSAGE_EXPIRY_INTERVAL, int(carried.life_secs))
    return found


def carried_of(raw: bytes) -> Carried:
    """Return what a PUBLISH with this property list carries."""
    left = decode_list(raw, PacketType.PUBLISH).get(Property.MESSAGE_EXPIRY_INTERVAL)
    return carried_in(decode_properties(raw), left)


class MqttSender(Sender):
    """Publishes with QoS 1 or 2 below `prefix`."""

    def __init__(
        self,
        name: str,
        port: int,
        history: History,
        *,
        addresses: Iterable[str],
        count: int,
        rate: float,
        prefix: str,
        qos: int,
        version: Version,
    ) -> None:
        super().__init__(name, port, history, addresses=addresses, count=count, rate=rate)
        self._prefix = prefix
        self._qos = qos
        self._version = version
        self._last = 0
        self._publishing: dict[int, Id] = {}  # by packet identifier: PUBACK or PUBREC is missing
        self._releasing: dict[int, None] = {}  # PUBCOMP is missing

    def converse(self) -> None:
        """One connection."""
        device, connack = opened(self, self._version)
        with device:
            self._resume(device, connack.session_present)
            while self.going:
                room = min(WINDOW, device.machine.peer_receive_max)
                for id in self.due(room - len(self._publishing) - len(self._releasing)):
                    self._publish(device, self._free(), id)
                device.flush()
                events = device.arrived()
                for event in events:
                    if isinstance(event, Acks):
                        self._answered(device, event)
                if self.alive(bool(events)):
                    device.machine.send_pingreq(time.monotonic())
                    device.flush()
            device.machine.disconnect()
            device.flush()

    def _resume(self, device: Device, present: bool) -> None:
        """Repeat what is open, under the same identifiers; as new when the broker knows nothing of it."""
        order = {id: at for at, id in enumerate(self.unacked)}
        pending = sorted(self._publishing.items(), key=lambda one: order[one[1]])
        if not present:
            self._publishing.clear()
            self._releasing.clear()
            for _, id in pending:
                self._publish(device, self._free(), id)
            return
        for packet_id, id in pending:
            self._publish(device, packet_id, id, dup=True)
        for packet_id in self._releasing:
            device.machine.send(Ack(PacketType.PUBREL, packet_id))

    def _free(self) -> int:
        while True:
            self._last = self._last % IDS + 1
            if self._last not in self._publishing and self._last not in self._releasing:
                return self._last

    def _publish(self, device: Device, packet_id: int, id: Id, *, dup: bool = False) -> None:
        self._publishing[packet_id] = id
        carried = self.noted(id, bare=self._version is not Version.V5)
        topic = f"{self._prefix}/{id.address}".encode()
        properties = listed(carried)
        device.machine.publish(
            topic, body_of(id), self._qos, packet_id=packet_id, dup=dup, properties=properties
        )

    def _answered(self, device: Device, acks: Acks) -> None:
        for packet_id, reason in acks.rows:
            if acks.kind is PacketType.PUBCOMP:
                self._releasing.pop(packet_id, None)
                continue
            id = self._publishing.pop(packet_id, None)
            if id is not None:
                self.told(id, reason < FAILURE)
            if acks.kind is PacketType.PUBREC and reason < FAILURE:
                self._releasing[packet_id] = None
                device.machine.send(Ack(PacketType.PUBREL, packet_id))


class MqttReceiver(Receiver):
    """Subscribes to everything below `prefix`, with others of its `group` if it has one."""

    def __init__(
        self,
        name: str,
        port: int,
        history: History,
        *,
        prefix: str,
        qos: int,
        version: Version,
        group: str = "",
    ) -> None:
        super().__init__(name, port, history)
        self._prefix = prefix
        self._filter = f"$share/{group}/{prefix}/#" if group else f"{prefix}/#"
        self._qos = qos
        self._version = version
        self._known: set[int] = set()  # packet identifiers of QoS 2 that wait for their PUBREL

    def converse(self) -> None:
        """One connection."""
        self.receive(*opened(self, self._version))

    def receive(self, device: Device, connack: Connack) -> None:
        """Subscribe on a new connection, and receive until it ends."""
        with device:
            if not connack.session_present:
                self._known.clear()
            # Always: it may have died between its CONNACK and its SUBACK.
            subscription = Subscription(self._filter, self._qos)
            device.machine.subscribe(1, [subscription], {})
            device.flush()
            while self.going:
                self.dawdle()
                events = device.arrived()
                for event in events:
                    self._take(device, event)
                if self.alive(bool(events)):
                    device.machine.send_pingreq(time.monotonic())
                device.flush()
            device.machine.disconnect()
            device.flush()

    def _take(self, device: Device, event: Event) -> None:
        if isinstance(event, Suback):
            if event.reasons[0] >= FAILURE:
                raise ConnectionError(f"the subscription was refused: {event.reasons[0]:#04x}")
            self.ready.set()
        elif isinstance(event, Publishes):
            for flags, topic, packet_id, raw, body in event.rows:
                twice = flags & QOS == 4
                if not twice or packet_id not in self._known:
                    address = topic.decode().removeprefix(f"{self._prefix}/")
                    carried = carried_of(raw) if self._version is Version.V5 else None
                    self.note(body, address, bool(flags & DUP), carried)
                if twice:
                    self._known.add(packet_id)
                device.machine.send(Ack(PacketType.PUBREC if twice else PacketType.PUBACK, packet_id))
        elif isinstance(event, Acks):
            assert event.kind is PacketType.PUBREL
            for packet_id, _ in event.rows:
                self._known.discard(packet_id)
                device.machine.send(Ack(PacketType.PUBCOMP, packet_id))
