"""Views of connected clients for the HTTP interface, and the closing of their connections.

The functions read listeners and connections and return plain records of `gateway/admin`, which knows no
listeners itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from gateway.admin import ConnectedClient, ConnectionDetails, ConsumerDetails, RabbitListener
from gateway.broker.mqtt.session import Session
from gateway.broker.queue import Consumer
from gateway.ingress.client import CloseReason, IngressClient
from gateway.ingress.listener import Listener
from gateway.settings import AmqpListener, Settings
from gateway.settings.amqp091 import RABBITMQ_VERSION


def dismiss(session: Session) -> None:
    """Disconnect the client of an MQTT session, if it is connected."""
    outlet: object = session.outlet
    if isinstance(outlet, IngressClient):
        outlet.shut_down(CloseReason.DISMISSED)


def connected(listeners: Mapping[str, Listener]) -> Iterator[ConnectedClient]:
    """Yield one record (`ConnectedClient`) for each client connection that is not closing.

    Connections may open and close during the iteration.
    """
    for listener in listeners.values():
        for connection in list(listener.connections):
            stream, sender = connection.stream, connection.sender
            if not (stream.closed or stream.ending):
                entrance = listener.admission_of(connection)
                yield ConnectedClient(
                    listener.name,
                    listener.stats.protocol,
                    sender.client,
                    sender.user,
                    stream.remote,
                    partial(connection.shut_down, CloseReason.DISMISSED),
                    connection.virtual_host,
                    connection.channel_count,
                    connection.idle,
                    *connection.in_flight(),
                    "" if entrance is None else entrance.version,
                    None if entrance is None else entrance.admitted_at,
                    stream,
                    _details(listener, connection),
                )


class _Channel(Protocol):
    """AMQP channel of a client, with the attributes that `consuming` reads."""

    @property
    def number(self) -> int: ...
    @property
    def connection(self) -> IngressClient: ...


@runtime_checkable
class _AmqpConsumer(Protocol):
    """Consumer of an AMQP 0-9-1 client, with the attributes that `consuming` reads."""

    tag: str
    no_ack: bool
    prefetch: int
    outstanding: int

    @property
    def channel(self) -> _Channel: ...


class _Handle(Protocol):
    """AMQP/Fast handle of a client, with the attributes that `consuming` reads."""

    number: int

    @property
    def channel(self) -> _Channel: ...


@runtime_checkable
class _FastConsumer(Protocol):
    """Consumer of an AMQP/Fast client, with the attributes that `consuming` reads."""

    unreliable: bool
    prefetch: int
    outstanding: int

    @property
    def handle(self) -> _Handle: ...


def _details(listener: Listener, connection: IngressClient) -> ConnectionDetails:
    """Return the listener's address, whether it uses TLS, and the values that the client has negotiated."""
    return ConnectionDetails(
        listener.host, listener.port, listener.front.tls is not None, *connection.negotiated()
    )


def consuming(consumer: Consumer) -> ConsumerDetails | None:
    """Return a record of a queue's consumer for the HTTP interface.

    Return None if the consumer does not belong to a client of an AMQP 0-9-1 or AMQP/Fast listener.
    """
    if isinstance(consumer, _AmqpConsumer):
        tag, acknowledges, channel = consumer.tag, not consumer.no_ack, consumer.channel
    elif isinstance(consumer, _FastConsumer):
        handle = consumer.handle
        tag, acknowledges, channel = str(handle.number), not consumer.unreliable, handle.channel
    else:
        return None
    return ConsumerDetails(
        tag,
        acknowledges,
        consumer.prefetch,
        consumer.outstanding,
        channel.number,
        channel.connection.sender,
    )


def announced_version(settings: Settings, otherwise: str) -> str:
    """Return the broker version that the gateway reports to programs written for RabbitMQ.

    Return RABBITMQ_VERSION if the first AMQP 0-9-1 listener has `announce: rabbitmq`. Return `otherwise` if
    that listener has `announce: gateway`, or if there is no such listener.
    """
    for listener in settings.listeners.values():
        if isinstance(listener, AmqpListener):
            return RABBITMQ_VERSION if listener.announce == "rabbitmq" else otherwise
    return otherwise


def listener_addresses(listeners: Mapping[str, Listener]) -> list[RabbitListener]:
    """Return a record of each listener for RabbitMQ's HTTP API: name, protocol, host, port and use of TLS."""
    return [
        RabbitListener(one.name, one.stats.protocol, one.host, one.port, one.front.tls is not None)
        for one in listeners.values()
    ]


def revoke(listeners: Mapping[str, Listener], names: frozenset[str]) -> None:
    """Disconnect all clients that are logged in as one of the users `names`."""
    for listener in listeners.values():
        for connection in list(listener.connections):
            stream = connection.stream
            if connection.sender.user in names and not (stream.closed or stream.ending):
                try:
                    connection.shut_down(CloseReason.REVOKED)
                except Exception as error:
                    stream.fail(error)
