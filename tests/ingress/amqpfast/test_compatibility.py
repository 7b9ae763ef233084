"""The clients of 2005 and what they met: bytes against a listener with `compatibility: openamq-2005`.

What the first server did wrong is here too, the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.broker.shares import IDENTIFIER_BYTES
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import encode_command
from gateway.protocols.amqpfast.events import CommandReceived, Replies
from gateway.protocols.amqpfast.sender import Transfer
from gateway.settings import Limits
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, TOPIC, Fast, head
from tests.ingress.clients import Raw, eventually
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of


@pytest.fixture
def old() -> Iterator[Running]:
    listener = make_listener(
        protocol="amqpfast",
        host=LOOPBACK,
        port=0,
        compatibility="openamq-2005",
        limits=Limits(heartbeat_secs=0),
    )
    with running(settings_of(listeners={"amqpfast": listener})) as one:
        yield one


def recv(raw: Raw, count: int) -> bytes:
    found = b""
    while len(found) < count:
        data = raw.sock.recv(count - len(found))
        assert data, f"the gateway has closed the connection behind {found!r}"
        found += data
    return found


def frame(raw: Raw) -> bytes:
    size = recv(raw, 2)
    return recv(raw, int.from_bytes(size))


def greeted(gateway: Running, response: m.ConnectionResponse) -> Raw:
    """The negotiation with a response of those days."""
    raw = Raw(gateway.port("amqpfast"))
    raw.send(b"\x80\x01")
    assert frame(raw)[0] == m.ConnectionChallenge.type
    raw.send(encode_command(response))
    assert frame(raw)[0] == m.ConnectionTune.type
    return raw


@pytest.mark.parametrize("response", [m.ConnectionResponse("plain"), m.ConnectionResponse("none")])
def test_the_java_client_pipelines_everything_with_tag_0(
    old: Running, response: m.ConnectionResponse
) -> None:
    with greeted(old, response) as raw:
        said = (
            m.ConnectionTune(32_000, 255, 255, 0),
            m.ConnectionOpen(0, "/", "java"),
            m.ChannelOpen(1),
            m.HandleOpen(1, 1, TOPIC, 0, True, True, True, True, ""),
        )
        raw.send(b"".join(map(encode_command, said)))
        created = frame(raw)
        assert created[:3] == b"\x28\0\x01"  # CREATED is the first frame
        assert created[4:8] == b"tmp-"


def test_replies_come_first_and_names_may_have_slashes(old: Running) -> None:
    with Fast(old, "perl").open() as client:
        handle = client.ask_handle("tmp/000000001", temporary=True)
        while len(client.events) < 2:
            client.hear()
        assert [type(event) for event in client.events] == [Replies, CommandReceived]
        assert client.reply()[3] == 200
        assert client.command(m.HandleCreated).dest_name == "tmp/000000001"
        client.put(handle, b"1", b"2", b"3")
        client.say(m.HandleQuery(handle))
        assert client.command(m.HandleIndex).message_list == b"0 1 2"
        client.consume(handle, prefetch=1)
        client.rows(1)
        client.ack(1)
        client.rows(1)
        client.say(m.HandleQuery(handle))
        assert client.command(m.HandleIndex).message_list == b"0"
        tag = client.machine.new_tag(1)
        client.say(m.HandleBrowse(handle, tag, 0))
        assert client.reply()[2:4] == (tag, 200)
        assert client.rows(1)[0][1:3] == (0, 0)
        client.say(m.HandleBrowse(handle, 0, 9))
        assert client.channel_closed() == (1, 310)


def test_each_query_replaces_the_identifiers_of_the_one_before(old: Running) -> None:
    opened = old.gateway.quotas.opened
    with Fast(old).open() as client:
        handle = client.handle("q")
        before = opened.of("guest")
        for number in range(1, 4):
            client.put(handle, b"x")
            client.say(m.HandleQuery(handle))
            assert len(client.command(m.HandleIndex).message_list.split()) == number
            assert opened.of("guest") == before + number * IDENTIFIER_BYTES
        client.consume(handle)
        client.rows(3)
        client.say(m.HandleQuery(handle))
        assert client.command(m.HandleIndex).message_list == b""
        assert opened.of("guest") == before


def test_a_close_of_the_client_behind_that_of_the_server_frees_the_channel(old: Running) -> None:
    with Fast(old).open() as client:
        client.send(encode_command(m.ChannelCommit(1)))
        client.channel_closed()  # which the machine has answered by now
        client.flush()
        assert client.channel() in (1, 2)


def test_reading_goes_on_after_a_ping(old: Running) -> None:
    with Fast(old).open() as client:
        client.send(b"\0\x03\x0e\x01\xce" * 3)
        client.put(client.handle("q"), b"x")


def test_an_oversize_fragment_is_no_command(old: Running) -> None:
    with Fast(old, frame_max=1_024).open() as client:
        handle = client.handle("q")
        client.send(encode_command(m.HandleSend(handle, 0, 5_000)) + encode_command(m.ChannelOpen(7)) * 400)
        assert client.closed() == 501


def test_messages_are_told_apart_from_their_channels_and_lives(old: Running) -> None:
    with Fast(old).open() as client:
        second = client.channel()
        one, other = client.handle("q"), client.handle("q", channel=second)
        client.put(one, b"1", b"2", head=head(headers={"n": -1}))
        client.consume(other, channel=second, prefetch=1)
        (row,) = client.rows(1)
        assert row[1] == 1
        assert row[3] == head(headers={"n": -1})
        reply = client.ask(m.ChannelAck(second, 0, 1), second)
        assert reply[0] == second
        client.rows(1)
        client.cut()
    with Fast(old).open() as client:
        client.consume(client.handle("q"))
        assert client.bodies(1) == [b"2"]


def test_a_wrong_total_costs_the_handle(old: Running) -> None:
    with Fast(old).open() as client:
        handle = client.handle("q")
        command = encode_command(m.HandleSend(handle, 0, 4 + len(EMPTY) + 3))
        client.send(command + (99).to_bytes(4, "big") + EMPTY + b"abc")
        assert client.handle_closed() == (handle, 542)


def test_a_broken_head_costs_the_handle(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        broken = EMPTY[:-2] + b"\0\x03\x01nX"
        command = encode_command(m.HandleSend(handle, 0, 4 + len(broken) + 1))
        client.send(command + (1).to_bytes(4, "big") + broken + b"a")
        assert client.handle_closed() == (handle, 542)


def test_handles_are_freed_with_their_channel(old: Running) -> None:
    with Fast(old).open() as client:
        second = client.channel()
        client.consume(client.handle("q", channel=second), channel=second)
        client.machine.close_channel(second)
        client.flush()
        client.put(client.handle("q"), b"x")
        consumers = old.gateway.fast_hosts["/"].queues["q"].consumers
        eventually(lambda: old.ask(lambda: len(consumers)) == 0)


def test_answers_to_a_handle_do_not_reach_its_successor(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        data = encode_command(m.HandleOpen(1, 40, 1, 0, True, dest_name="q"))
        send = encode_command(m.HandleSend(40, 5, 4 + len(EMPTY) + 1)) + (1).to_bytes(4, "big") + EMPTY + b"a"
        client.machine.open_handle(m.HandleOpen(1, dest_name="other", producer=True), confirm=False)
        client.send((data + send + encode_command(m.HandleClose(40))) * 50)
        client.machine.data_to_send()
        raw = b""
        while raw.count(encode_command(m.HandleClose(40))) < 50:
            raw += client.sock.recv(65_536)
        assert raw.count(b"\x30\0\x28\0\x05") <= 50


def test_a_transfer_that_is_cut_leaves_nothing(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        transfer = Transfer(client.machine, client.handle("q"), EMPTY, 10_000)
        transfer.write(b"x" * 5_000)
        client.flush()
        client.cut()
    with Fast(gateway).open() as client:
        handle = client.handle("q")
        client.put(handle, b"whole")
        client.consume(handle)
        assert client.bodies(1) == [b"whole"]


def test_a_list_of_single_ids_keeps_to_the_frame_max_of_its_client(old: Running) -> None:
    with Fast(old, frame_max=1_024).open() as client:
        handle = client.handle("q")
        client.put(handle, *[b""] * 400)
        ids: list[int] = []
        above = -1
        while above:
            found, above = client.index(handle, max(above, 0))
            ids += found
        assert ids == list(range(400))
