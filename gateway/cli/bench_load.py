"""Load of `gateway bench`: one connection publishes messages in groups, another may consume them.

A body begins with random bytes that mark this run, and the message's number; its publishing time is stored in
this process, so that only one clock is used. Other messages in the queue are consumed, and do not count.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gateway.cli.publish_subscribe import open_client
from gateway.clients.wire import Client
from gateway.errors import LinkError
from gateway.model.address import Address
from gateway.model.delivery_mode import DURABLE_AT_QOS
from gateway.model.message import Message
from gateway.protocols import dialect_of
from gateway.settings import LinkUrl

GROUPS_PER_SEC: Final = 100  # groups of messages a second, if a rate is given
MARK_BYTES: Final = 4
NUMBER_BYTES: Final = 4
SHARES: Final = (0.5, 0.9, 0.99, 0.999, 1.0)
QUIET_SECS: Final = 5.0  # if no message arrives for so long, the missing ones are lost


class Load(NamedTuple):
    """Parameters of one run of the benchmark.

    `size` is in bytes. `rate` is in messages per second; None is as fast as possible.
    """

    messages: int
    size: int
    qos: int
    in_flight: int
    rate: float | None
    receive: bool


@dataclass
class BenchResult:
    """Result of one run of the benchmark.

    `latencies` are in seconds, sorted. They are the latencies of received messages or, if the run does not
    consume messages, of groups of messages until their confirmation. `why` is the reason of the last refusal.
    """

    sent: int = 0
    refused: int = 0
    received: int | None = None
    send_secs: float = 0.0
    receive_secs: float = 0.0
    latencies: list[float] = field(default_factory=list)
    why: str = ""

    @property
    def lost(self) -> int:
        """Number of messages that were accepted but not received; 0 if the run does not consume them."""
        return 0 if self.received is None else max(self.sent - self.refused - self.received, 0)

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON object; times are in seconds."""
        return {
            "sent": self.sent,
            "refused": self.refused,
            "received": self.received,
            "lost": self.lost,
            "send_secs": self.send_secs,
            "receive_secs": self.receive_secs,
            "latency_secs": {f"p{share * 100:g}": self.quantile(share) for share in SHARES},
        }

    def lines(self) -> list[str]:
        """Return the result as lines of text for people."""
        lines = [f"sent      {self.sent} in {self.send_secs:.2f} s: {self.sent / self.send_secs:.0f}/s"]
        if self.refused:
            lines.append(f"refused   {self.refused}: {self.why}")
        if self.received is not None:
            per_sec = self.received / self.receive_secs if self.receive_secs else 0.0
            lines.append(f"received  {self.received} in {self.receive_secs:.2f} s: {per_sec:.0f}/s")
            if self.lost:
                lines.append(f"lost      {self.lost}")
        parts = [f"p{share * 100:g} {(self.quantile(share) or 0.0) * 1_000:.2f}" for share in SHARES]
        title = "until confirmed" if self.received is None else "until received"
        lines.append(f"{title}, in ms: {', '.join(parts)}")
        return lines

    def quantile(self, share: float) -> float | None:
        """Return the latency in seconds that the fraction `share` (0 to 1) of all messages does not exceed.

        Return None if there are no latencies.
        """
        if not self.latencies:
            return None
        return self.latencies[min(int(share * len(self.latencies)), len(self.latencies) - 1)]


def run_load(
    target: LinkUrl, address: Address, load: Load, timeout: float, ca_file: str | None
) -> BenchResult:
    """Run the benchmark at a broker, and return the result.

    Raises LinkError if the broker cannot be reached, or the connection is lost.
    """
    began = array("d", bytes(8 * load.messages))
    mark = secrets.token_bytes(MARK_BYTES)
    result = BenchResult()
    receiver = (
        BenchReceiver(open_client(target, timeout, ca_file), address, load, mark, began)
        if load.receive
        else None
    )
    publisher = open_client(target, timeout, ca_file)
    try:
        _publish(publisher, address, load, mark, began, result)
    except BaseException:
        publisher.close_abruptly()
        if receiver is not None:
            receiver.end()
        raise
    publisher.close()
    if receiver is not None:
        receiver.wait(result.sent - result.refused)
        result.received, result.receive_secs = len(receiver.latencies), receiver.secs
        result.latencies = receiver.latencies
    result.latencies.sort()
    return result


def _publish(
    client: Client, address: Address, load: Load, mark: bytes, began: array[float], result: BenchResult
) -> None:
    """Publish the messages of the load in groups, with a progress bar, and write the results into `result`.

    `began` receives the publishing time of each message by its number; `mark` identifies this run in the
    bodies.
    """
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeRemainingColumn

    group = load.in_flight if load.rate is None else max(int(load.rate / GROUPS_PER_SEC), 1)
    rest = bytes(load.size - MARK_BYTES - NUMBER_BYTES)
    start = time.perf_counter()
    columns = (*Progress.get_default_columns()[:3], TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("publishing", total=load.messages, rate="")
        for first in range(0, load.messages, group):
            if load.rate is not None:
                ahead = first / load.rate - (time.perf_counter() - start)
                if ahead > 0:
                    client.pause_reading(ahead)
            numbers = range(first, min(first + group, load.messages))
            now = time.perf_counter()
            for number in numbers:
                began[number] = now
            messages = [
                Message(
                    address,
                    mark + number.to_bytes(NUMBER_BYTES) + rest,
                    assurance=load.qos,
                    durable=DURABLE_AT_QOS[load.qos],
                )
                for number in numbers
            ]
            refused = client.publish_many(messages, in_flight=load.in_flight)
            done = time.perf_counter()
            result.latencies.append(done - now)
            result.sent += len(numbers)
            result.refused += len(refused)
            result.why = next((one.text for one in refused.values()), result.why)
            rate = f"{result.sent / max(done - start, 1e-9):.0f}/s"
            progress.update(task, completed=result.sent, rate=rate)
    result.send_secs = max(time.perf_counter() - start, 1e-9)


def consumed(address: Address) -> dict[str, str]:
    """Return options of the command line to consume the messages that are published to `address`.

    The result maps names of options to their values, such as `topic` to a topic filter.
    """
    dialect = dialect_of(address)
    words = {word: text for word, text in dialect.words_of(address).items() if text is not None}
    if dialect.queue_word is not None and not address.scope:
        return {dialect.queue_word: address.name}
    return {dialect.pattern_word if word == dialect.name_word else word: text for word, text in words.items()}


class BenchReceiver:
    """Consumer of the benchmark's messages, in a thread of its own.

    `latencies` are in seconds, in the order of arrival.
    """

    def __init__(
        self, client: Client, address: Address, load: Load, mark: bytes, began: array[float]
    ) -> None:
        self.latencies: list[float] = []
        self._client = client
        self._mark = mark
        self._began = began
        self._first = self._last = 0.0
        self._over = threading.Event()
        self._failed: LinkError | None = None
        client.listen(consumed(address), load.qos)
        self._early = client.arrivals(0.2)  # gives an AMQP broker time to start the consumer
        self._thread = threading.Thread(target=self._run, name="receiver", daemon=True)
        self._thread.start()

    @property
    def secs(self) -> float:
        """Seconds between the arrivals of the first and the last message."""
        return self._last - self._first

    def _run(self) -> None:
        """Receive messages until `end` is called, and record the latencies of messages of this run."""
        try:
            while not self._over.is_set():
                arrivals, self._early = [*self._early, *self._client.arrivals(0.2)], []
                now = time.perf_counter()
                for one in arrivals:
                    body = one.message.body
                    if body.startswith(self._mark):
                        number = int.from_bytes(body[MARK_BYTES : MARK_BYTES + NUMBER_BYTES])
                        self.latencies.append(now - self._began[number])
                        self._first = self._first or now
                        self._last = now
                self._client.acknowledge(arrivals)
        except LinkError as error:
            self._failed = error

    def wait(self, expected_count: int) -> None:
        """Wait until `expected_count` messages have arrived, and then stop consuming.

        Also stop if no message has arrived for QUIET_SECS. Raises LinkError if the connection failed.
        """
        quiet, last_count = time.perf_counter(), -1
        while len(self.latencies) < expected_count and time.perf_counter() - quiet < QUIET_SECS:
            if len(self.latencies) != last_count:
                quiet, last_count = time.perf_counter(), len(self.latencies)
            self._thread.join(0.02)
            if not self._thread.is_alive():
                break
        self.end()
        if self._failed is not None:
            raise self._failed

    def end(self) -> None:
        """Stop consuming and close the connection."""
        self._over.set()
        self._thread.join()
        if self._failed is None:
            self._client.close()
        else:
            self._client.close_abruptly()
