"""Outboxes on the cluster whose consumer ends by itself: what it had in hand is sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher, Surroundings
from gateway.broker.routing import OneSink
from gateway.egress.mqtt.publisher import MqttLinkPublisher
from gateway.engine.outboxes import SharedOutboxes
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.server import ServerConnection
from gateway.settings import Limits
from gateway.store.messages import encode_message
from gateway.telemetry.stats import LinkStats
from tests.broker.parts import mqtt
from tests.configured import make_link
from tests.egress.amqp091.remote import Remote, World, routed
from tests.egress.queue_rig import NotedStatus, QueueRig
from tests.engine.test_endings import ENGINE

pytestmark = pytest.mark.interpreted  # the stream is one in memory

ROUTES: Final = """
version: 1
routes:
  - name: out
    from: {endpoint: mqtt, topic: "a/{rest...}"}
    to: {endpoint: far, topic: "b/{rest...}"}
    settle: stored
"""
QUEUE: Final = "endings.outbox.far.out"


def closed(machine: ServerConnection, channel: int) -> None:
    """The broker closes the channel: the acknowledgements took too long."""
    machine.close_channel(channel, 406, "PRECONDITION_FAILED - delivery acknowledgement timed out", 0, 0)


def cancelled(machine: ServerConnection, channel: int) -> None:
    """The broker cancels the consumer: its queue has moved."""
    machine.send_method(channel, m.BasicCancel(f"tag{channel}"))


@pytest.mark.parametrize("end", [closed, cancelled])
def test_what_a_lost_consumer_had_in_hand_is_sent_once(
    tmp_path: Path, end: Callable[[ServerConnection, int], None]
) -> None:
    """The cluster delivers it to the next consumer; what waited for the link until then is forgotten."""

    async def run() -> None:
        far = MqttLinkPublisher(LinkStats("far", "mqtt"), in_flight_max=1, messages_max=99, bytes_max=9999)
        router = routed(tmp_path, ROUTES, far="mqtt")
        dispatcher = Dispatcher(
            router, DeadLetters(), Surroundings(links={"far"}, namespaces={"far": OneSink(far)})
        )
        outboxes = SharedOutboxes(
            "far",
            make_link(url="mqtt://far"),
            ENGINE,
            dispatcher,
            Limits(),
            NotedStatus(LinkStats("far (outbox)", "amqp091")),
            client_id="one",
            up=lambda: True,
            delivers=far,
            paused=lambda: (),
        )
        world = World()
        rig: QueueRig[Any, Any, Remote] = QueueRig(outboxes, lambda: Remote(world))
        outboxes.tick(0.0)
        rig.connect()
        rig.tick()

        def deliver() -> None:
            bodies = [encode_message(mqtt(body=b"%d" % at)) for at in range(3)]
            rig.remote.deliver(QUEUE, amqp_address("d", QUEUE), bodies)
            rig.move()

        deliver()
        assert far.waiting_messages == 3
        (channel,) = (number for number, (name, _) in rig.remote.consumers.items() if name == QUEUE)
        del rig.remote.consumers[channel]
        end(rig.remote.machine, channel)
        rig.move()
        assert not far.waiting_messages
        await trio.sleep(2.0)
        rig.tick()
        assert rig.remote.consumed == [QUEUE]
        deliver()
        assert far.waiting_messages == 3

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))
