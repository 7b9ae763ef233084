"""Messages in fragments, of which no more than a limit is in memory (2.2.8.8, 3.5.3; 7 of the notes)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from gateway.broker import spool
from gateway.egress.amqpfast.client import connect
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.mqtt.packets import Connack, Connect
from gateway.settings import Limits, ListenerTls
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, PEER, PERSISTENT, TOPIC, fresh, head
from tests.ingress.amqpfast.large import MIB, SMALL_MEMORY, Whole, data
from tests.ingress.clients import Mqtt
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of
from tests.interop.test_tls import make_certificate

BODY = data(3 * MIB)
OTHER = data(2 * MIB, 2)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Running]:
    listeners = {
        "mqtt": make_listener(protocol="mqtt", host=LOOPBACK, port=0),
        "amqpfast": make_listener(protocol="amqpfast", host=LOOPBACK, port=0, virtual_hosts=["/", "apart"]),
    }
    with running(settings_of(limits=SMALL_MEMORY, listeners=listeners)) as started:
        yield started


def used(gateway: Running) -> int:
    return gateway.ask(lambda: gateway.gateway.bodies.spool.used_bytes)


def nothing_left(gateway: Running) -> None:
    bodies = gateway.gateway.bodies.spool
    gateway.until(lambda: not bodies.used_bytes and not bodies.reserved_bytes)
    assert not bodies.is_persistent
    assert list(bodies.folder.iterdir()) == []


def test_fragments_of_two_channels_interleave_and_the_bodies_wait_on_disk(gateway: Running) -> None:
    with Whole(gateway).open() as client:
        second = client.channel()
        one, other = client.handle("one"), client.handle("two", channel=second)
        first_tag, second_tag = client.machine.new_tag(1), client.machine.new_tag(second)
        first, then = client.transfer(one, BODY), client.transfer(other, OTHER, PERSISTENT)
        client.write(first, BODY[:100_000], last=False)
        client.write(then, OTHER[:MIB], last=False)
        client.write(first, BODY[100_000 : 2 * MIB], last=False)
        client.write(then, OTHER[MIB:], second_tag)
        assert client.reply()[1:4] == (other, second_tag, 200)
        client.write(first, BODY[2 * MIB :], first_tag)
        assert client.reply()[1:4] == (one, first_tag, 200)
        assert used(gateway) == len(BODY) + len(OTHER)
        client.consume(one)
        row = client.large()
        assert fresh(row)
        assert (row[1], row[3], row[4], row[5]) == (1, EMPTY, BODY, b"one")
        client.consume(other, channel=second)
        assert client.large()[3:] == (PERSISTENT, OTHER, b"two")
        client.ack(1)
        client.ack(1, second)
    nothing_left(gateway)


def test_two_deliveries_interleave_and_what_follows_on_a_channel_waits(gateway: Running) -> None:
    with Whole(gateway).open() as client:
        second = client.channel()
        one, other = client.handle("one"), client.handle("two", channel=second)
        client.put_large(one, BODY)
        client.put(one, b"small")
        client.put_large(one, OTHER)
        client.put_large(other, OTHER, channel=second)
        client.say(m.HandleConsume(one, 0, 10), m.HandleConsume(other, 0, 10))
        bodies: dict[int, bytes] = {}
        order = []
        while len(bodies.get(other, b"")) < len(OTHER) or len(bodies.get(one, b"")) < len(BODY):
            part = client.next_part()
            bodies[part[0]] = bodies.get(part[0], b"") + part[1]
            order.append(part[0])
        assert bodies == {one: BODY, other: OTHER}
        assert len([at for at in range(1, len(order)) if order[at] != order[at - 1]]) > 2
        assert client.bodies(1) == [b"small"]
        assert client.large()[4] == OTHER
        client.ack(3)
        client.ack(1, second)
    nothing_left(gateway)


SPILLED = [
    ("in memory", Limits(), 2 * MIB, False),
    ("over the limit of one", SMALL_MEMORY, 2 * MIB, True),
    ("over the limit of all", Limits(fast_memory_total_bytes_max=0), 2 * MIB, True),
    ("too small for a file", Limits(fast_memory_total_bytes_max=0), MIB, False),
]


@pytest.mark.parametrize("what, limits, size, spilled", SPILLED, ids=[row[0] for row in SPILLED])
def test_where_a_body_arrives(what: str, limits: Limits, size: int, spilled: bool) -> None:
    body = data(size)
    with running(settings_of(limits=limits)) as gateway:
        spool = gateway.gateway.bodies.spool
        with Whole(gateway).open() as client:
            handle = client.handle("q")
            transfer = client.transfer(handle, body)
            client.write(transfer, body[:-1], last=False)
            assert client.quiet()
            gateway.until(
                lambda: (spool.used_bytes, spool.reserved_bytes) == ((size - 1, 0) if spilled else (0, size))
            )
            tag = client.machine.new_tag(1)
            client.write(transfer, body[-1:], tag)
            assert client.reply()[2] == tag
            assert gateway.ask(lambda: spool.reserved_bytes) == 0
            client.consume(handle)
            assert client.large()[4] == body


def test_a_message_over_the_limit_costs_the_channel() -> None:
    with running(settings_of(limits=Limits(fast_message_bytes_max=MIB))) as gateway:
        with Whole(gateway).open() as client:
            client.write(client.transfer(client.handle("q"), BODY), BODY[:1000], last=False)
            assert client.channel_closed() == (1, 311)
        with Whole(gateway).open(restartable=True) as client:
            client.machine.prepare(client.handle("q"), EMPTY, MIB + 1)
            client.flush()
            assert client.channel_closed() == (1, 311)


def test_a_full_spool_costs_the_channel_and_takes_more_when_it_has_room() -> None:
    with running(settings_of(limits=Limits(fast_memory_bytes_max=MIB, spool_bytes_max=4 * MIB))) as gateway:
        spool = gateway.gateway.bodies.spool
        with Whole(gateway).open() as client:
            client.channel(restartable=True)
            handle = client.handle("q")
            client.put_large(handle, BODY)
            client.write(client.transfer(handle, OTHER), OTHER[:1000], last=False)
            assert client.channel_closed() == (1, 506)
            prepared = client.handle("q", channel=2)
            client.machine.prepare(prepared, EMPTY, len(OTHER))
            client.flush()
            assert client.channel_closed() == (2, 506)
        with Whole(gateway).open() as client:
            handle = client.handle("q")
            client.consume(handle)
            assert client.large()[4] == BODY
            client.ack(1)
            gateway.until(lambda: not spool.used_bytes)
            client.put_large(handle, OTHER)
            assert client.large()[4] == OTHER


def test_two_that_begin_while_there_is_room_for_one() -> None:
    limits = Limits(fast_memory_bytes_max=MIB, spool_bytes_max=4 * MIB)
    with running(settings_of(limits=limits)) as gateway, Whole(gateway).open() as client:
        second = client.channel()
        one, other = client.handle("q"), client.handle("q", channel=second)
        first, then = client.transfer(one, BODY), client.transfer(other, BODY)
        client.write(first, BODY[: 2 * MIB], last=False)
        client.write(then, BODY[:-1], last=False)
        assert client.channel_closed() == (second, 506)
        tag = client.machine.new_tag(1)
        client.write(first, BODY[2 * MIB :], tag)
        assert client.reply()[2] == tag


ENDS = ["handle", "channel", "connection"]


@pytest.mark.parametrize("end", ENDS)
def test_what_is_broken_off_is_forgotten(gateway: Running, end: str) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.write(client.transfer(handle, BODY), BODY[: 2 * MIB], last=False)
        spool = gateway.gateway.bodies.spool
        gateway.until(lambda: spool.used_bytes == 2 * MIB)
        if end == "handle":
            client.machine.close_handle(handle)
        elif end == "channel":
            client.machine.close_channel(1)
        else:
            client.sock.close()
        if end != "connection":
            client.flush()
        nothing_left(gateway)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("unreliable", [False, True])
def test_what_was_not_wholly_delivered_goes_to_another(gateway: Running, end: str, unreliable: bool) -> None:
    body = data(30 * MIB)
    with Whole(gateway).open() as client, Whole(gateway).open() as other:
        handle = client.handle("q")
        client.put_large(handle, body)
        client.consume(handle, unreliable=unreliable)
        client.next_part()
        if end == "handle":
            client.machine.close_handle(handle)
        elif end == "channel":
            client.machine.close_channel(1)
        else:
            client.sock.close()
        if end != "connection":
            client.flush()
        taker = other.handle("q")
        other.consume(taker)
        row = other.large()
        assert row[4] == body
        assert not fresh(row)
        other.ack(row[1])
    nothing_left(gateway)


def test_an_early_acknowledgement_does_not_cover_what_is_still_on_its_way(gateway: Running) -> None:
    body = data(30 * MIB)
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, body)
        client.consume(handle)
        client.next_part()
        client.say(m.ChannelAck(1, 0, 99))
        client.sock.close()
    with Whole(gateway).open() as client:
        client.consume(client.handle("q"))
        assert client.large()[4] == body
        client.ack(1)
    nothing_left(gateway)


def test_browse_unget_and_unreliable(gateway: Running) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, BODY)
        ((number,), _) = client.index(handle)
        tag = client.machine.new_tag(1)
        client.say(m.HandleBrowse(handle, tag, number))
        row = client.large()
        assert (row[1], row[2], row[4]) == (number, 0, BODY)
        assert client.reply()[1:4] == (handle, tag, 200)
        client.consume(handle)
        row = client.large()
        assert client.ask(m.HandleUnget(handle, 0, row[1]))[3] == 200
        again = client.large()
        assert (again[4], fresh(again)) == (BODY, False)
        client.ack(again[1])
        nothing_left(gateway)
        unreliable = client.handle("u")
        client.consume(unreliable, unreliable=True)
        client.put_large(unreliable, OTHER)
        assert client.large()[4] == OTHER
        nothing_left(gateway)


def test_each_subscription_has_the_one_file(gateway: Running) -> None:
    with Whole(gateway, virtual_path="apart").open() as client:  # no route leads away from there
        handle = client.handle("t.x", TOPIC)
        client.consume(handle)
        client.consume(handle)
        client.put_large(handle, OTHER)
        assert used(gateway) == len(OTHER)
        assert [client.large()[4] for _ in range(2)] == [OTHER, OTHER]
        client.ack(2)
    nothing_left(gateway)


def test_a_peer_sends_it_back(gateway: Running) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("echo", PEER)
        client.put_large(handle, BODY)
        assert client.large()[4:] == (BODY, b"echo")
    nothing_left(gateway)


def test_transactions(gateway: Running) -> None:
    with Whole(gateway).open(transacted=True) as client:
        handle = client.handle("q")
        client.put_large(handle, BODY)
        assert client.ask(m.ChannelRollback(1))[3] == 200
        nothing_left(gateway)
        client.put_large(handle, OTHER)
        client.put_large(handle, BODY)
        assert client.ask(m.ChannelCommit(1))[3] == 200
        client.consume(handle)
        assert [client.large()[4] for _ in range(2)] == [OTHER, BODY]
        assert client.ask(m.ChannelRollback(1))[3] == 200
        assert [client.large()[4] for _ in range(2)] == [OTHER, BODY]
        assert client.ask(m.ChannelCommit(1))[3] == 200
    nothing_left(gateway)


@pytest.mark.parametrize("restartable", [False, True])
@pytest.mark.parametrize("ends", [m.ChannelRollback, m.ChannelCommit])
def test_what_is_still_in_line_belongs_to_the_next_transaction(
    gateway: Running, ends: type[m.ChannelRollback] | type[m.ChannelCommit], restartable: bool
) -> None:
    """A reply is due when three messages come, so that they are in line together when the reply is sent."""
    bodies = [data(6 * MIB, seed) for seed in range(3)]
    ready = 0 if restartable else None
    with (
        Whole(gateway).open() as other,
        Whole(gateway).open(transacted=True, restartable=restartable) as client,
    ):
        for body in bodies:
            other.put_large(other.handle("q"), body)
        handle = client.handle("q")
        client.ask(m.HandleFlow(handle, flow_pause=True))
        client.consume(handle)
        client.say(m.HandleFlow(handle), m.HandleFlow(handle, client.machine.new_tag(1)))
        client.reply()
        queue = gateway.gateway.fast_hosts["/"].queues["q"]
        gateway.until(lambda: queue.unacknowledged == 3)
        client.say(ends(1, client.machine.new_tag(1)))
        got = [client.large(ready=ready) for _ in bodies]
        assert [(row[1], row[4]) for row in got] == list(enumerate(bodies, 1))
        begun = not restartable  # the first message, before the response to ROLLBACK or COMMIT
        assert client.reply()[3] == 200
        again = bodies[:begun] if ends is m.ChannelRollback else []
        assert [client.large(ready=ready)[4] for _ in again] == again
        assert client.ask(m.ChannelRollback(1))[3] == 200
        again = bodies[begun:] if ends is m.ChannelCommit else bodies
        assert [client.large(ready=ready)[4] for _ in again] == again
        client.ack(100)
        assert client.ask(m.ChannelCommit(1))[3] == 200
        assert (len(queue), queue.unacknowledged) == (0, 0)
    nothing_left(gateway)


def test_a_queue_that_was_deleted_since_the_last_message_is_created_again(gateway: Running) -> None:
    host = gateway.gateway.fast_hosts["/"]
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"small")
        gateway.ask(lambda: host.delete_queue(host.queues["q"]))
        client.put_large(handle, BODY)
        client.consume(handle)
        assert client.large()[4] == BODY
        client.ack(1)
    nothing_left(gateway)


def test_routes_take_it_from_memory_or_not_at_all() -> None:
    limits = Limits(fast_memory_bytes_max=MIB, message_bytes_max=2 * MIB)
    with running(settings_of(limits=limits)) as gateway, Mqtt(gateway.mqtt) as device:
        device.say(Connect(client_id="d"))
        device.next(Connack)
        device.subscribe("t/#")
        with Whole(gateway).open() as client:
            handle = client.handle("t.x", TOPIC)
            client.put_large(handle, OTHER)
            assert device.row()[4] == OTHER
            queue = client.handle("q")
            client.put_large(queue, BODY)
            tag = client.machine.new_tag(1)
            client.write(client.transfer(handle, BODY), BODY, tag)
            assert client.channel_closed() == (1, 311)


def test_the_lengths_must_add_up(gateway: Running) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        transfer = client.transfer(handle, BODY)
        client.write(transfer, BODY[:-1])
        assert client.handle_closed() == (handle, 542)
    nothing_left(gateway)


def test_heads_are_what_they_were(gateway: Running) -> None:
    said = head(persistent=True, priority=5, identifier="id", headers={"n": -3})
    with Whole(gateway).open() as client:
        handle = client.handle("q", mime_type="text/plain")
        client.put_large(handle, BODY, said)
        client.consume(handle)
        assert b"text/plain" in client.large()[3]
        client.ack(1)
    nothing_left(gateway)


@pytest.mark.interpreted
@pytest.mark.parametrize("place", ["read", "open_file"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_body_that_cannot_be_opened_for_a_moment_is_delivered_later(
    monkeypatch: pytest.MonkeyPatch, number: int, place: str
) -> None:
    failures = 2
    original = getattr(spool.SpoolFile, place)

    def reading(self: spool.SpoolFile, *arguments: int) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(number, os.strerror(number))
        return original(self, *arguments)

    with running(settings_of(limits=SMALL_MEMORY)) as gateway, Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, BODY)
        monkeypatch.setattr(spool.SpoolFile, place, reading)
        client.consume(handle)
        assert client.large()[4] == BODY
        assert not failures
        assert gateway.ask(lambda: gateway.gateway.bodies.spool.unread_count) == 2
        client.ack(1)
        nothing_left(gateway)


@pytest.mark.parametrize("size", [None, len(BODY) - 1])
def test_a_body_that_is_not_there_any_more_costs_itself(size: int | None) -> None:
    with running(settings_of(limits=SMALL_MEMORY)) as gateway, Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, BODY)
        (path,) = gateway.gateway.bodies.spool.folder.iterdir()
        if size is None:
            path.unlink()
        else:
            os.truncate(path, size)
        ((number,), _) = client.index(handle)
        client.say(m.HandleBrowse(handle, client.machine.new_tag(1), number))
        assert client.channel_closed() == (1, 541)
        second = client.channel()
        handle = client.handle("q", channel=second)
        client.consume(handle, channel=second)
        gateway.until(lambda: gateway.gateway.dead_letters.counted == {("", "store"): 1})
        client.put_large(handle, BODY, channel=second)
        assert client.large()[4] == BODY


def test_a_body_on_disk_and_one_in_memory_go_through_tls(tmp_path: Path) -> None:
    make_certificate(tmp_path, LOOPBACK)
    tls = ListenerTls(cert_file=tmp_path / "cert.pem", key_file=tmp_path / "key.pem")
    listeners = {"secure": make_listener(protocol="amqpfast", host=LOOPBACK, port=0, tls=tls)}
    bodies = [BODY, data(MIB + MIB // 2, 3)]
    limits = Limits(fast_memory_bytes_max=2 * MIB)
    with running(settings_of(limits=limits, listeners=listeners)) as gateway:

        async def pass_through() -> list[bytes]:
            url = f"amqpfasts://guest:guest@{LOOPBACK}:{gateway.port('secure')}/"
            async with connect(url, ca_file=str(tmp_path / "cert.pem")) as client:
                channel = await client.channel()
                sender = await channel.sender("queue", "q")
                for body in bodies:
                    await sender.upload(body)
                assert gateway.gateway.bodies.spool.used_bytes == len(BODY)
                consumer = await channel.consume("queue", "q")
                return [(await anext(consumer)).message.body for _ in bodies]

        assert trio.run(pass_through) == bodies
