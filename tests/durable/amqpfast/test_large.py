"""Large AMQP/Fast messages and transfers, before and after the gateway was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.protocols.amqpfast import commands as m
from tests.ingress.amqpfast.client import EMPTY, PERSISTENT, TOPIC, fresh, head
from tests.ingress.amqpfast.large import MIB, Whole, data, sha1
from tests.interop.gateway_process import GatewayProcess

LARGE: Final = 200 * MIB
BODY: Final = data(3 * MIB)
OTHER: Final = data(2 * MIB, 2)
LIMITS: Final = {"fast_memory_bytes_max": MIB}
CLIENT: Final = "c"


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[GatewayProcess]:
    made = GatewayProcess(tmp_path, limits=LIMITS)
    made.configuration["listeners"]["amqpfast"]["virtual_hosts"] = ["/", "apart"]
    with made:
        yield made


def spool(gateway: GatewayProcess) -> list[Path]:
    return sorted((gateway.folder / "data" / "spool").iterdir())


def resident(gateway: GatewayProcess) -> int:
    """Bytes of memory that the gateway has."""
    text = Path(f"/proc/{gateway.process.pid}/statm").read_text(encoding="ascii")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gone(gateway: GatewayProcess) -> None:
    """Nothing refers to a file any more: the gateway removes them."""
    with Whole(gateway).open() as client:
        while spool(gateway):
            assert client.quiet()


def take(gateway: GatewayProcess, count: int, *, ack: bool = True, queue: str = "q") -> list[Any]:
    """The next large messages of a queue, or what `client` is given; acknowledged."""
    with Whole(gateway).open() as client:
        client.consume(client.handle(queue))
        rows = [client.large() for _ in range(count)]
        if ack:
            client.ack(count)
        assert not ack or client.quiet()
        return rows


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_confirmed_persistent_message_survives(gateway: GatewayProcess, way: str) -> None:
    said = head(persistent=True, identifier="file")
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, BODY, said)
        client.put_large(handle, OTHER)  # transient
        client.write(client.transfer(handle, BODY, PERSISTENT), BODY[: 2 * MIB], last=False)
        client.quiet()
        files = spool(gateway)
        assert [file.stat().st_mode & 0o777 for file in files] == [0o600] * 3
        assert files[0].parent.stat().st_mode & 0o777 == 0o700
        if way == "killed":
            gateway.restart()
        else:
            assert gateway.terminate() == 0
            gateway.start()
    assert [file.stat().st_size for file in spool(gateway)] == [len(BODY)]
    (row,) = take(gateway, 1, ack=False)
    assert row[3:] == (said, BODY, b"q")
    assert fresh(row) is (way == "stopped"), "nobody had been handed it, which is known after a planned stop"
    assert len(take(gateway, 1)) == 1
    gone(gateway)


def test_what_was_acknowledged_goes_with_its_file(gateway: GatewayProcess) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, BODY, PERSISTENT)
        client.put_large(handle, OTHER, PERSISTENT)
        client.consume(handle)
        assert [client.large()[4] for _ in range(2)] == [BODY, OTHER]
        client.ack(1)
        gateway.restart()
    assert [file.stat().st_size for file in spool(gateway)] == [len(OTHER)]
    assert take(gateway, 1)[0][4] == OTHER


def test_several_owe_the_one_file(gateway: GatewayProcess) -> None:
    for name in ("a", "b"):
        with Whole(gateway, name, virtual_path="apart").open() as client:
            client.consume(client.handle("t", TOPIC), identifier="sub")
    with Whole(gateway, virtual_path="apart").open() as client:
        client.put_large(client.handle("t", TOPIC), BODY, PERSISTENT)
    assert len(spool(gateway)) == 1
    for name in ("a", "b"):
        gateway.restart()
        assert len(spool(gateway)) == 1
        with Whole(gateway, name, virtual_path="apart").open() as client:
            client.consume(client.handle("t", TOPIC), identifier="sub")
            assert client.large()[4] == BODY
            client.ack(1)
    gone(gateway)


def test_more_than_the_memory_of_a_queue(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, limits=LIMITS | {"queue_memory_bytes_max": MIB}) as gateway:
        bodies = [data(2 * MIB, seed) for seed in range(5)]
        with Whole(gateway).open() as client:
            handle = client.handle("q")
            for at, body in enumerate(bodies):
                client.put_large(handle, body, EMPTY if at == 2 else PERSISTENT)
            client.consume(handle)
            assert client.large()[4] == bodies[0]
            client.ack(1)
            assert client.large()[4] == bodies[1]
        assert [row[4] for row in take(gateway, 2)] == bodies[1:3]
        gateway.restart()
        assert [row[4] for row in take(gateway, 2)] == bodies[3:]
        gone(gateway)


def test_what_a_virtual_host_has_outlasts_a_time_without_it(gateway: GatewayProcess) -> None:
    listener = gateway.configuration["listeners"]["amqpfast"]
    with Whole(gateway, virtual_path="apart").open() as client:
        client.put_large(client.handle("q"), BODY, PERSISTENT)
    listener["virtual_hosts"] = ["/"]
    gateway.restart()
    assert len(spool(gateway)) == 1
    listener["virtual_hosts"] = ["/", "apart"]
    gateway.restart()
    with Whole(gateway, virtual_path="apart").open() as client:
        client.consume(client.handle("q"))
        assert client.large()[4] == BODY


def test_a_file_that_is_gone_is_told_and_costs_its_message_alone(gateway: GatewayProcess) -> None:
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, BODY, PERSISTENT)
        (file,) = spool(gateway)
        client.put_large(handle, OTHER, PERSISTENT)
    gateway.kill()
    file.unlink()
    gateway.start()
    assert take(gateway, 1)[0][4] == OTHER
    assert file.name in gateway.log


def test_a_transaction_is_there_whole_or_not_at_all(gateway: GatewayProcess) -> None:
    with Whole(gateway).open(transacted=True) as client:
        handle = client.handle("q")
        client.put_large(handle, BODY, PERSISTENT)
        assert client.ask(m.ChannelCommit(1))[3] == 200
        client.put_large(handle, OTHER, PERSISTENT)
        gateway.restart()
    assert [file.stat().st_size for file in spool(gateway)] == [len(BODY)]
    assert take(gateway, 1)[0][4] == BODY


# Restartable transfers.


def test_a_transfer_goes_on_exactly_where_it_broke_off_after_each_of_two_kills(
    gateway: GatewayProcess,
) -> None:
    body, said = data(LARGE), head(persistent=True, identifier="large")
    digest, at = sha1(body), 0
    for part in (1, 2):
        with Whole(gateway, CLIENT).open(restartable=True) as client:
            handle = client.handle("q")
            held = client.prepare(handle, body, said, content_hash=digest)
            assert held == at
            client.resume(handle, body, at, stop=part * LARGE // 3)
            if part == 2:
                client.quiet()  # so that all of it has come
            gateway.kill()
        (file,) = spool(gateway)
        at = file.stat().st_size
        assert body.startswith(file.read_bytes())
        assert at <= part * LARGE // 3
        gateway.start()
    assert at == 2 * LARGE // 3
    with Whole(gateway, CLIENT).open(restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, body, said, content_hash=digest) == at
        tag = client.machine.new_tag(1)
        client.sock.settimeout(60)
        client.resume(handle, body, at, tag)
        assert client.reply()[1:4] == (handle, tag, 200)
        gateway.restart()
    (row,) = take(gateway, 1)
    assert row[3] == said
    assert row[4] == body
    gateway.restart()
    assert spool(gateway) == []


def test_a_complete_transfer_whose_end_was_lost(gateway: GatewayProcess) -> None:
    with Whole(gateway, CLIENT).open(restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, BODY, first=100) == 100
        client.resume(handle, BODY, 100, stop=len(BODY))
        client.quiet()
        gateway.restart()
    with Whole(gateway, CLIENT).open(restartable=True) as client:
        handle = client.handle("q")
        assert client.prepare(handle, BODY) == len(BODY)
        tag = client.machine.new_tag(1)
        client.resume(handle, BODY, len(BODY), tag)
        assert client.reply()[2] == tag
    assert take(gateway, 1)[0][4] == BODY


def test_a_transfer_ages_while_the_gateway_is_away(tmp_path: Path) -> None:
    with GatewayProcess(tmp_path, limits=LIMITS) as gateway:
        with Whole(gateway, CLIENT).open(restartable=True) as client:
            assert client.prepare(client.handle("q"), BODY, first=1_000) == 1_000
            gateway.kill()
        gateway.configuration["limits"] = LIMITS | {"fast_partial_age_secs": 0.001}
        gateway.start()
        with Whole(gateway, CLIENT).open(restartable=True) as client:
            assert client.prepare(client.handle("q"), BODY) == 0


# Memory.


def test_a_slow_reader_does_not_make_memory_grow(gateway: GatewayProcess) -> None:
    """100 MB, from a client to another that has read hardly anything: a few of them are in memory."""
    size = 100 * MIB
    with Whole(gateway).open() as client:
        handle = client.handle("q")
        client.put_large(handle, OTHER)
        client.consume(handle)
        client.large()
        client.ack(1)
        before = resident(gateway)
        transfer, piece = client.sized(handle, size), data(MIB)
        for _ in range(size // MIB - 1):
            client.write(transfer, piece, last=False)
        tag = client.machine.new_tag(1)
        client.write(transfer, piece, tag)
        assert client.reply()[2] == tag
        assert resident(gateway) - before < 16 * MIB
        left = size - len(client.part().data)
        with Whole(gateway).open() as other:
            assert other.quiet()  # the gateway has gone on
        assert resident(gateway) - before < 16 * MIB
        while left:
            left -= len(client.part().data)
        assert resident(gateway) - before < 16 * MIB
