"""What a replica counts of the messages that it publishes to the cluster, and how it numbers them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway import clock
from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.envelope import ENGINE, ENGINE_OTHER, decode
from gateway.engine.names import names_of
from gateway.engine.publisher import ELSEWHERE, EnginePublisher
from gateway.model.batch import Batch, Recipient, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.model.spooled_bodies import ReadFault
from gateway.protocols.amqp091.translate import EXPIRATION_MS_MAX, expiration_ms
from gateway.protocols.mqtt.dialect import topic_address
from gateway.telemetry.stats import LinkStats
from tests.broker.parts import Answers

YEAR_SECS = 365 * 86_400
LIMITS: dict[str, int] = {"in_flight_max": 10, "messages_max": 10, "bytes_max": 1 << 20, "topics_max": 10}


def missing_stream() -> Any:
    """A stream that only counts what is queued."""
    return SimpleNamespace(queued=0, mark_for_flush=lambda: None, congested=False)


class Sent:
    """A publisher on a channel that takes everything, except the bodies in `refused`."""

    def __init__(self, *refused: bytes) -> None:
        self.rows: list[Any] = []
        self.published = 0
        self.usable = True
        self.faults: dict[int, ReadFault] = {}
        self.refused = refused

    def publish_many(self, rows: list[Any]) -> list[int]:
        unsent = [at for at, row in enumerate(rows) if row[2] in self.refused]
        sent = [row for row in rows if row[2] not in self.refused]
        self.rows += sent
        self.published += len(sent)
        return unsent


class Hasty(Answers):
    """A source that publishes its next message as soon as one is refused."""

    def __init__(self, publisher: EnginePublisher) -> None:
        super().__init__()
        self.publisher = publisher

    def settle(self, receipts: list[object], refused: dict[int, Outcome] | None, received: float) -> None:
        super().settle(receipts, refused, received)
        if refused:
            batch = Batch(self, clock.now())
            batch.add_only(b"next", Recipient(self.publisher), Message(topic_address("a"), b"next"))
            batch.send()


def make_publisher(stats: LinkStats) -> EnginePublisher:
    missing: Any = None
    return EnginePublisher(stats, names_of("n", "amq.topic"), ClusterClock(), missing, missing, **LIMITS)


async def test_a_life_beyond_that_of_the_cluster_is_counted_and_known_to_replicas() -> None:
    stats = LinkStats("engine", "amqp091", {}, ("localhost",))
    publisher = make_publisher(stats)
    sent: Any = Sent()
    publisher._publishers = (sent, sent)
    publisher._stream = missing_stream()
    utc = clock.utc()
    ends = [utc + years * YEAR_SECS for years in (9, 11, 20)]
    messages = [Message(topic_address("a"), b"x", expires=end) for end in ends]
    part = SubBatch(Batch(Answers(), clock.now()), Recipient(publisher))
    part.messages, part.slots = messages, [0, 1, 2]
    publisher._send(part, range(3), messages)
    assert stats.degraded.counts == {"expiration": 2}
    limited = [expiration_ms(raw) for _, raw, _ in sent.rows]
    assert limited[1:] == [EXPIRATION_MS_MAX] * 2
    assert limited[0] is not None
    assert limited[0] < EXPIRATION_MS_MAX
    known = [decode(raw).expires for _, raw, _ in sent.rows]
    assert [round(one - end) for one, end in zip(known, ends, strict=True)] == [0] * 3


@pytest.mark.parametrize("expires", [0.0, 4_000_000_000.0])
def test_a_client_of_another_protocol_is_not_its_namesake(expires: float) -> None:
    publisher = make_publisher(LinkStats("engine", "amqp091", {}, ("localhost",)))
    publisher.listeners = frozenset({"mqtt"})
    found = []
    for endpoint in ("mqtt", "amqp", "mqtt"):
        message = Message(topic_address("a"), b"x", expires=expires, sender=Sender(endpoint, "me"))
        found.append(decode(publisher._encoded(message, clock.utc(), None)).sender.endpoint)
    assert found == [ENGINE, ENGINE_OTHER, ENGINE]


def test_a_topic_that_is_too_long_is_refused_each_time_and_not_remembered() -> None:
    """Such topics have up to 64 KB each, and nothing would free them."""
    publisher = make_publisher(LinkStats("engine", "amqp091", {}, ("localhost",)))
    for _ in range(2):
        assert publisher._encoded_target("x" * 65_000) is None
        assert publisher._encoded_target("a") is not None
    assert list(publisher._wires) == ["a"]


@pytest.mark.interpreted  # its channel is a fake
@pytest.mark.parametrize("topic, body", [("a", b"unsent"), ("x" * 65_000, b"b")])
async def test_a_message_that_cannot_be_sent_changes_no_number_of_others(topic: str, body: bytes) -> None:
    """Its source may publish more at once, which gets later numbers than the rest of the part."""
    publisher = make_publisher(LinkStats("engine", "amqp091", {}, ("localhost",)))
    sent: Any = Sent(b"unsent")
    publisher._publishers = (sent, sent)
    publisher._stream = missing_stream()
    publisher._flowing = True
    source, recipient = Hasty(publisher), Recipient(publisher)
    batch = Batch(source, clock.now())
    for name, data in (("a", b"a"), (topic, body), ("a", b"c")):
        batch.add_only(data, recipient, Message(topic_address(name), data))
    batch.send()
    assert [row[2] for row in sent.rows] == [b"a", b"c", b"next"]
    publisher.confirm([(1, 2, True, True)])
    accepted = [receipt for receipt, outcome in source.told if outcome is ACCEPTED]
    assert accepted == [b"a", b"c"]


@pytest.mark.interpreted  # its channel is a fake
@pytest.mark.parametrize("is_left", [False, True])
async def test_a_will_that_another_replica_has_claimed_meanwhile_is_not_published(is_left: bool) -> None:
    """This process was frozen until the database had retained the will for it."""
    retaining: list[Any] = []
    retained: Any = SimpleNamespace(retain=lambda _, done: retaining.append(done))
    names, missing = names_of("n", "amq.topic"), cast(Any, None)
    publisher = EnginePublisher(
        LinkStats("engine", "amqp091", {}, ("localhost",)), names, ClusterClock(), retained, missing, **LIMITS
    )
    sent: Any = Sent()
    publisher._publishers = (sent, sent)
    publisher._stream = missing_stream()
    publisher._flowing = True
    source = Answers()
    batch = Batch(source, clock.now())
    for name in (b"will", b"other"):
        message = Message(topic_address("a"), name, retain=True)
        batch.add_only(name, Recipient(publisher), message)
    batch.send()
    publisher.is_left = lambda receipt: is_left and receipt == b"will"
    while retaining:
        retaining.pop(0)(ACCEPTED)
    assert [row[2] for row in sent.rows] == ([b"other"] if is_left else [b"will", b"other"])
    assert [one for one, outcome in source.told if outcome is ELSEWHERE] == ([b"will"] if is_left else [])
