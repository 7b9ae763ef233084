"""Who is connected to the listeners, as the HTTP side wants to know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from gateway.admin import Connected, Consuming, Details, Door
from gateway.broker.mqtt.session import Session
from gateway.broker.queue import Consumer
from gateway.engine.relay import RelayedConnection
from gateway.ingress.amqp091.channel import AmqpConsumer
from gateway.ingress.amqp091.connection import AmqpConnection
from gateway.ingress.amqpfast.connection import FastConnection
from gateway.ingress.guests import Connection, Farewell
from gateway.ingress.listener import Listener
from gateway.ingress.mqtt.connection import MqttConnection


def dismiss(session: Session) -> None:
    """Say goodbye to the client of an MQTT session."""
    if isinstance(session.outlet, MqttConnection):
        session.outlet.shut_down(Farewell.DISMISSED)


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
                    *_worlds(connection),
                    connection.idle,
                    *connection.in_flight(),
                    "" if entrance is None else entrance.version,
                    None if entrance is None else entrance.since,
                    stream,
                    _details(listener, connection),
                )


def _worlds(connection: Connection) -> tuple[str, int]:
    """The virtual host of a connection, and how many channels it has."""
    if isinstance(connection, AmqpConnection | FastConnection):
        return connection.host.name, len(connection.channels)
    if isinstance(connection, RelayedConnection):
        return connection.host_name, len(connection.channels)
    return "", 0


def _details(listener: Listener, connection: Connection) -> Details:
    """Of one of its connections."""
    at = Details(listener.host, listener.port, listener.front.tls is not None)
    if not isinstance(connection, AmqpConnection):
        return at
    machine = connection.machine
    return at._replace(
        client_properties=connection.client_properties,
        frame_max=machine.frame_max,
        channel_max=machine.channel_max,
        timeout=machine.heartbeat,
    )


def consuming(consumer: Consumer) -> Consuming | None:
    """Who takes messages out of a queue, if that is a client of AMQP 0-9-1."""
    if not isinstance(consumer, AmqpConsumer):
        return None
    channel, connection = consumer.channel, consumer.channel.connection
    return Consuming(
        consumer.tag,
        not consumer.no_ack,
        consumer.prefetch,
        channel.number,
        connection.stream.remote,
        connection.sender.user,
    )


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
