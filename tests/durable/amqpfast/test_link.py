"""Two gateways joined by an AMQP/Fast link, one of them killed: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.ingress.amqpfast.client import PERSISTENT, TOPIC, Fast
from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import GatewayProcess

PATIENCE_SECS: Final = 60.0
ROUNDS: Final = int(os.environ.get("LINK_ROUNDS", "1"))  # kills of one test
MAPPING: Final = """
version: 1
routes:
  - name: out
    from: {{endpoint: amqpfast, service: topic, destination: "out.{{rest...}}"}}
    to: {{endpoint: far, service: queue, destination: "{{rest}}"}}
    settle: {settle}
  - name: in
    from: {{endpoint: far, service: queue, destination: jobs}}
    to: {{endpoint: amqpfast, service: queue, destination: jobs}}
  - name: news
    from: {{endpoint: far, service: topic, destination: "news.{{rest...}}"}}
    to: {{endpoint: amqpfast, service: queue, destination: news}}
"""


@contextmanager
def pair(folder: Path, settle: str) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    """The near gateway, which has the link, and the far one."""
    with ExitStack() as stack:
        far = stack.enter_context(GatewayProcess(folder / "far"))
        (folder / "near").mkdir()
        mapping = folder / "near" / "mapping.yaml"
        mapping.write_text(MAPPING.format(settle=settle))
        url = f"amqpfast://guest:guest@{LOOPBACK}:{far.port('amqpfast')}/"
        near = GatewayProcess(
            folder / "near",
            links={
                "far": {
                    "url": url,
                    "client_id": "near",
                    "reconnect_min_secs": 0.1,
                    "reconnect_max_secs": 0.3,
                }
            },
            mappings=[str(mapping)],
            drain_timeout_secs=1,
        )
        stack.enter_context(near)
        deadline = time.monotonic() + PATIENCE_SECS
        while "link connected" not in near.log:  # until then a topic keeps nothing for it
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield near, far


class Publisher:
    """Publishes numbers, one after the other, and notes those that were confirmed; comes back when it is cut
    off, and then says again what was not."""

    def __init__(self, gateway: GatewayProcess, name: str, service: int) -> None:
        self.confirmed: list[int] = []
        self._gateway = gateway
        self._name = name
        self._service = service
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Publisher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECS)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                with Fast(self._gateway) as client:
                    handle = client.open().handle(self._name, self._service)
                    while not self._stop.is_set():
                        client.put(handle, b"%d" % number, head=PERSISTENT)
                        self.confirmed.append(number)
                        number += 1
            except OSError:
                time.sleep(0.02)

    def wait(self, more: int) -> None:
        """Until so many more have been confirmed."""
        wanted = len(self.confirmed) + more
        deadline = time.monotonic() + PATIENCE_SECS
        while len(self.confirmed) < wanted:
            assert time.monotonic() < deadline, f"only {len(self.confirmed)} of {wanted} were confirmed"
            time.sleep(0.01)


def fetched(gateway: GatewayProcess, queue: str, wanted: set[int]) -> list[int]:
    """What a queue holds and is given, until all that is wanted has come."""
    found: list[int] = []
    with Fast(gateway).open() as client:
        client.sock.settimeout(PATIENCE_SECS)
        client.consume(client.handle(queue))
        missing = set(wanted)
        while missing:
            (row,) = client.rows(1)
            found.append(int(row[4]))
            missing.discard(found[-1])
            client.machine.ack(1, row[1])
            client.flush()
    return found


def in_order(numbers: list[int]) -> bool:
    """Without the repeats of what was on its way when somebody was killed."""
    once = list(dict.fromkeys(numbers))
    return once == sorted(once)


@pytest.mark.parametrize("victim", ["near", "far"])
@pytest.mark.parametrize("settle", ["confirmed", "stored"])
def test_what_the_near_gateway_confirmed_is_at_the_far_one(tmp_path: Path, settle: str, victim: str) -> None:
    with pair(tmp_path, settle) as (near, far):
        killed = near if victim == "near" else far
        with Publisher(near, "out.q", TOPIC) as publisher:
            for _ in range(ROUNDS):
                publisher.wait(50)
                killed.kill()
                if victim == "far" and settle == "stored":
                    publisher.wait(50)  # the outbox takes them
                killed.start()
            publisher.wait(50)
        found = fetched(far, "q", set(publisher.confirmed))
        assert set(found) >= set(publisher.confirmed)
        assert in_order(found)


@pytest.mark.parametrize("victim", ["near", "far"])
@pytest.mark.parametrize("name, service, queue", [("jobs", 1, "jobs"), ("news.a", TOPIC, "news")])
def test_what_the_far_gateway_confirmed_comes_to_the_near_one(
    tmp_path: Path, victim: str, name: str, service: int, queue: str
) -> None:
    with pair(tmp_path, "confirmed") as (near, far):
        killed = near if victim == "near" else far
        with Publisher(far, name, service) as publisher:
            for _ in range(ROUNDS):
                publisher.wait(100)
                killed.kill()
                if victim == "near":
                    publisher.wait(100)
                killed.start()
            publisher.wait(50)
        found = fetched(near, queue, set(publisher.confirmed))
        assert in_order(found)
