"""Who is connected to the listeners, as the HTTP side wants to know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from gateway.admin import Connected, Consuming, Details, Door
from gateway.broker.mqtt.session import Session
from gateway.broker.queue import Consumer
from gateway.ingress.guest import Farewell, Guest
from gateway.ingress.listener import Listener
from gateway.settings import AmqpListener, Settings
from gateway.settings.amqp091 import RABBITMQ_VERSION


def dismiss(session: Session) -> None:
    """Say goodbye to the client of an MQTT session."""
    outlet: object = session.outlet
    if isinstance(outlet, Guest):
        outlet.shut_down(Farewell.DISMISSED)


def connected(listeners: Mapping[str, Listener]) -> Iterator[Connected]:
    """Every connection that has not begun to end. They may come and go while this is gone through."""
    for listener in listeners.values():
        for connection in list(listener.connections):
            stream, sender = connection.stream, connection.sender
            if not (stream.closed or stream.ending):
                entrance = listener.entrance(connection)
                yield Connected(
                    listener.name,
                    listener.stats.protocol,
                    sender.client,
                    sender.user,
                    stream.remote,
                    partial(connection.shut_down, Farewell.DISMISSED),
                    connection.virtual_host,
                    connection.channel_count,
                    connection.idle,
                    *connection.in_flight(),
                    "" if entrance is None else entrance.version,
                    None if entrance is None else entrance.since,
                    stream,
                    _details(listener, connection),
                )


class _Channel(Protocol):
    """On which something is consumed."""

    @property
    def number(self) -> int: ...
    @property
    def connection(self) -> Guest: ...


@runtime_checkable
class _Tagged(Protocol):
    """A consumer as RabbitMQ tells of one: a client's, by its tag, on a channel."""

    tag: str
    no_ack: bool
    prefetch: int

    @property
    def channel(self) -> _Channel: ...


def _details(listener: Listener, connection: Guest) -> Details:
    """Of one of its connections."""
    return Details(listener.host, listener.port, listener.front.tls is not None, *connection.agreed())


def consuming(consumer: Consumer) -> Consuming | None:
    """Who takes messages out of a queue, if that is a client with channels and tags."""
    if not isinstance(consumer, _Tagged):
        return None
    channel = consumer.channel
    return Consuming(
        consumer.tag,
        not consumer.no_ack,
        consumer.prefetch,
        channel.number,
        channel.connection.stream.remote,
        channel.connection.sender.user,
    )


def announced_version(settings: Settings, otherwise: str) -> str:
    """The version that the first listener of AMQP 0-9-1 announces; without one `otherwise`."""
    for listener in settings.listeners.values():
        if isinstance(listener, AmqpListener):
            return RABBITMQ_VERSION if listener.announce == "rabbitmq" else otherwise
    return otherwise


def doors(listeners: Mapping[str, Listener]) -> list[Door]:
    """Where clients may come in."""
    return [
        Door(one.name, one.stats.protocol, one.host, one.port, one.front.tls is not None)
        for one in listeners.values()
    ]


def revoke(listeners: Mapping[str, Listener], names: frozenset[str]) -> None:
    """Send off everybody who is connected as one of these users."""
    for listener in listeners.values():
        for connection in list(listener.connections):
            stream = connection.stream
            if connection.sender.user in names and not (stream.closed or stream.ending):
                try:
                    connection.shut_down(Farewell.REVOKED)
                except Exception as error:
                    stream.fail(error)
