"""Arguments of queues, exchanges, bindings and consumers: checks and meaning.

The rules are RabbitMQ's. Unknown arguments are ignored, because programs use them for notes; arguments of
another type of queue are refused. Arguments that mean something in RabbitMQ and nothing here (where a queue
keeps its messages, and their copies) are accepted. A quorum queue is one on a single node: durable, and it
counts deliveries. Streams are refused, because no queue here can be read again from an offset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.broker.amqp091.refusals import COMMAND_INVALID, TYPE_NAMES, AmqpRefused, precondition_failed
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.protocols.amqp091.translate import EXPIRATION_MS_MAX

INTEGERS: Final = frozenset(
    {
        ValueType.INT8,
        ValueType.UINT8,
        ValueType.INT16,
        ValueType.UINT16,
        ValueType.INT32,
        ValueType.UINT32,
        ValueType.INT64,
    }
)
EXPIRY_MS_MAX: Final = EXPIRATION_MS_MAX
PRIORITY_MAX: Final = 255
NAME_BYTES_MAX: Final = 255
OVERFLOWS: Final = ("drop-head", "reject-publish", "reject-publish-dlx")
TYPES: Final = ("classic", "quorum")
STRATEGIES: Final = ("at-most-once", "at-least-once")
MODES: Final = ("default", "lazy")
LOCATORS: Final = ("min-masters", "client-local", "random")
LEADER_LOCATORS: Final = ("client-local", "balanced", "least-leaders", "random")
MATCHES: Final = ("all", "any", "all-with-x", "any-with-x")
ALTERNATE: Final = "alternate-exchange"
DEAD_LETTER_EXCHANGE: Final = "x-dead-letter-exchange"
HASH: Final = "x-consistent-hash"
HASH_HEADER: Final = "hash-header"
HASH_PROPERTY: Final = "hash-property"
HASHED_PROPERTIES: Final = ("correlation_id", "message_id", "timestamp")
DELAYED: Final = "x-delayed-message"
DELAYED_TYPE: Final = "x-delayed-type"
EXCHANGE_TYPES: Final = ("direct", "fanout", "topic", "headers", HASH, DELAYED)
EXCHANGE_ARGUMENTS: Final = (ALTERNATE, DELAYED_TYPE, HASH_HEADER, HASH_PROPERTY)

NONE: Final = Value(ValueType.VOID, None)
CONSUMER_ARGUMENTS_ALIEN: Final = {
    False: ("x-stream-offset",),
    True: ("x-stream-offset", "x-cancel-on-ha-failover"),
}
"""Arguments of consumers that a classic queue (False) and a quorum queue (True) do not have."""

Fault = str | None


class QueueArguments(NamedTuple):
    """Values of a queue's arguments, with times in milliseconds and sizes in bytes."""

    ttl_ms: int | None = None
    expires_ms: int | None = None
    length_max: int | None = None
    bytes_max: int | None = None
    overflow: str = "drop-head"
    dead_letter_exchange: str | None = None
    dead_letter_key: str | None = None
    priority_max: int = 0  # 0 for a queue without priorities
    single_active: bool = False
    quorum: bool = False
    delivery_limit: int | None = None  # number of returns that a message survives
    at_least_once: bool = False  # a dead letter that reaches no queue is not dropped


def _integer(argument: Value) -> Fault:
    if argument.type in INTEGERS:
        return None
    return f'"expected integer, got {TYPE_NAMES[argument.type]}"'


def _natural(argument: Value) -> Fault:
    fault = _integer(argument)
    if fault is None and argument.value < 0:
        return f"{{value_negative,{argument.value}}}"
    return fault


def _span(argument: Value) -> Fault:
    fault = _natural(argument)
    if fault is None and argument.value > EXPIRY_MS_MAX:
        return f"{{value_too_large,{argument.value}}}"
    return fault


def _positive_span(argument: Value) -> Fault:
    fault = _span(argument)
    return "{value_zero,0}" if fault is None and argument.value == 0 else fault


def _priority(argument: Value) -> Fault:
    fault = _natural(argument)
    if fault is None and argument.value > PRIORITY_MAX:
        return f"{{max_value_exceeded,{argument.value}}}"
    return fault


def _unacceptable(argument: Value) -> Fault:
    return f"{{unacceptable_type,{TYPE_NAMES[argument.type]}}}"


def _string(argument: Value) -> Fault:
    return None if isinstance(argument.value, str) else _unacceptable(argument)


def _name(argument: Value) -> Fault:
    """Return why an argument's value is not a name of at most 255 bytes; None if it is a valid name."""
    fault = _string(argument)
    return (
        "longer than 255 bytes" if fault is None and len(argument.value.encode()) > NAME_BYTES_MAX else fault
    )


def _flag(argument: Value) -> Fault:
    return None if argument.type is ValueType.BOOL else _unacceptable(argument)


def _overflow(argument: Value) -> Fault:
    fault = _string(argument)
    return "invalid_overflow" if fault is None and argument.value not in OVERFLOWS else fault


def _positive(argument: Value) -> Fault:
    fault = _natural(argument)
    return "{value_zero,0}" if fault is None and argument.value == 0 else fault


def _type(argument: Value) -> Fault:
    fault = _string(argument)
    if fault is None and argument.value == "stream":
        return "\"unsupported queue type 'stream'\": no queue here is read again from an offset"
    return fault if fault or argument.value in TYPES else f"\"unsupported queue type '{argument.value}'\""


def _strategy(argument: Value) -> Fault:
    fault = _string(argument)
    return fault if fault or argument.value in STRATEGIES else "invalid_dlx_strategy"


def _leader_locator(argument: Value) -> Fault:
    fault = _string(argument)
    return fault if fault or argument.value in LEADER_LOCATORS else "invalid_queue_locator_arg"


def _accept_any(argument: Value) -> Fault:
    return None


def _mode(argument: Value) -> Fault:
    return None if argument.value in MODES else f"\"unsupported queue mode '{argument.value}'\""


def _version(argument: Value) -> Fault:
    return None if argument.value in (1, 2) else f"\"unsupported queue version '{argument.value}'\""


def _locator(argument: Value) -> Fault:
    return None if argument.value in LOCATORS else "invalid_queue_locator_arg"


QUEUE_ARGUMENTS: Final[dict[str, Callable[[Value], Fault]]] = {
    "x-message-ttl": _span,
    "x-expires": _positive_span,
    "x-max-length": _natural,
    "x-max-length-bytes": _natural,
    "x-overflow": _overflow,
    DEAD_LETTER_EXCHANGE: _name,
    "x-dead-letter-routing-key": _name,
    "x-max-priority": _priority,
    "x-single-active-consumer": _flag,
    "x-queue-type": _type,
    "x-queue-mode": _mode,
    "x-queue-version": _version,
    "x-queue-master-locator": _locator,
    "x-queue-leader-locator": _leader_locator,
    "x-delivery-limit": _accept_any,  # a value that is not a number limits nothing
    "x-dead-letter-strategy": _strategy,
    "x-quorum-initial-group-size": _positive,
    "x-initial-cluster-size": _positive,
    "x-max-in-memory-length": _natural,
    "x-max-in-memory-bytes": _natural,
    "x-max-age": _accept_any,
    "x-stream-max-segment-size-bytes": _natural,
}
_STREAMS: Final = frozenset({"x-initial-cluster-size", "x-max-age", "x-stream-max-segment-size-bytes"})
# Known arguments that belong to other types of queue.
ALIEN: Final = {
    "classic": _STREAMS
    | {
        "x-queue-leader-locator",
        "x-delivery-limit",
        "x-dead-letter-strategy",
        "x-quorum-initial-group-size",
        "x-max-in-memory-length",
        "x-max-in-memory-bytes",
    },
    "quorum": _STREAMS | {"x-max-priority", "x-queue-mode", "x-queue-version", "x-queue-master-locator"},
}


def queue_arguments(arguments: Headers, resource: str) -> QueueArguments:
    """Check a queue's arguments and return their values.

    `resource` names the queue in errors: "queue 'q' in vhost '/'". Raises AmqpRefused (406) for arguments
    that are invalid.
    """
    by_name = dict(arguments)
    way = by_name.get(DEAD_LETTER_EXCHANGE)
    if way is not None and way.type is not ValueType.STRING:
        name = TYPE_NAMES[way.type]
        raise precondition_failed(f"invalid type '{name}' for arg 'x-dead-letter-exchange' in {resource}")
    kind = by_name.get("x-queue-type", string("classic"))
    if fault := _type(kind):
        raise invalid("x-queue-type", resource, fault)
    for key in by_name:
        if key in ALIEN[kind.value]:
            raise precondition_failed(
                f"invalid arg '{key}' for {resource} of queue type rabbit_{kind.value}_queue"
            )
    for key, value in arguments:
        fault = QUEUE_ARGUMENTS.get(key, _accept_any)(value)
        if fault is None and key == "x-dead-letter-routing-key" and way is None:
            fault = "routing_key_but_no_dlx_defined"
        if fault is not None:
            raise invalid(key, resource, fault)
    stated = {key: value.value for key, value in arguments}
    quorum = kind.value == "quorum"
    overflow = stated.get("x-overflow", "drop-head")
    if quorum and overflow == "reject-publish-dlx":
        overflow = "drop-head"
    limit = stated.get("x-delivery-limit", 0)
    limited = quorum and by_name.get("x-delivery-limit", NONE).type in INTEGERS
    return QueueArguments(
        stated.get("x-message-ttl"),
        stated.get("x-expires"),
        stated.get("x-max-length"),
        stated.get("x-max-length-bytes"),
        overflow,
        stated.get(DEAD_LETTER_EXCHANGE),
        stated.get("x-dead-letter-routing-key"),
        stated.get("x-max-priority", 0),
        stated.get("x-single-active-consumer", False),
        quorum,
        max(limit, 0) if limited else None,
        stated.get("x-dead-letter-strategy") == "at-least-once" and overflow == "reject-publish",
    )


def check_quorum(resource: str, *, durable: bool, exclusive: bool, auto_delete: bool) -> None:
    """Raise AmqpRefused (406) if a quorum queue is declared non-durable, auto-delete or exclusive."""
    for word, fault in (
        ("non-durable", not durable),
        ("auto-delete", auto_delete),
        ("exclusive-owner", exclusive),
    ):
        if fault:
            raise precondition_failed(f"invalid property '{word}' for {resource}")


def meaningful(arguments: Headers) -> dict[str, Value]:
    """Return the arguments that must be equal in two declarations of a queue.

    `x-queue-type: classic` is left out, because it is the default.
    """
    return {
        key: value
        for key, value in arguments
        if key in QUEUE_ARGUMENTS and (key, value.value) != ("x-queue-type", "classic")
    }


def invalid(key: str, resource: str, fault: str) -> AmqpRefused:
    """Return the error (406) for an argument `key` with an invalid value; `fault` is the reason."""
    return precondition_failed(f"invalid arg '{key}' for {resource}: {fault}")


def exchange_arguments(kind: str, arguments: Headers, resource: str) -> Headers:
    """Check an exchange's arguments and return those that have an effect.

    `resource` names the exchange in errors: "exchange 'x' in vhost '/'". Raises AmqpRefused: 406, or 503 for
    an unknown type.
    """
    found: dict[str, Value] = {}
    for key, value in arguments:
        if key == ALTERNATE:
            if value.type is not ValueType.STRING:
                raise precondition_failed(
                    f"invalid type '{TYPE_NAMES[value.type]}' for arg '{ALTERNATE}' in {resource}"
                )
            if fault := _name(value):
                raise invalid(ALTERNATE, resource, fault)
            found[key] = value
    by_name = dict(arguments)
    if kind == DELAYED:
        kind = _delayed_type(by_name.get(DELAYED_TYPE))
        found[DELAYED_TYPE] = string(kind)
    if kind == HASH:
        hashed: dict[str, Value] = {
            key: by_name[key] for key in (HASH_HEADER, HASH_PROPERTY) if key in by_name
        }
        for key, value in hashed.items():
            if fault := _string(value):
                raise invalid(key, resource, fault)
        if len(hashed) > 1:
            raise precondition_failed("hash-header and hash-property are mutually exclusive")
        if HASH_PROPERTY in hashed and hashed[HASH_PROPERTY].value not in HASHED_PROPERTIES:
            raise precondition_failed(f"Unsupported property: {hashed[HASH_PROPERTY].value}")
        found |= hashed
    return tuple(found.items())


def _delayed_type(argument: Value | None) -> str:
    """Return the exchange type in `x-delayed-type`, by which a delaying exchange routes messages.

    Raises AmqpRefused.
    """
    if argument is None or not isinstance(argument.value, str):
        raise precondition_failed(f"Invalid argument, '{DELAYED_TYPE}' must be an existing exchange type")
    if argument.value == DELAYED:
        raise precondition_failed(f"Invalid argument, '{DELAYED}' can't be used for '{DELAYED_TYPE}'")
    if argument.value not in EXCHANGE_TYPES:
        raise AmqpRefused(COMMAND_INVALID, f"COMMAND_INVALID - unknown exchange type '{argument.value}'")
    return str(argument.value)


def check_match(arguments: Headers) -> None:
    """Check the arguments of a binding to a headers exchange. Raises AmqpRefused (406)."""
    match = dict(arguments).get("x-match")
    if match is None:
        return
    if match.type is not ValueType.STRING:
        raise precondition_failed(
            f"Invalid x-match field type {TYPE_NAMES[match.type]} (value {match.value}); expected longstr"
        )
    if match.value not in MATCHES:
        raise precondition_failed(
            f'Invalid x-match field value <<"{match.value}">>; expected all, any, all-with-x, or any-with-x'
        )


def consumer_priority(arguments: Headers, resource: str, *, quorum: bool) -> int:
    """Return the `x-priority` in the arguments of basic.consume, 0 if absent.

    `resource` names the queue in errors. Raises AmqpRefused (406) for a value that is not an integer, and for
    arguments of other types of queue. Other arguments are ignored.
    """
    given_all = dict(arguments)
    for key in CONSUMER_ARGUMENTS_ALIEN[quorum]:
        if key in given_all:
            kind = "quorum" if quorum else "classic"
            raise precondition_failed(f"invalid arg '{key}' for {resource} of queue type rabbit_{kind}_queue")
    failover = given_all.get("x-cancel-on-ha-failover")
    if failover is not None and (fault := _flag(failover)):
        raise invalid("x-cancel-on-ha-failover", resource, fault)
    priority = given_all.get("x-priority")
    if priority is None:
        return 0
    if fault := _integer(priority):
        raise invalid("x-priority", resource, fault)
    return int(priority.value)
