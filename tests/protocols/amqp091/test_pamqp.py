"""Both directions against pamqp, an independent codec, for every method and property set.

Where pamqp differs it is the odd one out, and these tests stay on the common ground:

| what | pamqp | here |
|---|---|---|
| class access, field type `U` | not known | known |
| longlong of 2^63 and more | negative | unsigned, as the paper says |
| integers in tables | the smallest type that fits | the type that the value carries |
| float in a table | always `f` | `f` or `d`, as the value says |
| a string in a table that is not UTF-8 | bytes, which it cannot write again | kept |
| a timestamp beyond 2106 | taken for milliseconds | kept |
| empty property | left out | written, as it was said |
| bytes after the last argument, bits beyond | ignored | 502 |
| names with other than letters, digits, `-_.:` | refused locally | the broker's business |
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import commands, frame
from pamqp.header import ContentHeader

from gateway.model.properties import Value, ValueType, string
from gateway.protocols.amqp091.codec import (
    BasicProperties,
    decode_content_header,
    decode_frame,
    decode_method,
    decode_properties,
    encode_basic_properties,
    encode_content_frames,
    encode_method_frame,
)
from gateway.protocols.amqp091.methods import METHODS, Method
from gateway.protocols.amqp091.spec import PROPERTIES
from gateway.protocols.amqp091.table import plain
from tests.protocols.amqp091.wires import DOMAINS, RANGES, SCALARS, ascii_names, methods_of

pytestmark = pytest.mark.filterwarnings("ignore:This command is deprecated")
V = ValueType
COMMANDS: dict[int, Any] = dict(commands.INDEX_MAPPING)
UNKNOWN = {"access.request", "access.request-ok"}
KNOWN = sorted(index for index, kind in METHODS.items() if kind.name not in UNKNOWN)
stamps = st.integers(0, 0xFFFF_FFFF)
common_scalars = st.one_of(
    [
        st.builds(Value, st.just(kind), values)
        for kind, values in {
            **SCALARS,
            V.STRING: st.text(max_size=10),
            V.BYTES: st.binary(max_size=10),
            V.TIMESTAMP: stamps,
        }.items()
    ]
)
common_values = st.recursive(
    common_scalars,
    lambda inner: st.builds(Value, st.just(V.ARRAY), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=4,
)
tables = st.dictionaries(ascii_names, common_values, max_size=4).map(lambda found: tuple(found.items()))
OURS = {
    **DOMAINS,
    "ss": ascii_names,
    "ll": st.integers(0, (1 << 63) - 1),
    "ls": st.text(max_size=20).map(str.encode),
    "T": tables,
}


def theirs(value: Any) -> Any:
    """A value of ours as pamqp says it."""
    if isinstance(value, Value):
        if value.type is V.TIMESTAMP:
            return datetime.fromtimestamp(value.value, tz=UTC)
        if value.type is V.ARRAY:
            return [theirs(each) for each in value.value]
        if value.type is V.BYTES:
            return bytearray(value.value)
        return value.value
    if isinstance(value, tuple):
        return {name: theirs(each) for name, each in value}
    return value


def unmarshal(wire: bytes) -> tuple[int, int, Any]:
    return frame.unmarshal(wire)


def test_only_the_class_of_0_8_is_unknown_to_pamqp() -> None:
    ours = {index for index, kind in METHODS.items() if kind.name not in UNKNOWN}
    assert ours == set(COMMANDS)
    flat = {
        kind.name.replace(".", "").replace("-", "") for kind in METHODS.values() if kind.name not in UNKNOWN
    }
    assert flat == {kind.name.replace(".", "").lower() for kind in COMMANDS.values()}


@given(st.sampled_from(KNOWN).flatmap(lambda index: methods_of(METHODS[index], OURS)))
def test_pamqp_reads_what_we_write(method: Method) -> None:
    wire = encode_method_frame(7, method)
    size, channel, found = unmarshal(wire)
    assert (size, channel, found.name) == (len(wire), 7, COMMANDS[method.index].name)
    for (domain, name), attribute in zip(method.layout, found.attributes(), strict=True):
        if name:
            value = getattr(method, name)
            said = getattr(found, attribute)
            if domain == "ls":
                said = said.encode() if isinstance(said, str) else said
            assert said == theirs(value), attribute


@given(st.sampled_from(KNOWN).flatmap(lambda index: methods_of(METHODS[index], {**OURS, "T": st.just(())})))
def test_we_read_what_pamqp_writes(method: Method) -> None:
    found = COMMANDS[method.index]()
    for (domain, name), attribute in zip(method.layout, found.attributes(), strict=True):
        if name:
            value = getattr(method, name)
            setattr(
                found,
                attribute,
                value.decode() if domain == "ls" else theirs(value) if domain == "T" else value,
            )
        elif domain in ("ss", "ls"):
            setattr(found, attribute, "")  # pamqp says "0" in some that are reserved
    try:
        wire = frame.marshal(found, 7)
    except ValueError:  # a name that pamqp's own rules refuse
        return
    assert wire == encode_method_frame(7, method)
    taken = decode_frame(wire, 0, 131_072)
    assert taken is not None
    assert decode_method(taken[2]) == method


bare_tables = st.dictionaries(
    ascii_names,
    st.one_of(st.none(), st.booleans(), st.integers(*RANGES[V.INT64]), st.text(max_size=9), stamps),
    max_size=5,
)


@given(bare_tables)
def test_we_read_pamqps_tables(table: dict[str, Any]) -> None:
    found = frame.marshal(commands.Queue.Bind(queue="q", arguments=table), 1)
    taken = decode_frame(found, 0, 131_072)
    assert taken is not None
    method: Any = decode_method(taken[2])
    assert plain(method.arguments) == table


some_properties = st.builds(
    BasicProperties,
    **{
        name: st.none() | OURS[domain]
        for name, domain, _ in PROPERTIES
        if name not in ("cluster_id", "timestamp")
    },
    timestamp=st.none() | stamps,
)


@settings(max_examples=200)
@given(some_properties)
def test_pamqp_reads_our_properties(properties: BasicProperties) -> None:
    properties.correlation_id = None if properties.correlation_id is None else b"id-7"
    (wire,) = encode_content_frames(3, encode_basic_properties(properties), b"", 131_072)
    _, _, found = unmarshal(wire)
    for (name, _, _), attribute in zip(PROPERTIES[:-1], found.properties.attributes(), strict=False):
        value = getattr(properties, name)
        said = getattr(found.properties, attribute)
        if name == "timestamp" and value is not None:
            value = datetime.fromtimestamp(value, tz=UTC)
        if name == "correlation_id" and value is not None:
            value = value.decode()
        assert said == theirs(value), name


def test_we_read_pamqps_properties() -> None:
    written = commands.Basic.Properties(
        content_type="a/b", content_encoding="gzip", headers={"a": "b"}, delivery_mode=2, priority=9,
        correlation_id="c", reply_to="r", expiration="10", message_id="m",
        timestamp=datetime(2020, 1, 1, tzinfo=UTC), message_type="t", user_id="u", app_id="p",
    )  # fmt: skip
    wire = frame.marshal(ContentHeader(0, 10, written), 1)
    size, raw = decode_content_header(wire[7:-1])
    expected = BasicProperties(
        "a/b", "gzip", (("a", string("b")),), 2, 9, b"c", "r", "10", "m", 1577836800, "t", "u", "p"
    )
    assert size == 10
    assert decode_properties(raw) == expected
    assert encode_basic_properties(expected) == raw


def test_pamqp_reads_our_bodies() -> None:
    body = bytes(range(256)) * 80
    _, *bodies = encode_content_frames(1, b"\0\0", body, 4096)
    assert b"".join(unmarshal(each)[2].value for each in bodies) == body
