"""Trials of an AMQP 0-9-1 broker: actions that test the existence of objects and the right to publish."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gateway.cli.trials import Trial
from gateway.clients.amqp import AmqpClient
from gateway.errors import LinkError
from gateway.mapping.linter import Severity
from gateway.mapping.router import Subscriptions, Targets
from gateway.settings import AmqpLink, LinkSettings


def trials(link: LinkSettings, sources: Subscriptions, targets: Targets) -> Iterator[Trial]:
    """Yield trials that test whether the broker of a link has what the routes need.

    `sources` and `targets` are what the routes consume from and publish to. The trials check that each queue
    and exchange exists, and publish to each target exchange in a transaction that is rolled back. The right
    to consume from a queue is not tested, because a test would consume its messages.
    """
    assert isinstance(link, AmqpLink)
    missing = Severity.NOTE if link.declare == "create" else Severity.ERROR
    for queue in dict.fromkeys((*sources.queues, *targets.queues)):
        yield Trial(f"the queue {queue!r}", missing, _check_existence(queue=queue))
    bound = [scope for scope, _ in sources.bindings]
    for exchange in dict.fromkeys((*bound, *targets.scopes)):
        if exchange:
            yield Trial(f"the exchange {exchange!r}", missing, _check_existence(exchange=exchange))
    for exchange in targets.scopes:
        yield Trial(f"publish to the exchange {exchange!r}", Severity.ERROR, _publish(exchange))


def _check_existence(queue: str = "", exchange: str = "") -> Callable[[AmqpClient], object]:
    return lambda client: client.check_exists(queue=queue, exchange=exchange)


def _publish(exchange: str) -> Callable[[AmqpClient], object]:
    def act(client: AmqpClient) -> None:
        try:
            client.check_exists(exchange=exchange)
        except LinkError:
            return  # its own trial has reported that it does not exist
        client.try_publishing(exchange)

    return act
