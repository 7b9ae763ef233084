"""Large bodies of AMQP 0-9-1 clients: on disk as they come, while they wait, and as they go."""

from __future__ import annotations

import errno
import itertools
import os
import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError, UnroutableError

from gateway.broker import spool
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    encode_basic_properties,
    encode_content_frames,
    encode_method_frame,
)
from gateway.protocols.amqp091.events import GetResponse
from gateway.settings import Limits, ListenerTls, StoreSettings
from gateway.transport import stream
from tests.configured import make_listener
from tests.ingress.amqp_client import NOTHING, Amqp
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.test_tls import make_certificate

MIB: Final = 1_048_576
LIMITS: Final = Limits(message_bytes_max=MIB, amqp_message_bytes_max=8 * MIB)
BODY: Final = random.Random(1).randbytes(3 * MIB)
OTHER: Final = random.Random(2).randbytes(2 * MIB)
SMALL: Final = b"small"


@pytest.fixture
def gateway() -> Iterator[Running]:
    with running(settings_of(limits=LIMITS)) as one:
        yield one


@pytest.fixture
def channel(gateway: Running) -> Iterator[BlockingChannel]:
    """It confirms, and has the queue q."""
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        yield confirming(connection)


def confirming(connection: pika.BlockingConnection) -> BlockingChannel:
    found = connection.channel()
    found.confirm_delivery()
    found.queue_declare("q")
    return found


def used(gateway: Running) -> int:
    """Bytes on disk."""
    return gateway.ask(lambda: gateway.gateway.bodies.spool.used_bytes)


def nothing_left(gateway: Running) -> None:
    gateway.until(lambda: gateway.gateway.bodies.spool.used_bytes == 0)


def taken(channel: BlockingChannel, count: int, *, ack: bool = True, queue: str = "q") -> list[bytes]:
    """The next bodies of a queue, by a consumer."""
    found: list[bytes] = []
    for method, _, body in itertools.islice(channel.consume(queue, inactivity_timeout=20.0), count):
        assert method is not None
        found.append(body)
        if ack:
            channel.basic_ack(method.delivery_tag)
    channel.cancel()
    return found


def test_it_comes_out_as_it_came_in(gateway: Running, channel: BlockingChannel) -> None:
    for body in (BODY, SMALL, OTHER):
        channel.basic_publish("", "q", body)
    assert used(gateway) == len(BODY) + len(OTHER)
    assert taken(channel, 3) == [BODY, SMALL, OTHER]
    nothing_left(gateway)


def test_each_queue_has_the_one_file(gateway: Running, channel: BlockingChannel) -> None:
    for queue in ("a", "b"):
        channel.queue_declare(queue)
        channel.queue_bind(queue, "amq.fanout")
    channel.basic_publish("amq.fanout", "", BODY)
    assert used(gateway) == len(BODY)
    assert taken(channel, 1, queue="a") == [BODY]
    assert used(gateway) == len(BODY)
    assert taken(channel, 1, queue="b") == [BODY]
    nothing_left(gateway)


@pytest.mark.parametrize("no_ack", [False, True])
def test_it_can_be_got(gateway: Running, channel: BlockingChannel, no_ack: bool) -> None:
    channel.basic_publish("", "q", BODY)
    method, _, body = channel.basic_get("q", auto_ack=no_ack)
    assert body == BODY
    assert method is not None
    if not no_ack:
        assert used(gateway) == len(BODY)
        channel.basic_ack(method.delivery_tag)
    nothing_left(gateway)


def test_nobody_takes_it_and_it_comes_back(gateway: Running, channel: BlockingChannel) -> None:
    with pytest.raises(UnroutableError) as caught:
        channel.basic_publish("", "nowhere", BODY, mandatory=True)
    assert [one.body for one in caught.value.messages] == [BODY]
    nothing_left(gateway)


def test_it_is_delivered_again(gateway: Running, channel: BlockingChannel) -> None:
    channel.basic_publish("", "q", BODY)
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as other:
        assert taken(other.channel(), 1, ack=False) == [BODY]
    method, _, body = channel.basic_get("q", auto_ack=True)
    assert body == BODY
    assert method is not None
    assert method.redelivered


def test_it_dies_and_is_a_letter(gateway: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("letters")
    arguments: dict[str, Any] = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "letters"}
    channel.queue_declare("mortal", arguments=arguments)
    channel.basic_publish("", "mortal", BODY)
    method, _, _ = channel.basic_get("mortal")
    assert method is not None
    channel.basic_reject(method.delivery_tag, requeue=False)
    assert taken(channel, 1, queue="letters") == [BODY]
    nothing_left(gateway)


def test_a_purged_queue_leaves_nothing(gateway: Running, channel: BlockingChannel) -> None:
    channel.basic_publish("", "q", BODY)
    channel.queue_purge("q")
    nothing_left(gateway)


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_transactions(gateway: Running, end: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
        channel = connection.channel()
        channel.queue_declare("q")
        channel.tx_select()
        for body in (BODY, OTHER):
            channel.basic_publish("", "q", body)
        if end == "commit":
            channel.tx_commit()
            assert taken(channel, 2) == [BODY, OTHER]
            channel.tx_commit()
        else:
            channel.tx_rollback()
            assert channel.basic_get("q")[0] is None
    nothing_left(gateway)


def test_behind_a_route_is_only_what_is_held_whole(gateway: Running, channel: BlockingChannel) -> None:
    """A device that wants it refuses it for its size, and the publisher hears of that; its queue has it."""
    channel.queue_bind("q", "amq.topic", "a.#")
    channel.basic_publish("amq.topic", "a.b", BODY)
    with connect(gateway, "device")[0] as device:
        device.subscribe("a/#", 1)
        with pytest.raises(NackError):
            channel.basic_publish("amq.topic", "a.b", OTHER)
        channel.basic_publish("amq.topic", "a.b", SMALL)
        assert device.body() == SMALL
    assert taken(channel, 3) == [BODY, OTHER, SMALL]
    routes = gateway.gateway.dispatcher.router.routes
    assert gateway.ask(lambda: sum(route.failed for route in routes)) == 1
    nothing_left(gateway)


def test_too_large_is_too_large(gateway: Running, channel: BlockingChannel) -> None:
    with pytest.raises(ChannelClosedByBroker, match=f"message size {8 * MIB + 1} is larger") as caught:
        channel.basic_publish("", "q", bytes(8 * MIB + 1))
    assert caught.value.reply_code == 406
    nothing_left(gateway)


def test_the_spool_is_full() -> None:
    limits = LIMITS.model_copy(update={"spool_bytes_max": 4 * MIB})
    with (
        running(settings_of(limits=limits)) as gateway,
        pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection,
    ):
        confirming(connection).basic_publish("", "q", BODY)
        with pytest.raises(ChannelClosedByBroker, match="limits.spool_bytes_max") as caught:
            confirming(connection).basic_publish("", "q", OTHER)
        assert caught.value.reply_code == 406
        channel = confirming(connection)
        assert taken(channel, 1) == [BODY]
        nothing_left(gateway)
        channel.basic_publish("", "q", OTHER)
        assert taken(channel, 1) == [OTHER]


def test_larger_than_a_route_takes_but_not_worth_a_file() -> None:
    limits = LIMITS.model_copy(update={"message_bytes_max": 1_000})
    with (
        running(settings_of(limits=limits)) as gateway,
        pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection,
    ):
        channel = confirming(connection)
        channel.queue_bind("q", "amq.topic", "#")
        with connect(gateway, "device")[0] as device:
            device.subscribe("a", 1)
            channel.basic_publish("amq.topic", "a", bytes(1_000))
            with pytest.raises(NackError):
                channel.basic_publish("amq.topic", "a", bytes(1_001))
            assert len(device.body()) == 1_000
        assert [len(body) for body in taken(channel, 2)] == [1_000, 1_001]
        nothing_left(gateway)


def frames(
    number: int, body: bytes, publish: m.BasicPublish | None = None, properties: bytes = NOTHING
) -> list[Any]:
    """Of one message, by default for the queue q."""
    method = encode_method_frame(number, publish or m.BasicPublish("", "q"))
    return [method, *encode_content_frames(number, properties, body, 131_072)]


def test_parts_of_several_channels_come_in_between_each_other(gateway: Running) -> None:
    with Amqp(gateway).open() as client:
        client.open_channel()
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        for pair in itertools.zip_longest(frames(1, BODY), frames(2, OTHER), fillvalue=b""):
            client.send(b"".join(pair))
        found: list[bytes] = []
        while len(found) < 2:
            client.say(m.BasicGet("q", no_ack=True))
            found.append(client.next(GetResponse).body)
    assert sorted(map(len, found)) == [len(OTHER), len(BODY)]
    assert set(found) == {OTHER, BODY}


@pytest.mark.parametrize("persistent", [False, True])
def test_behind_a_new_address_that_has_spent_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool
) -> None:
    """To one more new address, of which there was enough for this turn, it goes all the same."""
    monkeypatch.setattr(stream, "SLOW_WORK_SECS", 0.0)
    settings = settings_of(limits=LIMITS, store=StoreSettings(path=tmp_path / "data"))
    with running(settings) as gateway, Amqp(gateway).open() as client:
        client.open_channel()
        client.call(m.QueueDeclare("q", durable=True), m.QueueDeclareOk)
        client.call(m.QueueBind("q", "amq.topic", "#"), m.QueueBindOk)
        mode = encode_basic_properties(BasicProperties(delivery_mode=2 if persistent else 1))
        large = frames(1, OTHER, m.BasicPublish("amq.topic", "large"), mode)
        client.send(b"".join(large[:-1]))
        gateway.until(lambda: gateway.gateway.bodies.spool.used_bytes > MIB)
        small = frames(2, SMALL, m.BasicPublish("amq.topic", "small"), mode)
        client.send(b"".join([*small, large[-1]]))
        client.say(m.BasicConsume("q", "c", no_ack=True, no_wait=True))
        assert [row[6] for row in client.delivered(2)] == [SMALL, OTHER]


@pytest.mark.parametrize("how", ["cut", "closed"])
def test_what_never_comes_whole_leaves_nothing(gateway: Running, how: str) -> None:
    with Amqp(gateway).open() as client:
        client.call(m.QueueDeclare("q"), m.QueueDeclareOk)
        client.send(b"".join(frames(1, BODY)[:-1]))
        gateway.until(lambda: gateway.gateway.bodies.spool.used_bytes > len(OTHER))
        if how == "closed":
            client.say(m.QueueDeclare("q"))  # in the midst of a body: 505
    nothing_left(gateway)


def test_over_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path, "large")
    tls = ListenerTls(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    listener = make_listener(protocol="amqp091", host=LOOPBACK, port=0, tls=tls)
    with running(settings_of(limits=LIMITS, listeners={"amqp091": listener})) as gateway:
        context = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        parameters = pika.ConnectionParameters(
            LOOPBACK, gateway.amqp, ssl_options=pika.SSLOptions(context, LOOPBACK)
        )
        with pika.BlockingConnection(parameters) as connection:
            channel = confirming(connection)
            for body in (BODY, SMALL, OTHER):
                channel.basic_publish("", "q", body)
            assert taken(channel, 3) == [BODY, SMALL, OTHER]
        nothing_left(gateway)


@pytest.mark.interpreted
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("way", ["consumed", "got"])
def test_a_body_that_cannot_be_opened_for_a_moment_is_delivered_later(
    monkeypatch: pytest.MonkeyPatch, way: str, number: int
) -> None:
    failures = 2
    open_file = spool.OpenFile.__init__
    read = spool.SpoolFile.read

    def fails() -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(number, os.strerror(number))

    def opening(self: spool.OpenFile, path: Path) -> None:
        fails()
        open_file(self, path)

    def reading(self: spool.SpoolFile, at: int, count: int) -> bytes:
        if way == "got":
            fails()
        return read(self, at, count)

    with running(settings_of(limits=LIMITS)) as gateway:
        with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
            channel = confirming(connection)
            for body in (SMALL, BODY, OTHER):
                channel.basic_publish("", "q", body)
            monkeypatch.setattr(spool.OpenFile, "__init__", opening)
            monkeypatch.setattr(spool.SpoolFile, "read", reading)
            if way == "consumed":
                assert taken(channel, 3) == [SMALL, BODY, OTHER]
            else:
                for body in (SMALL, BODY, OTHER):
                    assert channel.basic_get("q", auto_ack=True)[2] == body
        assert not failures
        assert gateway.ask(lambda: gateway.gateway.bodies.spool.unread_count) == 2
        assert not gateway.ask(lambda: len(gateway.gateway.dead_letters))
        nothing_left(gateway)


@pytest.mark.parametrize("way", ["consumed", "got"])
def test_a_body_that_is_not_there_any_more_costs_itself(way: str) -> None:
    with running(settings_of(limits=LIMITS)) as gateway:
        with pika.BlockingConnection(pika.URLParameters(gateway.amqp_url)) as connection:
            channel = confirming(connection)
            channel.basic_publish("", "q", BODY)
            (path,) = gateway.gateway.bodies.spool.folder.iterdir()
            path.unlink()
            channel.basic_publish("", "q", OTHER)
            if way == "consumed":
                assert taken(channel, 1) == [OTHER]
            else:
                assert channel.basic_get("q", auto_ack=True)[2] == OTHER
        assert gateway.ask(lambda: dict(gateway.gateway.dead_letters.counted)) == {("", "store"): 1}
