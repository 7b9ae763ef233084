"""Who is connected to the listeners, as the HTTP side wants to know it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from gateway.admin import Connected
from gateway.broker.mqtt.session import Session
from gateway.ingress.guest import Farewell, Guest
from gateway.ingress.listener import Listener


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
                )


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
