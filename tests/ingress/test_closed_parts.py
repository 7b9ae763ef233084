"""Log events of what an AMQP or AMQP/Fast listener closes: they name the connection, channel or handle."""

from __future__ import annotations

from typing import Any

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.events import Closed
from gateway.protocols.amqpfast import commands as fast
from gateway.protocols.amqpfast.codec import encode_command
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Raw
from tests.interop.gateway_fixture import no_errors_logged, running, settings_of


def closings(lines: list[Any], listener: str) -> list[str]:
    """Return the warnings of a listener."""
    return [line["event"] for line in lines if line.get("listener") == listener]


def test_amqp_names_the_channel_or_the_connection() -> None:
    with running(settings_of()) as gateway, no_errors_logged() as lines:
        with Amqp(gateway).open() as client:
            client.say(m.QueueDeclare("absent", passive=True))
            client.refusal()  # by the listener
            client.say(m.BasicAck(77))
            client.refusal()  # likewise
            client.say(m.ConnectionOpen("/"))  # only channel 0 may have it, so the protocol is violated
            client.next(Closed)
        with Raw(gateway.port("amqp091")) as stranger:
            stranger.send(b"GET / HTTP/1.1\r\n\r\n")
            while stranger.sock.recv(65_536):
                pass
        gateway.until(lambda: len(closings(lines, "amqp091")) == 4)
    assert closings(lines, "amqp091") == [
        "client channel closed by AMQP listener",
        "client channel closed by AMQP listener",
        "client connection closed by AMQP listener",
        "client refused by AMQP listener",
    ]


def test_amqpfast_names_the_handle_the_channel_or_the_connection() -> None:
    with running(settings_of()) as gateway, no_errors_logged() as lines:
        with Fast(gateway).open() as client:
            handle = client.ask_handle("a name with spaces")
            assert client.handle_closed() == (handle, 502)
            client.send(encode_command(fast.ChannelCommit(1)))
            assert client.channel_closed() == (1, 503)
            client.send(b"\0\x03\x63\0\xce")
            assert client.closed() == 501
        with Fast(gateway, virtual_path="/none") as client:
            assert client.closed() == 402
        gateway.until(lambda: len(closings(lines, "amqpfast")) == 4)
    assert closings(lines, "amqpfast") == [
        "client handle closed by AMQP/Fast listener",
        "client channel closed by AMQP/Fast listener",
        "client connection closed by AMQP/Fast listener",
        "client refused by AMQP/Fast listener",
    ]
