"""Codecs in memory: nanoseconds per message, ours against pamqp (AMQP 0-9-1) and paho-mqtt (MQTT).

Ours are measured as the gateway uses them: a whole read in and its rows out, a batch of rows in and the
bytes of one write out. The peers get every advantage that their interface allows: pamqp is handed each frame
already cut out, and frame objects that were made before; paho's socket is replaced by memory and its logging
is off. Their decoders read the properties, and ours leave them as bytes: so ours are made to look them up
too, as the gateway does for every message that it takes in, in what it remembers by those bytes.

mqttproto is not on the package index; paho's `_send_publish` and `_packet_read` stand in for it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any, Final

from paho.mqtt.client import Client as Paho
from paho.mqtt.client import MQTTv311
from paho.mqtt.enums import CallbackAPIVersion
from pamqp import body as pamqp_body
from pamqp import commands, frame, header

from gateway.protocols.amqp091 import events as amqp_events
from gateway.protocols.amqp091.client import ClientConnection as AmqpClient
from gateway.protocols.amqp091.codec import encode_response
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.sender import Deliverer, Publisher
from gateway.protocols.amqp091.server import ServerConnection as AmqpServer
from gateway.protocols.amqp091.translate import content_properties
from gateway.protocols.mqtt.packets import Connect
from gateway.protocols.mqtt.runs import Publishes
from gateway.protocols.mqtt.server import ServerConnection as MqttServer
from gateway.protocols.mqtt.spec import Version
from gateway.protocols.mqtt.writers import encode
from tests.benchmarks import wires
from tests.benchmarks.report import Figure, median

TARGET: Final = 5.0
BATCH: Final = 250  # messages of one read or write: about 64 KiB
BODY: Final = b"x" * 128
TOPICS: Final = tuple(f"plant/line1/machine{at}/temperature" for at in range(10))
KEYS: Final = tuple(topic.replace("/", ".") for topic in TOPICS)
PROPERTIES: Final = b"\x90\x00\x18application/octet-stream\x02"  # content type, delivery mode
ROUND_SECS: Final = 0.05

Work = Callable[[], object]
Pair = tuple[Work, Work]


def _mqtt_server() -> MqttServer:
    machine = MqttServer(packet_bytes_max=1 << 20)
    machine.receive_data(encode(Connect("c", Version.V311), Version.V311), 0.0)
    machine.send_connack()
    machine.data_to_send()
    return machine


class _Memory(BytesIO):
    """A socket for paho: reading takes from memory, writing is forgotten."""

    def recv(self, size: int) -> bytes:
        """As much as is asked for."""
        return self.read(size)

    def send(self, data: bytes) -> int:
        """Everything."""
        return len(data)

    def pending(self) -> int:
        """Nothing that `select` would not see."""
        return 0


def _paho() -> Any:
    """A paho client that believes to be connected."""
    client: Any = Paho(CallbackAPIVersion.VERSION2, protocol=MQTTv311)
    client._sock = _Memory()
    return client


def _publish_packets(qos: int) -> list[bytes]:
    """A batch of PUBLISH over some topics, as devices would send them in turn."""
    packets = []
    for at in range(BATCH):
        rest = wires.text(TOPICS[at % len(TOPICS)]) + ((at + 1).to_bytes(2, "big") if qos else b"")
        packets.append(wires.packet(0x30 | qos << 1, rest + BODY))
    return packets


def _decode_publish() -> Pair:
    """QoS 0: at QoS 1, paho's reader would also write the PUBACK."""
    data = b"".join(_publish_packets(0))
    machine, client = _mqtt_server(), _paho()

    def ours() -> int:
        (event,) = machine.receive_data(data, 0.0)
        assert isinstance(event, Publishes)
        return len(event.rows)

    def theirs() -> None:
        client._sock = _Memory(data)
        for _ in range(BATCH):
            client._packet_read()

    assert ours() == BATCH
    return ours, theirs


def _encode_publish() -> Pair:
    """QoS 1, 3.1.1. paho's queue of packets is replaced: only the packing is measured."""
    machine, client = _mqtt_server(), _paho()
    topics = [topic.encode() for topic in TOPICS]
    rows = [(0x02, topics[at % len(topics)], at + 1, b"", BODY) for at in range(BATCH)]
    kept: list[bytes] = []
    client._packet_queue = lambda command, packet, *rest: kept.append(packet)

    def ours() -> bytes:
        machine.publish_many(rows)
        return machine.data_to_send()

    def theirs() -> None:
        kept.clear()
        send = client._send_publish
        for _, topic, packet_id, _, body in rows:
            send(packet_id, topic, body, 1)

    theirs()
    assert ours() == b"".join(kept) == b"".join(_publish_packets(1))
    return ours, theirs


# AMQP 0-9-1.


def _amqp_pair() -> tuple[AmqpServer, AmqpClient]:
    """A server and a client with channel 1 open between them."""
    server = AmqpServer()
    client = AmqpClient(mechanism="PLAIN", response=encode_response("PLAIN", "guest", "guest"))
    opened = False
    while said := client.data_to_send():
        for event in server.receive_data(said, 0.0):
            if isinstance(event, amqp_events.Authenticate):
                server.authenticated()
            elif isinstance(event, amqp_events.Open):
                server.opened()
        client.receive_data(server.data_to_send(), 0.0)
        if not opened and client.closed is False and not client.out:
            client.open_channel()
            opened = True
    assert server.channels == client.channels == [1]
    return server, client


def _pamqp_frames(method: Callable[[str, int], Any]) -> list[tuple[Any, Any, Any]]:
    """Method, header and body of each message of a batch."""
    said = commands.Basic.Properties(content_type="application/octet-stream", delivery_mode=2)
    return [
        (
            method(KEYS[at % len(KEYS)], at + 1),
            header.ContentHeader(0, len(BODY), said),
            pamqp_body.ContentBody(BODY),
        )
        for at in range(BATCH)
    ]


def _pamqp_publish(key: str, _: int) -> Any:
    return commands.Basic.Publish(exchange="amq.topic", routing_key=key)


def _pamqp_deliver(key: str, tag: int) -> Any:
    return commands.Basic.Deliver("c", tag, False, "amq.topic", key)


def _marshal(frames: list[tuple[Any, Any, Any]]) -> list[bytes]:
    marshal = frame.marshal
    return [marshal(one, 1) for three in frames for one in three]


def _unmarshal(data: list[bytes]) -> None:
    unmarshal = frame.unmarshal
    for one in data:
        unmarshal(one)


def _decode(data: list[bytes], receive: Callable[[bytes, float], list[Any]], properties_at: int) -> Pair:
    """Rows out of bytes, each with the property set that the gateway remembers."""
    read = b"".join(data)

    def ours() -> int:
        (event,) = receive(read, 0.0)
        return len([content_properties(row[properties_at]) for row in event.contents])

    assert ours() == BATCH
    return ours, lambda: _unmarshal(data)


def _decode_basic_publish() -> Pair:
    server, _ = _amqp_pair()
    return _decode(_marshal(_pamqp_frames(_pamqp_publish)), server.receive_data, 2)


def _decode_basic_deliver() -> Pair:
    _, client = _amqp_pair()
    return _decode(_marshal(_pamqp_frames(_pamqp_deliver)), client.receive_data, 5)


def _encode_basic_publish() -> Pair:
    _, client = _amqp_pair()
    publisher = Publisher(client, 1)
    addresses = [amqp_address("amq.topic", key).wire for key in KEYS]
    rows = [(addresses[at % len(addresses)], PROPERTIES, BODY) for at in range(BATCH)]
    frames = _pamqp_frames(_pamqp_publish)

    def ours() -> bytes:
        publisher.publish_many(rows)
        return client.data_to_send()

    assert ours() == b"".join(_marshal(frames))
    return ours, lambda: _marshal(frames)


def _encode_basic_deliver() -> Pair:
    server, _ = _amqp_pair()
    deliverer = Deliverer(server, 1, "c")
    addresses = [amqp_address("amq.topic", key).wire for key in KEYS]
    rows = [(False, addresses[at % len(addresses)], PROPERTIES, BODY) for at in range(BATCH)]
    frames = _pamqp_frames(_pamqp_deliver)

    def ours() -> bytes:
        deliverer.deliver_many(1, rows)
        return server.data_to_send()

    assert ours() == b"".join(_marshal(frames))
    return ours, lambda: _marshal(frames)


CASES: Final[tuple[tuple[str, str, Callable[[], Pair]], ...]] = (
    ("decode PUBLISH", "paho", _decode_publish),
    ("encode PUBLISH", "paho", _encode_publish),
    ("decode basic.publish", "pamqp", _decode_basic_publish),
    ("encode basic.publish", "pamqp", _encode_basic_publish),
    ("decode basic.deliver", "pamqp", _decode_basic_deliver),
    ("encode basic.deliver", "pamqp", _encode_basic_deliver),
)


def _rounds(work: Work) -> Iterator[float]:
    """Nanoseconds per message, of one round after the other; each round lasts about ROUND_SECS."""
    work()
    begin = time.perf_counter()
    work()
    calls = max(1, int(ROUND_SECS / (time.perf_counter() - begin)))
    while True:
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        yield (time.perf_counter() - begin) / calls / BATCH * 1e9


def measure(seconds: float, repeat: int) -> list[Figure]:
    """One figure per case: the median round; ours and theirs take turns for `seconds` together."""
    figures = []
    for name, peer, prepare in CASES:
        gc.collect()
        ours, theirs = (_rounds(work) for work in prepare())
        pairs = [(next(ours), next(theirs)) for _ in range(max(repeat, int(seconds / ROUND_SECS / 2)))]
        fast, slow = (median(column) for column in zip(*pairs, strict=True))
        figures.append(Figure(name, "ns/message", fast, slow, slow / fast, TARGET, {"against": peer}))
    return figures
