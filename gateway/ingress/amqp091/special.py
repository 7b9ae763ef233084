"""Messages whose properties say something to the broker itself: who sent them, who gets copies, who answers.

Few messages have such properties; `essentials` tells which, so that the others cost nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.broker.amqp091.dead_lettering import COPIES_MAX, copied_keys
from gateway.broker.amqp091.refusals import TYPE_NAMES, failed
from gateway.broker.amqp091.replies import REPLY_TO
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.routing import RoutingEntry
from gateway.errors import LocalProtocolError
from gateway.ingress.amqp091.channel import AmqpChannel
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.model.properties import Headers, PropertySet, ValueType
from gateway.protocols.amqp091.codec import decode_properties, encode_basic_properties
from gateway.protocols.amqp091.translate import COPIES, content_properties

VISIBLE, BLIND = COPIES


class Copies:
    """The namespace of one message with copies: it goes where any of its keys leads."""

    def __init__(self, host: VirtualHost, exchange: str, keys: Sequence[str]) -> None:
        self._host = host
        self._exchange = exchange
        self._keys = keys

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """The message decides."""
        return None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """The queues; each has it once."""
        return tuple(self._host.route_keys(self._exchange, self._keys, message))

    @property
    def retained(self) -> None:
        """AMQP retains nothing."""


def look_closer(
    channel: AmqpChannel, entry: RoutingEntry, given: PropertySet
) -> tuple[RoutingEntry, PropertySet]:
    """Where a special message goes, and its properties as others may see them.

    Refused 406 for a user who is not the client's, copies that are no list, or a direct reply to a channel
    that does not consume them.
    """
    native = decode_properties(given.raw)
    principal = channel.connection.principal
    assert principal is not None
    if native.user_id is not None and native.user_id != principal.name:
        raise failed(
            f"user_id property set to '{native.user_id}' but authenticated user was '{principal.name}'"
        )
    changed = False
    if native.reply_to == REPLY_TO:
        if channel.requester is None:
            raise failed("fast reply consumer does not exist")
        native.reply_to = channel.requester.name
        changed = True
    copies = _copies(native.headers or (), VISIBLE) + _copies(native.headers or (), BLIND)
    if len(copies) > COPIES_MAX:
        raise failed(f"invalid message: more than {COPIES_MAX} keys in CC and BCC")
    if copies:
        address = entry.address
        host = channel.connection.host
        for key in copies:
            channel.connection.check_key("write", address.scope, key)
        keys = (address.name, *copies)
        entry = entry.chosen_by(Copies(host, address.scope, keys))
    if not changed:
        return entry, given
    try:
        octets = encode_basic_properties(native)
    except LocalProtocolError:
        raise failed("invalid message: its headers are nested too deep") from None
    return entry, content_properties(octets)


def _copies(headers: Headers, name: str) -> list[str]:
    found = dict(headers).get(name)
    if found is not None and found.type is not ValueType.ARRAY:
        kind = TYPE_NAMES[found.type]
        raise failed(f'invalid message: {{unacceptable_type_in_header,"{name}",{kind}}}')
    return copied_keys(headers, name)
