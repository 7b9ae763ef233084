"""Queues that are made after their prefix was consumed: they are found by what waits in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from gateway.egress.amqpfast import sources
from gateway.egress.amqpfast.sources import DOUBT_SECS, SURVEY_SECS
from gateway.protocols.amqpfast import commands as m
from tests.egress.amqp091.remote import Shelf
from tests.egress.amqpfast.remote import LinkRig
from tests.egress.amqpfast.test_consuming import acks, notify, rig
from tests.ingress.amqpfast.client import Fast
from tests.interop.test_amqpfast_link import far, gateway_to, until, up

pytestmark = pytest.mark.interpreted  # the stream is one in memory

__all__ = ["far"]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
async def one(tmp_path: Path, shelf: Shelf) -> LinkRig:
    return rig(tmp_path, shelf)


async def later(one: LinkRig, seconds: float) -> None:
    await trio.sleep(seconds)
    one.tick()


def asked(one: LinkRig) -> int:
    return sum(isinstance(command, m.HandleQuery) for command in one.world.said)


def consumed(one: LinkRig) -> int:
    """How often the prefix was."""
    return sum(consumer.name == "jobs." for consumer in one.remote.consumers)


async def test_what_still_waits_after_a_while_is_in_a_queue_that_is_not_consumed(
    one: LinkRig, autojump_clock: trio.testing.MockClock
) -> None:
    await later(one, SURVEY_SECS)
    assert (asked(one), consumed(one)) == (1, 1)
    one.world.waiting = True
    await later(one, SURVEY_SECS)
    assert (asked(one), consumed(one)) == (2, 1)
    await later(one, DOUBT_SECS)
    assert (asked(one), consumed(one)) == (3, 2)
    old, new = (consumer for consumer in one.remote.consumers if consumer.name == "jobs.")
    assert old.handle not in one.remote.machine.handles
    assert old.channel not in one.remote.machine.channels
    one.remote.consumers.remove(old)
    one.world.waiting = False
    notify(one, "jobs.", b"1", name="jobs.new")
    assert acks(one, "jobs.") == [1]
    assert new.handle in one.remote.machine.handles


async def test_what_was_of_no_use_is_tried_less_and_less_often(
    one: LinkRig, autojump_clock: trio.testing.MockClock
) -> None:
    one.world.waiting = True
    for _ in range(int(100 * SURVEY_SECS)):
        await later(one, DOUBT_SECS)
    assert 3 < consumed(one) < 9


async def test_nothing_is_asked_while_messages_are_on_their_way(
    one: LinkRig, shelf: Shelf, autojump_clock: trio.testing.MockClock
) -> None:
    shelf.outcome = None
    notify(one, "jobs.", b"1", name="jobs.a")
    await later(one, SURVEY_SECS)
    assert asked(one) == 0


@pytest.mark.parametrize("channel", [False, True])
async def test_a_server_that_does_not_like_to_be_asked_is_left_alone(
    one: LinkRig, channel: bool, autojump_clock: trio.testing.MockClock
) -> None:
    await later(one, SURVEY_SECS)
    (query,) = [command for command in one.world.said if isinstance(command, m.HandleQuery)]
    if channel:
        one.remote.machine.close_channel(one.remote.channels[query.handle_id], 540, "no")
    else:
        one.remote.machine.close_handle(query.handle_id, 403, "no")
    one.move()
    await later(one, SURVEY_SECS)
    assert (asked(one), consumed(one)) == (1, 1)
    notify(one, "jobs.", b"1", name="jobs.a")
    assert acks(one, "jobs.") == [1]


MAPPING = """
version: 1
routes:
  - name: jobs
    from: {endpoint: far, service: queue, destination: "made.{name}"}
    to: {endpoint: amqpfast, service: queue, destination: "local.{name}"}
"""


def test_a_queue_that_another_gateway_makes_later(
    far: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SURVEY_SECS", 0.1)
    monkeypatch.setattr(sources, "DOUBT_SECS", 0.1)
    with Fast(far).open() as there:  # type: ignore[arg-type]
        there.handle("made.first")
        with gateway_to(far, tmp_path, mapping=MAPPING) as near, Fast(near).open() as here:  # type: ignore[arg-type]
            up(near)
            there.put(there.handle("made.second"), b"found")
            handle = here.handle("local.second")
            here.consume(handle)
            assert here.bodies(1) == [b"found"]
            until(lambda: there.index(there.handle("made.second")) == ([], 0))
