"""Messages to where nobody has published before are dear: what one turn leaves, the next one does, in order.

Each turn does the least here, one new address, of listeners and of links.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Confirms
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.mqtt.spec import PacketType
from gateway.transport import stream as streams
from gateway.transport.stream import Stream
from tests.configured import make_link
from tests.ingress.amqp_client import NOTHING, Amqp
from tests.ingress.amqpfast.client import EMPTY, TOPIC, Fast
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

pytestmark = pytest.mark.interpreted  # it looks at turns, and makes each of them short

MANY: Final = 50
NAMES: Final = range(MANY)
BODIES: Final = [b"%d" % name for name in NAMES]


@pytest.fixture
def turns() -> Iterator[list[int]]:
    """How much was left, each time that something was."""
    left: list[int] = []
    postpone = Stream.postpone

    def noting(stream: Stream, events: list[Any]) -> None:
        left.append(len(events))
        postpone(stream, events)

    with patch.object(streams, "SLOW_WORK_SECS", 0.0), patch.object(Stream, "postpone", noting):
        yield left


def reader_of(gateway: Running, topic_filter: str) -> Mqtt:
    reader, _ = connect(gateway, "reader")
    reader.subscribe(topic_filter)
    return reader


def test_of_mqtt(turns: list[int], gateway: Running) -> None:
    """What is said behind them is done behind them, the DISCONNECT, too."""
    with reader_of(gateway, "new/#") as reader, connect(gateway, "writer")[0] as writer:
        for name in NAMES:
            writer.machine.publish(b"new/%d" % name, b"%d" % name, 1, packet_id=name + 1)
        writer.flush()
        assert [writer.acked(PacketType.PUBACK) for _ in NAMES] == [(name + 1, 0) for name in NAMES]
        for name in NAMES:
            writer.machine.publish(b"new/again/%d" % name, b"%d" % name, 0)
        writer.machine.disconnect()
        writer.flush()
        assert [reader.body() for _ in range(2 * MANY)] == BODIES + BODIES
    assert len(turns) > MANY // 2


def test_of_amqp(turns: list[int], gateway: Running) -> None:
    with reader_of(gateway, "#") as reader, Amqp(gateway).open() as writer:
        writer.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        for name in NAMES:
            writer.machine.send_content(1, m.BasicPublish("amq.topic", f"new.{name}"), NOTHING, b"%d" % name)
        writer.flush()
        confirmed: list[int] = []
        while len(confirmed) < MANY:
            confirmed += [tag for _, tag, *_ in writer.next(Confirms).confirms]
        for name in NAMES:
            writer.machine.send_content(1, m.BasicPublish("amq.topic", f"more.{name}"), NOTHING, b"%d" % name)
        writer.machine.close()
        writer.flush()
        assert [reader.body() for _ in range(2 * MANY)] == BODIES + BODIES
    assert len(turns) > MANY // 2


def test_of_amqpfast(turns: list[int], gateway: Running) -> None:
    with reader_of(gateway, "#") as reader, Fast(gateway).open() as writer:
        handle = writer.handle("", TOPIC)
        tags = Producer(writer.machine, handle, confirm=True).send_many(
            [(b"new.%d" % name, EMPTY, b"%d" % name) for name in NAMES]
        )
        writer.flush()
        assert [writer.reply()[1:4] for _ in NAMES] == [(handle, tag, 200) for tag in tags]
        Producer(writer.machine, handle).send_many(
            [(b"more.%d" % name, EMPTY, b"%d" % name) for name in NAMES]
        )
        writer.machine.close()
        writer.flush()
        assert [reader.body() for _ in range(2 * MANY)] == BODIES + BODIES
    assert len(turns) > MANY // 2


ROUTES: Final = """
version: 1
routes:
  - name: down
    from: {endpoint: far, %s}
    to: {endpoint: mqtt, topic: "down/{rest...}"}
"""


@pytest.mark.parametrize(
    "protocol, source",
    [
        ("mqtt", 'topic: "new/{rest...}"'),
        ("amqp091", 'exchange: amq.topic, binding_key: "new.{rest...}"'),
        ("amqpfast", 'service: topic, destination: "new.{rest...}"'),
    ],
)
def test_of_links(turns: list[int], gateway: Running, tmp_path: Path, protocol: str, source: str) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(ROUTES % source)
    scheme = "amqp" if protocol == "amqp091" else protocol
    link = make_link(url=f"{scheme}://guest:guest@{LOOPBACK}:{gateway.port(protocol)}", client_id="near")
    with running(settings_of(links={"far": link}, mappings=(str(mapping),))) as near:
        near.until(lambda: near.gateway.links["far"].is_up)
        with reader_of(near, "down/#") as reader, Fast(gateway).open() as writer:
            handle = writer.handle("", TOPIC)
            writer.put(handle, b"first", name="new.first")
            assert reader.body() == b"first"
            turns.clear()
            Producer(writer.machine, handle).send_many(
                [(b"new.%d" % name, EMPTY, b"%d" % name) for name in NAMES]
            )
            writer.flush()
            assert [reader.body() for _ in NAMES] == BODIES
    assert len(turns) > MANY, "those of the listener, and those of the link"
