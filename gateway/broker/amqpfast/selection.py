"""Message selectors of subscriptions and queries: the languages by MIME type (3.5.4).

`Application/JMS` (RFC 012), the default, is the selector language of selector.py. A name in a selector is
looked up among the headers, then among the fields of the head in upper case, then among the names that Java
has for them. `application/cel` is a condition like `when` in mapping files.

A message that a selector cannot decide on is not selected, and neither is one whose evaluation fails
unexpectedly: a bad selector harms only the owner of the subscription.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from gateway import clock, containment
from gateway.broker.amqpfast.selector import SelectorRefused, compile_selector
from gateway.broker.selection_work import Selects
from gateway.errors import MappingError, RemoteProtocolError
from gateway.mapping.conditions import Condition
from gateway.model.caches import make_room
from gateway.model.message import Message
from gateway.model.properties import Properties, Value, ValueType

JMS: Final = "application/jms"
CEL: Final = "application/cel"
PRIORITY_DEFAULT: Final = 0
HEADERS_FEW: Final = 16  # a message with more headers gets an index of names; below that a search is faster
NAMES: Final = "selector names"

CEL_STEPS_MAX: Final = 25_000  # about 5 ms for one message; conditions of the operator may take more
COMPILED_MAX: Final = 64  # compiled selectors in the cache, which makes equal selectors one object


class LanguageUnknown(SelectorRefused):
    """Error for the MIME type of a selector language that the gateway does not support."""


class SelectorCounters:
    """Counters of messages on which a selector in CEL could not decide."""

    __slots__ = ("undecided", "unparsable")

    def __init__(self) -> None:
        self.unparsable = 0
        self.undecided = 0


def selection(mime_type: str, data: bytes) -> Selects | None:
    """Return the predicate of a selector; None for an empty one, which selects all messages.

    `data` is the selector's text in UTF-8. Equal selectors usually share one object, which `SelectionWork`
    evaluates once per message. Raises LanguageUnknown for an unsupported MIME type, SelectorRefused for a
    text that is not valid in its language.
    """
    language = mime_type.lower() or JMS
    if not data:
        return None
    if language not in (JMS, CEL):
        raise LanguageUnknown(f"selectors of type {mime_type!r} are not implemented")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise SelectorRefused("the selector is not UTF-8") from None
    if not text.strip():
        return None
    found = _compiled.get((language, text))
    if found is None:
        found = _guarded(_jms(text) if language == JMS else _cel(text))
        make_room(_compiled, COMPILED_MAX)
        _compiled[language, text] = found
    return found


_compiled: Final[dict[tuple[str, str], Selects]] = {}


def _guarded(selects: Selects) -> Selects:
    def matches(message: Message) -> bool:
        try:
            return selects(message)
        except Exception as error:
            containment.contained("message", error)
            return False

    return matches


def _cel(text: str) -> Selects:
    counts = SelectorCounters()
    try:
        condition = Condition(text, (), CEL_STEPS_MAX)
    except MappingError as error:
        raise SelectorRefused(str(error)) from None
    return lambda message: condition.holds(message, {}, counts)


def _jms(text: str) -> Selects:
    selects = compile_selector(text)

    def matches(message: Message) -> bool:
        try:
            properties = message.properties
        except RemoteProtocolError:
            return False  # the sender encoded the properties wrongly, so none can be read
        return selects(_SelectorValues(message, properties))

    return matches


FIELDS: Final[dict[str, Callable[[Message, Properties], Any]]] = {
    "PERSISTENT": lambda message, properties: message.durable,
    "PRIORITY": lambda message, properties: properties.priority or PRIORITY_DEFAULT,
    "EXPIRATION": lambda message, properties: int(_expires(message)),
    "MIME_TYPE": lambda message, properties: properties.content_type,
    "ENCODING": lambda message, properties: properties.content_encoding,
    "IDENTIFIER": lambda message, properties: properties.message_id,
    "CORRELATION_ID": lambda message, properties: _text(properties.correlation),
    "REPLY_TO": lambda message, properties: properties.reply_to,
    "TYPE": lambda message, properties: properties.type,
    "TIMESTAMP": lambda message, properties: properties.timestamp,
    "JMSDeliveryMode": lambda message, properties: "PERSISTENT" if message.durable else "NON_PERSISTENT",
    "JMSPriority": lambda message, properties: properties.priority or PRIORITY_DEFAULT,
    "JMSMessageID": lambda message, properties: properties.message_id,
    "JMSCorrelationID": lambda message, properties: _text(properties.correlation),
    "JMSReplyTo": lambda message, properties: properties.reply_to,
    "JMSType": lambda message, properties: properties.type,
    "JMSTimestamp": lambda message, properties: (
        None if properties.timestamp is None else properties.timestamp * 1000
    ),
    "JMSExpiration": lambda message, properties: int(_expires(message) * 1000),
}
"""Names in selectors that stand for fields of the message instead of headers."""


def _expires(message: Message) -> float:
    """Return the POSIX time in seconds at which a message expires, 0 for never.

    `message.expires` is converted from the gateway's clock to the wall clock, which other programs use.
    """
    return message.expires + clock.wall_offset() if message.expires else 0.0


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")


class _SelectorValues:
    """Headers and fields of a message by name, which are read when a selector uses them."""

    __slots__ = ("_message", "_properties")

    def __init__(self, message: Message, properties: Properties) -> None:
        self._message = message
        self._properties = properties

    def get(self, name: str, /) -> Any:
        """Return the value of a header or field, or None if the message does not have it."""
        value = self._header(name)
        if value is None:
            read = FIELDS.get(name)
            return None if read is None else read(self._message, self._properties)
        if value.type is ValueType.DECIMAL:
            assert isinstance(value.value, Decimal)
            return float(value.value)
        return value.value if isinstance(value.value, str | int | float) else None

    def _header(self, name: str) -> Value | None:
        """Return the first header of that name, or None."""
        headers = self._properties.headers
        if len(headers) > HEADERS_FEW:
            forms = self._message.property_set.forms
            names: dict[str, Value] | None = forms.get(NAMES)
            if names is None:
                names = forms[NAMES] = dict(reversed(headers))
            return names.get(name)
        for header, value in headers:
            if header == name:
                return value
        return None
