"""What selects messages for a subscription or a query: the languages by their MIME type (3.5.4).

`Application/JMS` (RFC 012; also when a client names none) is the selector language of selector.py: names are
those of headers, then those of the head's fields in upper case, then the names that Java has for them.
`application/cel` is a condition as mapping files have them in `when`.

What cannot be decided about a message does not select it, nor does what nobody foresaw: a subscription costs
nobody but its owner.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any, Final

from gateway import containment
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
HEADERS_FEW: Final = 16  # of more the names are remembered: each name in a selector looks for its own
NAMES: Final = "selector names"

CEL_STEPS_MAX: Final = 25_000  # some 5 ms for one message; conditions of the operator's may take more
COMPILED_MAX: Final = 64  # selectors that are remembered, so that equal ones are one


class LanguageUnknown(SelectorRefused):
    """A MIME type that no selector language of ours has."""


class Undecided:
    """Counts what conditions could not decide."""

    __slots__ = ("undecided", "unparsable")

    def __init__(self) -> None:
        self.unparsable = 0
        self.undecided = 0


def selection(mime_type: str, octets: bytes) -> Selects | None:
    """What selects messages; None for an empty selector, which selects all. Equal selectors are mostly one
    object, which `SelectionWork` evaluates once for a message.

    Raises LanguageUnknown, or SelectorRefused for a text that is no selector of its language.
    """
    language = mime_type.lower() or JMS
    if not octets:
        return None
    if language not in (JMS, CEL):
        raise LanguageUnknown(f"selectors of type {mime_type!r} are not implemented")
    try:
        text = octets.decode()
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
    def look(message: Message) -> bool:
        try:
            return selects(message)
        except Exception as error:
            containment.contained("message", error)
            return False

    return look


def _cel(text: str) -> Selects:
    counts = Undecided()
    try:
        condition = Condition(text, (), CEL_STEPS_MAX)
    except MappingError as error:
        raise SelectorRefused(str(error)) from None
    return lambda message: condition.holds(message, {}, counts)


def _jms(text: str) -> Selects:
    selects = compile_selector(text)

    def look(message: Message) -> bool:
        try:
            properties = message.properties
        except RemoteProtocolError:
            return False  # its sender malformed it, so it says nothing
        return selects(_SelectorValues(message, properties))

    return look


FIELDS: Final[dict[str, Callable[[Message, Properties], Any]]] = {
    "PERSISTENT": lambda message, given: message.durable,
    "PRIORITY": lambda message, given: given.priority or PRIORITY_DEFAULT,
    "EXPIRATION": lambda message, given: int(message.expires),
    "MIME_TYPE": lambda message, given: given.content_type,
    "ENCODING": lambda message, given: given.content_encoding,
    "IDENTIFIER": lambda message, given: given.message_id,
    "CORRELATION_ID": lambda message, given: _text(given.correlation),
    "REPLY_TO": lambda message, given: given.reply_to,
    "TYPE": lambda message, given: given.type,
    "TIMESTAMP": lambda message, given: given.timestamp,
    "JMSDeliveryMode": lambda message, given: "PERSISTENT" if message.durable else "NON_PERSISTENT",
    "JMSPriority": lambda message, given: given.priority or PRIORITY_DEFAULT,
    "JMSMessageID": lambda message, given: given.message_id,
    "JMSCorrelationID": lambda message, given: _text(given.correlation),
    "JMSReplyTo": lambda message, given: given.reply_to,
    "JMSType": lambda message, given: given.type,
    "JMSTimestamp": lambda message, given: None if given.timestamp is None else given.timestamp * 1000,
    "JMSExpiration": lambda message, given: int(message.expires * 1000),
}
"""Names that are no headers."""


def _text(octets: bytes | None) -> str | None:
    return None if octets is None else octets.decode(errors="replace")


class _SelectorValues:
    """What a message says, by name, looked up when a selector asks."""

    __slots__ = ("_message", "_properties")

    def __init__(self, message: Message, properties: Properties) -> None:
        self._message = message
        self._properties = properties

    def get(self, name: str, /) -> Any:
        """The value of a header or field; None when the message does not say it."""
        value = self._header(name)
        if value is None:
            read = FIELDS.get(name)
            return None if read is None else read(self._message, self._properties)
        if value.type is ValueType.DECIMAL:
            assert isinstance(value.value, Decimal)
            return float(value.value)
        return value.value if isinstance(value.value, str | int | float) else None

    def _header(self, name: str) -> Value | None:
        """The first header of that name."""
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
