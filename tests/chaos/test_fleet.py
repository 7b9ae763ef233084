"""A fleet stays whole while its replicas are replaced; `python -m tests.chaos.fleet` has a larger one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.checker import History, Id
from tests.chaos.fleet import judged, roll
from tests.interop.servers import RabbitMQ


def test_nothing_is_lost_or_doubled_while_replicas_are_replaced(tmp_path: Path, rabbitmq: RabbitMQ) -> None:
    result = roll(tmp_path, rabbitmq, clients=60, replicas=2, rate=4.0, secs=0.5)
    assert result.sound, str(result)
    assert result.connects >= 90, str(result)  # whoever was at a replica had to go to another one


def test_what_comes_twice_counts_at_qos_2_alone() -> None:
    history = History()
    for source in ("f-0", "f-1"):
        id = Id(source, "f-2", 1)
        history.sent(id)
        history.acked(id)
        history.received(id, "f-2", False)
        history.received(id, "f-2", True)
    assert judged(history).duplicated == (Id("f-1", "f-2", 1),)
