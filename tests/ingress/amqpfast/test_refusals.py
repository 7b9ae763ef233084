"""Every error scope of the protocol (3.2.10, 3.3.10, 3.5.17): handle, channel or connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import pytest

from gateway.model.properties import Headers, string
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import decode_command, decode_frame, encode_command, encode_credentials
from gateway.protocols.amqpfast.sender import Transfer
from gateway.protocols.amqpfast.spec import CLOSE_WAIT_SECS, FRAME_MAX, INITIATION
from gateway.settings import Limits, ListenerSettings
from gateway.settings.amqpfast import DestinationNames, FastVirtualHost
from tests.configured import make_listener
from tests.ingress.amqpfast.client import EMPTY, PEER, QUEUE, TOPIC, Fast
from tests.ingress.clients import Raw, stats
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

FIXED: Final = FastVirtualHost(destinations=DestinationNames(queues=("q", "deep.er"), topics=("t",)))


def fast(**more: object) -> ListenerSettings:
    return make_listener(protocol="amqpfast", host=LOOPBACK, port=0, **more)


Say = Callable[[Fast], int]


def commands(raw: Raw, count: int) -> list[m.Command]:
    """The next commands, none of which has a fragment."""
    data = b""
    found: list[m.Command] = []
    while len(found) < count:
        frame = decode_frame(data, 0, FRAME_MAX)
        if frame is None:
            more = raw.sock.recv(65_536)
            assert more, found
            data += more
        else:
            begin, stop, after = frame
            found.append(decode_command(data[begin:stop]))
            data = data[after:]
    return found


def on(name: str, service: int, *commands: m.HandleCommand, **rights: bool) -> Say:
    """Open a handle, then say the commands on it; returns the handle."""

    def say(client: Fast) -> int:
        handle = client.ask_handle(name, service, **rights)
        for command in commands:
            command.handle_id = handle
            client.send(encode_command(command))
        return handle

    return say


def put(name: str, service: int, more: str = "", **rights: bool) -> Say:
    def say(client: Fast) -> int:
        handle = client.ask_handle(name, service, **rights)
        client.put(handle, b"x", name=more, confirm=False)
        return handle

    return say


OF_HANDLES = [
    ("open: no such queue", on("none", QUEUE), 404),
    ("open: no such topic", on("q", TOPIC), 404),
    ("open: no such peer", on("none", PEER), 404),
    ("open: no such service", on("q", 4, consumer=False, browser=False), 401),
    ("open: consumer of a peer", on("echo", PEER, consumer=True), 502),
    ("send: neither destination nor prefix", put("deep.er", QUEUE, "x"), 404),
    ("send: a command's own name is no prefix", put("", QUEUE, "deep."), 404),
    ("send: not a producer", put("q", QUEUE, producer=False), 403),
    ("consume: not a consumer", on("q", QUEUE, m.HandleConsume(prefetch=1), consumer=False), 403),
    ("query: not a browser", on("q", QUEUE, m.HandleQuery(), browser=False), 403),
    ("query: no such queue", on("deep.", QUEUE, m.HandleQuery(dest_name="x")), 404),
    ("browse: not a browser", on("q", QUEUE, m.HandleBrowse(message_number=1), browser=False), 403),
    ("consume: no such queue", on("deep.", QUEUE, m.HandleConsume(dest_name="x")), 404),
    ("consume: durable queue", on("q", QUEUE, m.HandleConsume(identifier="d")), 502),
    ("consume: durable without client-name", on("t", TOPIC, m.HandleConsume(identifier="d")), 502),
    ("consume: bad selector", on("t", TOPIC, m.HandleConsume(selector=b"a ="), consumer=True), 502),
    (
        "consume: bad condition",
        on("t", TOPIC, m.HandleConsume(selector=b"a(", mime_type="application/cel")),
        502,
    ),
    ("consume: unknown language", on("t", TOPIC, m.HandleConsume(selector=b"x", mime_type="x/y")), 540),
    ("query: bad selector", on("q", QUEUE, m.HandleQuery(selector=b"((")), 502),
    ("cancel: a queue", on("q", QUEUE, m.HandleCancel(identifier="d")), 502),
    ("cancel: no identifier", on("t", TOPIC, m.HandleCancel()), 502),
    ("cancel: unknown", on("t", TOPIC, m.HandleCancel(identifier="d")), 404),
    ("unget: unknown", on("q", QUEUE, m.HandleUnget(message_number=7)), 310),
    ("unget: a topic", on("t", TOPIC, m.HandleUnget(message_number=7)), 503),
    ("consume: a peer", on("echo", PEER, m.HandleConsume(prefetch=1)), 503),
    ("flow: a peer", on("echo", PEER, m.HandleFlow()), 503),
    ("query: a peer", on("echo", PEER, m.HandleQuery()), 503),
]


@pytest.fixture(scope="module")
def fixed() -> object:
    with running(settings_of(listeners={"amqpfast": fast(virtual_hosts={"/": FIXED})})) as one:
        yield one


@pytest.mark.parametrize("what, say, code", OF_HANDLES, ids=[row[0] for row in OF_HANDLES])
def test_it_costs_the_handle(fixed: Running, what: str, say: Say, code: int) -> None:
    with Fast(fixed).open() as client:
        handle = say(client)
        assert client.handle_closed() == (handle, code)
        client.events.clear()  # the replies to what it did before
        client.put(client.handle("q"), b"the channel lives")


def test_the_answer_to_501_ends_the_connection_at_once(fixed: Running) -> None:
    """3.2.9: whoever has said CLOSE waits for the other's, not for 5 s, whatever is broken before it."""
    with Fast(fixed).open() as client:
        began = time.monotonic()
        client.send(b"\xff\xff\0\0")
        client.send(b"\0\1" + b"bytes that are no frames")
        (found,) = commands(client, 1)
        assert isinstance(found, m.ConnectionClose)
        assert found.reply_code == 501
        for byte in encode_command(m.ConnectionClose(200, "as you wish")):
            client.send(bytes((byte,)))
        assert client.sock.recv(1) == b""
        assert time.monotonic() - began < CLOSE_WAIT_SECS / 2


@pytest.mark.parametrize("said", [b"\0\3\x0e\1\xcd", b"\0\4\x0f\1\2\xce"], ids=["broken", "unknown"])
def test_a_close_that_nobody_answers_is_counted_as_that(
    fixed: Running, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr("gateway.protocols.amqpfast.lifetime.CLOSE_WAIT_SECS", 0.2)
    counts = stats(fixed, "amqpfast").protocol_errors.counts
    before = counts.get("close_timeout", 0)
    with Fast(fixed).open() as client:
        client.send(said)
        while client.sock.recv(65_536):
            pass
    assert counts["close_timeout"] == before + 1
    assert "heartbeat_timeout" not in counts


def test_a_browse_of_nothing_costs_nothing(fixed: Running) -> None:
    with Fast(fixed).open() as client:
        assert client.ask(m.HandleBrowse(client.handle("q"), 0, 77))[3] == 310


OF_CHANNELS = [
    ("open on an open channel", lambda client: client.send(encode_command(m.ChannelOpen(1))), 503),
    ("commit without transactions", lambda client: client.send(encode_command(m.ChannelCommit(1))), 503),
    ("rollback without transactions", lambda client: client.send(encode_command(m.ChannelRollback(1))), 503),
]


@pytest.mark.parametrize("what, say, code", OF_CHANNELS, ids=[row[0] for row in OF_CHANNELS])
def test_it_costs_the_channel(fixed: Running, what: str, say: Say, code: int) -> None:
    with Fast(fixed).open() as client:
        say(client)
        assert client.channel_closed() == (1, code)
        client.channel()


def test_out_of_band_is_refused_with_the_channel(fixed: Running) -> None:
    with Fast(fixed).open() as client:
        number = client.machine.open_channel(out_of_band="file:/tmp")
        client.flush()
        assert client.channel_closed() == (number, 540)


def test_limits() -> None:
    limits = Limits(fast_message_bytes_max=1_000, consumers_max=2, queues_max=2, handles_max=5)
    with running(settings_of(limits=limits)) as gateway:
        with Fast(gateway).open() as client:
            handle = client.handle("q")
            client.put(handle, b"x" * 1_000)
            client.put(handle, b"x" * 1_001, confirm=False)
            assert client.channel_closed() == (1, 311)
        with Fast(gateway).open() as client:
            handle = client.handle("q")
            client.consume(handle)
            client.consume(handle)
            client.say(m.HandleConsume(handle, 0, 1))
            assert client.channel_closed() == (1, 506)
        with Fast(gateway).open() as client:
            client.handle("r")
            client.ask_handle("s")
            assert client.channel_closed() == (1, 506)
        with Fast(gateway).open() as client:
            for _ in range(5):
                client.handle("q")
            client.send(encode_command(m.HandleOpen(1, 99, QUEUE, dest_name="q")))
            assert client.channel_closed() == (1, 506)


def test_consumers_of_what_was_deleted_count_no_more() -> None:
    with (
        running(settings_of(limits=Limits(consumers_max=2))) as gateway,
        Fast(gateway, "named").open() as client,
    ):
        topic, queue = client.handle("t", TOPIC), client.handle("q")
        host = gateway.gateway.fast_hosts["/"]
        for _ in range(3):
            client.consume(topic, identifier="i")
            client.consume(queue)
            assert client.ask(m.HandleCancel(topic, identifier="i"))[3] == 200
            gateway.ask(lambda: host.delete_queue(host.queues["q"]))


OF_CONNECTIONS = [
    ("an unknown type", b"\0\x03\x63\0\xce", 501),
    ("no frame end", b"\0\x03\x0e\0\0", 501),
    ("a command of the server", encode_command(m.HandleIndex(1, 0, b"")), 503),
    ("a channel that is not open", encode_command(m.ChannelAck(9, 0, 1)), 504),
    ("a handle that is not open", encode_command(m.HandleFlow(9)), 505),
    ("channel 0", encode_command(m.ChannelOpen(0)), 502),
    ("a second open", encode_command(m.ConnectionOpen()), 503),
]


@pytest.mark.parametrize("what, data, code", OF_CONNECTIONS, ids=[row[0] for row in OF_CONNECTIONS])
def test_it_costs_the_connection(fixed: Running, what: str, data: bytes, code: int) -> None:
    with Fast(fixed).open() as client:
        client.send(data)
        assert client.closed() == code


@pytest.mark.parametrize("name", ["a/b", "a#b", "a&b", "a b", "a\tb"])
def test_names_that_no_new_destination_may_have(gateway: Running, name: str) -> None:
    with Fast(gateway).open() as client:
        handle = client.ask_handle(name)
        assert client.handle_closed() == (handle, 502)


def test_names_that_are_too_long_together(gateway: Running) -> None:
    with Fast(gateway).open() as client:
        handle = client.handle("a" * 200)
        client.put(handle, b"x", name="b" * 100, confirm=False)
        assert client.handle_closed() == (handle, 502)


def test_commands_behind_a_refused_open_are_discarded_and_the_stream_stays_in_step(fixed: Running) -> None:
    with Fast(fixed).open() as client:
        handle = client.machine.open_handle(m.HandleOpen(channel_id=1, dest_name="none", producer=True))
        transfer = Transfer(client.machine, handle, EMPTY, 5_000)
        transfer.write(b"\xce" * 3_000)
        transfer.write(b"\xce" * 2_000, last=True)
        client.flush()
        assert client.handle_closed() == (handle, 404)
        client.put(client.handle("q"), b"x")


# --- who may come in


def test_an_unknown_virtual_host_and_a_name_in_use(gateway: Running) -> None:
    with Fast(gateway, virtual_path="/none") as client:
        assert client.closed() == 402
    with Fast(gateway, "me").open(), Fast(gateway, "me") as second:
        assert second.closed() == 320
    with Fast(gateway, "me").open() as again:
        again.put(again.handle("q"), b"x")


def test_virtual_hosts_are_apart_and_may_have_the_same_names() -> None:
    hosts = {"/": FastVirtualHost(), "other": FIXED}
    with (
        running(settings_of(listeners={"amqpfast": fast(virtual_hosts=hosts)})) as gateway,
        Fast(gateway).open() as one,
        Fast(gateway, virtual_path="other").open() as other,
    ):
        one.put(one.handle("q"), b"here")
        handle = other.handle("q")
        other.consume(handle)
        assert other.quiet()


def test_a_client_name_is_active_in_one_connection_at_a_time_whatever_its_virtual_host() -> None:
    """3.2.6: the client, not one for each virtual host or listener."""
    listeners = {
        "amqpfast": fast(virtual_hosts={"/": FastVirtualHost(), "other": FastVirtualHost()}),
        "second": fast(virtual_hosts={"third": FastVirtualHost()}),
    }
    with running(settings_of(listeners=listeners)) as gateway:
        with Fast(gateway, "me").open() as first:
            with Fast(gateway, "me", virtual_path="other") as second:
                assert second.closed() == 320
            with Fast(gateway, "me", virtual_path="third", listener="second") as second:
                assert second.closed() == 320
            with Fast(gateway, "you", virtual_path="other").open() as second:
                second.put(second.handle("q"), b"x")
            first.put(first.handle("q"), b"x")
            first.leave()
        with Fast(gateway, "me", virtual_path="other").open() as again:
            again.put(again.handle("q"), b"x")


def test_a_wrong_password_is_answered_after_a_pause() -> None:
    with running(settings_of(listeners={"amqpfast": fast(negotiation_pause_secs=0.3)})) as gateway:
        with Fast(gateway, password="wrong") as client:
            assert client.closed() == 403
        assert stats(gateway, "amqpfast").protocol_errors.counts == {"access_refused": 1}


def test_a_bad_initiation_is_not_answered() -> None:
    with (
        running(settings_of(listeners={"amqpfast": fast(negotiation_pause_secs=0.1)})) as gateway,
        Raw(gateway.port("amqpfast")) as raw,
    ):
        assert raw.send(b"GET / HTTP/1.1\r\n\r\n").rest() == b""


@pytest.mark.parametrize(
    "mechanism, said, code",
    [
        ("PLAIN", encode_credentials("guest", "guest"), 0),
        ("plain", encode_credentials("guest", "guest"), 0),
        ("NONE", (), 403),
        ("TLS", (), 502),
        ("", (), 502),
        ("PLAIN NONE", encode_credentials("guest", "guest"), 502),
    ],
)
def test_the_mechanism_is_one_that_was_offered(mechanism: str, said: Headers, code: int) -> None:
    listener = fast(anonymous="never", negotiation_pause_secs=0.0)
    with (
        running(settings_of(listeners={"amqpfast": listener})) as gateway,
        Raw(gateway.port("amqpfast")) as raw,
    ):
        raw.send(INITIATION + encode_command(m.ConnectionResponse(mechanism, said)))
        heard = commands(raw, 2)
        assert isinstance(heard[0], m.ConnectionChallenge)
        assert heard[0].mechanisms == "PLAIN"
        if code:
            assert isinstance(heard[1], m.ConnectionClose)
            assert heard[1].reply_code == code
        else:
            assert isinstance(heard[1], m.ConnectionTune)


@pytest.mark.parametrize("anonymous, code", [("always", 0), ("never", 403)])
def test_an_empty_table_names_nobody(anonymous: str, code: int) -> None:
    listener = fast(anonymous=anonymous, negotiation_pause_secs=0.0)
    with (
        running(settings_of(listeners={"amqpfast": listener})) as gateway,
        Fast(gateway, responses=()) as client,
    ):
        if code:
            assert client.closed() == code
        else:
            client.open()


def test_login_in_lower_case_is_understood(gateway: Running) -> None:
    with Fast(gateway, responses=(("login", string("guest")), ("password", string("guest")))) as client:
        client.open()


def test_a_ping_is_answered_and_a_quiet_server_pings() -> None:
    limits = Limits(heartbeat_secs=1)
    with running(settings_of(limits=limits)) as gateway, Fast(gateway, heartbeat=1).open() as client:
        client.send(b"\0\x03\x0e\x01\xce")
        pings = m.ConnectionPing.type
        for expected in (1, 2):
            while client.machine.received[pings] < expected:
                client.events += client.machine.receive_data(client.sock.recv(1_000), 0.0)
    with running(settings_of(limits=Limits(heartbeat_secs=0))) as gateway, Fast(gateway).open() as client:
        client.channel()
        assert client.machine.received[pings] == 0
