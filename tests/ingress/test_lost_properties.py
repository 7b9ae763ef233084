"""What a message loses on its way into another protocol: counted by route and name, and told in the log."""

from __future__ import annotations

from typing import Final

import pytest

from gateway.containment import counted
from gateway.mapping.routes import Route
from gateway.protocols.amqp091 import methods as m
from tests.ingress.amqp_client import Amqp
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, no_errors_logged, running

LONG: Final = b"n" * 256  # more than AMQP takes for a name
COUNT: Final = 20


def user_property(name: bytes, value: bytes) -> bytes:
    return b"\x26" + len(name).to_bytes(2, "big") + name + len(value).to_bytes(2, "big") + value


def lost(gateway: Running) -> dict[str, int]:
    def ask() -> dict[str, int]:
        found: dict[str, int] = {}
        for route in gateway.gateway.dispatcher.router.routes:
            for name, count in route.lost.items():
                found[name] = found.get(name, 0) + count
        return found

    return gateway.ask(ask)


@pytest.mark.parametrize("burst", [False, True])
def test_each_message_counts_and_the_log_says_whose(burst: bool) -> None:
    with (
        running() as gateway,
        no_errors_logged() as lines,
        connect(gateway, "device")[0] as writer,
        Amqp(gateway).open() as reader,
    ):
        subscribed(reader)
        properties = user_property(LONG, b"v") + user_property(b"kept", b"v")
        for number in range(COUNT):
            writer.machine.publish(b"a/b", b"x", 1, packet_id=number + 1, properties=properties)
            if not burst:
                writer.flush()
                writer.ping()
        writer.flush()
        raws = {raw for *_, raw, _ in reader.delivered(COUNT)}
        assert all(b"kept" in raw and LONG not in raw for raw in raws)
        assert lost(gateway) == {"header_name_long": COUNT}
        writer.machine.publish(b"a/b", b"x", 1, packet_id=1, properties=user_property(b"kept", b"v"))
        writer.flush()
        reader.delivered(1)
        assert lost(gateway) == {"header_name_long": COUNT}
    told = [
        line for line in lines if line["event"] == "message properties lost, unsupported by target protocol"
    ]
    assert told
    assert {line["client"] for line in told} == {"device"}
    assert {line["properties"] for line in told} == {"header_name_long"}
    assert len(told) < COUNT or not burst, "once in a wake-up"


def subscribed(reader: Amqp) -> None:
    reader.call(m.QueueDeclare("q"), m.QueueDeclareOk)
    reader.call(m.QueueBind("q", "amq.topic", "#"), m.QueueBindOk)
    reader.call(m.BasicConsume("q", "t"), m.BasicConsumeOk)


def test_a_fault_in_the_counting_costs_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> str:
        raise ArithmeticError("nobody foresaw it")

    monkeypatch.setattr(Route, "losses", fault)
    before = counted["message"]
    with (
        running(but="internal error, contained") as gateway,
        connect(gateway, "device")[0] as writer,
        Amqp(gateway).open() as reader,
    ):
        subscribed(reader)
        writer.machine.publish(b"a/b", b"x", 1, packet_id=1, properties=user_property(LONG, b"v"))
        writer.flush()
        assert len(reader.delivered(1)) == 1
        writer.ping()
    assert counted["message"] == before + 1
