"""However a connection to the cluster ends, what was heard with that costs nothing but the connection.

The bytes of one wake-up may hold answers, and the end of a channel or of the connection, in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import trio
import trio.testing

from gateway.app.state import open_state
from gateway.app.topics import topics_of
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.shares import UserQuotas
from gateway.egress.link import LinkStatus
from gateway.egress.mqtt.publisher import MqttLinkPublisher
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.outboxes import SharedOutboxes
from gateway.mapping.router import Router
from gateway.protocols.amqp091.server import ServerConnection
from gateway.settings import Limits
from gateway.settings.engine import RabbitEngine
from gateway.telemetry.stats import LinkStats
from tests.configured import make_link, make_listener
from tests.egress.amqp091.remote import Remote, World
from tests.egress.queue_rig import NotedStatus, QueueRig
from tests.interop.gateway_fixture import settings_of
from tests.interop.state_database import NOWHERE

pytestmark = pytest.mark.interpreted  # the stream is one in memory

LISTENERS: Final = {"mqtt": make_listener(protocol="mqtt")}
ENGINE: Final = RabbitEngine(
    engine="rabbitmq", urls=("amqp://remote",), namespace="endings", postgresql=NOWHERE
)


class Rig(QueueRig[Any, Any, Remote]):
    """In one of its wake-ups the remote end does more than answer. `first`: before that."""

    def __init__(self, session: Any, at: int, end: Callable[[ServerConnection], None], first: bool) -> None:
        super().__init__(session, lambda: Remote(world()))
        self.at = at
        self.turns = 0
        self._end = end
        self._first = first

    def _fresh(self) -> None:
        super()._fresh()
        receive = self.remote.receive

        def received(data: bytes) -> None:
            self.turns += 1
            if self.turns != self.at:
                receive(data)
            elif self._first:
                self._end(self.remote.machine)
                receive(data)
            else:
                receive(data)
                self._end(self.remote.machine)

        self.remote.receive = received  # type: ignore[method-assign]


def world() -> World:
    made = World()
    made.exchanges["amq.topic"] = "topic"
    return made


def dispatcher() -> Dispatcher:
    return Dispatcher(Router([], {}), DeadLetters())


def status() -> LinkStatus:
    return NotedStatus(LinkStats("engine", "amqp091"))


def topics() -> Any:
    settings = settings_of(broker=ENGINE, replica="one", listeners=LISTENERS)
    quotas = UserQuotas(Limits())
    _, engine = topics_of(
        settings,
        dispatcher(),
        None,
        lambda: None,
        lambda user: True,
        quotas,
        open_state(settings, quotas),
    )
    assert engine is not None
    return engine


def outboxes() -> Any:
    return SharedOutboxes(
        "far",
        make_link(url="mqtt://far"),
        ENGINE,
        dispatcher(),
        Limits(),
        status(),
        client_id="one",
        time=ClusterClock(),
        up=lambda: True,
        delivers=MqttLinkPublisher(LinkStats("far", "mqtt"), in_flight_max=1, messages_max=1, bytes_max=1),
        paused=lambda: (),
    )


def over(machine: ServerConnection) -> None:
    machine.close(320, "CONNECTION_FORCED - the node stops")


def channels(machine: ServerConnection) -> None:
    for number in list(machine.channels):
        channel(number)(machine)


def channel(number: int) -> Callable[[ServerConnection], None]:
    def end(machine: ServerConnection) -> None:
        if number in machine.channels:
            machine.close_channel(number, 406, "PRECONDITION_FAILED - no replica on this node", 50, 10)

    return end


def all_over(machine: ServerConnection) -> None:
    channels(machine)
    over(machine)


ENDS: Final = {"connection": over, "channels": channels, "all": all_over} | {
    f"channel {number}": channel(number) for number in range(1, 13)
}


@pytest.mark.parametrize("make", [topics, outboxes])
@pytest.mark.parametrize("first", [True, False], ids=["before answers", "behind answers"])
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_at_any_step(make: Callable[[], Any], end: str, first: bool) -> None:
    """And the next connection stands as if nothing had been."""

    async def run() -> None:
        whole = Rig(make(), 0, over, first)
        whole.connect()
        whole.tick()
        assert whole.connection.open
        assert whole.turns >= 5
        for at in range(1, whole.turns + 1):
            rig = Rig(make(), at, ENDS[end], first)
            rig.connect()
            while rig.turns < at:
                rig.tick()
            if rig.remote.machine.closed:
                rig.lose()  # without a word: the handshake had not begun
            if not rig.stream.closed:
                rig.tick()
            if rig.stream.closed:
                rig.connect()
            assert rig.connection.open
            assert rig.remote.machine.channels

    trio.run(run, clock=trio.testing.MockClock())
