"""Connections in any state, and the wire between two of them."""

from __future__ import annotations

from typing import Any

from gateway.protocols.mqtt.client import ClientConnection
from gateway.protocols.mqtt.connection import Connection, State
from gateway.protocols.mqtt.packets import (
    Connack,
    Connect,
)
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import Property as P
from gateway.protocols.mqtt.spec import Version
from gateway.protocols.mqtt.writers import encode

V5, V311 = Version.V5, Version.V311
METHOD = {P.AUTHENTICATION_METHOD: "m"}


def server(state: State, version: Version = V5, **limits: Any) -> ServerConnection:
    """A server connection in `state`, with nothing left to send."""
    connection = ServerConnection(**{"packet_bytes_max": 1 << 20, **limits})
    if state is State.START:
        return connection
    with_auth = version is V5 and state in (State.AUTHENTICATING, State.OPEN)
    connect = Connect("c", version, properties=METHOD if with_auth else {})
    connection.receive_data(encode(connect, version), 0.0)
    if state is State.OPEN:
        connection.send_connack()
    if state is State.CLOSED:
        connection.send_disconnect()
    assert connection.state is state
    connection.data_to_send()
    return connection


def client(state: State, version: Version = V5, **limits: Any) -> ClientConnection:
    connection = ClientConnection(**{"packet_bytes_max": 1 << 20, **limits})
    if state is not State.START:
        properties = METHOD if version is V5 else {}
        connection.connect(Connect("c", version, keep_alive=10, properties=properties), 0.0)
    if state in (State.OPEN, State.CLOSED):
        connection.receive_data(encode(Connack(), version), 0.0)
    if state is State.CLOSED:
        connection.disconnect()
    connection.data_to_send()
    return connection


def small_client(maximum: int, **more: int) -> ServerConnection:
    connection = server(State.START)
    properties = {P.MAXIMUM_PACKET_SIZE: maximum, **{P[name]: value for name, value in more.items()}}
    connection.receive_data(encode(Connect("c", properties=properties), V5), 0.0)
    connection.send_connack()
    connection.data_to_send()
    return connection


def waits(connection: Connection) -> bool:
    """`pending`, asked anew each time."""
    return connection.pending


def exchange(one: Connection, other: Connection) -> tuple[list[Any], list[Any]]:
    """Carry bytes between two ends until both are silent; what each of them saw."""
    seen: tuple[list[Any], list[Any]] = ([], [])
    while (there := one.data_to_send()) or (here := other.data_to_send()):
        if there:
            seen[1].extend(other.receive_data(there, 1.0))
        else:
            seen[0].extend(one.receive_data(here, 1.0))
    return seen
