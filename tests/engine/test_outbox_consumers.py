"""Outboxes on the cluster whose consumer ends by itself: what it had in hand is sent once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import trio
import trio.testing

from gateway import clock
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher, DispatcherServices
from gateway.broker.routing import OneSink
from gateway.egress.mqtt.publisher import MqttLinkPublisher
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.outboxes import COUNT_SECS, SharedOutboxes
from gateway.model.message import NEVER, Message
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.server import ServerConnection
from gateway.settings import Limits
from gateway.store.messages import encode_message
from gateway.telemetry.stats import LinkStats
from tests.broker.parts import mqtt
from tests.configured import make_link
from tests.egress.amqp091.remote import Remote, World, routed
from tests.egress.queue_rig import NotedStatus, QueueRig, Settled
from tests.engine.test_endings import ENGINE, outboxes

pytestmark = pytest.mark.interpreted  # the stream is one in memory

ROUTES: Final = """
version: 1
routes:
  - name: out
    from: {endpoint: mqtt, topic: "a/{rest...}"}
    to: {endpoint: far, topic: "b/{rest...}"}
    settle: stored
"""
HOUR: Final = 3_600
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
            router, DeadLetters(), DispatcherServices(links={"far"}, namespaces={"far": OneSink(far)})
        )
        out = SharedOutboxes(
            "far",
            make_link(url="mqtt://far"),
            ENGINE,
            dispatcher,
            Limits(),
            NotedStatus(LinkStats("far (outbox)", "amqp091")),
            client_id="one",
            time=ClusterClock(),
            up=lambda: True,
            delivers=far,
            paused=lambda: (),
        )
        world = World()
        rig: QueueRig[Any, Any, Remote] = QueueRig(out, lambda: Remote(world))
        out.tick(0.0)
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


@pytest.mark.parametrize("how", ["counted", "published to"])
def test_the_queue_of_an_outbox_is_declared_again(tmp_path: Path, how: str) -> None:
    """A user has deleted it while no replica consumes it, as the link is down."""

    async def run() -> None:
        router = routed(tmp_path, ROUTES, far="mqtt")
        dispatcher = Dispatcher(router, DeadLetters(), DispatcherServices(links={"far"}))
        far = MqttLinkPublisher(LinkStats("far", "mqtt"), in_flight_max=1, messages_max=99, bytes_max=9999)
        status = NotedStatus(LinkStats("far (outbox)", "amqp091"))
        out = SharedOutboxes(
            "far",
            make_link(url="mqtt://far"),
            ENGINE,
            dispatcher,
            Limits(),
            status,
            client_id="one",
            time=ClusterClock(),
            up=lambda: False,
            delivers=far,
            paused=lambda: (),
        )
        world = World()
        rig: QueueRig[Any, Any, Remote] = QueueRig(out, lambda: Remote(world))
        out.tick(0.0)
        rig.connect()
        rig.tick()
        assert not rig.remote.consumers
        bindings = set(world.bindings)
        assert QUEUE in world.queues
        world.queues.discard(QUEUE)
        world.bindings.clear()
        if how == "counted":
            for _ in range(2):
                await trio.sleep(COUNT_SECS)
                rig.tick()
                rig.move()
        else:
            (address,) = {amqp_address(exchange, QUEUE) for _, exchange, _ in bindings}
            world.unroutable.add(QUEUE)
            stored = Message(address, b"x", assurance=1, durable=True)
            out.publisher.publish(Settled().part([stored], out.publisher))
            rig.move()
        assert QUEUE in world.queues
        assert world.bindings == bindings

    trio.run(run, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_what_is_stored_expires_by_the_time_of_the_cluster() -> None:
    """A replica that began with a wrong clock, which was set right, still has a wrong one of its own."""
    wrong, right = outboxes(), outboxes()
    wrong._time.apply_reply(int(clock.utc()) - HOUR, clock.now(), clock.now())
    expires = clock.utc() + 60.0
    message = mqtt(expires=expires)
    for writer, reader, wanted in (
        (wrong, right, expires - HOUR),
        (right, wrong, expires + HOUR),
        (wrong, wrong, expires),
    ):
        assert reader.decode(writer.encode(message)).expires == pytest.approx(wanted, abs=1.0)
    assert wrong.decode(wrong.encode(mqtt())).expires == NEVER
