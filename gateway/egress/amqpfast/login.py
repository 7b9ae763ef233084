"""Code that the link and the client share: login, names of destinations, and outcomes of closes.

A name is split at its last dot between a handle and its commands, because a name that a handle has as a whole
may also mean every destination that begins with it (3.5.2.3).
"""

from __future__ import annotations

from typing import Final

from gateway.model.outcome import Outcome, Verdict
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.codec import encode_credentials
from gateway.protocols.amqpfast.dialect import SERVICES
from gateway.protocols.amqpfast.spec import FRAME_MAX, MESSAGE_BYTES_MAX, PLAIN, ReplyCode
from gateway.protocols.amqpfast.translate import refusal
from gateway.settings.endpoints import LinkUrl

GUEST: Final = "guest"  # user and password if the URL names none, as in AMQP 0-9-1

OF_DESTINATIONS: Final = frozenset(
    (
        *(ReplyCode.SERVICE_TYPE_NOT_VALID, ReplyCode.ACCESS_REFUSED, ReplyCode.DESTINATION_NOT_FOUND),
        *(ReplyCode.BAD_FIELD_VALUE, ReplyCode.INSUFFICIENT_RESOURCES, ReplyCode.TEMPORARILY_FORBIDDEN),
        ReplyCode.NOT_IMPLEMENTED,
    )
)
"""Codes that concern the destination; the others concern the message or the client."""
FOR_NOW: Final = frozenset((ReplyCode.INSUFFICIENT_RESOURCES, ReplyCode.TEMPORARILY_FORBIDDEN))


def outcome_of(code: int, text: str) -> Outcome:
    """Return the outcome of a message that caused the server to close a handle, a channel or the connection.

    `code` and `text` are those of the close.
    """
    verdict = Verdict.RELEASED if code in FOR_NOW else Verdict.REJECTED
    return Outcome(verdict, refusal(code), f"{code} {text}".rstrip())


def client_machine(
    target: LinkUrl,
    client_name: str,
    *,
    frame_max: int = FRAME_MAX,
    channel_max: int = 0,
    heartbeat: int = 30,
    pings: bool = True,
    message_bytes_max: int = MESSAGE_BYTES_MAX,
    bounded: bool = False,
) -> ClientConnection:
    """Return the protocol machine of a client connection to `target`.

    Sizes are in bytes, `heartbeat` is in seconds; `channel_max` 0 means no limit. `pings` allows to send
    PING, `bounded` limits the work of each call of `receive_data`; see ClientConnection.
    """
    return ClientConnection(
        mechanism=PLAIN,
        responses=encode_credentials(target.username or GUEST, target.password or GUEST),
        virtual_path=target.virtual_host,
        client_name=client_name,
        frame_max=frame_max,
        channel_max=channel_max,
        heartbeat=heartbeat,
        pings=pings,
        message_bytes_max=message_bytes_max,
        bounded=bounded,
    )


def split_name(service: str, name: str) -> tuple[str, str]:
    """Split a destination's name at its last dot, into the part for HANDLE OPEN and that for commands.

    The first part includes the dot. It is "" for a peer service, whose name is not split.
    """
    begin, dot, end = name.rpartition(".")
    return (begin + dot, end) if end and service != "peer" else ("", name)


def open_for_sending(machine: ClientConnection, channel: int, service: str, name: str) -> tuple[int, bytes]:
    """Open a handle to send to one destination. Return its number and the name to use in each SEND.

    Raises LocalProtocolError if no handle is available now.
    """
    begin, end = split_name(service, name)
    command = m.HandleOpen(channel, service_type=SERVICES[service], producer=True, dest_name=begin)
    return machine.open_handle(command, confirm=False), end.encode()
