"""While a large message comes more is read at a time: of what a fleet says in one read, and of no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.model.spooled_bodies import join_pieces
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import encode_content_frames, encode_method_frame
from gateway.transport.stream import LARGE_READ_BYTES, READ_BYTES
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import Raw, connect
from tests.interop.gateway_fixture import Running

BODY = bytes(range(256)) * 200


def mqtt(gateway: Running) -> tuple[Raw, bytes]:
    client = connect(gateway)[0]
    client.machine.publish(b"large", BODY, 0)
    return client, client.machine.data_to_send()


def amqp(gateway: Running) -> tuple[Raw, bytes]:
    client = Amqp(gateway).open()
    method = encode_method_frame(1, m.BasicPublish("", "nobody"))
    return client, method + join_pieces(encode_content_frames(1, b"\0\0", BODY, 131_072))


@pytest.mark.parametrize("listener, begin", [("mqtt", mqtt), ("amqp091", amqp)])
def test_more_is_read_at_a_time_while_a_large_message_comes(
    gateway: Running, listener: str, begin: Callable[[Running], tuple[Raw, bytes]]
) -> None:
    client, data = begin(gateway)

    def reads(count: int) -> Callable[[], bool]:
        """So much is read at a time."""
        connections = gateway.gateway.listeners[listener].connections
        return lambda: {one.stream.read_bytes for one in connections} == {count}

    with client:
        gateway.until(reads(READ_BYTES))
        client.send(data[:20_000])
        gateway.until(reads(LARGE_READ_BYTES))
        client.send(data[20_000:])
        gateway.until(reads(READ_BYTES))
