"""Decoding of bodies by the schemas of a registry (Confluent's REST interface, by Confluent's client).

A serializer writes a zero byte, the schema's number in the registry, and the value. Values in JSON are left
as they are. Avro is converted to JSON: records become objects, decimals numbers with every digit, times ISO
8601, bytes base64. Protobuf is not decoded, because its schemas would have to be compiled. For a body that
cannot be decoded the reason is recorded. A registry that does not respond is an error, so that its bodies are
decoded by a later run.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from functools import lru_cache
from importlib.util import find_spec
from io import BytesIO
from math import isfinite
from typing import Any, Final
from uuid import UUID

import orjson

from gateway.errors import PipelineError

TIMEOUT_SECS: Final = 10
SCHEMAS_MAX: Final = 1_000  # Schemas that a task caches, also unknown ones.
PACKAGES: Final = ("authlib", "confluent_kafka", "fastavro")
UNKNOWN: Final = 404

Decode = Callable[[bytes], bytes]


class UndecodableError(Exception):
    """Error for a body that cannot be decoded; the text is the reason."""


@dataclass(frozen=True)
class Registry:
    """Schema registry at `url`, with its password and a PEM file of certificate authorities, or None."""

    url: str
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None

    def checked(self) -> Registry:
        """Check that the registry responds, and return this object.

        Raises PipelineError if the registry does not respond, or if its client library is not installed.
        """
        missing = [package for package in PACKAGES if find_spec(package) is None]
        if missing:
            raise PipelineError(
                f"--registry needs {', '.join(missing)}; install them with: pip install 'gateway[registry]'"
            )
        try:
            self._client().get_subjects()
        except Exception as error:
            raise PipelineError(f"the schema registry {self.url} does not respond: {error}") from error
        return self

    def decoder(self) -> Callable[[int, bytes], bytes]:
        """Return a function that converts a value to JSON, given the number of its schema.

        The function raises UndecodableError for a value that cannot be decoded, and PipelineError if the
        registry does not respond.
        """
        client = self._client()

        @lru_cache(SCHEMAS_MAX)
        def decoding(number: int) -> Decode | str:
            try:
                return _decoding(client, number)
            except UndecodableError as error:
                return str(error)

        def decode(number: int, value: bytes) -> bytes:
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
    """Return the registry at a URL. Raises PipelineError for another scheme, or a password in the URL."""
    scheme, separator, rest = url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest:
        raise PipelineError(f"{url} is not the URL of a schema registry; write http://registry:8081")
    if ":" in rest.rpartition("@")[0]:
        raise PipelineError("a password in the registry's URL is visible to other users: put it in a file")
    return Registry(url.rstrip("/"), password, ca_file)


def _decoding(client: Any, number: int) -> Decode:
    """Return a function that converts values of the schema with this number to JSON.

    Raises UndecodableError or PipelineError.
    """
    from confluent_kafka.schema_registry.error import SchemaRegistryError

    try:
        schema = client.get_schema(number)
        if schema.schema_type == "JSON":
            return bytes
        if schema.schema_type != "AVRO":
            raise UndecodableError(f"schema {number} of the registry is {schema.schema_type}, not decoded")
        return _avro(client, schema)
    except UndecodableError:
        raise
    except SchemaRegistryError as error:
        if error.http_status_code == UNKNOWN:
            raise UndecodableError(f"the registry has no schema {number}") from error
        raise PipelineError(f"the schema registry refuses schema {number}: {error}") from error
    except Exception as error:
        raise PipelineError(f"schema {number} cannot be read from the registry: {error}") from error


def _avro(client: Any, schema: Any) -> Decode:
    """Return a function that converts Avro values of a schema to JSON."""
    from fastavro import parse_schema, schemaless_reader

    named: dict[str, Any] = {}
    _parse_references(client, schema.references or (), named, set())
    parsed = parse_schema(json.loads(schema.schema_str), named)

    def decode(value: bytes) -> bytes:
        stream = BytesIO(value)
        try:
            found = _plain(schemaless_reader(stream, parsed, None))
        except UndecodableError:
            raise
        except Exception as error:  # Whatever the bytes make the decoder raise.
            raise UndecodableError(f"not Avro of its schema: {error or type(error).__name__}") from error
        if stream.tell() < len(value):
            raise UndecodableError(f"not Avro of its schema: {len(value) - stream.tell()} extra bytes")
        return orjson.dumps(found)

    return decode


def _parse_references(
    client: Any, references: Iterable[Any], named: dict[str, Any], seen: set[tuple[str, int]]
) -> None:
    """Parse the schemas that a schema refers to, and add them to `named` by their names."""
    from fastavro import parse_schema

    for one in references:
        if (one.subject, one.version) not in seen:
            seen.add((one.subject, one.version))
            schema = client.get_version(one.subject, one.version).schema
            _parse_references(client, schema.references or (), named, seen)
            parse_schema(json.loads(schema.schema_str), named)


def _plain(value: Any) -> Any:
    """Convert a decoded value to JSON values. Raises UndecodableError for NaN and infinity."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Decimal):
        return orjson.Fragment(format(value, "f"))
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, float) and not isfinite(value):
        raise UndecodableError(f"JSON has no {value}")
    return value
