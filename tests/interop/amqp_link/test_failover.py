"""A link to a real RabbitMQ that is cut off, blocked or refused: it comes back, and nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pika
import pytest
import structlog
import trio

from gateway.app import Gateway
from tests.chaos.proxy import Proxy
from tests.interop.amqp_link.rig import (
    MAPPING,
    PATIENCE_SECS,
    POLL_SECS,
    Device,
    drop,
    fetch,
    gateway_to,
    sink_queue,
    until,
    with_channel,
)
from tests.interop.servers import LOOPBACK, RabbitMQ, free_ports
from tests.interop.test_tls import make_certificate

IDENTIFIED: Final = MAPPING.replace('key: "{rest}"}', 'key: "{rest}"}\n    message_id: add', 1)
UNLIMITED: Final = "0.6"  # of the machine's memory, RabbitMQ may use


def url_by(proxy: Proxy) -> str:
    return f"amqp://guest:guest@{LOOPBACK}:{proxy.port}/%2F"


def address_of(proxy: Proxy) -> str:
    return f"{LOOPBACK}:{proxy.port}"


@contextmanager
def memory_alarm(rabbitmq: RabbitMQ) -> Iterator[Callable[[], None]]:
    """RabbitMQ takes no publishes, until the function that this yields is called."""

    def end() -> None:
        rabbitmq.control("set_vm_memory_high_watermark", UNLIMITED)

    rabbitmq.control("set_vm_memory_high_watermark", "0.0000001")
    try:
        yield end
    finally:
        end()


async def in_thread(work: Callable[..., Any], *arguments: object) -> Any:
    return await trio.to_thread.run_sync(work, *arguments)


async def eventually(rabbitmq: RabbitMQ, question: Callable[[Any], bool]) -> None:
    """Ask the broker over a channel until the answer is yes; a channel closed over it is a no."""
    with trio.fail_after(PATIENCE_SECS):
        while True:
            try:
                if await with_channel(rabbitmq, question):
                    return
            except pika.exceptions.ChannelClosedByBroker:
                pass  # what it asked about is not there
            await trio.sleep(POLL_SECS)


def consumers(queue: str, count: int) -> Callable[[Any], bool]:
    return lambda channel: channel.queue_declare(queue, passive=True).method.consumer_count == count


def metric(gateway: Gateway, name: str) -> dict[str, float]:
    """The samples of a gauge of the link, by the rest of their labels."""
    found = re.findall(rf"^{name}{{(.*?)}} (\S+)$", gateway.metrics.exposition("")[0].decode(), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


async def test_what_was_not_confirmed_goes_to_the_next_url_with_the_same_message_id(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    with ExitStack() as there, Proxy(rabbitmq.port) as second:
        first = there.enter_context(Proxy(rabbitmq.port))
        link: dict[str, Any] = {"mapping": IDENTIFIED, "urls": [url_by(first), url_by(second)]}
        with structlog.testing.capture_logs() as lines:
            async with (
                gateway_to(rabbitmq, tmp_path, **link) as gateway,
                Device(gateway) as device,
            ):
                await sink_queue(rabbitmq, "link.sink")
                erp = gateway.links["erp"]
                assert erp.stats.address == address_of(first)
                first.stall("down")  # what is published arrives, and we do not hear so
                device.publish("t/one", b"one")
                device.publish("t/two", b"two", 2)

                def arrived(channel: Any) -> bool:
                    return channel.queue_declare("link.sink", passive=True).method.message_count == 2

                await eventually(rabbitmq, arrived)
                assert device.acked == {}
                there.close()  # nobody listens at the first address any more
                await until(lambda: len(device.acked) == 2)
                assert set(device.acked.values()) == {0}
                assert erp.stats.address == address_of(second)
                states = metric(gateway, "gateway_link_address")
                assert [state for labels, state in states.items() if address_of(first) in labels] == [0]
                assert [state for labels, state in states.items() if address_of(second) in labels] == [1]
                found = await fetch(rabbitmq, "link.sink")
                assert sorted(body for body, _, _ in found) == [b"one", b"one", b"two", b"two"]
                ids = {(body, properties.message_id) for body, properties, _ in found}
                assert len(ids) == 2
                assert all(id for _, id in ids)
    await drop(rabbitmq, queue="link.sink")
    ups = [line["address"] for line in lines if line["event"] == "link connected"]
    assert ups == [address_of(first), address_of(second)]
    assert next(line for line in lines if line["event"] == "link disconnected")["next"] == address_of(second)


async def test_a_url_that_refuses_us_is_passed_over(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with Proxy(rabbitmq.port) as proxy:
        urls = [url_by(proxy).replace(":guest@", ":wrong@"), rabbitmq.url]
        with structlog.testing.capture_logs() as lines:
            async with gateway_to(rabbitmq, tmp_path, urls=urls) as gateway:
                stats = gateway.links["erp"].stats
                assert stats.address == f"{LOOPBACK}:{rabbitmq.port}"
                assert stats.protocol_errors.counts == {"access_refused": 1}
    refusal = next(line for line in lines if line["event"] == "link disconnected")
    assert (refusal["retry_in_secs"], "ACCESS_REFUSED" in refusal["why"]) == (0.0, True)


async def test_heartbeats_keep_an_idle_link_and_end_a_dead_one(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """Either end leaves a peer that is silent for twice the heartbeat, so both must be heard."""
    with Proxy(rabbitmq.port) as proxy:
        async with gateway_to(rabbitmq, tmp_path, urls=[url_by(proxy)], heartbeat_secs=1) as gateway:
            stats = gateway.links["erp"].stats

            def beats(direction: str) -> int:
                return stats.frames().get(("0-9-1", direction, "heartbeat"), 0)

            def ended() -> bool:
                """A broker that heard nothing for two seconds, as of a machine that stood still, leaves
                first: then it is the next connection that we see dying.
                """
                if stats.up:
                    proxy.stall()
                return "heartbeat_timeout" in stats.protocol_errors.counts

            await until(lambda: min(beats("in"), beats("out")) >= 3)
            await until(ended)
            assert set(stats.protocol_errors.counts) == {"heartbeat_timeout"}
            proxy.resume()
            await until(lambda: stats.up)


async def test_a_blocked_link_waits_and_goes_on(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """More than its window waits; none is acknowledged; nothing is lost when the alarm is over."""
    async with gateway_to(rabbitmq, tmp_path, in_flight_max=5) as gateway, Device(gateway) as device:
        await sink_queue(rabbitmq, "link.sink")
        stats = gateway.links["erp"].stats
        alarm = memory_alarm(rabbitmq)
        end = await in_thread(alarm.__enter__)
        try:
            device.publish("t/first", b"0")  # whoever publishes is told that it is blocked
            await until(lambda: stats.blocked)
            assert set(metric(gateway, "gateway_link_blocked").values()) == {1.0}
            for number in range(1, 20):
                device.publish("t/more", b"%d" % number)
            await until(lambda: gateway.listeners["mqtt"].stats.messages_in == 20)
            assert (device.acked, stats.up) == ({}, True)
            await in_thread(end)
            await until(lambda: len(device.acked) == 20)
        finally:
            await in_thread(alarm.__exit__, None, None, None)
        assert not stats.blocked
        assert (set(device.acked.values()), stats.reconnects) == ({0}, 0)
        assert [int(body) for body, _, _ in await fetch(rabbitmq, "link.sink")] == list(range(20))
    await drop(rabbitmq, queue="link.sink")


NEEDED: Final = """
version: 1
routes:
  - name: out
    from: {endpoint: mqtt, topic: "t/{rest...}"}
    to: {endpoint: erp, exchange: need.exchange, routing_key: "{rest}"}
  - name: in
    from: {endpoint: erp, queue: need.queue}
    to: {endpoint: mqtt, topic: "in/{routing_key...}"}
  - name: bound
    from: {endpoint: erp, exchange: need.events, binding_key: "{plant}.#"}
    to: {endpoint: mqtt, topic: "events/{plant}"}
"""
OWN_QUEUE: Final = "replica.need.events"


def there(channel: Any) -> dict[str, bool]:
    """Which of the things that NEEDED names exist."""
    found = {}
    questions = {
        "need.exchange": lambda one: one.exchange_declare("need.exchange", passive=True),
        "need.queue": lambda one: one.queue_declare("need.queue", passive=True),
        "need.events": lambda one: one.exchange_declare("need.events", passive=True),
        OWN_QUEUE: lambda one: one.queue_declare(OWN_QUEUE, passive=True),
    }
    for name, ask in questions.items():
        opened = channel.connection.channel()
        try:
            ask(opened)
            found[name] = True
        except pika.exceptions.ChannelClosedByBroker:
            found[name] = False
    return found


def make(channel: Any) -> None:
    """What NEEDED names, in forms that a link would not choose."""
    channel.exchange_declare("need.exchange", "fanout")
    channel.queue_declare("need.queue", auto_delete=False, arguments={"x-max-length": 100})
    channel.exchange_declare("need.events", "direct", durable=True)
    channel.queue_declare(OWN_QUEUE)
    channel.queue_declare("need.sink")
    channel.queue_bind("need.sink", "need.exchange")


@pytest.fixture
def tidy(rabbitmq: RabbitMQ) -> None:
    """Nothing that these tests name exists before them."""
    with pika.BlockingConnection(pika.URLParameters(rabbitmq.url)) as connection:
        channel = connection.channel()
        for queue in ("need.queue", OWN_QUEUE, "first.need.events", "need.sink"):
            channel.queue_delete(queue)
        for exchange in ("need.exchange", "need.events"):
            channel.exchange_delete(exchange)


@pytest.mark.usefixtures("tidy")
async def test_declare_create_makes_what_is_missing(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    options: dict[str, Any] = {"client_id": "replica", "declare": "create"}
    async with (
        gateway_to(rabbitmq, tmp_path, mapping=NEEDED, **options) as gateway,
        Device(gateway) as device,
    ):
        assert set((await with_channel(rabbitmq, there)).values()) == {True}
        await device.subscribe("#")

        def use(channel: Any) -> None:
            channel.queue_declare("need.queue", durable=True)  # as it was declared, or this is refused
            channel.exchange_declare("need.exchange", "topic", durable=True)
            channel.basic_publish("need.events", "p1.a.b", b"event", mandatory=True)

        await with_channel(rabbitmq, use)
        await until(lambda: device.heard == [("events/p1", b"event")])


@pytest.mark.usefixtures("tidy")
@pytest.mark.parametrize("declare", ["check", "none"])
async def test_what_may_not_be_declared_is_refused_until_it_is_there(
    rabbitmq: RabbitMQ, tmp_path: Path, declare: str
) -> None:
    options: dict[str, Any] = {"client_id": "replica", "declare": declare, "reconnect_max_secs": 1.0}
    async with (
        gateway_to(rabbitmq, tmp_path, mapping=NEEDED, **options) as gateway,
        Device(gateway) as device,
    ):
        await device.subscribe("in/#")
        mid = device.publish("t/lost", b"lost")
        await until(lambda: mid in device.acked)
        assert device.acked[mid] == 0x83
        assert set((await with_channel(rabbitmq, there)).values()) == {False}
        await with_channel(rabbitmq, make)
        await eventually(rabbitmq, consumers("need.queue", 1))
        await eventually(rabbitmq, consumers(OWN_QUEUE, 1))
        await with_channel(rabbitmq, lambda channel: channel.basic_publish("", "need.queue", b"come"))
        await until(lambda: device.heard == [("in/need/queue", b"come")])
        sent = []

        async def accepted() -> bool:
            sent.append(device.publish("t/kept", b"kept"))
            await until(lambda: sent[-1] in device.acked)
            return device.acked[sent[-1]] == 0

        with trio.fail_after(PATIENCE_SECS):
            while not await accepted():
                await trio.sleep(POLL_SECS)
        assert [body for body, _, _ in await fetch(rabbitmq, "need.sink")] == [b"kept"]
        await drop(rabbitmq, queue="need.queue")  # basic.cancel: it waits for the queue, and makes none
        await eventually(rabbitmq, lambda channel: not there(channel)["need.queue"])
        erp = gateway.links["erp"].session
        await until(
            lambda: "need.queue" in {need.name for need in erp.topology.declarations.values() if need.why}
        )
        await with_channel(rabbitmq, lambda channel: channel.queue_declare("need.queue"))
        await eventually(rabbitmq, consumers("need.queue", 1))


@pytest.mark.usefixtures("tidy")
async def test_of_two_replicas_one_is_served_and_the_other_when_it_goes(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    def say(*bodies: bytes) -> Callable[[Any], None]:
        def publish(channel: Any) -> None:
            for body in bodies:
                channel.basic_publish("", "need.queue", body, mandatory=True)

        return publish

    (tmp_path / "two").mkdir()
    link: dict[str, Any] = {"mapping": NEEDED, "single_active_consumer": True}
    async with gateway_to(rabbitmq, tmp_path, client_id="replica", **link) as first:
        await eventually(rabbitmq, consumers("need.queue", 1))
        async with gateway_to(rabbitmq, tmp_path / "two", client_id="second", **link) as second:
            await eventually(rabbitmq, consumers("need.queue", 2))
            await with_channel(rabbitmq, say(*[b"%d" % at for at in range(20)]))
            await until(lambda: first.links["erp"].stats.messages_in == 20)
            assert second.links["erp"].stats.messages_in == 0
            first.stop()
            await with_channel(rabbitmq, say(b"more"))
            await until(lambda: second.links["erp"].stats.messages_in >= 1)


@pytest.mark.usefixtures("tidy")
async def test_a_consumer_of_low_priority_is_served_when_others_have_enough(
    rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mapping": NEEDED, "client_id": "replica", "consumer_priority": -1}
    async with gateway_to(rabbitmq, tmp_path, **options) as gateway:
        stats = gateway.links["erp"].stats

        def compete(channel: Any) -> int:
            channel.basic_qos(prefetch_count=3)
            taken: list[bytes] = []
            channel.basic_consume("need.queue", lambda one, method, properties, body: taken.append(body))
            for at in range(5):
                channel.basic_publish("", "need.queue", b"%d" % at)
            while len(taken) < 3:
                channel.connection.process_data_events(1)
            return len(taken)

        assert await with_channel(rabbitmq, compete) == 3
        await until(
            lambda: stats.messages_in == 5
        )  # two at first, and then what the other had not acknowledged


async def test_each_url_has_its_own_name_in_certificates(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    """The certificate is for localhost; the first URL calls the same broker by a name that is not in it."""
    make_certificate(tmp_path, "rabbit")
    (port,) = free_ports(1)
    options = ", ".join(f'{{{name}file, "{tmp_path}/{name}.pem"}}' for name in ("cert", "key"))
    start = f"rabbit_networking:ensure_ssl(), rabbit_networking:start_ssl_listener({port}, [{options}], 5)."
    stop = f"rabbit_networking:stop_tcp_listener({port})."
    await in_thread(rabbitmq.control, "eval", start)
    try:
        link: dict[str, Any] = {
            "urls": [
                f"amqps://guest:guest@127.0.0.2:{port}",
                f"amqps://guest:guest@localhost:{port}",
            ],
            "tls": {"ca_file": tmp_path / "cert.pem"},
        }
        with structlog.testing.capture_logs() as lines:
            async with gateway_to(rabbitmq, tmp_path, **link) as gateway, Device(gateway) as device:
                await sink_queue(rabbitmq, "link.sink")
                mid = device.publish("t/one", b"x" * 300_000)  # of many records and frames
                await until(lambda: mid in device.acked)
                assert device.acked[mid] == 0
                assert [len(body) for body, _, _ in await fetch(rabbitmq, "link.sink")] == [300_000]
                assert gateway.links["erp"].stats.address == f"localhost:{port}"
        why = next(line for line in lines if line["event"] == "link disconnected")["why"]
        assert "not valid for '127.0.0.2'" in why
    finally:
        await in_thread(rabbitmq.control, "eval", stop)
    await drop(rabbitmq, queue="link.sink")
