"""Bytes <-> commands and heads: every row runs four ways; the vectors; what is no frame."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from gateway.errors import LocalProtocolError, RemoteProtocolError
from gateway.model.properties import string
from gateway.protocols.amqpfast import codec as c
from gateway.protocols.amqpfast import commands as m
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.protocols.amqpfast.tables import decode_table
from tests.protocols.amqpfast.heads import decode_head, encode_head
from tests.protocols.amqpfast.wires import all_commands, all_heads

FRAME_MAX = 131_072
VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))["frames"]
GUEST = c.encode_credentials("guest", "guest")

ROWS = [  # the frame of section 2.6, or one made by hand after 3.1.1
    (m.ConnectionChallenge(1, "PLAIN"), "000b 0a 01 05504c41494e 0000 ce"),
    (
        m.ConnectionResponse("PLAIN", GUEST),
        "0029 0b 05504c41494e 001f 054c4f47494e 53 0005 6775657374 0850415353574f5244 53 0005 6775657374 ce",
    ),
    (m.ConnectionTune(48000, 1024, 0, 30), "000e 0c 0000bb80 0400 0000 001e 0000 ce"),
    (m.ConnectionOpen(1, "/", "c1"), "000b 0d 0001 012f 026331 0000 ce"),
    (m.ConnectionReply(1), "0007 12 0001 00c8 00 ce"),
    (m.ConnectionPing(True), "0003 0e 01 ce"),
    (m.ConnectionPing(), "0003 0e 00 ce"),
    (m.ConnectionClose(320, "x"), "0006 13 0140 0178 ce"),
    (m.ChannelOpen(1, 0, True), "000a 14 0001 0000 01 0000 00 ce"),
    (m.ChannelOpen(1, 2, True, True, (), "o"), "000b 14 0001 0002 03 0000 016f ce"),
    (m.ChannelAck(1, 0, 1), "000a 15 0001 0000 00000001 ce"),
    (m.ChannelCommit(1, 2), "0008 16 0001 0002 0000 ce"),
    (m.ChannelRollback(1, 2), "0008 17 0001 0002 0000 ce"),
    (m.ChannelReply(1, 2), "0009 1c 0001 0002 00c8 00 ce"),
    (m.ChannelClose(1, 503, ""), "0007 1d 0001 01f7 00 ce"),
    (
        m.HandleOpen(1, 1, 1, 0, True, True, dest_name="q"),
        "0011 1e 0001 0001 0001 0000 03 0171 00 00 0000 ce",
    ),
    (m.HandleSend(1, 0, 23), "000c 1f 0001 0000 00000017 00 00 ce"),
    (m.HandleSend(1, 5, 2, True, True, True, True, "n"), "000d 1f 0001 0005 00000002 0f 016e ce"),
    (m.HandleConsume(1, 0, 10), "000e 20 0001 0000 000a 00 00 00 0000 00 ce"),
    (m.HandleCancel(1, 0, "d", "i"), "000a 21 0001 0000 0164 0169 ce"),
    (m.HandleFlow(1, 0, True), "0007 22 0001 0000 01 ce"),
    (m.HandleUnget(1, 0, 7), "000a 23 0001 0000 00000007 ce"),
    (m.HandleQuery(1, 7), "000c 24 0001 00000007 00 0000 00 ce"),
    (m.HandleBrowse(1, 7, 3), "000a 25 0001 0007 00000003 ce"),
    (m.HandleCreated(1, "t"), "0006 28 0001 0174 ce"),
    (
        m.HandleNotify(1, 1, 23, delivered=True, dest_name="q"),
        "000f 29 0001 00000001 00000017 08 0171 ce",
    ),
    (
        m.HandleNotify(1, 1, 23, redelivered=True, streaming=True),
        "000e 29 0001 00000001 00000017 30 00 ce",
    ),
    (m.HandleIndex(1, 0, b"5,9,15-40,80"), "0016 2a 0001 00000000 000c 352c392c31352d34302c3830 ce"),
    (m.HandlePrepare(1, 4, b"ab"), "000b 2b 0001 00000004 026162 ce"),
    (m.HandleReady(1, 4), "0008 2c 0001 00000004 ce"),
    (m.HandleReply(1, 2, 310, "n"), "000a 30 0001 0002 0136 016e ce"),
    (m.HandleClose(1, 404, ""), "0007 31 0001 0194 00 ce"),
]


def read(data: bytes, frame_max: int = FRAME_MAX) -> m.Command | None:
    found = c.decode_frame(data, 0, frame_max)
    if found is None:
        return None
    begin, stop, after = found
    assert after == len(data)
    return c.decode_command(data[begin:stop])


def check(command: m.Command, data: bytes) -> None:
    """Encode, decode, with bytes before and behind, in the long form, truncated anywhere."""
    assert c.encode_command(command) == data
    assert read(data) == command
    assert c.decode_frame(b"xx" + data + b"yy", 2, FRAME_MAX) == (4, 1 + len(data), 2 + len(data))
    long = b"\xff\xff\0\0" + data
    assert read(long) == command
    for form in (data, long):
        for size in range(len(form)):
            assert c.decode_frame(form[:size], 0, FRAME_MAX) is None
            assert size < c.frame_bytes(form[:size], 0) <= len(form)
    content = data[2:-1]
    for size in range(1, len(content)):
        if isinstance(command, m.HandleBrowse) and size == 7:
            continue
        with pytest.raises(RemoteProtocolError) as caught:
            c.decode_command(content[:size])
        assert caught.value.reason in (ReplyCode.FRAMING_ERROR, ReplyCode.BAD_FIELD_VALUE)


@pytest.mark.parametrize(
    "command, wire", ROWS, ids=lambda row: row.name if isinstance(row, m.Command) else ""
)
def test_rows(command: m.Command, wire: str) -> None:
    check(command, bytes.fromhex(wire))


def test_every_command_has_a_row() -> None:
    assert {type(command) for command, _ in ROWS} == set(m.COMMANDS.values())
    assert len(m.COMMANDS) == 28


FIELDS = {"confirm_tag": "tag", "message_nbr": "message_number"}


def from_vector(values: dict[str, Any]) -> m.Command:
    kind = m.COMMANDS[values["type"]]
    layout = {name: domain for domain, name in kind.layout}
    found: dict[str, Any] = {}
    for said, value in values.items():
        name = FIELDS.get(said, said)
        if name == "type":
            continue
        domain = layout[name]
        if isinstance(value, dict):
            value = bytes.fromhex(value["hex"])
            if domain == "T":
                value = decode_table(len(value).to_bytes(2, "big") + value)[0]
        elif domain == "b":
            value = bool(value)
        elif domain == "sb":
            value = value.encode()
        found[name] = value
    return kind(**found)


@pytest.mark.parametrize(
    "vector", [one for one in VECTORS if one["wire"]], ids=lambda one: f"{one['frame']}-{one['sample']}"
)
def test_frames_of_another_encoder(vector: dict[str, Any]) -> None:
    check(from_vector(vector["values"]), bytes.fromhex(vector["wire"]))


HEADS = [
    (5, c.Head(True, 4, identifier="id1"), "00000005 01 04 00000000 00 00 03696431 0000"),
    (0, c.Head(), "00000000 00 00 00000000 00 00 00 0000"),
    (
        1 << 31,
        c.Head(False, 9, 1109845709, "text/plain", "utf-8", "ID1", (("LOGIN", string("johan")),)),
        "80000000 00 09 4226e6cd 0a746578742f706c61696e 057574662d38 03494431"
        "000e 054c4f47494e 53 0005 6a6f68616e",
    ),
]


@pytest.mark.parametrize("body_size, head, wire", HEADS)
def test_heads(body_size: int, head: c.Head, wire: str) -> None:
    data = bytes.fromhex(wire)
    assert encode_head(body_size, head) == data
    assert decode_head(data) == (body_size, head, len(data))
    assert decode_head(b"xx" + data, 2) == (body_size, head, len(data) + 2)
    assert c.find_head_end(data + b"body", 0, len(data) + 4) == len(data)
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError) as caught:
            decode_head(data[:size])
        assert caught.value.reason == ReplyCode.MESSAGE_CONTENTS_INVALID
        with pytest.raises(RemoteProtocolError):
            c.find_head_end(data, 0, size)


@pytest.mark.parametrize("vector", [one for one in VECTORS if one["frame"] == "message_head"])
def test_heads_of_another_encoder(vector: dict[str, Any]) -> None:
    values = dict(vector["values"])
    table = bytes.fromhex(values.pop("headers")["hex"])
    texts = [values[name].encode() for name in ("mime_type", "encoding", "identifier")]
    data = (
        values["body_size"].to_bytes(4, "big")
        + bytes((values["persistent"], values["priority"]))
        + values["expiration"].to_bytes(4, "big")
        + b"".join(bytes((len(text),)) + text for text in texts)
        + len(table).to_bytes(2, "big")
        + table
    )
    body_size, head, _ = decode_head(data)
    assert encode_head(body_size, head) == data
    assert [head.mime_type, head.encoding, head.identifier] == [text.decode() for text in texts]


@given(all_commands)
def test_any_command_comes_back(command: m.Command) -> None:
    assert read(c.encode_command(command)) == command


@given(all_heads)
def test_any_head_comes_back(head: c.Head) -> None:
    data = encode_head(7, head)
    assert decode_head(data) == (7, head, len(data))
    assert c.find_head_end(data, 0, len(data)) == len(data)


NO_FRAMES = [
    ("0000", "2.2: no room for type and end"),
    ("0002 0e ce", "2.2: no room for a field"),
    ("ffff 00000002", "2.2: the same in the long form"),
    ("ffff ffffffff", "2.2: reserved"),
    ("2000", "2.5: more than frame-max"),
    ("ffff 00010000", "2.5: more than frame-max in the long form"),
    ("0003 0e 01 cd", "2.2: another end"),
    ("0004 0e 01 ce ce", "2.2: bytes behind the last field"),
]


@pytest.mark.parametrize("wire, why", NO_FRAMES)
def test_what_is_no_frame(wire: str, why: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        read(bytes.fromhex(wire), 8191)
    assert caught.value.reason == ReplyCode.FRAMING_ERROR, why


@pytest.mark.parametrize("kind", [10, 11, 12])
def test_the_handshake_has_a_limit_of_its_own(kind: int) -> None:
    with pytest.raises(RemoteProtocolError):
        c.decode_frame(bytes((0x10, 0x01, kind)), 0, FRAME_MAX)
    assert c.decode_frame(bytes((0x10, 0x00, kind)), 0, FRAME_MAX) is None
    assert c.decode_frame(bytes((0x10, 0x01, 13)), 0, FRAME_MAX) is None


BAD_FIELDS = [
    ("0f 00", 501, "2.2: no such command"),
    ("13 00c8 0100", 501, "6: a zero byte in a short string"),
    ("13 00c8 01ff", 501, "6: not UTF-8"),
    ("16 0001 0000 0004 01610158", 502, "2.4: a type that no table knows"),
    ("16 0001 0000 0003 016153", 502, "2.4: a value that is cut short"),
    ("25 0001 0007", 501, "3.5.9: neither with nor without a tag"),
]


@pytest.mark.parametrize("wire, code, why", BAD_FIELDS)
def test_bad_fields(wire: str, code: int, why: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        c.decode_command(bytes.fromhex(wire))
    assert caught.value.reason == code, why


def test_browse_without_a_tag() -> None:
    assert read(bytes.fromhex("0008 25 0001 00000003 ce")) == m.HandleBrowse(1, 0, 3)


def test_unused_bits_are_ignored() -> None:
    assert read(bytes.fromhex("0003 0e ff ce")) == m.ConnectionPing(True)


def test_the_long_form_from_ffff() -> None:
    for size, begin in ((65_524, b"\xff\xfe"), (65_525, b"\xff\xff\x00\x00\xff\xff")):
        command = m.HandleIndex(1, 0, bytes(size))
        data = c.encode_command(command)
        assert data.startswith(begin)
        assert read(data) == command


@pytest.mark.parametrize(
    "command",
    [
        m.ConnectionClose(70_000),
        m.ConnectionClose(200, "x" * 256),
        m.ConnectionClose(200, "\0"),
        m.HandleUnget(1, 0, -1),
        m.ConnectionOpen(options=(("", string("")),)),
        m.HandleIndex(1, 0, bytes(70_000)),
    ],
)
def test_what_does_not_fit_is_our_fault(command: m.Command) -> None:
    with pytest.raises(LocalProtocolError):
        c.encode_command(command)


LISTS: list[tuple[list[int], bytes, bytes]] = [
    ([], b"", b""),
    ([0], b"0", b"0"),
    (
        [5, 9, *range(15, 41), 80],
        b"5,9,15-40,80",
        b"5 9 " + b" ".join(b"%d" % n for n in range(15, 41)) + b" 80",
    ),
    ([1, 2], b"1-2", b"1 2"),
    ([9, 10, 12, 13], b"9-10,12-13", b"9 10 12 13"),
]


@pytest.mark.parametrize("numbers, ranges, singly", LISTS)
def test_message_lists(numbers: list[int], ranges: bytes, singly: bytes) -> None:
    assert c.encode_message_list(numbers) == (ranges, len(numbers))
    assert c.encode_message_list(numbers, singly=True) == (singly, len(numbers))
    for said in (ranges, singly, ranges.replace(b",", b"."), ranges.replace(b",", b"; ")):
        found = c.decode_message_list(said)
        assert [n for first, last in found for n in range(first, last + 1)] == numbers


def test_a_message_list_has_a_limit() -> None:
    for limit in range(20):
        data, taken = c.encode_message_list([1, 2, 3, 100, 101, 200], bytes_max=limit)
        assert len(data) <= limit
        found = c.decode_message_list(data)
        assert [n for first, last in found for n in range(first, last + 1)] == [1, 2, 3, 100, 101, 200][
            :taken
        ]


@pytest.mark.parametrize("data", [b"a", b"3-1", b"1-2-3", b"-1", b"99999999999", b"\xff"])
def test_what_is_no_message_list(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        c.decode_message_list(data)


CREDENTIALS = [
    ("PLAIN", c.encode_credentials("a", "b"), ("a", "b")),
    ("plain", (("login:", string("a")), ("password:", string("b"))), ("a", "b")),
    ("PLAIN", (("LOGIN", string("a")),), ("a", "")),
    ("PLAIN", (), None),
    ("none", (), None),
    ("NONE", c.encode_credentials("a", "b"), None),
]


@pytest.mark.parametrize("mechanism, responses, said", CREDENTIALS)
def test_credentials(mechanism: str, responses: Any, said: Any) -> None:
    assert c.decode_credentials(mechanism, responses) == said


@pytest.mark.parametrize("mechanism, responses", [("X", ()), ("PLAIN", (("PASSWORD", string("b")),))])
def test_what_are_no_credentials(mechanism: str, responses: Any) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        c.decode_credentials(mechanism, responses)
    assert caught.value.reason == ReplyCode.BAD_FIELD_VALUE


@pytest.mark.parametrize(
    "said, digest",
    [
        (b"", b""),
        (b"00ff" * 10, b"\0\xff" * 10),
        (b"00FF" * 10, b"\0\xff" * 10),
        (bytes(range(20)), bytes(range(20))),
        (b"x" * 40, None),
        (b"\xff" * 40, None),
        (b"00", None),
    ],
)
def test_content_hashes(said: bytes, digest: bytes | None) -> None:
    assert c.read_content_hash(said) == digest
