"""What MassTransit declares and does on a bus of two endpoints, by way of pika: python main.py AMQP-URL.

A message type has a fanout exchange Namespace:Type, bound to the exchanges of the types that it is; an
endpoint has a fanout exchange and a queue of one name, bound to the types that it consumes. What fails goes
to NAME_error, what nobody consumes to NAME_skipped, both declared when first needed. A bus has an endpoint
of its own for responses, which goes with it.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Final

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

PATIENCE_SECS: Final = 20.0
CONTENT_TYPE: Final = "application/vnd.masstransit+json"
CREATED: Final = "Shop.Contracts:OrderCreated"
ANY_ORDER: Final = "Shop.Contracts:IOrderEvent"
GENERIC: Final = "Shop.Contracts:Batch--Shop.Contracts:OrderCreated--"
NESTED: Final = "Shop.Contracts:Orders-Cancelled"
FAULT: Final = "MassTransit:Fault--Shop.Contracts:OrderCreated--"
BUS: Final = "host_shop_bus_yryoyyfq1nayyxtwbdpp6xkqop"
QUORUM: Final = {"x-queue-type": "quorum"}
TEMPORARY: Final = {"x-expires": 60_000}


def message_type(channel: BlockingChannel, name: str, *bases: str) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    for base in bases:
        channel.exchange_declare(base, "fanout", durable=True)
        channel.exchange_bind(destination=base, source=name)


def endpoint(channel: BlockingChannel, name: str, *types: str, **arguments: Any) -> None:
    channel.exchange_declare(name, "fanout", durable=True)
    channel.queue_declare(name, durable=True, arguments=arguments or None)
    channel.queue_bind(name, name, "")
    for one in types:
        channel.exchange_bind(destination=name, source=one)


def bus(channel: BlockingChannel) -> None:
    channel.exchange_declare(BUS, "fanout", auto_delete=True)
    channel.queue_declare(BUS, auto_delete=True, arguments=TEMPORARY)
    channel.queue_bind(BUS, BUS, "")


def send(channel: BlockingChannel, exchange: str, kind: str, number: int, **headers: Any) -> None:
    """To an exchange with an empty key, confirmed, in an envelope, as it publishes and sends."""
    envelope = {"messageType": [f"urn:message:{kind}"], "message": {"number": number}}
    said = pika.BasicProperties(
        content_type=CONTENT_TYPE, delivery_mode=2, message_id=f"m-{number}", correlation_id=f"c-{number}",
        headers={"publishId": "1", **headers},
    )  # fmt: skip
    channel.basic_publish(exchange, "", json.dumps(envelope).encode(), said)


def took(channel: BlockingChannel, queue: str, *, again: bool = False) -> str:
    """The next message of a queue, or that there is none; it is acknowledged or stays."""
    method, said, body = channel.basic_get(queue)
    if method is None or said is None or body is None:
        return f"{queue}: nothing"
    if again:
        channel.basic_nack(method.delivery_tag)
    else:
        channel.basic_ack(method.delivery_tag)
    kind, number = json.loads(body)["messageType"][0], json.loads(body)["message"]["number"]
    counted = (said.headers or {}).pop("x-delivery-count", None)
    where = f"{method.exchange!r} {method.routing_key!r} {method.redelivered} {counted}"
    return f"{queue}: {kind} {number} {said.content_type} {said.message_id} {said.headers} {where}"


def declared(channel: BlockingChannel) -> None:
    """Twice: each instance of a service declares all of it again."""
    for _ in range(2):
        message_type(channel, CREATED, ANY_ORDER)
        message_type(channel, NESTED, ANY_ORDER)
        message_type(channel, GENERIC)
        endpoint(channel, "order-created", CREATED, **QUORUM)
        endpoint(channel, "audit", ANY_ORDER, GENERIC)
        bus(channel)
    print("declared")


def published(channel: BlockingChannel) -> None:
    for number, kind in enumerate((CREATED, NESTED, GENERIC)):
        send(channel, kind, kind, number)
        print("published", kind, "|", took(channel, "order-created"), "|", took(channel, "audit"))
    send(channel, "order-created", CREATED, 3)
    print("sent |", took(channel, "order-created"), "|", took(channel, "audit"))


def failed(channel: BlockingChannel) -> None:
    """Taken again, then moved to the error queue with its reason, and a fault is published."""
    message_type(channel, FAULT, "MassTransit:Fault")
    endpoint(channel, "faults", FAULT)
    send(channel, CREATED, CREATED, 4)
    print("again |", took(channel, "order-created", again=True))
    print("again |", took(channel, "order-created"), "|", took(channel, "audit"))
    for suffix, reason in (("error", "fault"), ("skipped", "dead-letter")):
        queue = f"order-created_{suffix}"
        endpoint(channel, queue, **QUORUM)
        reasons = {
            "MT-Reason": reason,
            "MT-Fault-Message": "it fails\r\n  at Shop.Consumer",
            "MT-Fault-RetryCount": 2,
        }
        send(channel, queue, CREATED, 4, **reasons)
        print("moved |", took(channel, queue))
    send(channel, FAULT, FAULT, 4)
    print("fault |", took(channel, "faults"))


def answered(channel: BlockingChannel, url: str) -> None:
    """A response goes to the exchange of who asked, and that goes when it has no consumer any more."""
    tag = channel.basic_consume(BUS, lambda *_: None, auto_ack=True)
    channel.basic_cancel(tag)
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        asker = connection.channel()
        bus(asker)
        send(channel, BUS, "Shop.Contracts:OrderStatus", 5)
        method, _, body = next(asker.consume(BUS, auto_ack=True, inactivity_timeout=PATIENCE_SECS))
        print("answered", method and method.exchange, body)
        asker.cancel()
    try:
        connection = pika.BlockingConnection(pika.URLParameters(url))
        connection.channel().exchange_declare(BUS, passive=True)
        print("it is still there")
    except ChannelClosedByBroker as error:
        print("gone", error.reply_code, error.reply_text)
    connection.close()


def mistaken(url: str) -> None:
    """Another kind of queue or exchange under a name that there is."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        for declare in (
            lambda channel: channel.queue_declare("order-created", durable=True),
            lambda channel: channel.exchange_declare(CREATED, "topic", durable=True),
            lambda channel: channel.exchange_bind("order-created", "Shop.Contracts:Unknown"),
        ):
            try:
                declare(connection.channel())
                print("taken")
            except ChannelClosedByBroker as error:
                print("refused", error.reply_code, error.reply_text)


def main(url: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        declared(channel)
        published(channel)
        failed(channel)
        answered(channel, url)
        mistaken(url)
        for queue in ("order-created", "audit", "faults", "order-created_error", "order-created_skipped"):
            channel.exchange_delete(queue)
            channel.queue_delete(queue)
        for exchange in (CREATED, NESTED, GENERIC, ANY_ORDER, FAULT, "MassTransit:Fault"):
            channel.exchange_delete(exchange)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
