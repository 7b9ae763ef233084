"""Conversion of values in Avro and Protobuf to JSON.

Records and messages become objects, decimals numbers with every digit, integers numbers, times ISO 8601,
bytes base64, and values of an enumeration their names. Fields of Protobuf have the names of their definition;
a field without presence that is not in the value has its default, and one with presence is left out. NaN and
infinity, for which JSON has no notation, are errors.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time
from decimal import Decimal
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Final
from uuid import UUID

import orjson

from gateway.errors import PipelineError

AVRO_SUFFIX: Final = ".avsc"
WELL_KNOWN: Final = "google.protobuf."
DECIMAL: Final = "confluent.type.Decimal"
SCALE_MAX: Final = 1_000  # of a decimal; each digit is written
IMPORTED: Final = ("any", "duration", "empty", "field_mask", "struct", "timestamp", "wrappers")
"""Files of Protobuf itself that definitions import."""

Decode = Callable[[bytes], bytes]


class UndecodableError(Exception):
    """Error for a body that cannot be decoded; the text is the reason."""


@dataclass(frozen=True)
class BodyEncoding:
    """Encoding of all message bodies of a route, for bodies without the number of a schema in a registry.

    If `message` is None, `schema` is the text of an Avro schema. Otherwise `schema` is a descriptor set of
    Protobuf, and `message` the name of a message in it. `file` is the path of the schema, for errors.
    """

    is_framed: ClassVar[bool] = False
    """True if the number of a schema precedes a value."""

    file: str
    schema: bytes = field(repr=False)
    message: str | None = None

    @classmethod
    def read(cls, text: str) -> BodyEncoding:
        """Parse the option `FILE.avsc` or `FILE:MESSAGE`, read the file, and return the encoding.

        Raises PipelineError if the file cannot be read or has no such schema, or if a package is missing.
        """
        name, colon, message = text.rpartition(":")
        is_avro = text.endswith(AVRO_SUFFIX)
        if not is_avro and not (colon and message):
            raise PipelineError(
                f"{text} is neither a schema of Avro (reading.avsc) nor a descriptor set of Protobuf with the"
                " name of a message (reading.desc:plant.Reading)"
            )
        check_packages("--decode", "fastavro" if is_avro else "google.protobuf")
        file = text if is_avro else name
        try:
            schema = Path(file).read_bytes()
        except OSError as error:
            raise PipelineError(f"{file} cannot be read: {error.strerror}") from error
        found = cls(file, schema, None if is_avro else message)
        found.decoder()
        return found

    def decoder(self) -> Callable[[int | None, bytes], bytes]:
        """Return a function that converts an encoded body to JSON. The first of its two arguments is ignored.

        The function raises UndecodableError for a body that cannot be decoded. Raises PipelineError if the
        schema is invalid.
        """
        try:
            if self.message is None:
                convert = avro_decoder(json.loads(self.schema), {})
            else:
                convert = protobuf_decoder(_descriptor(self.schema, self.message))
        except Exception as error:  # The libraries raise many kinds.
            raise PipelineError(f"{self.file}: {error or type(error).__name__}") from error

        def decode(number: int | None, value: bytes) -> bytes:
            del number
            return convert(value)

        return decode


def check_packages(option: str, *names: str) -> None:
    """Raise PipelineError if one of the packages `names`, from the extra `registry`, is not installed.

    `option` is the command-line option that needs the packages, for the error.
    """
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise PipelineError(
            f"{option} needs {', '.join(missing)}; install them with: pip install 'gateway[registry]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # The package that contains it is missing.
        return False


def avro_decoder(schema: Any, named: dict[str, Any]) -> Decode:
    """Return a function that converts Avro values of a schema to JSON.

    `named` has the parsed schemas that the schema refers to, by name.
    """
    from fastavro import parse_schema

    parsed = parse_schema(schema, named)
    # The compiled reader has no limit of nesting: a long chain of values ends the process.
    readers = import_module("fastavro._read_py" if _is_recursive(parsed, named) else "fastavro")
    schemaless_reader = readers.schemaless_reader

    def decode(value: bytes) -> bytes:
        stream = BytesIO(value)
        try:
            found = orjson.dumps(_plain(schemaless_reader(stream, parsed, None)))
        except UndecodableError:
            raise
        except Exception as error:  # Whatever the bytes make the decoder raise.
            raise UndecodableError(f"not Avro of its schema: {error or type(error).__name__}") from error
        if stream.tell() < len(value):
            raise UndecodableError(f"not Avro of its schema: {len(value) - stream.tell()} extra bytes")
        return found

    return decode


def _is_recursive(schema: Any, named: Mapping[str, Any]) -> bool:
    """Return True if values of a parsed schema may contain values of the same schema, at any depth."""
    flat: set[str] = set()  # names whose values are not recursive

    def visit(schema: Any, above: frozenset[str]) -> bool:
        if isinstance(schema, list):
            return any(visit(one, above) for one in schema)
        if isinstance(schema, str):
            return schema in above or (schema not in flat and schema in named and visit(named[schema], above))
        name = schema.get("name")
        if name in above:
            return True
        below = above if name is None else above | {name}
        parts = [one["type"] for one in schema.get("fields", ())]
        parts += [schema[part] for part in ("type", "items", "values") if part in schema]
        found = any(visit(one, below) for one in parts)
        flat.update(() if found or name is None else (name,))
        return found

    return visit(schema, frozenset())


def protobuf_decoder(descriptor: Any) -> Decode:
    """Return a function that converts Protobuf values of the message with this descriptor to JSON."""
    from google.protobuf.message_factory import GetMessageClass

    kind = GetMessageClass(descriptor)

    def decode(value: bytes) -> bytes:
        try:
            return orjson.dumps(_plain(_message(kind.FromString(value))))
        except UndecodableError:
            raise
        except Exception as error:  # Whatever the bytes make the library raise.
            raise UndecodableError(f"not Protobuf of its schema: {error or type(error).__name__}") from error

    return decode


def protobuf_pool(files: Mapping[str, Any]) -> Any:
    """Return a descriptor pool with the Protobuf files in `files`, and the standard files that they import.

    `files` has FileDescriptorProtos by file name. Raises ValueError if another imported file is missing.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool

    for name in IMPORTED:
        import_module(f"google.protobuf.{name}_pb2")
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str, needed_by: str) -> None:
        if name in added:
            return
        added.add(name)
        file = files.get(name)
        if file is None:
            try:
                known = descriptor_pool.Default().FindFileByName(name)
            except KeyError:
                raise ValueError(f"{needed_by} imports {name}, which is missing") from None
            file = descriptor_pb2.FileDescriptorProto.FromString(known.serialized_pb)
        for one in file.dependency:
            add(one, name)
        pool.Add(file)

    for name in files:
        add(name, name)
    return pool


def _descriptor(data: bytes, message: str) -> Any:
    """Return the descriptor of the Protobuf message named `message` in the descriptor set `data`.

    Raises ValueError if `data` is not a descriptor set, or does not contain the message.
    """
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(data).file
    except DecodeError:
        files = []
    if not files:
        raise ValueError("no descriptor set; write one with protoc --include_imports --descriptor_set_out")
    pool = protobuf_pool({one.name: one for one in files})
    try:
        return pool.FindMessageTypeByName(message)
    except KeyError:
        names = (f"{one.package}.{kind.name}".lstrip(".") for one in files for kind in one.message_type)
        raise ValueError(f"there is no message {message}; its messages are {', '.join(names)}") from None


def _message(message: Any) -> Any:
    """Convert a Protobuf message to Python values."""
    name = message.DESCRIPTOR.full_name
    if name.startswith(WELL_KNOWN):
        return _well_known(message, name.removeprefix(WELL_KNOWN))
    if name == DECIMAL:
        return _decimal(int.from_bytes(message.value, "big", signed=True), message.scale)
    found: dict[str, Any] = {}
    for one in message.DESCRIPTOR.fields:
        if one.has_presence and not message.HasField(one.name):
            continue
        value = getattr(message, one.name)
        if one.message_type is not None and one.message_type.GetOptions().map_entry:
            kind = one.message_type.fields_by_name["value"]
            found[one.name] = {_key(key): _value(value[key], kind) for key in value}
        elif one.is_repeated:
            found[one.name] = [_value(item, one) for item in value]
        else:
            found[one.name] = _value(value, one)
    return found


def _decimal(unscaled: int, scale: int) -> Decimal:
    """Return `unscaled` divided by ten to the power `scale`, with every digit.

    Raises ValueError if `scale` is out of range.
    """
    if abs(scale) > SCALE_MAX:
        raise ValueError(f"a decimal has scale {scale}")
    return Decimal(f"{unscaled}e{-scale}")  # `scaleb` would round to 28 digits


def _well_known(message: Any, name: str) -> Any:
    """Convert a message of one of Protobuf's well-known types, whose name is `name`, to Python values."""
    if name in ("Timestamp", "Duration", "FieldMask"):
        return message.ToJsonString()
    if name.endswith("Value") and "value" in message.DESCRIPTOR.fields_by_name:
        return message.value
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, descriptor_pool=message.DESCRIPTOR.file.pool)


def _value(value: Any, kind: Any) -> Any:
    """Convert one value of a field with the descriptor `kind`."""
    if kind.message_type is not None:
        return _message(value)
    if kind.enum_type is not None:
        named = kind.enum_type.values_by_number.get(value)
        return value if named is None else named.name
    return value


def _key(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _plain(value: Any) -> Any:
    """Convert a decoded value to one that JSON can express. Raises UndecodableError for NaN and infinity."""
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


def message_at(file: Any, indexes: Iterable[int]) -> str:
    """Return the full name of a Protobuf message, given its position in a FileDescriptorProto.

    `indexes` are the index of the outermost message in the file, and then those of nested messages, each in
    the message around it. Raises IndexError if there is no such message.
    """
    names, kinds = [file.package] if file.package else [], file.message_type
    for index in indexes:
        found = kinds[index]
        names.append(found.name)
        kinds = found.nested_type
    return ".".join(names)
