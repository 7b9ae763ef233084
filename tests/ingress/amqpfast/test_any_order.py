"""Commands in any order with any numbers: whatever a client says, the gateway has no fault of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import pytest

from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.codec import encode_command
from tests.ingress.amqpfast.client import EMPTY, PERSISTENT, Fast, head
from tests.interop.gateway_fixture import running

STEPS: Final = 400
ROUNDS: Final = 6
NAMES: Final = ("", "a", "a.b", "a.", "b", "echo", "x/y")
HEADS: Final = (EMPTY, PERSISTENT, head(priority=9, headers={"n": 1}))


def send(chance: random.Random, handle: int, tag: int) -> bytes:
    fragment = (2).to_bytes(4, "big") + chance.choice(HEADS) + b"hi"
    streaming = chance.random() < 0.05
    if streaming:
        fragment = (0).to_bytes(4, "big") + EMPTY + b"hi"
    name = chance.choice(NAMES)
    command = m.HandleSend(handle, tag, len(fragment), streaming, False, False, streaming, name)
    return encode_command(command) + fragment


def any_command(chance: random.Random) -> bytes:
    channel, handle = chance.randrange(1, 3), chance.randrange(1, 6)
    tag = chance.choice((0, chance.randrange(1, 9)))
    name, service = chance.choice(NAMES), chance.randrange(1, 4)
    bits = [chance.random() < 0.8 for _ in range(3)]
    if service == 3:
        bits[1] = bits[2] = False
    number = chance.randrange(0, 40)
    selector = chance.choice((b"", b"", b"n = 1", b"n ="))
    identifier = chance.choice(("", "", "d"))
    commands: list[Callable[[], m.Command]] = [
        lambda: m.ChannelOpen(channel, tag, chance.random() < 0.3, chance.random() < 0.2),
        lambda: m.ChannelAck(channel, tag, number),
        lambda: m.ChannelAck(channel, tag, number),
        lambda: m.ChannelCommit(channel, tag),
        lambda: m.ChannelRollback(channel, tag),
        lambda: m.ChannelClose(channel),
        lambda: m.HandleOpen(channel, handle, service, tag, *bits, chance.random() < 0.1, name),
        lambda: m.HandleOpen(channel, handle, 1, tag, True, True, True, False, "a"),
        lambda: m.HandleConsume(
            handle, tag, chance.randrange(4), bits[0], not bits[1], name, identifier, selector
        ),
        lambda: m.HandleCancel(handle, tag, name, identifier),
        lambda: m.HandleFlow(handle, tag, bits[0]),
        lambda: m.HandleUnget(handle, tag, number),
        lambda: m.HandleQuery(handle, number // 4, name, selector),
        lambda: m.HandleBrowse(handle, tag, number // 4),
        lambda: m.HandleClose(handle),
    ]
    if chance.random() < 0.4:
        return send(chance, handle, tag)
    return encode_command(chance.choice(commands)())


@pytest.mark.parametrize("seed", range(12))
def test_nothing_that_a_client_says_is_a_fault_of_the_gateway(seed: int) -> None:
    chance = random.Random(seed)
    with running() as gateway:
        for _ in range(ROUNDS):
            clients = [Fast(gateway, f"c{number}").open() for number in range(2)]
            opening = b"".join(
                encode_command(m.HandleOpen(1, number, 1 + number % 2, 0, True, True, True, False, "a"))
                for number in range(1, 5)
            )
            for client in clients:
                client.send(opening)
            with suppress(OSError):
                for _ in range(STEPS // ROUNDS):
                    client = chance.choice(clients)
                    client.sock.sendall(any_command(chance))
            for client in clients:
                client.cut()
            connections = gateway.gateway.listeners["amqpfast"].connections
            gateway.until(lambda found=connections: not found)
        hosts = gateway.gateway.fast_hosts["/"]
        with Fast(gateway).open() as client:
            client.put(client.handle("after"), b"x")
        left = gateway.ask(
            lambda: [
                (queue.name, queue.unacknowledged, len(queue.consumers)) for queue in hosts.queues.values()
            ]
        )
        assert [one for one in left if one[1:] != (0, 0)] == []
        durable = gateway.ask(lambda: [one.attached or bool(one.consumers) for one in hosts.durable.values()])
        assert not any(durable)
        assert gateway.ask(lambda: len(hosts.subscriptions) - len(hosts.durable)) == 0
