"""A replica that is told to stop: its clients' sessions are free before their connections end."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Final

import pytest

from gateway.protocols.mqtt.packets import Disconnect
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.engine.replicas import PATIENCE_SECS, Client, Replica, lasting, replicas
from tests.ingress.clients import connect
from tests.interop.servers import RabbitMQ

NAMESPACE: Final = "stopping"
KEPT: Final = {Property.SESSION_EXPIRY_INTERVAL: 300}
numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    """One of this test's own."""
    return f"stopping/{next(numbers)}"


def replica(name: str, rabbitmq: RabbitMQ) -> Replica:
    return Replica(name, rabbitmq.url, NAMESPACE, queue_type="classic")


def test_sessions_are_released_before_their_clients_are_told_to_go(rabbitmq: RabbitMQ, topic: str) -> None:
    """So the other replica does not wait for anybody when the client comes."""
    going, staying = replica("going", rabbitmq), replica("staying", rabbitmq)
    with replicas(going, staying), Client(staying.mqtt, f"p {topic}") as publisher:
        client, _ = connect(going, "guest", properties=KEPT)
        with client:
            client.subscribe(topic, 1)
            publisher.publish(topic, b"unacknowledged")
            assert client.row()[4] == b"unacknowledged"
            going.ask(going.gateway.stop)
            assert client.next(Disconnect).reason == 0x8B
            assert staying.stored("session", "guest", "holder") == [("",)]
        with lasting(staying.mqtt, "guest") as again:
            assert again.present
            again.until(lambda: again.messages)
            assert again.told == [(topic, b"unacknowledged")]
            assert again.messages[0].dup
            staying.until(lambda: not staying.engine.sessions._waiting)


def test_nothing_is_sent_that_the_next_owner_sends(rabbitmq: RabbitMQ, topic: str) -> None:
    """Of a client that is slow, what waits for its acknowledgement stays in the queue."""
    going, staying = replica("slow", rabbitmq), replica("quick", rabbitmq)
    with replicas(going, staying), Client(staying.mqtt, f"p {topic}") as publisher:
        client, _ = connect(going, "careful", properties=KEPT | {Property.RECEIVE_MAXIMUM: 1})
        with client:
            client.subscribe(topic, 1)
            for at in range(3):
                publisher.publish(topic, b"%d" % at)
            row = client.row()
            going.ask(lambda: going.engine.release_sessions(lambda outcome: None))
            staying.until(lambda: staying.stored("session", "careful", "holder") == [("",)])
            client.ack(PacketType.PUBACK, row[2])
            client.ping()
            assert not [one for event in client.heard for one in event.rows]
            going.ask(going.gateway.stop)
            assert client.next(Disconnect).reason == 0x8B
        with lasting(staying.mqtt, "careful") as again:
            again.until(lambda: len(again.messages) == 3)
            assert [body for _, body in again.told] == [b"0", b"1", b"2"]


WINDOW: Final = 100  # messages that are unacknowledged at a time


class Sending:
    """Publishes one message after the other, wherever its client is connected, until told to finish."""

    def __init__(self, client: Client, topic: str, qos: int) -> None:
        self._client = client
        self._topic = topic
        self._qos = qos
        self._over = threading.Event()
        self._sent: dict[int, bytes] = {}  # by packet id
        self._acked: set[int] = set()
        client.paho.on_publish = self._published
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _published(self, _: Any, __: Any, packet_id: int, *___: Any) -> None:
        self._acked.add(packet_id)

    def _run(self) -> None:
        while not self._over.wait(0.005):
            if len(self._sent) - len(self._acked) >= WINDOW:
                continue  # on a busy machine, more would be sent than is acknowledged in time
            body = b"%d" % len(self._sent)
            self._sent[self._client.paho.publish(self._topic, body, qos=self._qos).mid] = body

    def finish(self, replica: Replica) -> list[bytes]:
        """Some more, and return what was sent when all of it is acknowledged."""
        reached = max(self._sent)
        replica.until(lambda: reached in self._acked, PATIENCE_SECS)
        self._over.set()
        self._thread.join()
        replica.until(lambda: self._acked >= set(self._sent), PATIENCE_SECS)
        return list(self._sent.values())


@pytest.mark.parametrize("qos", [1, 2])
def test_under_load_nothing_is_lost_and_qos_2_comes_once(rabbitmq: RabbitMQ, topic: str, qos: int) -> None:
    """Publisher and subscriber are at the replica that stops, and go on at the other one."""
    going, staying = replica("first", rabbitmq), replica("second", rabbitmq)
    with replicas(going, staying):
        names = [f"{role} {topic}" for role in ("s", "p")]
        subscriber, publisher = (lasting(going.mqtt, name) for name in names)
        with subscriber, publisher:
            subscriber.subscribe(topic, qos=qos)
            sent = Sending(publisher, topic, qos)
            subscriber.until(lambda: len(subscriber.messages) >= 50)
            for client in (subscriber, publisher):
                client.goes_on(staying.mqtt)
            going.ask(going.gateway.stop)
            for client in (subscriber, publisher):
                client.until(lambda one=client: one.ended)
                assert client.ended[0].value == 0x8B
                client.until(lambda one=client: one.welcome is not None)
            total = sent.finish(staying)
            subscriber.until(lambda: {body for _, body in subscriber.told} >= set(total))
            came = [body for _, body in subscriber.told]
            assert set(came) == set(total)  # in which order paho sends again is its own affair
            assert qos == 1 or len(came) == len(total)
