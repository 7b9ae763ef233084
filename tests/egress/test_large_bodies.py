"""A broker whose message has a larger body than is taken: it costs that message alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pika
import pytest

from gateway.settings import Limits
from tests.configured import make_link
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import running, settings_of
from tests.interop.servers import RabbitMQ

MIB: Final = 1_048_576
MAPPING: Final = """
version: 1
routes:
  - name: down
    from: {endpoint: far, queue: work}
    to: {endpoint: mqtt, topic: "down"}
"""


@pytest.fixture(params=["gateway", "rabbitmq"])
def far(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a broker that takes such messages."""
    if request.param == "gateway":
        with running() as one:
            yield one.amqp_url
    else:
        rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
        yield rabbitmq.url


def test_it_goes_back_and_the_link_stays(far: str, tmp_path: Path) -> None:
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text(MAPPING)
    settings = settings_of(
        links={"far": make_link(url=far)}, mappings=(str(mapping),), limits=Limits(message_bytes_max=MIB)
    )
    with pika.BlockingConnection(pika.URLParameters(far)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        letters = channel.queue_declare("", exclusive=True).method.queue
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": letters}
        channel.queue_declare("work", arguments=arguments)
        with running(settings) as near, connect(near, "reader")[0] as reader:
            near.until(lambda: near.gateway.links["far"].is_up)
            connects = near.ask(lambda: near.gateway.links["far"].stats.connects)
            reader.subscribe("down")
            for body in (b"before", bytes(3 * MIB), b"after"):
                channel.basic_publish("", "work", body)
            assert [reader.body(), reader.body()] == [b"before", b"after"]
            stats = near.gateway.links["far"].stats
            near.until(lambda: ("rejected", "too_large", 1) in [tuple(one) for one in stats.settled_counts()])
            assert near.ask(lambda: stats.connects) == connects
            assert near.ask(lambda: len(near.gateway.dead_letters)) == 1
        _, _, body = next(channel.consume(letters, auto_ack=True, inactivity_timeout=20.0))
        assert body == bytes(3 * MIB)
        channel.cancel()
        channel.queue_delete("work")
