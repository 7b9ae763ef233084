"""Buffers that are written as runs, and blocks of the format that had none."""

from __future__ import annotations

import struct
import zlib
from base64 import b85decode
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.model.message import NEVER, Message, Sender
from gateway.model.outcome import ACCEPTED
from gateway.model.properties import NO_PROPERTIES, Properties, PropertySet, property_set
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.mqtt.dialect import MQTT, topic_address
from gateway.store.journal.encoding import Encoder
from gateway.store.journal.format import (
    VERSION,
    DamageError,
    JournalError,
    Repeated,
    decode_header,
    decode_runs,
)
from gateway.store.journal.gathering import RowLabels, Settled
from tests.store.journal.samples import gathered, octets_of, rows_of

FORMAT_1: Final = (
    "c-oCsOHUI~6uxce#l!MeR0OH0_yAf!d8i4|g+@tqW5iV*W{xmPJ2TAO8q|=uWT#7(E{Q8whNVlFELnERl7DbLw=>f@MTnf{%"
    "l+;*=hZv6r%&HJf4uzi$%_n&>_}%VmP3q6vNSw6)~+?zM<~@5#=c(uHT3%J@{e(qu|XDLiSQNVoh-sS;hThS6TU<EF5!EG|5"
    "2m9B=!kEAiPfaS^N)?%QKKTBK;d$T9?`&>fJ2DxR&NAA~#rsdE|IR4J;A;8FG2d60eB9f*eaX@Q&!~$nz}1Cego;{M$tThCI"
    "t6>=6As@!uu-PtyM$(SMUZ{}6qj@B_l@B>y4NPqQQR>1PoPEK+0<=JoVlEa|Dw3i4hSftpWzwvi992-J3Ua+iqzKB;v;d=81"
    "O7=i_0f%5@uMHiV6IIn=6RfG~&JZ^NU;{1iss|6O6!L@zQak-(XV(_9>aR9lZic6PkAp}NV6+>47sCpdArfmlhhDKLb43EU&"
    "e&BJ>@+yX!6<0?Cuf{<>FI=mdzVEne<qr^qj^|2o>^e7tHQ;GY6mQ&&#bzcwC&q7KBFn3Sq2<KwI{}y>rs&9tyAu&FbJ*lYU"
    "YndM#*HM+b!w&QnOF-g&j+JJo4t2GR$LQv=5-8<t2V=Q42!imOvkWTkzu(u(PoBWEihdRR9&>&NLMSMYN8_mZaQvG5uNLvAL"
    "jbRIU6c?`T^MGG^R)7Q#pz57G0?r<x%wR9@z99Y%JR*dRIOBV>xs_fzfWv%`f0N`4DgiLfkJtcv!{u%{3@HwyyN`4@hrz!u("
    "5C^_2B2mWh9(|MOui{XOSSd7jB+TGr#HoRYup2hBVgl8^Q$YnDpWExD>2oF{uZAAI@RC*~S^Ilugh=_U?xZk39Y@-w$MTg01"
    "javoW$=C}4d_kPBt|3wg_4zjLU-SCSGrN&;)8q>1C=U^xCuIIw>@2tl?jl}bYCH+p7qGcMhPIAw8ti^^fSvoFEcb;&TZDckz"
    "1DfRD`U7N6wbqZT#<l4A^vC@3*5^WcRSSy+v#`ZZxKGLZOb+oc@l_?3"
)
"""The block of `part`, as a gateway wrote it that knew format 1; zlib, base 85."""

FORMAT_3: Final = (
    "c-oCsO>7fK6dv3AmmeJS*M>s*St!sp1lxfI+#*GAAfib0RwNoZ%kFEklD#{b9iz0U633oUjvP7mm?KAy<;Ia?P6+kHk=yXbv+I2h"
    "iORD+%{Sk^KhKVzZ~uDd=G}X@ey%ZN%N`put)J0k>E!IWNoTa)KxxNfto`)Gt+)TZS}XjUHe<8QV43h$<kQT66aIwoEyAA@zD@W`"
    "!e85_KaDqp?-2fu@XzsokG#SRK9K$!PFa`QY1A9cpy`x(t|8Y)sj-9{k7|fzqW^;2Wd`?&zKR@653x>kj=atco)G<Sl7EZn&yZJ{"
    "!E>VjL;Sai{(|)XlIZ`EK3^044dFY4za#nI6MaAXfIdf<K?934nZc4<zKdnI^jSrIh#64ZBtBcnPcQ>&+b+3F$blJL^vYUIuk=|W"
    "y5%V*AcXi4M3$>68A#cKsA?%I>!s40vDFt}X6ZnL(1j%8X`D#UvDNIcuonYz%T`|<A7miBx~)!pEuf!D=mt?FAj`a&sycZp59cD4"
    "X_)pryQ)r~5$QmJe(s;`2b{;rTK5r%EKU<Gp8G}yVhv<j6UFlva&eT&t*MLOVxlnZgXh%Lci#&LGE6a5Q*)OL?@HK|Ufr3$+{_y("
    "nwxf7?S)*+!jywI<y^V?L#`wN=B&FImRB8xxfqsfd6<h~xuU~r6KW#JvVjPa5NuaXMo1s_z;@J>02#zd%~I3rDbH$$)qx0lc=`gO"
    "ZW(h>)l0dEZm5}3G<htyaS%3njEz+%)S-uI^hY;~{{(N+TfBB1&xwPOF=V*!{P<HJ+Yi>D8%M5n_{dT1&Gwjs#cJ=fevVc0-{}AO"
    "FjoGaYx_K}R4QZZZnO5uzr)2SPle>8{pp&mR(mX0e?!V*ujd2Tul>^EaIfbV?*&QWpyyVrIj=v9ohwbe8GGl^wFZ2==f&R_0{Wi>"
    "qIA%8gZ>6@UT+Qede#JC2wXx`#3yM2yT7xW_jD?sH>~LQa?31j%sMYq9*3QwFyGoOw5Rtt%Ly`@Mgb%8Y5k*QPL0>ktLC+exP^RX"
    "X?yIiLlEIG@H-D4_<=v?XHwvRK+^J8=5|SKe`V#b$9{RY{f^&9o#xn}0l)b=VvqY-+>d^~egxqLKV$"
)
"""The same of `part` with TOLD, and format 3: properties and addresses are texts."""


def user_properties(*pairs: tuple[bytes, bytes]) -> PropertySet:
    """A set as MQTT writes it."""
    texts = [b"".join([len(text).to_bytes(2, "big") + text for text in pair]) for pair in pairs]
    return MQTT.property_set(b"".join([b"\x26" + text for text in texts]))


TOLD: Final = (
    user_properties((b"a", b"1"), (b"a", b"2")),
    user_properties((b"amqp-message-id", b"m"), (b"q", b'"')),
)


def part(sets: Sequence[PropertySet] = (NO_PROPERTIES, property_set(Properties(message_id="a")))) -> Settled:
    """Three messages that crossed."""
    sender = Sender("mqtt", "press-7", "plant", "10.0.0.7:40123")
    came = [topic_address(f"plant/{number}") for number in (1, 1, 2)]
    went = [
        Message(
            amqp_address("amq.topic", f"plant.{number}"),
            b"%d" % number,
            sets[number - 1],
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
    return Settled(labels, went, None, ACCEPTED, 1_700_000_000_000_000, 1_700_000_000_000_005, None, came)


def test_the_first_format_is_read_as_before(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, octets in (
        (old, zlib.decompress(b85decode("".join(FORMAT_1)))),
        (new, octets_of(Encoder(0).encode(0, gathered([part()], body_bytes_max=100)))),
    ):
        folder.mkdir()
        (folder / f"0-{0:020}.gwj").write_bytes(octets)
    rows = rows_of(old)
    assert rows == rows_of(new)
    assert [(row["source_name"], row["target_name"], row["message_id"], row["hops"]) for row in rows] == [
        ("plant/1", "plant.1", None, 0),
        ("plant/1", "plant.1", None, 0),
        ("plant/2", "plant.2", "a", 0),
    ]


def test_the_third_format_is_read_as_before(tmp_path: Path) -> None:
    rows = {}
    for name, octets in (
        ("old", zlib.decompress(b85decode("".join(FORMAT_3)))),
        ("new", octets_of(Encoder(0).encode(0, gathered([part(TOLD)], body_bytes_max=100)))),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"0-{0:020}.gwj").write_bytes(octets)
        rows[name] = rows_of(tmp_path / name)
    assert rows["old"] == rows["new"]
    assert [row["properties"] for row in rows["old"]] == [
        *['{"headers":[["a","string","1"],["a","string","2"]]}'] * 2,
        '{"message_id":"m","headers":[["q","string","\\""]]}',
    ]


def test_a_format_of_tomorrow_is_refused_by_its_number() -> None:
    """As a gateway of before refuses what this one writes."""
    octets = bytearray(octets_of(Encoder(0).encode(0, gathered([part()]))))
    octets[8:10] = struct.pack("<H", VERSION + 1)
    octets[68:72] = zlib.crc32(octets[:68]).to_bytes(4, "little")
    with pytest.raises(JournalError, match=f"is of format {VERSION + 1}; this gateway knows formats up to"):
        decode_header(bytes(octets))


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
