"""Between a command with a confirm-tag and its reply nothing else comes on that channel (3.2.11)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.events import CommandReceived, Fragment, Notifies, Released, Replies
from gateway.protocols.amqpfast.sender import Producer, Transfer
from gateway.protocols.amqpfast.spec import REDELIVERED
from gateway.settings import Limits
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, PEER, QUEUE, TOPIC, Fast
from tests.ingress.amqpfast.large import MIB, Whole, data
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

MAPPING = """
version: 1
routes:
  - name: away
    from: {endpoint: amqpfast, service: topic, destination: "away"}
    to: {endpoint: amqpfast, service: queue, destination: "far"}
"""


class Site:
    """A gateway whose route `away` is paused: a message to the topic of that name waits for its reply."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        self.pause()

    def pause(self) -> None:
        self.gateway.ask(lambda: self.gateway.gateway.dispatcher.pauses.pause("route", "away"))

    def resume(self) -> None:
        self.gateway.ask(lambda: self.gateway.gateway.dispatcher.pauses.resume("route", "away"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "mapping.yaml").write_text(MAPPING)
    with running(settings_of(mappings=[str(tmp_path / "mapping.yaml")])) as gateway:
        yield Site(gateway)


def owe(client: Fast, channel: int = 1) -> tuple[int, int]:
    """Send what is not replied to until the route goes on; returns handle and tag."""
    handle = client.handle("away", TOPIC, channel=channel)
    (tag,) = Producer(client.machine, handle, confirm=True).send_many([(b"", EMPTY, b"waits")])
    client.flush()
    return handle, tag


def order(client: Fast, count: int) -> list[str]:
    """What comes on the connection, as kinds of events: runs of replies and messages."""
    found: list[str] = []
    while len(found) < count:
        while not client.events:
            client.hear()
        event = client.events.pop(0)
        if isinstance(event, Replies):
            found += ["reply"] * len(event.rows)
        elif isinstance(event, Notifies):
            found += [f"message {row[4].decode()}" for row in event.rows]
        elif isinstance(event, Fragment):
            found += [f"message of {event.body_size}"] * event.last
        else:
            assert isinstance(event, Released), event  # of the channels and handles that were closed
    return found


def settle(other: Fast) -> None:
    """Have the gateway done with what was sent before, by a round trip on another connection."""
    assert other.quiet()


@pytest.mark.parametrize("service", [QUEUE, TOPIC])
@pytest.mark.parametrize("unreliable", [False, True])
def test_no_message_comes_between_a_tagged_send_and_its_reply(
    site: Site, service: int, unreliable: bool
) -> None:
    with Fast(site.gateway).open() as client, Fast(site.gateway).open() as other:
        client.consume(client.handle("q", service), unreliable=unreliable)
        second = client.channel()
        if service == TOPIC:
            client.consume(client.handle("q", service, channel=second), second)
        owe(client)
        other.put(other.handle("q", service), b"1", b"2")
        settle(other)
        if service == TOPIC:
            assert client.bodies(2) == [b"1", b"2"], "another channel does not wait"
        assert client.quiet()
        site.resume()
        assert order(client, 3) == ["reply", "message 1", "message 2"]


def test_meanwhile_others_are_served(site: Site) -> None:
    with Fast(site.gateway).open() as client, Fast(site.gateway).open() as other:
        client.consume(client.handle("q"))
        owe(client)
        handle = other.handle("q")
        other.consume(handle)
        other.put(handle, b"1", b"2", b"3", b"4")
        assert other.bodies(2) == [b"2", b"4"], "nobody has more than their share"
        settle(other)
        site.resume()
        assert order(client, 3) == ["reply", "message 1", "message 3"]


def test_what_is_kept_for_a_reply_is_bounded_by_the_window_and_not_acknowledged(site: Site) -> None:
    with Fast(site.gateway).open() as client, Fast(site.gateway).open() as other:
        queue = client.handle("q")
        client.consume(queue, prefetch=2)
        owe(client)
        handle = other.handle("q")
        other.put(handle, b"1", b"2", b"3")
        client.say(m.ChannelAck(1, 0, 2))  # of nothing that was sent
        assert client.quiet()
        assert site.gateway.ask(lambda: len(site.gateway.gateway.fast_hosts["/"].queues["q"])) == 1
        site.resume()
        assert order(client, 3) == ["reply", "message 1", "message 2"]
        client.ack(2)
        assert client.bodies(1) == [b"3"]


def test_a_paused_handle_gets_nothing_of_what_was_kept(site: Site) -> None:
    with Fast(site.gateway).open() as client, Fast(site.gateway).open() as other:
        consuming = client.handle("q")
        client.consume(consuming)
        owe(client)
        handle = other.handle("q")
        other.put(handle, b"1")
        client.say(m.HandleFlow(consuming, 0, True))
        assert client.quiet()
        site.resume()
        assert order(client, 1) == ["reply"]
        assert client.quiet()
        other.consume(handle)
        assert other.bodies(1) == [b"1"]


@pytest.mark.parametrize("service", [QUEUE, TOPIC])
def test_created_and_index_come_after_the_reply_before_them(site: Site, service: int) -> None:
    with Fast(site.gateway).open() as client:
        queue = client.handle("q")
        client.put(queue, b"1")
        owe(client)
        client.say(m.HandleQuery(queue))
        client.ask_handle("", service, temporary=True, producer=False)
        tag = client.machine.new_tag(1)
        client.say(m.HandleFlow(queue, tag, False))
        assert client.quiet()
        assert not [event for event in client.events if isinstance(event, CommandReceived)]
        site.resume()
        assert client.reply()[1] != queue  # to what was owed
        kinds: list[object] = []
        while len(kinds) < 4:
            while not client.events:
                client.hear()
            event = client.events.pop(0)
            if isinstance(event, CommandReceived):
                kinds.append(type(event.command))
            elif isinstance(event, Replies):
                kinds += [row[1] == queue for row in event.rows]
        assert kinds == [m.HandleIndex, m.HandleCreated, False, True]


@pytest.mark.parametrize("end", ["reply", "handle", "channel"])
def test_a_stream_of_a_peer_comes_after_the_reply_before_it(site: Site, end: str) -> None:
    with Fast(site.gateway).open() as client:
        handle = client.handle("echo", PEER)
        owe(client)
        stream = Transfer(client.machine, handle, EMPTY, 0, streaming=True)
        stream.write(b"one")
        stream.write(b"two")
        client.flush()
        assert client.quiet()
        assert not [event for event in client.events if isinstance(event, Fragment)]
        if end == "handle":
            client.machine.close_handle(handle)
        elif end == "channel":
            client.machine.close_channel(1)
        client.flush()
        site.resume()
        if end != "channel":
            assert client.reply()[3] == 200
        if end == "reply":
            got = b""
            while len(got) < 6:
                got += bytes(client.next(Fragment).data)
            assert got == b"onetwo"
        number = client.channel()
        client.put(client.handle("q", channel=number), b"goes on")


def test_large_messages_wait_in_line(site: Site) -> None:
    bodies = [data(2 * MIB, seed) for seed in (1, 2)]
    with Whole(site.gateway).open() as client, Whole(site.gateway).open() as other:
        client.consume(client.handle("q"))
        owe(client)
        handle = other.handle("q")
        for body in bodies:
            other.put_large(handle, body)
        assert client.quiet()
        client.say(m.ChannelAck(1, 0, 1_000))  # of nothing that was sent
        assert client.quiet()
        site.resume()
        assert order(client, 3) == ["reply", *[f"message of {2 * MIB}"] * 2]
        client.leave()
        other.consume(handle)
        assert [other.large()[2] & REDELIVERED for _ in bodies] == [REDELIVERED] * 2


@pytest.mark.parametrize("end", ["handle", "channel", "connection"])
def test_what_waits_for_a_reply_goes_to_others_when_its_client_leaves(site: Site, end: str) -> None:
    with Fast(site.gateway).open() as client, Fast(site.gateway).open() as other:
        consuming = client.handle("q")
        client.consume(consuming)
        owe(client)
        handle = other.handle("q")
        other.put(handle, b"1")
        if end == "handle":
            client.machine.close_handle(consuming)
            client.flush()
        elif end == "channel":
            client.machine.close_channel(1)
            client.flush()
        else:
            client.cut()
        other.consume(handle)
        assert other.bodies(1) == [b"1"]
        site.resume()
        if end != "connection":
            client.channel()


def browse(client: Fast, handle: int) -> None:
    client.say(m.HandleBrowse(handle, client.machine.new_tag(1), 1))


def test_what_is_browsed_comes_after_the_reply_before_it_and_before_its_own(site: Site) -> None:
    with Fast(site.gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1")
        assert client.index(handle) == ([1], 0)
        owe(client)
        browse(client, handle)
        assert client.quiet()
        site.resume()
        assert order(client, 3) == ["reply", "message 1", "reply"]
        browse(client, handle)
        assert order(client, 2) == ["message 1", "reply"]


@pytest.mark.parametrize("transacted", [False, True])
def test_a_peer_answers_after_the_reply(site: Site, transacted: bool) -> None:
    with Fast(site.gateway).open(transacted=transacted) as client:
        handle = client.handle("echo", PEER)
        for _ in range(2):
            tags = Producer(client.machine, handle, confirm=True).send_many(
                [(b"", EMPTY, b"%d" % at) for at in range(3)]
            )
            assert len(tags) == 3
            if transacted:
                client.say(m.ChannelCommit(1, client.machine.new_tag(1)))
            expected = [*["reply"] * (3 + transacted), *[f"message {at}" for at in range(3)]]
            client.flush()
            assert order(client, len(expected)) == expected


def test_many_answers_of_a_peer_wait_and_end_with_their_handle(site: Site) -> None:
    with Fast(site.gateway).open() as client:
        handle = client.handle("echo", PEER)
        owe(client)
        Producer(client.machine, handle).send_many([(b"", EMPTY, b"%d" % at) for at in range(2_000)])
        client.flush()
        assert client.quiet()
        client.machine.close_handle(handle)
        client.flush()
        assert client.quiet()
        site.resume()
        assert order(client, 1) == ["reply"]
        client.put(client.handle("echo", PEER), b"still here")
        assert client.bodies(1) == [b"still here"]


def test_what_a_tagged_acknowledgement_releases_comes_after_its_reply(site: Site) -> None:
    with Fast(site.gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1", b"2")
        client.consume(handle, prefetch=1)
        assert order(client, 1) == ["message 1"]
        client.say(m.ChannelAck(1, client.machine.new_tag(1), 1))
        assert order(client, 2) == ["reply", "message 2"]


def test_the_clients_of_2005_too() -> None:
    listener: Any = make_listener(
        protocol="amqpfast",
        host=LOOPBACK,
        port=0,
        compatibility="openamq-2005",
        limits=Limits(heartbeat_secs=0),
    )
    with running(settings_of(listeners={"amqpfast": listener})) as gateway, Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"1")
        assert client.index(handle) == ([0], 0)
        client.say(m.HandleBrowse(handle, client.machine.new_tag(1), 0))
        assert order(client, 2) == ["reply", "message 1"]
