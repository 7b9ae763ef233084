"""QoS 2 from end to end, through a gateway that is killed at any moment: every message once, in order.

Publisher and reader are clients with sessions that keep their own state over everything, as the protocol
wants: what they were not told, they say again.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Final

from gateway.protocols.mqtt.packets import Connack, Connect, Event
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.ingress.clients import Mqtt
from tests.interop.gateway_process import GatewayProcess

PUBREC, PUBREL, PUBCOMP = PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP
MESSAGES: Final = 4_000
WINDOW: Final = 50
KILLS: Final = 5
SEED: Final = 20_260
LIFE_SECS_MAX: Final = 0.35
END_SECS: Final = 60.0


class Client:
    """A client with a session, on one connection after the other, until it has finished."""

    def __init__(self, gateway: GatewayProcess, client_id: str, failures: list[BaseException]) -> None:
        self.failures = failures
        self.connections = 0
        self._port = gateway.ports["mqtt"]
        self._id = client_id
        self._thread = threading.Thread(target=self._live, name=client_id)
        self._end = time.monotonic() + END_SECS

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _live(self) -> None:
        try:
            while not self.finished:
                assert time.monotonic() < self._end, f"{self._id} does not come to an end: {vars(self)}"
                try:
                    self._connection()
                except (OSError, TimeoutError):
                    time.sleep(0.05)  # the gateway is dead
        except BaseException as error:
            self.failures.append(error)

    def _connection(self) -> None:
        with Mqtt(self._port) as client:
            client.sock.settimeout(2.0)
            properties = {Property.SESSION_EXPIRY_INTERVAL: 600, Property.RECEIVE_MAXIMUM: WINDOW}
            client.say(Connect(self._id, clean_start=False, properties=properties))
            while not self.finished:
                data = client.sock.recv(65_536)
                if not data:
                    return
                for event in client.machine.receive_data(data, 0.0):
                    if isinstance(event, Connack):
                        assert event.reason == 0
                        self.connections += 1
                        self.connected(client)
                    else:
                        self.heard(client, event)
                client.flush()

    def connected(self, client: Mqtt) -> None:
        """Say again what was not answered."""

    def heard(self, client: Mqtt, event: Event) -> None:
        """Answer."""


class Publisher(Client):
    """Sends numbers; `open` holds those that were not completed, by packet id: (number, PUBREC came)."""

    def __init__(self, gateway: GatewayProcess, failures: list[BaseException]) -> None:
        self.next = 0
        self.open: dict[int, tuple[int, bool]] = {}
        super().__init__(gateway, "publisher", failures)

    @property
    def finished(self) -> bool:
        return self.next == MESSAGES and not self.open

    def connected(self, client: Mqtt) -> None:
        for packet_id, (number, received) in self.open.items():
            if received:
                client.machine.acknowledge(PUBREL, [packet_id])
            else:
                self._publish(client, packet_id, number, dup=True)
        self._go_on(client)

    def _publish(self, client: Mqtt, packet_id: int, number: int, *, dup: bool) -> None:
        client.machine.publish(b"chaos/a", b"%d" % number, 2, dup=dup, packet_id=packet_id)

    def _go_on(self, client: Mqtt) -> None:
        while len(self.open) < WINDOW and self.next < MESSAGES:
            packet_id = self.next % 60_000 + 1
            self.open[packet_id] = (self.next, False)
            self._publish(client, packet_id, self.next, dup=False)
            self.next += 1

    def heard(self, client: Mqtt, event: Event) -> None:
        assert isinstance(event, Acks)
        for packet_id, reason in event.rows:
            if event.kind is PUBREC:
                assert reason == 0
                self.open[packet_id] = (self.open[packet_id][0], True)
                client.machine.acknowledge(PUBREL, [packet_id])
            else:
                assert event.kind is PUBCOMP
                del self.open[packet_id]
        self._go_on(client)


class Reader(Client):
    """Reads each message once: `held` are the ids that were not released."""

    def __init__(self, gateway: GatewayProcess, failures: list[BaseException]) -> None:
        self.got: list[int] = []
        self.held: set[int] = set()
        self.repeats = 0
        super().__init__(gateway, "reader", failures)

    @property
    def finished(self) -> bool:
        return len(self.got) >= MESSAGES and not self.held

    def heard(self, client: Mqtt, event: Event) -> None:
        if isinstance(event, Publishes):
            for flags, _, packet_id, _, body in event.rows:
                assert flags >> 1 & 3 == 2
                if packet_id in self.held:
                    self.repeats += 1
                else:
                    self.got.append(int(body))
                    self.held.add(packet_id)
                client.machine.acknowledge(PUBREC, [packet_id])
        else:
            assert isinstance(event, Acks)
            assert event.kind is PUBREL
            for packet_id, _ in event.rows:
                self.held.discard(packet_id)
                client.machine.acknowledge(PUBCOMP, [packet_id])


def exchange(gateway: GatewayProcess, kills: int) -> None:
    """Send MESSAGES messages of QoS 2 through a gateway that is killed `kills` times; check what arrives."""
    chance = random.Random(SEED)
    failures: list[BaseException] = []
    with Mqtt(gateway.ports["mqtt"]) as client:
        given = {Property.SESSION_EXPIRY_INTERVAL: 600}
        client.say(Connect("reader", clean_start=False, properties=given))
        assert client.next(Connack).reason == 0
        assert client.subscribe("chaos/#", 2) == 2
    reader, publisher = Reader(gateway, failures), Publisher(gateway, failures)
    reader.start()
    publisher.start()
    for _ in range(kills):
        lived = reader.connections, publisher.connections
        time.sleep(chance.uniform(0.01, LIFE_SECS_MAX))
        gateway.restart()
        while not failures and not (reader.finished and publisher.finished):
            if reader.connections > lived[0] and publisher.connections > lived[1]:
                break
            time.sleep(0.01)
    publisher.join()
    reader.join()
    if failures:
        raise failures[0]
    assert reader.got == list(range(MESSAGES)), f"seed {SEED}"


def test_qos_2_is_delivered_once_and_in_order_whenever_the_gateway_is_killed(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path) as gateway:
        exchange(gateway, KILLS)
