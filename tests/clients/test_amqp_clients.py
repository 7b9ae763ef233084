"""AMQP 0-9-1 clients that people use, against the listener: amqp-tools, pika, aio-pika, amqplib."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from typing import Any

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, UnroutableError

from tests.clients.peers import PATIENCE_SECS, node
from tests.conftest import missing
from tests.interop.gateway_fixture import Running
from tests.interop.servers import PeerMissingError, program


@pytest.fixture
def connection(gateway: Running) -> Iterator[pika.BlockingConnection]:
    made = pika.BlockingConnection(pika.URLParameters(gateway.amqp_url))
    yield made
    if made.is_open:
        made.close()


@pytest.fixture
def channel(connection: pika.BlockingConnection) -> BlockingChannel:
    return connection.channel()


def tool(name: str, gateway: Running, *arguments: str, body: bytes = b"") -> bytes:
    """Run one of amqp-tools; what it printed."""
    try:
        command = [program(name), "-u", gateway.amqp_url, *arguments]
    except PeerMissingError as error:
        missing(str(error))
        raise
    done = subprocess.run(command, input=body, check=True, timeout=PATIENCE_SECS, capture_output=True)
    return done.stdout


def bodies(channel: BlockingChannel, queue: str) -> list[bytes]:
    """Take all that is ready."""
    found: list[bytes] = []
    while True:
        method, _, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return found
        found.append(body)


def test_amqp_tools(gateway: Running) -> None:
    tool("amqp-declare-queue", gateway, "-q", "tools")
    tool("amqp-publish", gateway, "-r", "tools", "-p", "-C", "text/plain", "-b", "first")
    tool("amqp-publish", gateway, "-r", "tools", body=b"second")
    tool("amqp-publish", gateway, "-r", "tools", "-b", "third")
    assert tool("amqp-get", gateway, "-q", "tools") == b"first"
    assert tool("amqp-consume", gateway, "-q", "tools", "-c", "2", "cat") == b"secondthird"
    tool("amqp-delete-queue", gateway, "-q", "tools")
    assert "tools" not in gateway.gateway.host.queues


@pytest.mark.parametrize(
    "kind, key, routed, passed_over",
    [("direct", "k", "k", "l"), ("topic", "a.*.#", "a.b.c", "b.a"), ("fanout", "", "any", None)],
)
def test_pika_exchanges_by_key(
    channel: BlockingChannel, kind: str, key: str, routed: str, passed_over: str | None
) -> None:
    channel.exchange_declare("e", kind, durable=True)
    channel.queue_declare("q")
    channel.queue_bind("q", "e", key)
    channel.basic_publish("e", routed, b"here")
    if passed_over is not None:
        channel.basic_publish("e", passed_over, b"elsewhere")
    assert bodies(channel, "q") == [b"here"]
    channel.queue_unbind("q", "e", key)
    channel.basic_publish("e", routed, b"no more")
    assert bodies(channel, "q") == []
    channel.exchange_delete("e")
    with pytest.raises(ChannelClosedByBroker) as closed:
        channel.exchange_declare("e", passive=True)
    assert closed.value.reply_code == 404


def test_pika_headers_exchange(channel: BlockingChannel) -> None:
    for name, mode in (("all", "all"), ("any", "any")):
        channel.queue_declare(name)
        channel.queue_bind(name, "amq.headers", "", {"x-match": mode, "a": 1, "b": "two"})
    for headers in ({"a": 1, "b": "two"}, {"a": 1}, {"a": 2}):
        channel.basic_publish("amq.headers", "", str(headers).encode(), pika.BasicProperties(headers=headers))
    assert bodies(channel, "all") == [b"{'a': 1, 'b': 'two'}"]
    assert bodies(channel, "any") == [b"{'a': 1, 'b': 'two'}", b"{'a': 1}"]


def test_pika_exchange_to_exchange(channel: BlockingChannel) -> None:
    channel.exchange_declare("front", "fanout")
    channel.exchange_bind("amq.topic", "front", "")
    channel.queue_declare("q")
    channel.queue_bind("q", "amq.topic", "a.#")
    channel.basic_publish("front", "a.b", b"through")
    assert bodies(channel, "q") == [b"through"]
    channel.exchange_unbind("amq.topic", "front", "")
    channel.basic_publish("front", "a.b", b"not")
    assert bodies(channel, "q") == []


def test_pika_properties_and_headers_keep_their_types(channel: BlockingChannel) -> None:
    headers: dict[str, Any] = {"i": -5, "b": True, "s": "text", "n": None, "l": [1, "two"], "t": {"x": 2**40}}
    said = pika.BasicProperties(
        content_type="text/plain", content_encoding="utf-8", headers=headers, delivery_mode=2, priority=7,
        correlation_id="c", reply_to="r", expiration="60000", message_id="m", timestamp=1_700_000_000,
        type="t", user_id="guest", app_id="a",
    )  # fmt: skip
    channel.queue_declare("q")
    channel.basic_publish("", "q", b"body", said)
    _, heard, body = channel.basic_get("q", auto_ack=True)
    assert (body, heard) == (b"body", said)


def test_pika_confirms_and_mandatory_returns(channel: BlockingChannel) -> None:
    channel.confirm_delivery()
    channel.queue_declare("q")
    channel.basic_publish("", "q", b"kept", mandatory=True)
    channel.basic_publish("amq.topic", "nobody.listens", b"nobody wants it")
    with pytest.raises(UnroutableError) as returned:
        channel.basic_publish("amq.direct", "nowhere", b"back", mandatory=True)
    (message,) = returned.value.messages
    assert (message.body, message.method.reply_code) == (b"back", 312)
    assert bodies(channel, "q") == [b"kept"]


def test_pika_prefetch_ack_nack_reject(connection: pika.BlockingConnection, channel: BlockingChannel) -> None:
    channel.queue_declare("q")
    for number in range(5):
        channel.basic_publish("", "q", str(number).encode())
    channel.basic_qos(prefetch_count=2)
    seen: list[tuple[bytes, bool]] = []

    def take(channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        seen.append((body, method.redelivered))
        if body == b"1" and not method.redelivered:
            channel.basic_nack(method.delivery_tag, requeue=True)
        elif body == b"2":
            channel.basic_reject(method.delivery_tag, requeue=False)
        else:
            channel.basic_ack(method.delivery_tag)
        if body == b"4":
            channel.stop_consuming()

    channel.basic_consume("q", take)
    channel.start_consuming()
    assert sorted(seen) == [
        (b"0", False),
        (b"1", False),
        (b"1", True),
        *[(f"{n}".encode(), False) for n in (2, 3, 4)],
    ]
    assert channel.queue_declare("q", passive=True).method.message_count == 0


def test_pika_exclusive_and_auto_delete(gateway: Running, channel: BlockingChannel) -> None:
    mine = channel.queue_declare("", exclusive=True).method.queue
    brief = channel.queue_declare("", auto_delete=True).method.queue
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as other:
        with pytest.raises(ChannelClosedByBroker) as closed:
            other.channel().queue_declare(mine, passive=True)
        assert closed.value.reply_code == 405
        second = other.channel()
        tag = second.basic_consume(brief, lambda *_: None)
        second.basic_cancel(tag)
        with pytest.raises(ChannelClosedByBroker) as closed:
            second.queue_declare(brief, passive=True)
        assert closed.value.reply_code == 404
    channel.connection.close()
    gateway.until(lambda: not gateway.gateway.host.queues)


@pytest.mark.parametrize(
    "mistake, code", [("passive", 404), ("redeclare", 406), ("tag", 406), ("exchange", 404)]
)
def test_pika_hears_its_mistakes(
    connection: pika.BlockingConnection, channel: BlockingChannel, mistake: str, code: int
) -> None:
    channel.queue_declare("q")
    with pytest.raises(ChannelClosedByBroker) as closed:
        make_mistake(connection, channel, mistake)
    assert closed.value.reply_code == code
    assert connection.channel().queue_declare("q", passive=True).method.message_count == 0


def make_mistake(connection: pika.BlockingConnection, channel: BlockingChannel, mistake: str) -> None:
    if mistake == "passive":
        channel.queue_declare("none", passive=True)
    elif mistake == "redeclare":
        channel.queue_declare("q", durable=True)
    elif mistake == "tag":
        channel.basic_ack(99)
        channel.queue_declare("q")
    else:
        channel.basic_publish("none", "k", b"x")
        channel.queue_declare("q")


def test_pika_time_to_live(channel: BlockingChannel) -> None:
    channel.queue_declare("q", arguments={"x-message-ttl": 60_000})
    channel.basic_publish("", "q", b"old", pika.BasicProperties(expiration="0"))
    channel.basic_publish("", "q", b"new", pika.BasicProperties(expiration="60000"))
    assert bodies(channel, "q") == [b"new"]


@pytest.mark.parametrize("size", [0, 1, 131_064, 131_065, 16 * 1024 * 1024, 128 * 1024 * 1024])
def test_pika_bodies_of_any_size(channel: BlockingChannel, size: int) -> None:
    body = bytes(range(256)) * (size // 256) + bytes(size % 256)
    channel.confirm_delivery()
    channel.queue_declare("q")
    channel.basic_publish("", "q", body)
    assert bodies(channel, "q") == [body]


def test_pika_hears_that_a_body_is_too_large(channel: BlockingChannel) -> None:
    channel.queue_declare("q")
    channel.confirm_delivery()
    with pytest.raises(ChannelClosedByBroker) as closed:
        channel.basic_publish("", "q", bytes(128 * 1024 * 1024 + 1))
    assert closed.value.reply_code == 406


def test_an_empty_key_is_confirmed_although_mqtt_has_no_empty_topic(channel: BlockingChannel) -> None:
    channel.confirm_delivery()
    channel.queue_declare("all")
    channel.queue_bind("all", "amq.topic", "#")
    channel.basic_publish("amq.topic", "", b"x")
    assert channel.basic_get("all", auto_ack=True)[2] == b"x"


async def _aio_pika(gateway: Running) -> list[bytes]:
    connection = await aio_pika.connect_robust(gateway.amqp_url)
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=10)
        exchange = await channel.declare_exchange("e", aio_pika.ExchangeType.TOPIC)
        queue = await channel.declare_queue("q", auto_delete=True)
        await queue.bind(exchange, "a.#")
        for number in range(30):
            await exchange.publish(aio_pika.Message(str(number).encode()), f"a.{number}")
        found = []
        async with queue.iterator() as messages:
            async for message in messages:
                async with message.process():
                    found.append(message.body)
                if len(found) == 30:
                    return found
    return found


def test_aio_pika(gateway: Running) -> None:
    found = asyncio.run(asyncio.wait_for(_aio_pika(gateway), PATIENCE_SECS))
    assert found == [str(number).encode() for number in range(30)]


AMQPLIB = """
const amqp = require("amqplib");
(async () => {
  const connection = await amqp.connect(process.argv[1]);
  const channel = await connection.createConfirmChannel();
  await channel.assertExchange("e", "direct");
  await channel.assertQueue("q");
  await channel.bindQueue("q", "e", "k");
  for (let n = 0; n < 5; n++)
    channel.publish("e", "k", Buffer.from(`body ${n}`), {persistent: true, headers: {n}});
  await channel.waitForConfirms();
  await channel.prefetch(2);
  const heard = [];
  await new Promise((done) => channel.consume("q", (message) => {
    heard.push(`${message.properties.headers.n} ${message.content}`);
    channel.ack(message);
    if (heard.length === 5) done();
  }));
  console.log(heard.join("\\n"));
  const gone = await connection.createChannel();
  gone.on("error", (error) => console.log(error.code));
  await gone.checkQueue("none").catch(() => {});
  await connection.close();
})().catch((error) => { console.error(error); process.exit(1); });
"""


def test_amqplib(gateway: Running) -> None:
    out = node(AMQPLIB, "amqplib", gateway.amqp_url)
    assert out.splitlines() == [*(f"{n} body {n}" for n in range(5)), "404"]
