"""The next consumer of a queue with a single active one gets first what the last one had not acknowledged."""

from __future__ import annotations

import pytest

from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqp091 import methods as m
from tests.ingress.amqp_client import Amqp
from tests.interop.gateway_fixture import Running

BODIES = [b"%d" % number for number in range(6)]


@pytest.mark.parametrize("end", ["channel", "connection", "socket"])
@pytest.mark.parametrize("quorum", [True, False])
def test_order_is_kept_when_the_active_consumer_ends(gateway: Running, quorum: bool, end: str) -> None:
    arguments = {"x-single-active-consumer": Value(ValueType.BOOL, True)}
    if quorum:
        arguments["x-queue-type"] = string("quorum")
    with Amqp(gateway).open() as first, Amqp(gateway).open() as second:
        for client in (first, second):
            declare = m.QueueDeclare("q", durable=True, arguments=tuple(arguments.items()))
            client.call(declare, m.QueueDeclareOk)
            client.call(m.BasicQos(prefetch_count=2), m.BasicQosOk)
            client.call(m.BasicConsume("q", "c"), m.BasicConsumeOk)
        second.publish("", "q", *BODIES)
        assert [one[-1] for one in first.delivered(2)] == BODIES[:2]
        if end == "channel":
            first.say(m.ChannelClose(200, "done", 0, 0))
        elif end == "connection":
            first.machine.close()
            first.flush()
        else:
            first.sock.close()
        bodies: list[object] = []
        while len(bodies) < len(BODIES):
            for delivery in second.delivered(1):
                bodies.append(delivery[-1])
                second.say(m.BasicAck(delivery[2]))
        assert bodies == BODIES
