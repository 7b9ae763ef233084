"""Logins of real clients, and what they are told: 0, or the code of the protocol."""

from __future__ import annotations

import re
import ssl
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import paho.mqtt.client as paho
import pika
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from gateway.clients.amqpfast import FastClient
from gateway.clients.wire import ConnectionOptions
from gateway.errors import LinkError
from gateway.protocols.amqpfast.events import Closed, Opened
from gateway.settings.endpoints import LinkUrl
from tests.ingress.amqpfast.client import Fast
from tests.interop.gateway_fixture import LOOPBACK

PROTOCOLS: Final = ("mqtt", "amqp091", "amqpfast")
PATIENCE_SECS: Final = 10.0
Files = tuple[Path, Path]


def trusting(authority: Path, own: Files | None) -> ssl.SSLContext:
    """A client's TLS, with its own certificate if it has one."""
    context = ssl.create_default_context(cafile=authority)
    if own is not None:
        context.load_cert_chain(*own)
    return context


def paho_login(
    port: int, user: str | None, password: str, tls: ssl.SSLContext | None = None, client_id: str = "c"
) -> int:
    """By paho, MQTT 5."""
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5)
    found: list[ReasonCode] = []
    client.on_connect = lambda _client, _data, _flags, reason, _properties: found.append(reason)
    if user is not None or password:
        client.username_pw_set(user, password or None)
    if tls is not None:
        client.tls_set_context(tls)
    client.connect(LOOPBACK, port)
    end = time.monotonic() + PATIENCE_SECS
    while not found and time.monotonic() < end:
        client.loop(PATIENCE_SECS)
    client.disconnect()
    client.loop(0.1)
    return int(found[0].value)


def pika_parameters(
    port: int, user: str | None, password: str, tls: ssl.SSLContext | None = None
) -> pika.ConnectionParameters:
    """For a connection of pika; without a name it is that of the certificate."""
    return pika.ConnectionParameters(
        LOOPBACK,
        port,
        credentials=pika.credentials.ExternalCredentials()
        if user is None
        else pika.PlainCredentials(user, password),
        ssl_options=None if tls is None else pika.SSLOptions(tls, LOOPBACK),
        connection_attempts=1,
        socket_timeout=PATIENCE_SECS,
    )


def pika_login(
    port: int, user: str | None, password: str, tls: ssl.SSLContext | None = None, client_id: str = ""
) -> int:
    """By pika."""
    try:
        connection = pika.BlockingConnection(pika_parameters(port, user, password, tls))
    except pika.exceptions.ProbableAuthenticationError as error:
        return int(re.findall(r"\((\d{3})\)", str(error))[0])
    except pika.exceptions.ConnectionClosedByBroker as error:
        return int(error.reply_code)
    except pika.exceptions.AuthenticationError:
        return -1  # EXTERNAL is not even offered
    connection.close()
    return 0


class _At(NamedTuple):
    """A gateway of which a port is known."""

    number: int

    def port(self, listener: str) -> int:
        """It."""
        return self.number


def nameless_fast_login(port: int, tls: ssl.SSLContext | None) -> int:
    """AMQP/Fast without a name, which the client never is: it says guest."""
    with Fast(_At(port), responses=(), tls=tls) as client:
        while True:
            event = client.next(object)
            if isinstance(event, Opened):
                return 0
            if isinstance(event, Closed):
                return int(event.reply_code)


def fast_login(
    port: int, user: str | None, password: str, files: tuple[Path, Files | None] | None = None
) -> int:
    """By the AMQP/Fast client."""
    authority, own = files or (None, None)
    target = LinkUrl("amqpfast", files is not None, LOOPBACK, port, "/", user or "", password)
    pair: Any = (None, None) if own is None else tuple(map(str, own))
    try:
        FastClient(ConnectionOptions(target, PATIENCE_SECS, authority and str(authority), *pair)).close()
    except LinkError as error:
        return int(re.findall(r"\b([345]\d\d)\b", str(error))[0])
    return 0


def log_in(
    protocol: str,
    port: int,
    user: str | None,
    password: str,
    files: tuple[Path, Files | None] | None = None,
    client_id: str = "c",
) -> int:
    """By the client of that protocol. `files`: the authority to trust, and an own certificate."""
    if protocol == "amqpfast" and user is None:
        return nameless_fast_login(port, None if files is None else trusting(*files))
    if protocol == "amqpfast":
        return fast_login(port, user, password, files)
    tls = None if files is None else trusting(*files)
    login = paho_login if protocol == "mqtt" else pika_login
    return login(port, user, password, tls, client_id)
