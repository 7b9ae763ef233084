"""Section `declare`: AMQP 0-9-1 exchanges, queues and bindings that the embedded broker declares at start.

The keys are those of RabbitMQ's `definitions.json`, so that entries of such a file can be copied unchanged.
This module checks only what no broker accepts, such as overlong names and untyped values. The broker itself
checks exchange types and the meaning of arguments when it declares.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from gateway.model.properties import NESTING_MAX, Headers, Value, ValueType, fits, string
from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section

# Limit of names, routing keys and argument names, which are short strings on the wire.
SHORT_BYTES_MAX: Final = 255


class Origin(NamedTuple):
    """Place where a configuration key is set.

    `file` is the path of a file, or the name of an environment variable. `line` and `column` start at 1; 0
    means that they are unknown.
    """

    file: str = ""
    line: int = 0
    column: int = 0


def _check_short_string(text: str) -> str:
    if (byte_count := len(text.encode())) > SHORT_BYTES_MAX:
        raise ValueError(f"{byte_count} bytes; the maximum is {SHORT_BYTES_MAX}")
    return text


def _name(text: str) -> str:
    if set(text) & set("\r\n"):
        raise ValueError(f"{text!r} contains a line end, which names of clients never have; remove it")
    return _check_short_string(text)


def _arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    headers(arguments)
    return arguments


def headers(arguments: dict[str, Any]) -> Headers:
    """Convert the arguments of a declaration to AMQP headers.

    The values get the AMQP types that RabbitMQ uses for values of a definitions file. Raises ValueError for a
    value without an AMQP type (such as a date of YAML, or a number of more than 64 bits), for a name that is
    too long, and for tables that are nested too deeply.
    """
    typed = Value(
        ValueType.TABLE, tuple((_check_short_string(name), _typed(one)) for name, one in arguments.items())
    )
    if not fits(typed):
        raise ValueError("arguments: a number exceeds 64 bits, or tables are nested too deeply")
    return tuple(typed.value)


def _typed(value: Any, depth: int = 0) -> Value:
    """Convert a Python value to a value with an AMQP type.

    `depth` is the number of tables and lists that contain the value. Raises ValueError for a value without an
    AMQP type.
    """
    if depth > NESTING_MAX:
        raise ValueError("arguments: tables are nested too deeply")
    if isinstance(value, bool):
        return Value(ValueType.BOOL, value)
    if isinstance(value, int):
        return Value(ValueType.INT64, value)
    if isinstance(value, float):
        return Value(ValueType.DOUBLE, value)
    if isinstance(value, str):
        return string(value)
    if value is None:
        return Value(ValueType.VOID, None)
    if isinstance(value, list | tuple):
        return Value(ValueType.ARRAY, tuple(_typed(one, depth + 1) for one in value))
    if isinstance(value, dict):
        return Value(
            ValueType.TABLE,
            tuple((_check_short_string(str(name)), _typed(one, depth + 1)) for name, one in value.items()),
        )
    raise ValueError(f"{value!r} is not a valid argument value; put it in quotes to make it a text")


Name = Annotated[str, Field(min_length=1), AfterValidator(_name)]
Arguments = Annotated[dict[str, Any], AfterValidator(_arguments)]


class DeclaredExchange(Section):
    """Exchange that the embedded broker declares at start, with the fields of a client's declaration."""

    name: Name
    """Name of the exchange. Names with `amq.` are reserved: those exchanges exist anyway."""
    type: Literal["direct", "fanout", "topic", "headers", "x-consistent-hash", "x-delayed-message"]
    """Exchange type, which decides how messages are routed to bindings."""
    vhost: str | None = None
    """Virtual host. Absent: the first one of the AMQP 0-9-1 listeners, to which routes belong."""
    durable: bool = True
    """True if the exchange, and its bindings to durable queues and exchanges, are also stored on disk."""
    auto_delete: bool = False
    """True if the exchange is deleted with its last binding, until the next start declares it again."""
    internal: bool = False
    """True if clients may not publish to it."""
    arguments: Arguments = Field({})
    """Arguments: `alternate-exchange`; for an `x-delayed-message` exchange `x-delayed-type`; for an
    `x-consistent-hash` exchange `hash-header` or `hash-property`. Others have no effect."""


class DeclaredQueue(Section):
    """Queue that the embedded broker declares at start, with the fields of a client's declaration.

    A declared queue is never exclusive, because an exclusive queue belongs to a connection.
    """

    name: Name
    """Name of the queue. Names with `amq.` are reserved for the broker."""
    vhost: str | None = None
    """Virtual host. Absent: the first one of the AMQP 0-9-1 listeners, to which routes belong."""
    durable: bool = True
    """True if the queue and its persistent messages are stored on disk."""
    auto_delete: bool = False
    """True if the queue is deleted with its last consumer, until the next start declares it again."""
    arguments: Arguments = Field({})
    """Arguments: `x-queue-type`, `x-message-ttl`, `x-max-length` and the others that clients may send."""


class DeclaredBinding(Section):
    """Binding that the embedded broker declares at start.

    Source and destination must be declared as well, or be `amq.` exchanges.
    """

    source: Name
    """Source exchange. The default exchange needs no bindings: it routes to every queue by the queue's name.
    """
    destination: Name
    """Queue or exchange that receives the messages."""
    destination_type: Literal["queue", "exchange"] = "queue"
    """Kind of the destination."""
    vhost: str | None = None
    """Virtual host of both ends. Absent: the first one of the AMQP 0-9-1 listeners, to which routes belong.
    """
    routing_key: Annotated[str, AfterValidator(_check_short_string)] = ""
    """Binding key; for a topic exchange a pattern with `*` and `#`."""
    arguments: Arguments = Field({})
    """Arguments. For a headers exchange: the headers to match, and `x-match`."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Declare(Section):
    """AMQP 0-9-1 definitions that are declared before links consume and listeners accept connections."""

    definitions: Annotated[
        tuple[FilePath, ...],
        Strict(False),
        BeforeValidator(_listed, json_schema_input_type=FilePath | list[FilePath]),
    ] = ()
    """Definition files that RabbitMQ has exported (`rabbitmqctl export_definitions`), relative to the working
    directory. A single file needs no list."""
    users: bool = False
    """True if users of `definitions` are imported, with their password hashes, permissions and topic
    permissions, and AMQP listeners without virtual hosts get those of `definitions`. `users` of this
    configuration take precedence."""
    policies: bool = False
    """True if policies of `definitions` are imported, as far as they set queue length, expiry, overflow,
    dead-lettering, the delivery limit of queues, or the alternate exchange of exchanges."""
    exchanges: Annotated[tuple[DeclaredExchange, ...], Strict(False)] = ()
    """Exchanges to declare."""
    queues: Annotated[tuple[DeclaredQueue, ...], Strict(False)] = ()
    """Queues to declare."""
    bindings: Annotated[tuple[DeclaredBinding, ...], Strict(False)] = ()
    """Bindings to declare."""

    @property
    def has_declarations(self) -> bool:
        """True if the section declares any object or imports a definitions file."""
        return bool(self.definitions or self.exchanges or self.queues or self.bindings)
