"""Definitions of Protobuf, as a compiler or a registry would return them."""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, json_format
from google.protobuf.message_factory import GetMessageClass

from gateway.pipeline.jobs.encodings import protobuf_pool

Field = descriptor_pb2.FieldDescriptorProto
UNIT_FILE: Final = "plant/unit.proto"
READING_FILE: Final = "plant/reading.proto"
DECIMAL_FILE: Final = "confluent/type/decimal.proto"


def field(number: int, name: str, kind: int | str, **also: Any) -> Any:
    """Return a field of a number, a text or, if `kind` is a name, a message."""
    stated = {"type": kind} if isinstance(kind, int) else {"type": Field.TYPE_MESSAGE, "type_name": kind}
    label = also.pop("label", Field.LABEL_OPTIONAL)
    return Field(name=name, number=number, label=label, **stated, **also)


def unit_file() -> Any:
    """Return the definition of a unit, which readings import."""
    file = descriptor_pb2.FileDescriptorProto(name=UNIT_FILE, package="plant", syntax="proto3")
    file.message_type.add(name="Unit", field=[field(1, "unit", Field.TYPE_STRING)])
    return file


def reading_file() -> Any:
    """Return the definition of a reading, with another message before it and one inside it."""
    file = descriptor_pb2.FileDescriptorProto(name=READING_FILE, package="plant", syntax="proto3")
    file.dependency.extend([UNIT_FILE, "google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"])
    file.dependency.append(DECIMAL_FILE)
    file.message_type.add(name="Other", field=[field(1, "t", Field.TYPE_DOUBLE)])
    reading = file.message_type.add(name="Reading")
    reading.field.extend(
        [
            field(1, "t", Field.TYPE_DOUBLE),
            field(2, "n", Field.TYPE_INT64),
            field(3, "of", ".plant.Unit"),
            field(4, "price", ".confluent.type.Decimal"),
            field(5, "seen", ".google.protobuf.Timestamp"),
            field(6, "raw", Field.TYPE_BYTES),
            field(7, "list", Field.TYPE_SINT32, label=Field.LABEL_REPEATED),
            field(8, "by_line", ".plant.Reading.ByLineEntry", label=Field.LABEL_REPEATED),
            field(9, "count", ".google.protobuf.UInt64Value"),
            field(10, "inner", ".plant.Reading.Inner"),
            field(11, "state", Field.TYPE_ENUM, type_name=".plant.Reading.State"),
        ]
    )
    entry = reading.nested_type.add(name="ByLineEntry")
    entry.field.extend([field(1, "key", Field.TYPE_INT32), field(2, "value", ".plant.Unit")])
    entry.options.map_entry = True
    reading.nested_type.add(name="Inner", field=[field(1, "t", Field.TYPE_DOUBLE)])
    state = reading.enum_type.add(name="State")
    state.value.add(name="OFF", number=0)
    state.value.add(name="ON", number=1)
    return file


def decimal_file() -> Any:
    """Return the definition of a decimal, as Confluent's serializers have it."""
    file = descriptor_pb2.FileDescriptorProto(name=DECIMAL_FILE, package="confluent.type", syntax="proto3")
    fields = [field(1, "value", Field.TYPE_BYTES), field(2, "precision", Field.TYPE_UINT32)]
    file.message_type.add(name="Decimal", field=[*fields, field(3, "scale", Field.TYPE_INT32)])
    return file


def descriptor_set(*files: Any) -> bytes:
    """Return definitions as `protoc --descriptor_set_out` writes them."""
    data: bytes = descriptor_pb2.FileDescriptorSet(file=files).SerializeToString()
    return data


def whole_set() -> bytes:
    """Return the definitions of readings, with what they import."""
    return descriptor_set(unit_file(), decimal_file(), reading_file())


def encoded(name: str, value: dict[str, Any]) -> bytes:
    """Return the bytes of a message by its full name; `value` is as in the JSON of Protobuf."""
    pool = protobuf_pool({one.name: one for one in (unit_file(), decimal_file(), reading_file())})
    made = GetMessageClass(pool.FindMessageTypeByName(name))()
    data: bytes = json_format.ParseDict(value, made).SerializeToString()
    return data
