"""A virtual host with shorter words, for the tests of AMQP's queues and exchanges."""

from __future__ import annotations

from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.pressure import FullQueues
from gateway.model.message import Message
from gateway.model.properties import Headers, Properties, Value, ValueType, property_set
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.settings import Limits

ME, OTHER = object(), object()
NONE: Headers = ()


def integer(value: int) -> Value:
    return Value(ValueType.INT32, value)


class Host(VirtualHost):
    """A virtual host that counts changes, with shorter words for the tests."""

    def __init__(self, *, full_queues: FullQueues | None = None, **limits: int) -> None:
        self.changes = 0
        super().__init__("/", self._note, limits=Limits(**limits), full_queues=full_queues)

    def _note(self) -> None:
        self.changes += 1

    def make(self, name: str, *arguments: tuple[str, Value], auto_delete: bool = False) -> AmqpQueue:
        return self.declare_queue(
            name, ME, durable=False, exclusive=False, auto_delete=auto_delete, arguments=arguments
        )

    def exchange_of(self, name: str, kind: str, *, auto_delete: bool = False, internal: bool = False) -> None:
        self.declare_exchange(
            name, kind, durable=False, auto_delete=auto_delete, internal=internal, arguments=NONE
        )

    def reached(self, exchange: str, key: str, headers: Headers = NONE) -> set[str]:
        address = amqp_address(exchange, key)
        sinks = self.sinks(address)
        if sinks is None:
            sinks = self.choose(Message(address, b"", property_set(Properties(headers=headers))))
        names = [sink.name for sink in sinks if isinstance(sink, AmqpQueue)]
        assert len(names) == len(set(names))
        return set(names)
