"""What a client acknowledges: runs of single acks on one channel are settled together.

An ack settles at most one delivery and a client sends one for each, so that per-message work here is a third
of what a delivery costs. The queues dispatch when all that arrived together has been taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.broker.amqp091.refusals import failed
from gateway.protocols.amqp091.methods import BasicAck

if TYPE_CHECKING:
    from gateway.ingress.amqp091.channel import Touched
    from gateway.ingress.amqp091.connection import AmqpConnection


def take_acks(connection: AmqpConnection, acks: list[tuple[int, int, bool]]) -> None:
    """basic.ack, in their order: (channel, delivery tag, multiple). An unknown tag closes its channel."""
    touched: Touched = {}
    single: list[int] = []  # tags of the channel `run`
    run = 0
    for number, tag, multiple in acks:
        if number != run or multiple:
            _take_single(connection, run, single, touched)
            single, run = [], number
        if not multiple:
            single.append(tag)
            continue
        channel = connection.channels.get(number)
        if channel is not None and not channel.acknowledge(tag, True, touched):
            _refuse(connection, number, tag)
    _take_single(connection, run, single, touched)
    for one in touched:
        one.dispatch()


def _take_single(connection: AmqpConnection, number: int, tags: list[int], touched: Touched) -> None:
    channel = connection.channels.get(number)
    if channel is None or not tags:
        return
    if channel.transaction is None:
        unknown = channel.acknowledge_each(tags, touched)
    else:
        unknown = next((tag for tag in tags if not channel.acknowledge(tag, False, touched)), None)
    if unknown is not None:
        _refuse(connection, number, unknown)


def _refuse(connection: AmqpConnection, number: int, tag: int) -> None:
    connection.refuse(number, failed(f"unknown delivery tag {tag}"), BasicAck)
