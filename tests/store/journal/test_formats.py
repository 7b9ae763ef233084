"""Buffers that are written as runs, and the refusal of other formats."""

from __future__ import annotations

import re
import struct
import zlib
from base64 import b85decode
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import PropertySet
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import MQTT, topic_address
from gateway.store.journal.column_buffers import RowLabels, SettledMessages
from gateway.store.journal.encoder import Encoder
from gateway.store.journal.format import (
    VERSION,
    DamageError,
    JournalError,
    Repeated,
    decode_runs,
)
from tests.store.journal.samples import bytes_of, gathered, rows_of, write

FORMAT_4: Final = (
    "c-oCsNmJB76z<F<lLT;v#RWG6L_`#rVR6(GrB!OVlw4eHLr9*Gs+pwe^dNfT=#e8wj$Ewb$kCs`PvGd0Be%Aj&X6|<C2#7h{`$+?"
    "x;yE4_4&>7cOPE7HHo$ro3vS8Vn~tsf&P(>!pT^b(zXnmd-?0rH}>&;%l}Yn{Y1mDGCnAI7ttsqK9BeU;){q=#5WM%v~+(8TZnHX"
    "zJvHh{C6cch{hi3e;?Jwb|Cd`qH&1w97*mF4I;Nq?XQAU$n<W>)pjfNBYjYE8Gej0q?aWx5{-GJzef2Nkp4yT9MM=r`U>)=NMA2x"
    "{cj-sC+c$(>05|zBff+3?;;)B9_sCPA=}%1w8jJE^9T7HNj^d}2JOse%+7qCNIp(9Oh*s~K7?x!n6@wy;Jgk&&J<=+kGWH_#MNs_"
    "++;q~APQ(4M%*b_qW`*I4?%L%5;tx(6JSo!61Q$MXv7?9UJx)y5~q|C19#GJ%3>b-aow?UVsMDXO%Ce$@ZE+-X&5cn)_^5p94T?+"
    "9{1QX@T{g3NAIWNNhUil#vaH-e%t`3kQd_*8F-0I(U}*ICN!^cSm$oBFgaBwX(wrSZkG~`R80Jsg4?O2Tq;Fg1KgrrnVunO<&#Jy"
    "8mX8@Dk+yrDl+d1*GrNn^CBNCTXY1HF4e&*h)xFF3!}U#x>jPE<om>>0P6A#7zDK}rbiSrxfR_lN|~thn09v$tkY1omUBh#QXG7*"
    "CE*WnJDl0M$9cJ36c`U7(Sq5KOYoMV76!K2clnC)CuiJat<gGXyoed;`}aSei_8tfXd6$Pc~1TV%1-har}DS@Q{Q!^GToM|vC4UC"
    "uD)-oj((zgJXiM*t$R_+L4A{z@}&AzpUsxlD|2QZRjWzcd#-++@$i2Nu*^Z#^%|?R{IqgBS9gWy`#?Dat@tR8pl!d<0`0Un(&~4r"
    "q6fLu96FfZ^v+P`%7T+TrlD^i`%YH=QKnDVDW>;{vQc7q#Hi?DdX$vZ0w&UzZXyhb(U8wpi7~AG{{nSq4Pp"
)
"""The block of `part` with TOLD, of before NEWER were columns; zlib, base 85."""
NEWER: Final = ("correlation_id", "content_type")


def user_properties(*pairs: tuple[bytes, bytes]) -> PropertySet:
    """A set as MQTT writes it."""
    texts = [b"".join([len(text).to_bytes(2, "big") + text for text in pair]) for pair in pairs]
    return MQTT.property_set(b"".join([b"\x26" + text for text in texts]))


TOLD: Final = (
    user_properties((b"a", b"1"), (b"a", b"2")),
    user_properties((b"amqp-message-id", b"m"), (b"q", b'"')),
)


def part() -> SettledMessages:
    """Three messages that crossed."""
    sender = Sender("mqtt", "press-7", "plant", "10.0.0.7:40123")
    came = [topic_address(f"plant/{number}") for number in (1, 1, 2)]
    went = [
        Message(
            amqp_address("amq.topic", f"plant.{number}"),
            b"%d" % number,
            TOLD[number - 1],
            1,
            True,
            False,
            7.5 if number == 2 else NEVER,
            1,
            sender,
        )
        for number in (1, 1, 2)
    ]
    labels = RowLabels("up", "7f3a", "erp", "amqp091", False)
    return SettledMessages(
        labels, went, None, ACCEPTED, 1_700_000_000_000_000, 1_700_000_000_000_005, None, came
    )


def test_the_format_of_the_first_release_is_read(tmp_path: Path) -> None:
    rows = {}
    for name, data in (
        ("released", zlib.decompress(b85decode("".join(FORMAT_4)))),
        ("ours", bytes_of(Encoder(0).encode(0, gathered([part()], body_bytes_max=100)))),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"0-{0:020}.gwj").write_bytes(data)
        rows[name] = rows_of(tmp_path / name)
    assert [row | dict.fromkeys(NEWER) for row in rows["released"]] == rows["ours"]
    assert [
        (row["source_name"], row["target_name"], row["message_id"], row["properties"])
        for row in rows["released"]
    ] == [
        *[("plant/1", "plant.1", None, '{"headers":[["a","string","1"],["a","string","2"]]}')] * 2,
        ("plant/2", "plant.2", "m", '{"message_id":"m","headers":[["q","string","\\""]]}'),
    ]


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_format_is_refused_by_its_number(version: int, tmp_path: Path) -> None:
    data = bytearray(bytes_of(Encoder(0).encode(0, gathered([part()]))))
    data[8:10] = struct.pack("<H", version)
    data[68:72] = zlib.crc32(data[:68]).to_bytes(4, "little")
    path = tmp_path / f"0-{0:020}.gwj"
    path.write_bytes(data)
    told = f"{path}: the journal has format {version}, but this gateway reads format {VERSION}: read it with"
    with pytest.raises(JournalError, match=re.escape(told)):
        rows_of(tmp_path)
    with pytest.raises(JournalError, match=f"has format {version}"):
        write(tmp_path, range(1))
    assert path.read_bytes() == data


runs = st.lists(st.tuples(st.integers(0, 255), st.integers(1, 40)), min_size=1, max_size=20)


@given(runs, st.sampled_from([1, 4, 8]))
def test_runs_are_read_as_they_were_written(given: list[tuple[int, int]], width: int) -> None:
    values = b"".join(bytes([value]) * width for value, _ in given)
    buffer = Repeated(values, width, [length for _, length in given])
    plain = b"".join(bytes([value]) * (width * length) for value, length in given)
    made = buffer.encoded()
    assert len(buffer) == len(plain)
    assert len(made) <= len(plain)
    assert made == plain or decode_runs(memoryview(made), len(plain)) == plain


SOUND: Final = Repeated(bytes(range(8)), 4, [10, 20]).encoded()
DAMAGED: Final = {
    "nothing": b"",
    "half a head": SOUND[:4],
    "no lengths": SOUND[:8],
    "a value too few": SOUND[:-4],
    "a value too many": SOUND + b"abcd",
    "other lengths": SOUND.replace(struct.pack("<I", 20), struct.pack("<I", 21)),
    "no width": struct.pack("<II", 0, 0),
    "more runs than there are": struct.pack("<II", 1 << 31, 4) + SOUND[8:],
}


@pytest.mark.parametrize("stored", DAMAGED.values(), ids=DAMAGED)
def test_runs_that_do_not_fit_are_damage(stored: bytes) -> None:
    with pytest.raises(DamageError, match="runs of a buffer"):
        decode_runs(memoryview(stored), 120)
