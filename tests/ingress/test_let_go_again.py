"""A client that a full queue, a slow disk or a read from disk keeps waiting goes on, however the reason ends.

`running` fails a test whose gateway still holds somebody at its end (tests/idle.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from pydantic import SecretStr

from gateway import clock
from gateway.model.properties import Headers, Value, ValueType
from gateway.model.times import WallTime
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import BasicProperties, encode_basic_properties
from gateway.protocols.amqp091.events import Confirms, GetResponse, MethodReceived
from gateway.protocols.mqtt.spec import PacketType, Property
from gateway.settings import AmqpPermissions, Http, Limits, Role, StoreSettings, User
from tests.idle import idle_report
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import PERSISTENT, Fast
from tests.ingress.clients import connect, eventually
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.passwords import hashed

FULL = Limits(queue_messages_max=10)
TTL_MS = 2_000  # enough to fill the queue on a busy machine


def holds(gateway: Running) -> bool:
    """Whether a queue holds somebody, and the report says so."""
    return any("held" in line for line in gateway.ask(lambda: idle_report(gateway.gateway)))


def waiting(gateway: Running) -> int:
    """Return how many messages wait in the queue, 0 if there is none."""
    queue = gateway.gateway.host.queues.get("q")
    return 0 if queue is None else len(queue)


def table(arguments: dict[str, str | int]) -> Headers:
    """Return the arguments of a declaration as headers."""
    return tuple(
        (key, Value(ValueType.INT32 if isinstance(value, int) else ValueType.STRING, value))
        for key, value in arguments.items()
    )


def declared(gateway: Running, arguments: dict[str, str | int], *, durable: bool) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q", durable=durable, arguments=table(arguments)), m.QueueDeclareOk)
        client.call(m.QueueDeclare("dead", durable=durable), m.QueueDeclareOk)


def full_and_holding(gateway: Running, client: Amqp) -> None:
    """Fill the queue until its publisher is held."""
    client.publish("", "q", *[b"x"] * 10)
    eventually(lambda: gateway.ask(lambda: waiting(gateway)) == 10)
    client.publish("", "q", b"x")
    eventually(lambda: holds(gateway))


def expired(gateway: Running) -> None:
    """Wait until all messages have reached their time to live."""
    eventually(lambda: gateway.ask(lambda: waiting(gateway) == 0))


def purged(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueuePurge("q"), m.QueuePurgeOk)


def deleted(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDelete("q"), m.QueueDeleteOk)


def got(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        for _ in range(11):
            client.say(m.BasicGet("q", no_ack=True))
            client.next(GetResponse)


DELAY = {"x-message-ttl": TTL_MS, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    ("arguments", "drain"),
    [
        ({"x-message-ttl": TTL_MS}, expired),
        (DELAY, expired),
        ({"x-message-ttl": TTL_MS, "x-max-priority": 3}, expired),
        ({}, purged),
        ({}, deleted),
        ({}, got),
    ],
    ids=["ttl", "delay-queue", "priorities", "purge", "delete", "get"],
)
def test_a_publisher_that_a_full_queue_held_goes_on_when_it_drains(
    arguments: dict[str, str | int], drain: Callable[[Running], None], stored: bool, tmp_path: Path
) -> None:
    store = StoreSettings(enabled=stored, path=tmp_path)
    with running(settings_of(limits=FULL, store=store)) as gateway, Amqp(gateway).open() as client:
        declared(gateway, arguments, durable=stored)
        full_and_holding(gateway, client)
        drain(gateway)
        assert client.call(m.QueueDeclare("another"), m.QueueDeclareOk).queue == "another"


@contextmanager
def store_busy(gateway: Running) -> Iterator[None]:
    """Keep the thread of the store from reading."""
    store, begun, done = gateway.gateway.store, threading.Event(), threading.Event()
    assert store is not None

    def job() -> Callable[[], None]:
        begun.set()
        assert done.wait(30.0)
        return int  # nothing to do in the loop

    def begin() -> None:
        store._do(job)
        store.flush()

    gateway.ask(begin)
    try:
        assert begun.wait(30.0)  # what is stored before that may be written together with it, and first
        yield
    finally:
        done.set()


SLOW = 65_536  # bytes that may wait for the disk
DURABLE = b"\x10\0\x02"
KEPT = {Property.SESSION_EXPIRY_INTERVAL: 600}


def held(gateway: Running) -> int:
    """Return how many connections are not read, or have publishes that are held."""
    lines = gateway.ask(lambda: idle_report(gateway.gateway))
    return len([line for line in lines if line.startswith("connection of") and "held" in line])


@pytest.mark.parametrize("ends", ["catches up", "deleted", "cut"])
def test_clients_that_a_slow_disk_holds_go_on(ends: str, tmp_path: Path) -> None:
    """A publisher of each protocol, to durable queues and to a session that is kept."""
    settings = settings_of(limits=Limits(store_pending_bytes_max=SLOW), store=StoreSettings(path=tmp_path))
    with (
        running(settings) as gateway,
        Amqp(gateway).open() as one,
        Amqp(gateway).open() as other,
        Fast(gateway).open() as fast,
        connect(gateway, "publisher")[0] as device,
    ):
        declared(gateway, {}, durable=True)
        one.call(m.ConfirmSelect(), m.ConfirmSelectOk)
        handle = fast.handle("q")
        with connect(gateway, "receiver", properties=KEPT)[0] as receiver:
            assert receiver.subscribe("t", 1) == 1
        with store_busy(gateway):
            device.publish("t", b"x" * SLOW, 1, 1)
            eventually(lambda: held(gateway) == 1)
            one.publish("", "q", b"x" * SLOW, properties=DURABLE)
            fast.put(handle, b"x" * SLOW, head=PERSISTENT, confirm=False)
            eventually(lambda: held(gateway) == 3)
            device.publish("t", b"behind it", 1, 2)
            one.publish("", "q", b"behind it", properties=DURABLE)
            if ends == "deleted":
                other.say(m.QueueDelete("q", no_wait=True))
                eventually(lambda: "q" not in gateway.gateway.host.queues)
            if ends == "cut":
                one.cut()
        assert [device.acked(PacketType.PUBACK) for _ in range(2)] == [(1, 0), (2, 0)]
        fast.put(handle, b"behind it", head=PERSISTENT)
        if ends != "cut":
            numbers = 0
            while numbers < 2:
                numbers = max(number for _, number, _, _ in one.next(Confirms).confirms)


COUNT = 20
LIFE_MS = "3600000"
EVERYTHING = AmqpPermissions(configure=".*", write=".*", read=".*")
GET = {"count": 8, "ackmode": "ack_requeue_false", "encoding": "auto"}


class Waiting(NamedTuple):
    """A gateway that has read nothing of a queue, whose client `one` waits for messages of it."""

    gateway: Running
    one: Amqp
    other: Amqp
    later: list[float]  # seconds by which the clock is ahead


@contextmanager
def all_on_disk(folder: Path, later: list[float]) -> Iterator[Waiting]:
    """Yield a gateway that has restarted with COUNT messages in its queue."""
    settings = settings_of(
        store=StoreSettings(path=folder),
        http=Http(host=LOOPBACK, port=0),
        users={"guest": User(password_hash=SecretStr(hashed("guest")), roles=("all",))},
        roles={"all": Role(console="write", console_bodies=True, amqp091={"/": EVERYTHING})},
    )
    with running(settings) as gateway:
        declared(gateway, {}, durable=True)
        with Amqp(gateway).open() as client:
            properties = encode_basic_properties(BasicProperties(delivery_mode=2, expiration=LIFE_MS))
            client.publish("", "q", *[b"x"] * COUNT, properties=properties)
            eventually(lambda: gateway.ask(lambda: waiting(gateway) == COUNT))
    with running(settings) as gateway, Amqp(gateway).open() as one, Amqp(gateway).open() as other:
        assert gateway.ask(lambda: waiting(gateway)) == COUNT
        yield Waiting(gateway, one, other, later)


def purge(now: Waiting) -> None:
    now.other.say(m.QueuePurge("q", no_wait=True))
    eventually(lambda: now.gateway.ask(lambda: waiting(now.gateway)) == 0)


def delete(now: Waiting) -> None:
    now.other.say(m.QueueDelete("q", no_wait=True))
    eventually(lambda: "q" not in now.gateway.gateway.host.queues)


def expire(now: Waiting) -> None:
    now.later[0] = 2.0 * int(LIFE_MS) / 1000


def cut(now: Waiting) -> None:
    now.one.cut()


ENDS = (purge, delete, expire, cut)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which the clock of the gateway is ahead."""
    ahead, utc = [0.0], clock.utc
    monkeypatch.setattr(clock, "utc", lambda: WallTime(utc() + ahead[0]))
    return ahead


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_get_that_reads_from_disk_ends_whatever_happens_meanwhile(
    end: Callable[[Waiting], None], tmp_path: Path, later: list[float]
) -> None:
    with all_on_disk(tmp_path, later) as now:
        with store_busy(now.gateway):
            now.one.say(*[m.BasicGet("q", no_ack=True)] * 8)
            eventually(lambda: holds(now.gateway))
            end(now)
        if end in (purge, expire):
            assert [now.one.next(MethodReceived).method for _ in range(8)] == [m.BasicGetEmpty()] * 8
        elif end is delete:
            assert now.one.refusal().reply_code == 404
        with Amqp(now.gateway).open() as client:
            left = client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
            assert left.message_count in ({COUNT, COUNT - 8} if end is cut else {0})


@pytest.mark.parametrize("end", [purge, delete, expire], ids=lambda end: end.__name__)
def test_an_http_get_that_reads_from_disk_ends_whatever_happens_meanwhile(
    end: Callable[[Waiting], None], tmp_path: Path, later: list[float]
) -> None:
    with all_on_disk(tmp_path, later) as now, ThreadPoolExecutor(1) as pool:
        url = f"http://{LOOPBACK}:{now.gateway.gateway.http_port}/api/queues/%2F/q/get"
        storage = now.gateway.gateway.host.queues["q"].storage
        assert storage is not None
        with store_busy(now.gateway):
            got = pool.submit(httpx.post, url, json=GET, auth=("guest", "guest"), timeout=60.0)
            eventually(lambda: now.gateway.ask(lambda: bool(storage._loaded)))
            end(now)
        assert (got.result().status_code, got.result().json()) == (200, [])
        assert not now.gateway.ask(lambda: waiting(now.gateway))
