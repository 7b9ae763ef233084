"""The checks beside a row's messages find each fault of wills and of what is retained, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from gateway.protocols.mqtt.spec import PacketType
from tests.chaos.checker import Carried, Id, body_of, carried_by
from tests.chaos.workers import beside as module
from tests.chaos.workers.beside import RETAINED, WILLS, Beside
from tests.chaos.workers.mqtt import listed
from tests.ingress.clients import Mqtt, connect, eventually
from tests.interop.gateway_fixture import Running, running

WILL = Id("mortals", "a0", 1)
TOPIC = f"{RETAINED}/1"


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(module, "SHOWN_SECS_MAX", 0.2)
    with running() as started:
        yield started


@pytest.fixture
def beside(gateway: Running) -> Iterator[Beside]:
    """Clients that have retained messages, lost some connections and had wills published; all is well."""
    made = Beside(gateway.mqtt, Random(5))
    made.watcher.start()
    assert made.watcher.ready.wait(30.0)
    made.start()
    eventually(lambda: made.retainer._number > 2 * module.TOPICS and made.mortals._number > 3)
    made.finish()
    eventually(lambda: made.is_complete(()))
    try:
        assert made.faults(0.0, ()) == []
        yield made
    finally:
        for worker in made.workers:
            worker.stop()


def published(gateway: Running, topic: str, body: bytes, properties: bytes = b"", *, retain: bool) -> None:
    """Publish behind the back of the clients."""
    client: Mqtt
    with connect(gateway, "culprit")[0] as client:
        client.publish(topic, body, 1, 1, retain=retain, properties=properties)
        client.acked(PacketType.PUBACK)


def wrong_body(gateway: Running, beside: Beside) -> None:
    published(gateway, TOPIC, b"wrong", listed(beside.retainer.retained[TOPIC].carried), retain=True)


def other_properties(gateway: Running, beside: Beside) -> None:
    kept = beside.retainer.retained[TOPIC]
    published(gateway, TOPIC, kept.body, listed(kept.carried._replace(message_id="other")), retain=True)


def no_properties(gateway: Running, beside: Beside) -> None:
    published(gateway, TOPIC, beside.retainer.retained[TOPIC].body, retain=True)


def another_life(gateway: Running, beside: Beside) -> None:
    kept = beside.retainer.retained[TOPIC]
    life = 1_000.0 if kept.carried.life_secs is None else kept.carried.life_secs / 2
    published(gateway, TOPIC, kept.body, listed(kept.carried._replace(life_secs=life)), retain=True)


def cleared(gateway: Running, beside: Beside) -> None:
    published(gateway, TOPIC, b"", retain=True)


def one_too_many(gateway: Running, beside: Beside) -> None:
    published(gateway, f"{RETAINED}/extra", b"extra", listed(Carried("extra")), retain=True)


def unacknowledged(gateway: Running, beside: Beside) -> None:
    beside.retainer.done = False


@pytest.mark.parametrize(
    "harm",
    [wrong_body, other_properties, no_properties, another_life, cleared, one_too_many, unacknowledged],
    ids=lambda harm: harm.__name__,
)
def test_what_is_retained_wrongly_is_reported(
    gateway: Running, beside: Beside, harm: Callable[[Running, Beside], None]
) -> None:
    harm(gateway, beside)
    (line,) = beside.faults(0.0, ())
    assert line.startswith("retained: ")


def test_a_retained_message_without_its_flag_is_reported(beside: Beside) -> None:
    kept = beside.retainer.retained[TOPIC]
    assert kept.is_as(kept, 0.0)
    assert not kept._replace(is_flagged=False).is_as(kept, 0.0)


def test_a_will_that_is_missing_is_reported(beside: Beside) -> None:
    beside.history.sent(WILL._replace(number=1_000_001), carried_by(WILL))
    beside.history.acked(WILL._replace(number=1_000_001))
    assert not beside.is_complete(())
    (line,) = beside.faults(0.0, ())
    assert line.startswith("wills: lost 1: ")


@pytest.mark.parametrize(
    "body, properties, fault",
    [
        (b"who is this", b"", "unexpected"),
        (body_of(WILL._replace(number=1_000_001)), b"", "unexpected"),
        (body_of(WILL), listed(Carried("other")), "altered"),
    ],
    ids=["of nobody", "never left", "other properties"],
)
def test_a_will_that_should_not_have_come_is_reported(
    gateway: Running, beside: Beside, body: bytes, properties: bytes, fault: str
) -> None:
    before = beside.watcher.history.records.copy()
    published(gateway, f"{WILLS}/{WILL.address}", body, properties, retain=False)
    eventually(lambda: len(beside.watcher.history.records) > len(before))
    (line,) = beside.faults(0.0, ())
    assert line.startswith(f"wills: {fault} 1: ")
