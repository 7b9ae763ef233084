"""Errors of operations on a virtual host, with RabbitMQ's reply codes and texts.

Clients that were written for RabbitMQ distinguish errors by these codes and texts.
"""

from __future__ import annotations

from typing import Any, Final

from gateway.errors import GatewayError
from gateway.model.properties import Value, ValueType

ACCESS_REFUSED, NOT_FOUND, RESOURCE_LOCKED, PRECONDITION_FAILED = 403, 404, 405, 406
RESOURCE_ERROR, NOT_ALLOWED, COMMAND_INVALID = 506, 530, 503

TYPE_NAMES: Final = {
    ValueType.VOID: "void",
    ValueType.BOOL: "bool",
    ValueType.INT8: "byte",
    ValueType.UINT8: "unsignedbyte",
    ValueType.INT16: "short",
    ValueType.UINT16: "unsignedshort",
    ValueType.INT32: "signedint",
    ValueType.UINT32: "unsignedint",
    ValueType.INT64: "long",
    ValueType.FLOAT: "float",
    ValueType.DOUBLE: "double",
    ValueType.DECIMAL: "decimal",
    ValueType.STRING: "longstr",
    ValueType.BYTES: "binary",
    ValueType.TIMESTAMP: "timestamp",
    ValueType.ARRAY: "array",
    ValueType.TABLE: "table",
}
"""RabbitMQ's names of field types in its texts."""


class AmqpRefused(GatewayError):
    """Error of an operation on the virtual host, to which AMQP responds with a reply code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def access_refused(text: str) -> AmqpRefused:
    """Return an error with code 403."""
    return AmqpRefused(ACCESS_REFUSED, f"ACCESS_REFUSED - {text}")


def not_found(text: str) -> AmqpRefused:
    """Return an error with code 404."""
    return AmqpRefused(NOT_FOUND, f"NOT_FOUND - {text}")


def locked(queue: str, host: str) -> AmqpRefused:
    """Return the error (405) for a queue that is exclusive to another connection.

    Also used for a queue that exists and is declared with a different value of `exclusive`.
    """
    text = (
        f"cannot obtain exclusive access to locked queue '{queue}' in vhost '{host}'. It could be originally "
        "declared on another connection or the exclusive property value does not match that of the original "
        "declaration."
    )
    return AmqpRefused(RESOURCE_LOCKED, f"RESOURCE_LOCKED - {text}")


def precondition_failed(text: str) -> AmqpRefused:
    """Return an error with code 406."""
    return AmqpRefused(PRECONDITION_FAILED, f"PRECONDITION_FAILED - {text}")


def inequivalent(word: str, resource: str, now: object, was: object) -> AmqpRefused:
    """Return the error (406) for a declaration that differs from the existing object.

    `word` is the differing property, `now` its value in the declaration and `was` that of the object.
    `resource` is "queue 'q' in vhost '/'".
    """
    return precondition_failed(
        f"inequivalent arg '{word}' for {resource}: received {text_of(now)} but current is {text_of(was)}"
    )


def text_of(value: object) -> str:
    """Return the text for a value in an error message."""
    if value is None:
        return "none"
    if isinstance(value, Value):
        return f"the value '{value.value}' of type '{TYPE_NAMES[value.type]}'"
    return f"'{str(value).lower() if isinstance(value, bool) else value}'"


def equivalent(before: Value | None, after: Value | None) -> bool:
    """Return True if two values of an argument are equal; the width of an integer does not matter."""
    if before is None or after is None:
        return before is after
    return type(before.value) is type(after.value) and bool(before.value == after.value)


def differing(word: str, resource: str, now: Value | None, was: Value | None) -> AmqpRefused:
    """Return the error (406) for a declaration with another value of an argument.

    `word` is the argument, `now` its value in the declaration and `was` that of the existing object.
    """
    bare: tuple[Any, Any] = (now, was)
    if now is not None and was is not None and type(now.value) is type(was.value):
        bare = (now.value, was.value)
    return inequivalent(word, resource, *bare)
