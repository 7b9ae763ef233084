"""What tracing costs: a gateway that traces no message against one without tracing, by clients; and by itself
one message that is traced across a route, with its four spans and their way to a collector.

The collector is in this process and throws everything away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

import trio

from gateway import clock
from gateway.broker.core import dispatcher_of
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import DispatcherServices
from gateway.broker.operator_publish import Publishing
from gateway.broker.routing import Namespace
from gateway.mapping import parse
from gateway.mapping.router import Router
from gateway.model.address import Address
from gateway.model.batch import Sink, SubBatch
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import Properties, property_set, string
from gateway.protocols.mqtt.dialect import topic_address
from gateway.telemetry.tracing import Tracing
from tests.benchmarks.report import Figure, median
from tests.benchmarks.roles import Load
from tests.benchmarks.sections.comparing import LoadAt, with_against_without
from tests.benchmarks.wires import MQTT_5

TARGET: Final = 0.95
MESSAGES: Final = 2_000
SETTLED_TOGETHER: Final = 100
MAPPING: Final = """version: 1
routes:
  - {name: out, from: {endpoint: mqtt, topic: "out/#"}, to: {endpoint: erp, queue: out}}
"""


def _a(mqtt: int, amqp: int, seconds: float) -> Load:
    return Load("mqtt", "amqp", mqtt, amqp, seconds=seconds)


def _five(mqtt: int, amqp: int, seconds: float) -> Load:
    return Load("mqtt", "amqp", mqtt, amqp, seconds=seconds, level=MQTT_5, properties=4)


ROWS: Final[dict[str, LoadAt]] = {
    "T-A: scenario A with tracing on, no message traced, against off": _a,
    "T-5: the same from MQTT 5 with four user properties": _five,
}


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def _collector() -> Iterator[str]:
    """A collector, by its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Target:
    """A remote broker that confirms so many at a time."""

    retained = None

    def __init__(self) -> None:
        self._parts: list[SubBatch] = []

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Everything comes here."""
        return (self,)

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The address has decided."""
        return (self,)

    def publish(self, part: SubBatch) -> None:
        """Keep it, and confirm what has gathered."""
        self._parts.append(part)
        if len(self._parts) == SETTLED_TOGETHER:
            for one in self._parts:
                one.accept()
            self._parts.clear()


def _cpu_us(tracing: Tracing | None) -> float:
    """Microseconds of a message across a route, of all threads."""
    router = Router([parse(MAPPING, "bench.yaml")], {"mqtt": "mqtt", "erp": "amqp091"})
    namespaces: dict[str, Namespace] = {"mqtt": _Target(), "erp": _Target()}
    letters = DeadLetters()
    dispatcher = dispatcher_of(
        router, letters, DispatcherServices(links=("erp",), namespaces=namespaces), tracing=tracing
    )
    context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    carried = property_set(Properties(headers=(("traceparent", string(context)),)))
    message = Message(topic_address("out/x"), bytes(128), carried, 1, True, sender=Sender("mqtt", "c"))
    told: list[Outcome] = []

    async def publish() -> float:
        publishing = Publishing(dispatcher)
        clock.now()
        begin = time.process_time()
        for _ in range(MESSAGES):
            publishing.publish("mqtt", message, told.append)
        if tracing is not None:
            tracing.flush()
        return (time.process_time() - begin) / MESSAGES * 1e6

    found = trio.run(publish)
    assert len(told) == MESSAGES
    return found


def _traced(url: str, repeat: int) -> Figure:
    found: list[tuple[float, float]] = []
    for _ in range(repeat):
        tracing = Tracing(url=url, messages_per_second_max=1e9)
        found.append((_cpu_us(tracing), _cpu_us(None)))
        tracing.close()
    traced, plain = (median([pair[at] for pair in found]) for at in (0, 1))
    return Figure("T-1: a message that is traced across a route", "us of CPU", traced, plain)


def measure(folder: Path, seconds: float, repeat: int) -> list[Figure]:
    """With tracing against without."""
    with _collector() as url:
        tracing = {"tracing": {"enabled": True, "url": url, "share": 0.0}}
        figures = [
            with_against_without(name, folder / str(at), load, seconds, repeat, TARGET, tracing)
            for at, (name, load) in enumerate(ROWS.items())
        ]
        return [*figures, _traced(url, repeat)]
