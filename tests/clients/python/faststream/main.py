"""A FastStream application as its tutorials have it, and its own publisher: python main.py AMQP-URL.

Handlers print nothing: what they heard is put in a queue, and the one who published prints it. So the lines
have one order, whoever answers.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import suppress
from typing import Any, Final

from aiormq.exceptions import AMQPError
from faststream import AckPolicy
from faststream.exceptions import NackMessage, RejectMessage
from faststream.rabbit import Channel, ExchangeType, QueueType, RabbitBroker, RabbitExchange, RabbitQueue
from faststream.rabbit.annotations import RabbitMessage
from pydantic import BaseModel

PATIENCE_SECS: Final = 20.0
FAILS: Final = 3


class Order(BaseModel):
    """What is sent as JSON, and checked where it arrives."""

    number: int
    article: str


logging.disable(logging.CRITICAL)  # a handler that fails on purpose is logged with its traceback
broker = RabbitBroker(
    sys.argv[1],
    reconnect_interval=0.2,
    default_channel=Channel(prefetch_count=5, publisher_confirms=True),
    app_id="shop",
    logger=None,
)
heard: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
attempts: list[tuple[bool, Any]] = []

events = RabbitExchange("faststream.events", type=ExchangeType.TOPIC, durable=True)
by_headers = RabbitExchange("faststream.by-headers", type=ExchangeType.HEADERS, auto_delete=True)
work = RabbitQueue(
    "faststream.work",
    queue_type=QueueType.QUORUM,
    durable=True,
    arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "faststream.work.dead"},
)


@broker.subscriber("faststream.orders")
async def on_order(order: Order, message: RabbitMessage) -> None:
    raw = message.raw_message
    said = (raw.content_type, raw.app_id, raw.priority, raw.type, raw.delivery_mode, message.headers)
    await heard.put((order, *said, message.correlation_id))


@broker.subscriber("faststream.prices")
@broker.publisher("faststream.quoted")
async def on_price_asked(article: str) -> dict[str, Any]:
    return {"article": article, "price": len(article)}


@broker.subscriber("faststream.quoted")
async def on_quoted(quote: dict[str, Any]) -> None:
    await heard.put(("quoted", quote))


@broker.subscriber(RabbitQueue("faststream.every-log", auto_delete=True, routing_key="log.#"), events)
async def on_log(text: str, message: RabbitMessage) -> None:
    await heard.put(("every log", message.raw_message.routing_key, text))


@broker.subscriber(RabbitQueue("faststream.bad-log", auto_delete=True, routing_key="log.*.error"), events)
async def on_bad_log(text: str, message: RabbitMessage) -> None:
    await heard.put(("bad log", message.raw_message.routing_key, text))


@broker.subscriber(
    RabbitQueue("faststream.of-two", auto_delete=True, bind_arguments={"x-match": "all", "a": 1, "b": "two"}),
    by_headers,
)
async def on_headers(text: str) -> None:
    await heard.put(("headers", text))


@broker.subscriber(work, ack_policy=AckPolicy.NACK_ON_ERROR)
async def on_work(text: str, message: RabbitMessage) -> None:
    attempts.append((message.raw_message.redelivered, message.headers.get("x-delivery-count")))
    if text == "bad":
        raise RejectMessage(requeue=False)
    if len(attempts) == 1:
        raise NackMessage(requeue=True)
    if len(attempts) <= FAILS:
        raise ValueError("fails, and is tried again")
    await heard.put(("worked", text))


@broker.subscriber("faststream.work.dead")
async def on_dead(text: str, message: RabbitMessage) -> None:
    (death,) = message.headers["x-death"]
    await heard.put(("dead", text, death["queue"], death["reason"], death["count"]))


async def next_heard(count: int = 1) -> list[str]:
    async with asyncio.timeout(PATIENCE_SECS):
        return sorted([str(await heard.get()) for _ in range(count)])


def answered(confirmed: Any) -> str:
    """Basic.Ack, or the Basic.Return that came before it."""
    frame = getattr(confirmed, "delivery", confirmed)
    return " ".join(str(said) for said in (frame.name, *(getattr(frame, "reply_code", ()),)) if said != ())


async def published_and_heard() -> None:
    for number in range(3):
        confirmed = await broker.publish(
            Order(number=number, article="screw"), "faststream.orders", headers={"n": number},
            priority=number, correlation_id=f"order-{number}", message_type="order", persist=number == 1,
        )  # fmt: skip
        print(answered(confirmed), "heard", *await next_heard())


async def asked_and_answered() -> None:
    for article in ("bolt", "nut", "w\u00e4sher"):
        answer = await broker.request(article, "faststream.prices", timeout=PATIENCE_SECS)
        print("answered", await answer.decode(), *await next_heard())


async def routed() -> None:
    for key in ("log.shop.info", "log.shop.error", "log"):
        count = 2 if key.endswith("error") else 1
        await broker.publish("text", exchange=events, routing_key=key)
        print("routed", key, *await next_heard(count))
    for headers in ({"a": 1, "b": "two"}, {"a": 1}):
        confirmed = await broker.publish("by headers", exchange=by_headers, headers=headers)
        print("routed", headers, answered(confirmed), *(await next_heard() if "b" in headers else ()))


async def tried_again() -> None:
    await broker.publish("good", "faststream.work")
    print("tried again", *await next_heard(), attempts)
    await broker.publish("bad", "faststream.work")
    print("given up", *await next_heard())


async def refused() -> None:
    for mandatory in (True, False):
        confirmed = await broker.publish("nobody", "there is no such queue", mandatory=mandatory)
        print("mandatory" if mandatory else "not mandatory", answered(confirmed))


async def published_through(text: str) -> None:
    """Publish until it is confirmed, as the connection comes back."""
    async with asyncio.timeout(PATIENCE_SECS):
        while True:
            try:
                await broker.publish(Order(number=0, article=text), "faststream.orders", correlation_id=text)
                return
            except (AMQPError, ConnectionError, RuntimeError):
                await asyncio.sleep(0.05)


async def heard_by_both(key: str) -> list[str]:
    """The client restores one subscriber after the other: publish until each of the two has heard of it."""
    found: set[str] = set()
    async with asyncio.timeout(PATIENCE_SECS):
        while len(found) < 2:
            await broker.publish("text", exchange=events, routing_key=key)
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    while len(found) < 2:
                        found.add(str(await heard.get()))
    return sorted(found)


async def cut_off() -> None:
    """Everything that was declared and consumed is there again."""
    connection = await broker.connect()
    lost = asyncio.Event()
    connection.close_callbacks.add(lambda *_: lost.set())
    print("cut me off", flush=True)
    async with asyncio.timeout(PATIENCE_SECS):
        await lost.wait()
    await published_through("after")
    print("back", *await next_heard())
    answer = await broker.request("rivet", "faststream.prices", timeout=PATIENCE_SECS)
    print("answered", await answer.decode(), *await next_heard())
    print("routed", *await heard_by_both("log.late.error"))


async def main() -> None:
    async with broker:
        await broker.start()
        print("connected")
        for step in (published_and_heard, asked_and_answered, routed, tried_again, refused, cut_off):
            await step()
    print("done")


asyncio.run(main())
