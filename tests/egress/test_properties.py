"""A broker whose message has more properties than a listener would take: it costs that message alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from gateway.settings import Limits
from tests.configured import make_link
from tests.ingress.amqpfast.client import TOPIC, Fast, head
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running, settings_of

MOST: Final = 10
BYTES: Final = 400
ROUTES: Final = """
version: 1
routes:
  - name: down
    from: {endpoint: far, %s}
    to: {endpoint: mqtt, topic: "down/{rest...}"}
"""
SOURCES: Final = {
    "mqtt": 'topic: "new/{rest...}"',
    "amqp091": 'exchange: amq.topic, binding_key: "new.{rest...}"',
    "amqpfast": 'service: topic, destination: "new.{rest...}"',
}


@pytest.fixture
def far() -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.mark.parametrize("protocol", SOURCES)
@pytest.mark.parametrize("name, value, count", [("many", "", 100), ("large", "v" * BYTES, 1)])
def test_too_many_properties_of_a_broker_are_a_dead_letter_and_the_link_stays(
    far: Running, tmp_path: Path, protocol: str, name: str, value: str, count: int
) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(ROUTES % SOURCES[protocol])
    scheme = "amqp" if protocol == "amqp091" else protocol
    link = make_link(url=f"{scheme}://guest:guest@{LOOPBACK}:{far.port(protocol)}", client_id="near")
    limits = Limits(properties_max=MOST, properties_bytes_max=BYTES)
    settings = settings_of(links={"far": link}, mappings=(str(mapping),), limits=limits)
    with running(settings) as near:
        near.until(lambda: near.gateway.links["far"].is_up)
        connects = near.ask(lambda: near.gateway.links["far"].stats.connects)
        reader, _ = connect(near, "reader")
        with reader, Fast(far).open() as writer:
            reader.subscribe("down/#")
            handle = writer.handle("", TOPIC)
            writer.put(handle, b"before", name="new.a", head=head(headers={"h": "1"}))
            writer.put(
                handle, b"not", name="new.a", head=head(headers={f"h{at}": value for at in range(count)})
            )
            writer.put(handle, b"after", name="new.a", head=head(headers={"h": "2"}))
            assert [reader.body(), reader.body()] == [b"before", b"after"]
            stats = near.gateway.links["far"].stats
            near.until(
                lambda: (
                    sum(count for outcome, _, count in stats.settled_counts() if outcome == "rejected") == 1
                )
            )
            assert near.ask(lambda: len(near.gateway.dead_letters)) == 1
            assert near.ask(lambda: near.gateway.links["far"].stats.connects) == connects
            far.until(lambda: not sum(len(queue) for queue in far.gateway.host.queues.values()))
