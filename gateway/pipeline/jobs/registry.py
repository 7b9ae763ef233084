"""Decoding of bodies by the schemas of a registry (Confluent's REST interface, by Confluent's client).

A serializer writes a zero byte, the schema's number in the registry, and the value; Protobuf also has the
place of the message in its file. Values in JSON are left as they are; Avro and Protobuf are converted to JSON
(`encodings.py`). For a body that cannot be decoded the reason is recorded. A registry that does not respond
is an error, so that its bodies are decoded by a later run.
"""

from __future__ import annotations

import json
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Final

from gateway.errors import PipelineError
from gateway.pipeline.jobs.encodings import (
    Decode,
    UndecodableError,
    avro_decoder,
    check_packages,
    message_at,
    protobuf_decoder,
    protobuf_pool,
)

TIMEOUT_SECS: Final = 10
SCHEMAS_MAX: Final = 1_000  # Schemas that a task caches, also unknown ones.
PACKAGES: Final = ("authlib", "confluent_kafka", "fastavro", "google.protobuf")
UNKNOWN: Final = 404
SERIALIZED: Final = "serialized"
"""Format in which a registry returns a definition of Protobuf as a FileDescriptorProto in base64."""

INDEXES_MAX: Final = 100  # Places in the file's messages, one for each level of nesting.


@dataclass(frozen=True)
class Registry:
    """Schema registry: URL, password, and a PEM file of certificate authorities; the last two may be None."""

    is_framed: ClassVar[bool] = True
    """True if the number of a schema precedes a value."""

    url: str
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None

    def checked(self) -> Registry:
        """Check that the registry responds, and return this object.

        Raises PipelineError if the registry does not respond, or if its client library is not installed.
        """
        check_packages("--registry", *PACKAGES)
        try:
            self._client().get_subjects()
        except Exception as error:
            raise PipelineError(f"the schema registry {self.url} does not respond: {error}") from error
        return self

    def decoder(self) -> Callable[[int | None, bytes], bytes]:
        """Return a function that converts a body to JSON, given the number of the body's schema.

        A body without a number (None) is returned unchanged. The function raises UndecodableError for a body
        that cannot be decoded, and PipelineError if the registry does not respond.
        """
        clients = self._client(), self._client()

        @lru_cache(SCHEMAS_MAX)
        def decoding(number: int) -> Decode | str:
            try:
                return _decoding(clients, number)
            except UndecodableError as error:
                return str(error)

        def decode(number: int | None, value: bytes) -> bytes:
            if number is None:
                return value
            found = decoding(number)
            if isinstance(found, str):
                raise UndecodableError(found)
            return found(value)

        return decode

    def _client(self) -> Any:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        scheme, _, rest = self.url.partition("://")
        user, at, host = rest.rpartition("@")
        options: dict[str, Any] = {"url": f"{scheme}://{host}", "timeout": TIMEOUT_SECS}
        if at:
            options["basic.auth.user.info"] = f"{user}:{self.password or ''}"
        if self.ca_file is not None:
            options["ssl.ca.location"] = self.ca_file
        return SchemaRegistryClient(options)


def registry_of(url: str, password: str | None, ca_file: str | None) -> Registry:
    """Return the registry at a URL, with its password and a PEM file of certificate authorities.

    Raises PipelineError for an unsupported URL scheme, or a password in the URL.
    """
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest:
        raise PipelineError(f"{url} is not the URL of a schema registry; write http://registry:8081")
    if ":" in rest.rpartition("@")[0]:
        raise PipelineError("a password in the registry's URL is visible to other users: put it in a file")
    return Registry(url.rstrip("/"), password, ca_file)


def _decoding(clients: tuple[Any, Any], number: int) -> Decode:
    """Return a function that converts bodies encoded by the schema `number` of the registry to JSON.

    `clients` are two clients of the registry, because a client caches only one format of a schema; the second
    requests only definitions of Protobuf. Raises UndecodableError if the registry has no such schema, and
    PipelineError if it cannot be read.
    """
    from confluent_kafka.schema_registry.error import SchemaRegistryError

    client, serialized = clients
    try:
        schema = client.get_schema(number)
        if schema.schema_type == "JSON":
            return bytes
        if schema.schema_type == "AVRO":
            named: dict[str, Any] = {}
            _parse_references(client, schema.references or (), named, set())
            return avro_decoder(json.loads(schema.schema_str), named)
        if schema.schema_type == "PROTOBUF":
            return _protobuf(serialized, serialized.get_schema(number, fmt=SERIALIZED))
        raise UndecodableError(f"schema {number} of the registry is {schema.schema_type}, not decoded")
    except UndecodableError:
        raise
    except SchemaRegistryError as error:
        if error.http_status_code == UNKNOWN:
            raise UndecodableError(f"the registry has no schema {number}") from error
        raise PipelineError(f"the schema registry refuses schema {number}: {error}") from error
    except Exception as error:
        raise PipelineError(f"schema {number} cannot be read from the registry: {error}") from error


def _protobuf(client: Any, schema: Any) -> Decode:
    """Return a function that converts Protobuf values of a schema to JSON.

    A value begins with the position of its message in the schema's file. `schema` is the registry's schema,
    and `client` fetches the schemas that it refers to. Raises ValueError for an unusable schema.
    """
    import_module("confluent_kafka.schema_registry.protobuf")  # Definitions that others import.
    name = "the schema"
    files: dict[str, Any] = {}
    _add_files(client, name, schema, files)
    pool = protobuf_pool(files)

    @lru_cache(SCHEMAS_MAX)
    def decoding(indexes: tuple[int, ...]) -> Decode:
        return protobuf_decoder(pool.FindMessageTypeByName(message_at(files[name], indexes)))

    def decode(value: bytes) -> bytes:
        try:
            indexes, begin = _message_indexes(value)
            convert = decoding(indexes)
        except IndexError:
            raise UndecodableError("not Protobuf of its schema: it has no such message") from None
        return convert(value[begin:])

    return decode


def _add_files(client: Any, name: str, schema: Any, files: dict[str, Any]) -> None:
    """Add the Protobuf definition of a schema to `files` as `name`, and the definitions that it refers to."""
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.message import DecodeError

    if name in files:
        return
    try:
        file = FileDescriptorProto.FromString(b64decode(schema.schema_str, validate=True))
    except (Base64Error, DecodeError):
        raise ValueError("it does not return definitions of Protobuf in the format 'serialized'") from None
    file.name = name
    files[name] = file
    for one in schema.references or ():
        found = client.get_version(one.subject, one.version, fmt=SERIALIZED)
        _add_files(client, one.name, found.schema, files)


def _message_indexes(value: bytes) -> tuple[tuple[int, ...], int]:
    """Parse the position of a message in its Protobuf file, which precedes the message in `value`.

    Return the position as indexes, and the offset in `value` at which the message begins. The encoded
    position is a count and that many indexes, as signed variable-length integers; count 0 means the first
    message. Raises IndexError if the value ends early, or if the count or an index is out of range.
    """
    count, at = _integer(value, 0)
    if not count:
        return (0,), at
    if count > INDEXES_MAX:
        raise IndexError
    indexes = []
    for _ in range(count):
        index, at = _integer(value, at)
        indexes.append(index)
    return tuple(indexes), at


def _integer(value: bytes, at: int) -> tuple[int, int]:
    """Parse a variable-length integer at the offset `at` in `value`. Return it and the offset after it.

    Raises IndexError if the integer is negative or `value` ends early.
    """
    number = shift = 0
    while True:
        byte = value[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    if number & 1:  # A negative one.
        raise IndexError
    return number >> 1, at


def _parse_references(
    client: Any, references: Iterable[Any], named: dict[str, Any], seen: set[tuple[str, int]]
) -> None:
    """Parse the schemas in `references`, to which another schema refers, and add them to `named` by name.

    `seen` has the schemas (name, version) that were added already.
    """
    from fastavro import parse_schema

    for one in references:
        if (one.subject, one.version) not in seen:
            seen.add((one.subject, one.version))
            schema = client.get_version(one.subject, one.version).schema
            _parse_references(client, schema.references or (), named, seen)
            parse_schema(json.loads(schema.schema_str), named)
