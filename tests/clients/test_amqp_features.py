"""What applications build on RabbitMQ, with their own clients: calls, retries, priorities, transactions."""

from __future__ import annotations

import asyncio
from typing import Any

import aio_pika
import kombu
import pika
from aio_pika.patterns import RPC
from pika.exchange_type import ExchangeType

from tests.clients.peers import PATIENCE_SECS, node
from tests.interop.gateway_fixture import Running

REPLY_TO = "amq.rabbitmq.reply-to"


def test_pika_calls_by_direct_reply(gateway: Running) -> None:
    parameters = pika.URLParameters(gateway.amqp_url)
    with pika.BlockingConnection(parameters) as asking, pika.BlockingConnection(parameters) as answering:
        client, server = asking.channel(), answering.channel()
        server.queue_declare("square")
        heard: list[bytes] = []
        client.basic_consume(REPLY_TO, lambda *said: heard.append(said[3]), auto_ack=True)
        for number in range(5):
            said = pika.BasicProperties(reply_to=REPLY_TO, correlation_id=str(number))
            client.basic_publish("", "square", str(number).encode(), said)
        for method, properties, body in server.consume("square", inactivity_timeout=PATIENCE_SECS):
            assert method is not None
            server.basic_publish("", properties.reply_to, str(int(body) ** 2).encode())
            server.basic_ack(method.delivery_tag)
            if body == b"4":
                break
        while len(heard) < 5:
            asking.process_data_events(PATIENCE_SECS)
        assert heard == [b"0", b"1", b"4", b"9", b"16"]


def test_pika_retries_with_a_delay_and_gives_up(gateway: Running) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        channel = connection.channel()
        channel.exchange_declare("retry", ExchangeType.direct)
        work = {"x-dead-letter-exchange": "retry", "x-dead-letter-routing-key": "later"}
        later = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "work", "x-message-ttl": 20}
        channel.queue_declare("work", arguments=work)
        channel.queue_declare("later", arguments=later)
        channel.queue_bind("later", "retry", "later")
        channel.basic_publish("", "work", b"fails")
        deliveries = channel.consume("work", inactivity_timeout=PATIENCE_SECS)
        for attempts, (method, properties, _) in enumerate(deliveries, 1):
            assert method is not None
            deaths = [] if properties.headers is None else properties.headers["x-death"]
            rejections = [death["count"] for death in deaths if death["reason"] == "rejected"]
            assert rejections == [attempts - 1][: attempts - 1]
            if attempts == 4:
                channel.basic_ack(method.delivery_tag)
                break
            channel.basic_nack(method.delivery_tag, requeue=False)


def test_pika_commits_and_rolls_back(gateway: Running) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.tx_select()
        channel.basic_publish("", "q", b"forgotten")
        channel.tx_rollback()
        channel.basic_publish("", "q", b"kept")
        assert channel.queue_declare("q", passive=True).method.message_count == 0
        channel.tx_commit()
        assert channel.basic_get("q", auto_ack=True)[2] == b"kept"


async def _aio_pika(url: str) -> tuple[int, list[bytes], list[bytes]]:
    async with await aio_pika.connect_robust(url) as connection:
        channel = await connection.channel(publisher_confirms=False)
        rpc = await RPC.create(channel)

        async def double(*, number: int) -> int:
            return 2 * number

        await rpc.register("double", double, auto_delete=True)
        doubled: int = await rpc.call("double", kwargs={"number": 21})
        arguments: dict[str, Any] = {"x-max-priority": 5, "x-max-length": 3}
        queue = await channel.declare_queue("levels", arguments=arguments)
        async with channel.transaction():
            for level in (1, 4, 2):
                message = aio_pika.Message(str(level).encode(), priority=level)
                await channel.default_exchange.publish(message, "levels")
        levels = [(await queue.get(no_ack=True)).body for _ in range(3)]
        other = await connection.channel(publisher_confirms=True)
        bounded = await other.declare_queue(
            "bounded", arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )
        refused = []
        for body in (b"1", b"2"):
            try:
                await other.default_exchange.publish(aio_pika.Message(body), bounded.name)
            except aio_pika.exceptions.DeliveryError:
                refused.append(body)
        return doubled, levels, refused


def test_aio_pika_calls_sorts_and_is_refused(gateway: Running) -> None:
    doubled, levels, refused = asyncio.run(asyncio.wait_for(_aio_pika(gateway.amqp_url), PATIENCE_SECS))
    assert (doubled, levels, refused) == (42, [b"4", b"2", b"1"], [b"2"])


def test_kombu_with_priorities_a_limit_and_dead_letters(gateway: Running) -> None:
    dead = kombu.Queue("dead", durable=False)
    tasks = kombu.Queue(
        "tasks",
        durable=False,
        max_priority=10,
        max_length=3,
        queue_arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"},
    )
    with kombu.Connection(gateway.amqp_url) as connection:
        for queue in (dead, tasks):
            queue(connection.default_channel).declare()
        producer = connection.Producer()
        for level in (3, 9, 5, 7):
            producer.publish({"level": level}, routing_key="tasks", priority=level, delivery_mode=1)
        with connection.SimpleQueue(tasks) as simple:
            levels = []
            for _ in range(3):
                message = simple.get(timeout=PATIENCE_SECS)
                levels.append(message.payload["level"])
                message.ack()
        assert levels == [7, 5, 3]
        with connection.SimpleQueue(dead) as simple:
            message = simple.get(timeout=PATIENCE_SECS)
            assert (message.payload["level"], message.headers["x-first-death-reason"]) == (9, "maxlen")
            message.ack()


RABBITMQ_CLIENT = """
const {Connection} = require("rabbitmq-client");
(async () => {
  const rabbit = new Connection(process.argv[1]);
  const heard = [];
  let consumer;
  const done = new Promise((resolve) => {
    consumer = rabbit.createConsumer({
      queue: "q", queueOptions: {autoDelete: true, arguments: {"x-max-priority": 5}},
      exchanges: [{exchange: "events", type: "topic"}],
      queueBindings: [{exchange: "events", routingKey: "a.*"}], qos: {prefetchCount: 2},
    }, async (message) => {
      heard.push(`${message.routingKey} ${message.body.n} ${message.redelivered}`);
      if (message.body.n === 1 && !message.redelivered) throw new Error("again");
      if (heard.length === 4) resolve();
    });
    consumer.on("error", () => {});
    consumer.on("ready", async () => {
      const publisher = rabbit.createPublisher({confirm: true, maxAttempts: 2});
      for (let n = 0; n < 3; n++) await publisher.send({exchange: "events", routingKey: `a.${n}`}, {n});
      await publisher.close();
    });
  });
  await done;
  console.log(heard.sort().join("\\n"));
  const server = rabbit.createConsumer({queue: "calls", queueOptions: {autoDelete: true}},
    async (message, reply) => reply({sum: message.body.a + message.body.b}));
  await new Promise((ready) => server.on("ready", ready));
  const client = rabbit.createRPCClient({confirm: true});
  const answer = await client.send("calls", {a: 40, b: 2});
  console.log(answer.body.sum);
  await client.close();
  await server.close();
  await consumer.close();
  await rabbit.close();
})().catch((error) => { console.error(error); process.exit(1); });
"""


def test_rabbitmq_client(gateway: Running) -> None:
    out = node(RABBITMQ_CLIENT, "rabbitmq-client", gateway.amqp_url)
    assert out.splitlines() == ["a.0 0 false", "a.1 1 false", "a.1 1 true", "a.2 2 false", "42"]


CLOUDAMQP = """
const {AMQPClient} = require("@cloudamqp/amqp-client");
(async () => {
  const url = `${process.argv[1]}?heartbeat=${process.argv[2]}`;
  const connection = await new AMQPClient(url).connect();
  const began = Date.now();
  let ended = 0;
  connection.onerror = () => { ended = ended || Date.now() - began; };
  await new Promise((done) => setTimeout(done, process.argv[2] * 2500));
  console.log(ended, connection.closed);
  if (!connection.closed) await connection.close();
})().catch((error) => { console.error(error); process.exit(1); });
"""


def test_a_client_that_ends_what_is_silent_for_one_interval(gateway: Running) -> None:
    assert node(CLOUDAMQP, "@cloudamqp/amqp-client", gateway.amqp_url, "2").split() == ["0", "false"]
