"""Messages that expire while a link is down are settled, in portions between which other tasks run."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any, Final

import pytest
import trio

from gateway.model.message import NEVER, Message
from gateway.model.outcome import ACCEPTED, Reason
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from tests.egress.amqp091.remote import LinkRig as AmqpRig
from tests.egress.amqpfast.remote import LinkRig as FastRig
from tests.egress.mqtt.remote import FakeStream, World
from tests.egress.mqtt.remote import message as mqtt_message
from tests.egress.queue_rig import MemoryStream, Settled

pytestmark = pytest.mark.interpreted  # the stream is one in memory

COUNT: Final = 40
PORTION: Final = 5


class Amqp:
    def __init__(self) -> None:
        self.rig: Any = self.make()
        self.source = Settled()
        self.rig.connect()
        self.rig.lose()

    def make(self) -> Any:
        rig = AmqpRig()
        rig.world.exchanges["amq.topic"] = "topic"
        rig.world.confirms = True
        return rig

    def message(self, body: bytes, expires: float) -> Message:
        return Message(amqp_address("amq.topic", "k"), body, expires=expires)

    def publish(self, body: bytes, expires: float) -> None:
        publisher = self.rig.session.publisher
        publisher.publish(self.source.part([self.message(body, expires)], publisher))

    @property
    def outcomes(self) -> dict[Any, Any]:
        return self.source.outcomes

    def turn(self) -> None:
        self.rig.stream.owner.receive(b"", trio.current_time())
        self.rig.move()


class Fast(Amqp):
    def make(self) -> Any:
        return FastRig()

    def message(self, body: bytes, expires: float) -> Message:
        return Message(fast_address("queue", "q"), body, expires=expires)


class Mqtt:
    def __init__(self) -> None:
        self.rig = World()

    def publish(self, body: bytes, expires: float) -> None:
        self.rig.publish(mqtt_message(body.decode(), expires=expires))

    @property
    def outcomes(self) -> dict[Any, Any]:
        return self.rig.outcomes

    def turn(self) -> None:
        assert self.rig.stream.owner is not None
        self.rig.stream.owner.receive(b"", trio.current_time())
        self.rig.talk()


@pytest.mark.parametrize("make", [Amqp, Fast, Mqtt])
async def test_many_expired_messages_are_settled_in_portions(
    monkeypatch: pytest.MonkeyPatch, make: type[Amqp | Mqtt]
) -> None:
    monkeypatch.setattr("gateway.egress.confirms.UNSENT_AT_ONCE", PORTION)
    requests: list[None] = []
    for stream in MemoryStream, FakeStream:
        monkeypatch.setattr(stream, "request_turn", lambda self: requests.append(None))
    one = make()
    for number in range(COUNT):
        one.publish(b"%d" % number, time.time() - 1)
    one.publish(b"kept", NEVER)
    one.rig.connect()
    counts = [0, len(one.outcomes)]
    while requests:
        requests.clear()
        one.turn()
        counts.append(len(one.outcomes))
    assert max(after - before for before, after in pairwise(counts)) <= 4 * PORTION
    assert {one.outcomes[b"%d" % number].reason for number in range(COUNT)} == {Reason.EXPIRED}
    assert one.outcomes[b"kept"] is ACCEPTED


@pytest.mark.parametrize("make", [Amqp, Fast, Mqtt])
async def test_what_expires_while_the_link_is_down_is_settled_at_once(
    monkeypatch: pytest.MonkeyPatch, make: type[Amqp | Mqtt]
) -> None:
    """Its publisher would wait for a link that may be down for days."""
    monkeypatch.setattr("gateway.egress.confirms.UNSENT_AT_ONCE", PORTION)
    one = make()
    one.publish(b"kept", NEVER)
    for number in range(2 * PORTION):
        one.publish(b"%d" % number, time.time() + 60)
    one.publish(b"later", time.time() + 600)
    one.rig.session.tick(trio.current_time())
    assert one.outcomes == {}
    monkeypatch.setattr("gateway.clock.utc", lambda: time.time() + 70)
    for count in (PORTION, 2 * PORTION, 2 * PORTION):
        one.rig.session.tick(trio.current_time())
        assert len(one.outcomes) == count
        assert one.rig.session.unconfirmed == 2 + 2 * PORTION - count
    assert {outcome.reason for outcome in one.outcomes.values()} == {Reason.EXPIRED}
    one.rig.connect()
    one.turn()
    assert (one.outcomes[b"kept"], one.outcomes[b"later"]) == (ACCEPTED, ACCEPTED)
