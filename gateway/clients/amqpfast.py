"""Blocking AMQP/Fast client for a broker that is given by a URL, with one channel.

Message bodies are held in memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.clients.wire import IN_FLIGHT, BrokerRefusal, ConnectionOptions, ReceivedMessage, Wire
from gateway.egress.amqpfast.deliveries import Assembly, JoinedMessage
from gateway.egress.amqpfast.login import (
    FOR_NOW,
    OF_DESTINATIONS,
    client_machine,
    open_for_sending,
    split_name,
)
from gateway.egress.amqpfast.sources import is_prefix
from gateway.errors import LinkError, RemoteProtocolError
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.dialect import AMQPFAST, SERVICES, fast_address
from gateway.protocols.amqpfast.events import (
    ChannelClosed,
    Closed,
    Fragment,
    HandleClosed,
    Notifies,
    NotifyRow,
    Opened,
    Replies,
)
from gateway.protocols.amqpfast.sender import Producer
from gateway.protocols.amqpfast.spec import DELIVERED, MESSAGE_BYTES_MAX, REDELIVERED, ReplyCode
from gateway.protocols.amqpfast.translate import encode_properties, essentials, head_properties

PREFETCH: Final = 100
HANDLES_MAX: Final = 100  # destinations whose handles stay open for sending
TOO_LARGE: Final = BrokerRefusal(
    "the head of the message does not fit into the server's frame-max", final=True
)
LOST: Final = BrokerRefusal("the handle was closed before the server replied", final=False)


class FastClient:
    """AMQP/Fast connection with one channel. Durable subscriptions belong to `client_name`."""

    def __init__(self, access: ConnectionOptions, *, client_name: str = "") -> None:
        """Connect to the broker that `access` describes, log in and open the channel.

        Raises LinkError if the broker is unreachable or refuses.
        """
        self._machine = client_machine(access.target, client_name)
        self._wire = Wire(access, self._machine, self._machine.tick)
        self._producers: dict[tuple[str, str], tuple[Producer, bytes, int]] = {}
        self._services: dict[int, str] = {}
        self._assembly = Assembly(MESSAGE_BYTES_MAX)
        self._oversized: JoinedMessage | None = None  # received, and skipped because it is too large
        try:
            self._wire.wait(Opened, Closed)
        except LinkError:
            self._wire.close_abruptly()
            raise
        self._wire.mark_open()
        self._channel = self._machine.open_channel(confirm=False)

    def publish_many(
        self, messages: Sequence[Message], *, in_flight: int = IN_FLIGHT
    ) -> dict[int, BrokerRefusal]:
        """Publish messages and wait for replies. Return the refused ones, as Client.publish_many defines.

        If the server closes a destination's handle, all messages in flight to that destination count as
        refused. They may be retried if there were several and the destination itself is not the reason,
        because only one of them has caused the close.
        """
        refused: dict[int, BrokerRefusal] = {}
        unanswered: dict[tuple[int, int], int] = {}  # position by handle and tag
        at = 0
        answers = self._wire.read_events()
        while at < len(messages) or unanswered:
            end = min(len(messages), at + in_flight - len(unanswered))
            self._send(messages, range(at, end), unanswered, refused)
            at = end
            self._wire.flush()
            if not unanswered:
                continue
            for event in next(answers):
                if isinstance(event, Replies):
                    for _, handle, tag, code, text in event.rows:
                        position = unanswered.pop((handle, tag), None)
                        if position is not None and code >= ReplyCode.MESSAGE_NOT_FOUND:
                            refused[position] = _refusal(code, text)
                elif isinstance(event, HandleClosed):
                    self._closed(event, unanswered, refused)
                elif isinstance(event, ChannelClosed | Closed):
                    raise LinkError(f"{event.text} ({event.reply_code})")
        return refused

    def _send(
        self,
        messages: Sequence[Message],
        positions: range,
        unanswered: dict[tuple[int, int], int],
        refused: dict[int, BrokerRefusal],
    ) -> None:
        """Send the messages at `positions`, and add them to `unanswered` by (handle, tag).

        Consecutive messages for the same destination are sent together. Messages that cannot be encoded are
        added to `refused` instead.
        """
        run: list[tuple[int, tuple[bytes, bytes, bytes]]] = []
        before: tuple[Producer, bytes, int] | None = None
        for position in positions:
            message = messages[position]
            try:
                head = encode_properties(message)
            except RemoteProtocolError as error:
                refused[position] = BrokerRefusal(str(error), final=True)
                continue
            found = self._producer(message.address)
            if before is not None and found is not before:
                _send_run(before, run, unanswered, refused)
                run = []
            before = found
            run.append((position, (found[1], head, message.body)))
        if before is not None:
            _send_run(before, run, unanswered, refused)

    def _producer(self, address: Address) -> tuple[Producer, bytes, int]:
        key = (address.scope, address.name)
        found = self._producers.get(key)
        if found is None:
            if len(self._producers) >= HANDLES_MAX:
                _, _, number = self._producers.pop(next(iter(self._producers)))
                self._machine.close_handle(number)
            number, name = open_for_sending(self._machine, self._channel, *key)
            found = self._producers[key] = (Producer(self._machine, number, confirm=True), name, number)
        return found

    def _closed(
        self,
        event: HandleClosed,
        unanswered: dict[tuple[int, int], int],
        refused: dict[int, BrokerRefusal],
    ) -> None:
        """Process HANDLE CLOSE from the server: move the handle's unanswered messages to `refused`.

        If several messages are affected and the destination is not the reason, each may be retried. The next
        message for the destination opens a new handle.
        """
        why = _refusal(event.reply_code, event.text)
        keys = [key for key in unanswered if key[0] == event.handle]
        if len(keys) > 1 and event.reply_code not in OF_DESTINATIONS:
            why = why._replace(final=False)  # only one of them is the cause: each may be retried alone
        for key in keys:
            refused[unanswered.pop(key)] = why
        for address, (_, _, number) in list(self._producers.items()):
            if number == event.handle:
                del self._producers[address]

    # Consuming.

    def listen(self, address_options: Mapping[str, str], qos: int) -> None:
        """Consume from the address in `address_options`, as Client.listen defines.

        The options are `service` and `destination`. `qos` has no effect.
        """
        self.consume(address_options.get("service", AMQPFAST.scope_default), address_options["destination"])

    def consume(
        self,
        service: str,
        name: str,
        *,
        identifier: str = "",
        prefetch: int = PREFETCH,
        selector: str = "",
        selector_type: str = "",
        unreliable: bool = False,
    ) -> None:
        """Consume the destination `name`; an empty name, or one that ends in a dot, is a prefix.

        A prefix stands for all destinations whose names begin with it. `identifier` makes the subscription of
        a topic durable. `prefetch` is the maximum number of unacknowledged messages. With `unreliable`, the
        server regards a message as acknowledged when it is sent. Raises LocalProtocolError if the command
        with its selector exceeds the server's frame-max.
        """
        begin, end = (name, "") if is_prefix(name) else split_name(service, name)
        opening = m.HandleOpen(self._channel, service_type=SERVICES[service], consumer=True, dest_name=begin)
        number = self._machine.open_handle(opening, confirm=False)
        self._services[number] = service
        command = m.HandleConsume(number, 0, prefetch, unreliable=unreliable, dest_name=end)
        command.identifier, command.selector, command.mime_type = identifier, selector.encode(), selector_type
        self._machine.send(command)
        self._wire.flush()

    def arrivals(self, seconds: float) -> list[ReceivedMessage]:
        """Return received messages after at most `seconds` seconds, as Client.arrivals defines.

        Raises LinkError for a message that is too large, after the messages before it have been returned. The
        large message and later ones are not acknowledged, so that the server requeues them when the
        connection is closed.
        """
        if self._oversized is not None:
            raise LinkError(_too_large(self._oversized, self._assembly.bytes_max))
        found: list[ReceivedMessage] = []
        for event in self._wire.turn(seconds):
            if self._oversized is not None:
                break
            if isinstance(event, Notifies):
                found += [self._arrival(row) for row in event.rows if row[2] & DELIVERED]
            elif isinstance(event, Fragment):
                joined = self._assembly.take(event)
                if joined is None or not joined.bits & DELIVERED:
                    continue
                if joined.body is None:
                    self._oversized = joined
                    continue
                row = (joined.handle, joined.number, joined.bits, joined.head, joined.body, joined.name)
                found.append(self._arrival(row))
            elif isinstance(event, HandleClosed | ChannelClosed | Closed):
                raise LinkError(f"{event.text} ({event.reply_code})")
        if self._machine.timed_out(time.monotonic()):
            raise LinkError("the server is silent")
        if self._oversized is not None and not found:
            raise LinkError(_too_large(self._oversized, self._assembly.bytes_max))
        return found

    def _arrival(self, row: NotifyRow) -> ReceivedMessage:
        handle, number, bits, head, body, name = row
        properties = head_properties(head)
        parsed = essentials(properties)
        address = fast_address(self._services[handle], name.decode())
        message = Message(
            *(address, body, properties, int(parsed.durable), parsed.durable, parsed.retain),
            *(parsed.expires, parsed.hops),
        )
        return ReceivedMessage(message, number, bits & REDELIVERED != 0)

    def pause_reading(self, seconds: float) -> None:
        """Stay connected without reading for `seconds` seconds, as Client.pause_reading defines."""
        self._wire.pause_reading(seconds)

    def acknowledge(self, arrivals: Sequence[ReceivedMessage]) -> None:
        """Acknowledge these messages with one CHANNEL ACK, which is cumulative (3.3.8)."""
        if arrivals:
            self._machine.ack(self._channel, arrivals[-1].token)
            self._wire.flush()

    def close(self) -> None:
        """Send CONNECTION CLOSE and close the socket without awaiting the response."""
        self._machine.close()
        self._wire.close()

    def close_abruptly(self) -> None:
        """Close the socket at once, as Client.close_abruptly defines."""
        self._wire.close_abruptly()


def _send_run(
    producer: tuple[Producer, bytes, int],
    run: Sequence[tuple[int, tuple[bytes, bytes, bytes]]],
    unanswered: dict[tuple[int, int], int],
    refused: dict[int, BrokerRefusal],
) -> None:
    machine, _, handle = producer
    tags = machine.send_many([row for _, row in run])
    for (position, _), tag in zip(run, tags, strict=True):
        if tag > 0:
            unanswered[handle, tag] = position
        else:
            refused[position] = TOO_LARGE if machine.usable else LOST


def _too_large(message: JoinedMessage, bytes_max: int) -> str:
    return (
        f"a message of {message.name.decode()!r} has {message.size} bytes, but this client"
        f" accepts at most {bytes_max}. It remains there; read it with another client, or delete"
        " it"
    )


def _refusal(code: int, text: str) -> BrokerRefusal:
    return BrokerRefusal(f"{text} ({code})".lstrip(), code not in FOR_NOW)
