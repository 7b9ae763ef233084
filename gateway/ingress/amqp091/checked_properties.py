"""Published messages whose properties affect routing or must be checked: user-id, reply-to, CC and BCC.

`essentials` detects the messages that have such properties, so that all others are published without this
code. The user-id is compared with the client's user. A direct reply-to is replaced by the name of the
channel's reply address. The keys in CC and BCC are added to the routing key; BCC is removed later, on
delivery.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.broker.amqp091.dead_letter_routing import COPIES_MAX, copied_keys
from gateway.broker.amqp091.refusals import TYPE_NAMES, precondition_failed
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


class CopiesNamespace:
    """Namespace for one message with CC or BCC: routes to the queues that any routing key matches."""

    def __init__(self, host: VirtualHost, exchange: str, keys: Sequence[str]) -> None:
        self._host = host
        self._exchange = exchange
        self._keys = keys

    def sinks(self, address: Address) -> tuple[Sink, ...] | None:
        """Return None: the receiving queues depend on the message, and not only on its address."""
        return None

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the queues that any of the routing keys matches, each queue once."""
        return tuple(self._host.route_keys(self._exchange, self._keys, message))

    @property
    def retained(self) -> None:
        """Receiver of retained messages: None, because AMQP has none."""


def resolve_special(
    channel: AmqpChannel, entry: RoutingEntry, properties: PropertySet
) -> tuple[RoutingEntry, PropertySet]:
    """Return the routing entry and the properties of a message with user-id, reply-to, CC or BCC.

    A direct reply-to is replaced by the channel's reply address. Raises AmqpRefused 406 if the user-id is not
    the client's user, if CC or BCC is not an array or has more than COPIES_MAX keys, if the headers cannot be
    re-encoded, or if a direct reply is requested on a channel that does not consume direct replies. Raises
    AmqpRefused 403 if the client may not write to a copied key.
    """
    native = decode_properties(properties.raw)
    principal = channel.connection.principal
    assert principal is not None
    if native.user_id is not None and native.user_id != principal.name:
        raise precondition_failed(
            f"user_id property set to '{native.user_id}' but authenticated user was '{principal.name}'"
        )
    changed = False
    if native.reply_to == REPLY_TO:
        if channel.requester is None:
            raise precondition_failed("fast reply consumer does not exist")
        native.reply_to = channel.requester.name
        changed = True
    copies = _copies(native.headers or (), VISIBLE) + _copies(native.headers or (), BLIND)
    if len(copies) > COPIES_MAX:
        raise precondition_failed(f"invalid message: more than {COPIES_MAX} keys in CC and BCC")
    if copies:
        address = entry.address
        host = channel.connection.host
        for key in copies:
            channel.connection.check_key("write", address.scope, key)
        keys = (address.name, *copies)
        entry = entry.with_namespace(CopiesNamespace(host, address.scope, keys))
    if not changed:
        return entry, properties
    try:
        data = encode_basic_properties(native)
    except LocalProtocolError:
        raise precondition_failed("invalid message: its headers are nested too deep") from None
    return entry, content_properties(data)


def _copies(headers: Headers, name: str) -> list[str]:
    """Return the routing keys in the header `name`, which is CC or BCC.

    Raises AmqpRefused 406 if the header is not an array.
    """
    found = dict(headers).get(name)
    if found is not None and found.type is not ValueType.ARRAY:
        kind = TYPE_NAMES[found.type]
        raise precondition_failed(f'invalid message: {{unacceptable_type_in_header,"{name}",{kind}}}')
    return copied_keys(headers, name)
