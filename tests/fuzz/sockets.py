"""Sequences of valid and mutated packets, over sockets, against a running gateway.

    python -m tests.fuzz.sockets [SECONDS]

Consumers of all three protocols are attached and take everything. Each connection says a run of packets of
its protocol's grammar, some of them mutated, reads what it likes and ends as it likes. Now and then a message
goes through that each consumer has to see. A run is known by its seed, which is printed; a failure is a
gateway that ended, a message that did not come, or an internal error that was counted.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqpfast.events import Opened
from gateway.protocols.amqpfast.lifetime import PING
from tests.adversary.arena import Arena
from tests.fuzz.grammars import GRAMMARS, FastGrammar, packets
from tests.fuzz.mutation import mutated
from tests.ingress.amqp_client import Amqp
from tests.ingress.amqpfast.client import TOPIC, Fast
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK

RUN_MAX: Final = 40  # packets of one connection
HELD_MAX: Final = 20  # connections that stay open beside it
MUTATED: Final = 0.15
SENTINEL_EVERY: Final = 50  # connections
PATIENCE_SECS: Final = 30.0
SENTINEL: Final = "a/sentinel"
PINGREQ: Final = b"\xc0\0"
HEARTBEAT: Final = b"\x08\0\0\0\0\0\0\xce"


class Consumers:
    """One of each protocol, who must see every sentinel."""

    def __init__(self, arena: Arena) -> None:
        self.device, _ = connect(arena, "sentinel")
        self.device.subscribe(SENTINEL)
        self.amqp = Amqp(arena, heartbeat=0).open()
        self.amqp.call(m.QueueDeclare("sentinels", exclusive=True), m.QueueDeclareOk)
        self.amqp.call(m.QueueBind("sentinels", "amq.topic", "a.sentinel"), m.QueueBindOk)
        self.amqp.call(m.BasicConsume("sentinels", no_ack=True), m.BasicConsumeOk)
        self.fast = Fast(arena, heartbeat=0).open()
        self.fast.consume(self.fast.handle("a.sentinel", TOPIC), prefetch=0, unreliable=True)
        self.everything = self._everything(arena)
        self.sender: Mqtt = connect(arena, "sender")[0]

    def close(self) -> None:
        for sock in (self.device.sock, self.amqp.sock, self.fast.sock, self.sender.sock, *self.everything):
            sock.close()

    def _everything(self, arena: Arena) -> list[socket.socket]:
        """Those who take all that crosses, so that it has to be encoded for each protocol; nobody looks at
        what they get."""
        device, _ = connect(arena, "everything")
        device.subscribe("#")
        amqp = Amqp(arena, heartbeat=0).open()
        amqp.call(m.QueueDeclare("all", exclusive=True), m.QueueDeclareOk)
        amqp.call(m.QueueBind("all", "amq.topic", "#"), m.QueueBindOk)
        amqp.call(m.BasicConsume("all", no_ack=True), m.BasicConsumeOk)
        found = [device.sock, amqp.sock]
        self._living = [(amqp.sock, HEARTBEAT), (device.sock, PINGREQ)]
        for name in ("a.b", "b.c", "a"):
            fast = Fast(arena, heartbeat=0).open()
            fast.consume(fast.handle(name, TOPIC), prefetch=0, unreliable=True)
            found.append(fast.sock)
            self._living.append((fast.sock, PING))
        for sock in found:
            sock.setblocking(False)
        return found

    def drain(self) -> None:
        """Read what has come to those who take everything."""
        for sock in self.everything:
            with suppress(BlockingIOError):
                while True:
                    if not sock.recv(1 << 20):
                        raise ConnectionError(
                            f"the gateway has closed {sock.getsockname()}, who takes everything"
                        )

    def see(self, number: int) -> None:
        """A message crosses to all of them. They go on living: the gateway wants to hear of them."""
        for sock, word in ((self.amqp.sock, HEARTBEAT), (self.device.sock, PINGREQ), *self._living):
            sock.send(word)
        body = b"%d" % number
        self.sender.publish(SENTINEL, body, 1, 1)
        while self.device.body() != body:
            pass
        while self.amqp.delivered(1)[0][6] != body:
            pass
        while self.fast.rows(1)[0][4] != body:
            pass


class Fuzzer:
    """One run. `said` counts packets that were sent."""

    def __init__(self, arena: Arena, seed: int) -> None:
        self.said = 0
        self._arena = arena
        self._chance = random.Random(seed)
        self._held: list[socket.socket] = []

    def connection(self) -> None:
        """One connection says its packets."""
        chance = self._chance
        grammar = chance.choice(GRAMMARS)(chance)
        run = packets(grammar, chance.randint(1, RUN_MAX))
        run = [mutated(data, chance) if chance.random() < MUTATED else data for data in run]
        sock = socket.create_connection((LOOPBACK, self._arena.port(grammar.listener)), PATIENCE_SECS)
        with suppress(ConnectionError, BlockingIOError):
            sock.sendall(grammar.greeting())
            if isinstance(grammar, FastGrammar):
                self._negotiate(sock, grammar)
            self.said += len(run)
            sock.setblocking(False)
            sock.send(b"".join(run))
        self._held.append(sock)
        if len(self._held) > HELD_MAX:
            self._end(self._held.pop(chance.randrange(len(self._held))))

    def _negotiate(self, sock: socket.socket, grammar: FastGrammar) -> None:
        opened = False
        while not opened:
            data = sock.recv(65_536)
            if not data:
                return
            opened = any(isinstance(event, Opened) for event in grammar.client.receive_data(data, 0.0))
            sock.sendall(grammar.client.data_to_send())
        sock.sendall(grammar.opening())

    def _end(self, sock: socket.socket) -> None:
        """In one of the ways in which connections end."""
        with suppress(OSError):
            match self._chance.randrange(3):
                case 0:
                    sock.recv(1 << 20)
                case 1:
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(1 << 20)
                case _:
                    pass
        sock.close()

    def close(self) -> None:
        for sock in self._held:
            sock.close()


def fuzz(folder: Path, seed: int, *, count: int = 0, seconds: float = 0.0, keep_going: bool = False) -> int:
    """So many packets, or for so long; returns how many were sent. AssertionError when it did not hold, at
    once or, to `keep_going` after internal errors, in the end."""
    print(f"fuzzing over sockets, seed {seed}")
    end = time.monotonic() + seconds
    with Arena(folder) as arena:
        consumers = Consumers(arena)
        fuzzer = Fuzzer(arena, seed)
        turn = 0
        while fuzzer.said < count or time.monotonic() < end:
            turn += 1
            try:
                fuzzer.connection()
                consumers.drain()
                if turn % SENTINEL_EVERY == 0:
                    consumers.see(turn)
                    assert errors(arena) == {} or keep_going, (seed, turn, told(arena))
            except (OSError, TimeoutError) as error:
                raise AssertionError(
                    f"seed {seed}, connection {turn}: {error!r}; alive: {arena.alive}; {told(arena)}"
                ) from error
        consumers.see(turn + 1)
        fuzzer.close()
        consumers.close()
        assert errors(arena) == {}, (seed, told(arena))
        arena.restart()
        assert arena.terminate() == 0
    return fuzzer.said


def errors(arena: Arena) -> dict[str, float]:
    """Internal errors that were counted."""
    found = arena.metrics("gateway_internal_errors_total")
    return {where: count for where, count in found.items() if count}


def told(arena: Arena) -> str:
    """The stacks of the internal errors, or else what was logged last."""
    stacks = [line.get("exception", line["event"]) for line in arena.log_lines if line["level"] == "error"]
    return "\n".join(stacks) or arena.log[-3_000:]


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(os.environ.get("FUZZ_SEED", str(random.SystemRandom().randrange(1 << 32))))
    with tempfile.TemporaryDirectory() as folder:
        print(fuzz(Path(folder), seed, seconds=seconds, keep_going=True), "packets")


if __name__ == "__main__":
    main()
