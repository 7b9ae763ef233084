"""What the embedded broker has of AMQP 0-9-1 before anybody connects: exchanges, queues and bindings.

The words are those of RabbitMQ's `definitions.json`, so that what such a file says can be written here as it
stands there. Types of exchanges and the meaning of arguments are the broker's, which looks at them when it
declares; here is what no broker could take.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from gateway.model.properties import Headers, Value, ValueType, fits, string
from gateway.settings.endpoints import FilePath
from gateway.settings.limits import Section

SHORT_OCTETS_MAX: Final = 255  # names, keys, and the names of arguments are short strings on the wire


class Origin(NamedTuple):
    """Where something is said: a file or variable, and the place in it from 1; 0: not known."""

    file: str = ""
    line: int = 0
    column: int = 0


def _short(text: str) -> str:
    if (octets := len(text.encode())) > SHORT_OCTETS_MAX:
        raise ValueError(f"{octets} octets; a client could say {SHORT_OCTETS_MAX} at most")
    return text


def _name(text: str) -> str:
    if set(text) & set("\r\n"):
        raise ValueError(f"{text!r} has a line end, and a name that clients declare loses those")
    return _short(text)


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    headers(given)
    return given


def headers(arguments: dict[str, Any]) -> Headers:
    """The arguments with their types, as RabbitMQ takes those of a file. Raises ValueError for what has none:
    a date of YAML, a number beyond 64 bits.
    """
    typed = Value(ValueType.TABLE, tuple((_short(name), _typed(one)) for name, one in arguments.items()))
    if not fits(typed):
        raise ValueError("arguments: a number beyond 64 bits, or nested too deeply")
    return tuple(typed.value)


def _typed(given: Any) -> Value:
    if isinstance(given, bool):
        return Value(ValueType.BOOL, given)
    if isinstance(given, int):
        return Value(ValueType.INT64, given)
    if isinstance(given, float):
        return Value(ValueType.DOUBLE, given)
    if isinstance(given, str):
        return string(given)
    if given is None:
        return Value(ValueType.VOID, None)
    if isinstance(given, list | tuple):
        return Value(ValueType.ARRAY, tuple(_typed(one) for one in given))
    if isinstance(given, dict):
        return Value(ValueType.TABLE, tuple((_short(str(name)), _typed(one)) for name, one in given.items()))
    raise ValueError(f"{given!r} is no value of an argument; put it in quotes for a text")


Name = Annotated[str, Field(min_length=1), AfterValidator(_name)]
Arguments = Annotated[dict[str, Any], AfterValidator(_arguments)]


class DeclaredExchange(Section):
    """An exchange, as a client would declare it."""

    name: Name
    """Not `amq.`: those are there anyway."""
    type: Literal["direct", "fanout", "topic", "headers", "x-consistent-hash", "x-delayed-message"]
    """How it chooses among what is bound to it."""
    vhost: str | None = None
    """Virtual host; absent: the first one of the AMQP 0-9-1 listeners, which routes belong to."""
    durable: bool = True
    """Whether it, and its bindings to what is durable, are in the store, too."""
    auto_delete: bool = False
    """It goes with the last thing that was bound to it, until the next start."""
    internal: bool = False
    """Clients do not publish to it."""
    arguments: Arguments = Field({})
    """`alternate-exchange`; of an `x-delayed-message` exchange `x-delayed-type`, of an `x-consistent-hash`
    exchange `hash-header` or `hash-property`. Others mean nothing."""


class DeclaredQueue(Section):
    """A queue, as a client would declare it: never exclusive, for then it would be somebody's."""

    name: Name
    """Not `amq.`: such names are the broker's."""
    vhost: str | None = None
    """As above."""
    durable: bool = True
    """Whether it and its messages are in the store."""
    auto_delete: bool = False
    """It goes with its last consumer, until the next start."""
    arguments: Arguments = Field({})
    """`x-queue-type`, `x-message-ttl`, `x-max-length` and the others that clients say."""


class DeclaredBinding(Section):
    """What an exchange passes on, and where to. Both ends are declared, too, or are `amq.` exchanges."""

    source: Name
    """The exchange. The default exchange needs no binding: it knows every queue by its name."""
    destination: Name
    """A queue or another exchange."""
    destination_type: Literal["queue", "exchange"] = "queue"
    """Which of the two."""
    vhost: str | None = None
    """As above, of both ends."""
    routing_key: Annotated[str, AfterValidator(_short)] = ""
    """The binding key: of a topic exchange a pattern with `*` and `#`."""
    arguments: Arguments = Field({})
    """Of a headers exchange: what it looks for, and `x-match`."""


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


class Declare(Section):
    """What is there from the start of AMQP 0-9-1, before a link consumes and before a listener accepts."""

    definitions: Annotated[
        tuple[FilePath, ...],
        Strict(False),
        BeforeValidator(_listed, json_schema_input_type=FilePath | list[FilePath]),
    ] = ()
    """Files that RabbitMQ has exported (`rabbitmqctl export_definitions`), relative to the working directory;
    a single one needs no list."""
    users: bool = False
    """Also the users of `definitions`, with their password hashes, permissions and topic permissions; and
    AMQP listeners that name no virtual hosts have theirs. `users` of this configuration come first."""
    policies: bool = False
    """Also the policies of `definitions`, as far as they are about lengths, times, overflow, dead-lettering
    and the delivery limit of queues, or the alternate exchange of exchanges."""
    exchanges: Annotated[tuple[DeclaredExchange, ...], Strict(False)] = ()
    """Exchanges."""
    queues: Annotated[tuple[DeclaredQueue, ...], Strict(False)] = ()
    """Queues."""
    bindings: Annotated[tuple[DeclaredBinding, ...], Strict(False)] = ()
    """Bindings."""

    @property
    def anything(self) -> bool:
        """Whether it says anything."""
        return bool(self.definitions or self.exchanges or self.queues or self.bindings)
