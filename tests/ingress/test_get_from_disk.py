"""basic.get empties a durable queue of which most messages are on disk alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.broker.amqp091.dead_letter_routing import EXPIRED_MAX
from gateway.broker.storage import PIECE_BYTES_MAX
from gateway.model.properties import Value, ValueType
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import GetResponse
from gateway.settings import Limits, StoreSettings
from tests.broker.amqp091.test_queue import native
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_fixture import running, settings_of

PERSISTENT = b"\x10\x00\x02"  # flags of basic properties with the delivery mode alone, and the mode
BODY = bytes(PIECE_BYTES_MAX // 40)
COUNT = 130  # more than two pieces, of which one is read while the other one waits


@pytest.mark.parametrize("acknowledges", [True, False])
@pytest.mark.parametrize("priorities", [True, False])
def test_every_message_is_got(tmp_path: Path, priorities: bool, acknowledges: bool) -> None:
    arguments = (("x-max-priority", Value(ValueType.INT32, 5)),) if priorities else ()
    limits = Limits(queue_memory_messages_max=10)
    settings = settings_of(store=StoreSettings(path=tmp_path), limits=limits)
    with running(settings) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", durable=True, arguments=arguments), m.QueueDeclareOk)
        client.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        client.publish("", "q", *[BODY] * COUNT, properties=PERSISTENT)
        queue = gateway.gateway.host.queues["q"]
        gateway.until(lambda: len(queue) == COUNT and queue.storage is not None and queue.storage.count > 0)
        for _ in range(COUNT):
            client.say(m.BasicGet("q", no_ack=not acknowledges))
            got = client.next(GetResponse)
            assert got.body == BODY
            if acknowledges:
                client.say(m.BasicAck(got.method.delivery_tag))
        client.call(m.BasicGet("q"), m.BasicGetEmpty)


def test_what_is_behind_many_expired_messages_is_got() -> None:
    """There are more of them than one turn may send to the dead letter exchange."""
    arguments = (("x-dead-letter-exchange", Value(ValueType.STRING, b"")),)
    with running(settings_of()) as gateway, Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", arguments=arguments), m.QueueDeclareOk)
        queue = gateway.gateway.host.queues["q"]
        expired = [native(b"late", life=1.0) for _ in range(3 * EXPIRED_MAX)]
        gateway.ask(lambda: queue.put([*expired, native(b"there")]))
        client.say(m.BasicGet("q", no_ack=True))
        assert client.next(GetResponse).body == b"there"
        client.call(m.BasicGet("q"), m.BasicGetEmpty)
