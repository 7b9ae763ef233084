"""Addresses and properties as their protocols write them, and the texts that are told of them.

The journal keeps the octets that came: to write JSON of each set of properties that is new costs more than
all else that the journal does with a message, and most rows are never asked for it. Whoever asks for a column
has its texts made here, by what the gateway itself would have made of the octets.

An octet before the octets says whose they are: FORMS. TEXTS are the texts themselves, of what no protocol has
written, or one of somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from struct import Struct, unpack
from typing import Final

from gateway.errors import RemoteProtocolError
from gateway.model.address import Address
from gateway.model.dialect import Dialect
from gateway.model.properties import PropertySet
from gateway.protocols import DIALECTS, dialect_of
from gateway.store.journal.entries import Entries, bitmap, octets_of, offsets
from gateway.store.journal.format import Buffer, DamageError, Octets, Repeated
from gateway.store.properties import encode_properties, encode_texts

Texts = tuple[bytes | None, ...]
AddressTexts = tuple[bytes, bytes | None, bytes]
SetTexts = tuple[bytes, bytes | None]
TEXTS: Final = 0
U32: Final = Struct("<I").pack
NULL: Final = U32(0xFFFF_FFFF)  # in the place of a length
FORM_OF: Final = {name: dialect.wire_form for name, dialect in DIALECTS.items() if dialect.wire_form}
WRITERS: Final = {dialect.wire_form: dialect for dialect in DIALECTS.values() if dialect.wire_form}
PROPERTIES_OCTETS_MAX: Final = 65_536  # of one set; more is recorded as {"omitted": octets}
MALFORMED: Final[SetTexts] = (b'{"malformed":true}', None)
TOLD: Final = "journal"  # the key in PropertySet.forms
ROWS_APART: Final = 65_536
APART_FROM: Final = 64  # rows of a block, half of which must be new
REMEMBERED: Final = 4_096  # sets and addresses, whose texts are wanted for block after block; and
REMEMBERED_OCTETS: Final = 1_024  # the largest that is worth it


def words_of(address: Address) -> AddressTexts:
    """An address as the journal has it: as one text, its scope if its protocol has any, and its name."""
    dialect = dialect_of(address)
    scope = None if dialect.scope_word is None else octets_of(address.scope)
    return octets_of(dialect.show(address)), scope, octets_of(address.name)


def recorded(found: PropertySet) -> SetTexts:
    """What the journal says of a property set, JSON and message id; remembered in its `forms`, unless it is
    soon made again: most sets of texts come once."""
    if found.read_texts is not None:
        made = encode_texts(found.read_texts, found.raw)
        if made is not None and len(made) <= PROPERTIES_OCTETS_MAX:
            return made, None
    form: SetTexts | None = found.forms.get(TOLD)
    if form is None:
        form = found.forms[TOLD] = _recorded(found)
    return form


def _recorded(found: PropertySet) -> SetTexts:
    try:
        properties = found.properties
    except RemoteProtocolError:
        return MALFORMED
    made = encode_properties(properties) or b"{}"
    name = properties.message_id
    if len(made) > PROPERTIES_OCTETS_MAX:
        made = b'{"omitted":%d}' % len(made)
    return made, None if name is None else octets_of(name)


def framed(texts: Texts) -> bytes:
    """The octets of texts, each behind its length."""
    return b"".join([NULL if text is None else U32(len(text)) + text for text in texts])


NOWHERE_TEXTS: Final = framed((None, None, None))  # of an address that there is none of


def _unframed(octets: bytes) -> Texts:
    found: list[bytes | None] = []
    at = 0
    while at < len(octets):
        length, at = octets[at : at + 4], at + 4
        if length == NULL:
            found.append(None)
        else:
            end = at + int.from_bytes(length, "little")
            found.append(octets[at:end])
            at = end
    return tuple(found)


Entered = tuple[bytes, list[bytes]]
"""Entries: their forms, and their octets."""
NOWHERE_ENTRY: Final[Entered] = bytes((TEXTS,)), [NOWHERE_TEXTS]


def address_entries(addresses: list[Address]) -> Entered:
    """An entry for each of addresses of one protocol."""
    form = FORM_OF.get(addresses[0].protocol, TEXTS)
    if form == TEXTS:
        return bytes(len(addresses)), [framed(words_of(one)) for one in addresses]
    return bytes((form,)) * len(addresses), [one.wire for one in addresses]


def set_entries(sets: list[PropertySet]) -> Entered:
    """An entry for each."""
    if not sets:
        return b"", []
    protocol = sets[0].protocol
    common = FORM_OF.get(protocol, TEXTS)
    octets = [
        one.raw for one in sets if one.protocol is protocol and 0 < len(one.raw) <= PROPERTIES_OCTETS_MAX
    ]
    if common and len(octets) == len(sets):
        return bytes((common,)) * len(octets), octets
    forms: list[int] = []
    octets = []
    for one in sets:
        raw = one.raw
        form = FORM_OF.get(one.protocol, TEXTS) if raw and len(raw) <= PROPERTIES_OCTETS_MAX else TEXTS
        forms.append(form)
        octets.append(raw if form else framed(recorded(one)))
    return bytes(forms), octets


class Wires:
    """A dictionary of octets. It lives on from block to block, as one of texts does (entries.py), where most
    of what comes has been there before. Where most is new, to look for it costs more than to write it again:
    then every row has an entry of its own, for as long as ROWS_APART, after which it is looked for once more.
    """

    __slots__ = ("_apart", "_differ", "_entries", "_forms")

    def __init__(self) -> None:
        self._entries = Entries(1)
        self._forms = bytearray()
        self._differ = False  # most rows of the last block that was looked at
        self._apart = 0  # rows that are not looked for

    def begin(self, rows: int) -> bool:
        """A block begins whose rows are looked for. True: nothing is known any more."""
        if not self._entries.begin(rows) and not self._differ:
            return False
        self._entries = Entries(1)
        self._forms.clear()
        return True

    def add_all(self, forms: bytes, octets: Sequence[bytes]) -> list[bytes]:
        """New entries; returns their numbers."""
        self._forms += forms
        return self._entries.add_all([(one,) for one in octets])

    def end(self, rows: int, fresh: int) -> list[Buffer]:
        """The buffers, when all rows have their numbers; `fresh` entries were made for them."""
        self._differ = rows >= APART_FROM and fresh > rows // 2
        if self._differ:
            self._apart = ROWS_APART
        return [_forms_buffer(bytes(self._forms)), *self._entries.end(rows)]

    @property
    def differ(self) -> bool:
        """Whether what comes next is not to be looked for."""
        return self._apart > 0

    def passed(self, rows: int) -> None:
        """So many rows have not been looked for."""
        self._apart = max(self._apart - rows, 0)


def wire_buffers(forms: bytes, octets: list[bytes]) -> list[Buffer]:
    """Those of a dictionary of these entries."""
    return held_buffers(forms, list(map(len, octets)), b"".join(octets))


def held_buffers(forms: bytes, sizes: list[int], octets: Octets) -> list[Buffer]:
    """The same of entries that lie one behind the other."""
    return [_forms_buffer(forms), offsets(sizes), octets]


def _forms_buffer(forms: bytes) -> Buffer:
    """Mostly all are one."""
    return Repeated(forms[:1], 1, [len(forms)]) if forms.count(forms[0]) == len(forms) else forms


# --- for readers

Dictionary = tuple[Octets, ...]
"""Validity, offsets and octets, as of a coded column."""


def address_dictionaries(forms: memoryview, starts: memoryview, octets: memoryview) -> list[Dictionary]:
    """What the columns have that share a dictionary of addresses, one for each in the order of their texts.
    Raises DamageError."""
    kinds = set(forms)
    if len(kinds) == 1 and (form := kinds.pop()) != TEXTS and _writer_of(form).wire_is_name:
        plain: Dictionary = b"", starts, octets
        return [plain, (bytes((len(forms) + 7) // 8), bytes(len(starts)), b""), plain]
    texts = [_address_texts(form, entry) for form, entry in _entries(forms, starts, octets)]
    return [_dictionary(column) for column in zip(*texts, strict=True)]


def set_dictionary(forms: memoryview, starts: memoryview, octets: memoryview, *, ids: bool) -> Dictionary:
    """What a column has of a dictionary of property sets: their message ids, which need no JSON of them, or
    their JSON. Raises DamageError."""
    read = _message_id if ids else _set_text
    return _dictionary(tuple([read(form, entry) for form, entry in _entries(forms, starts, octets)]))


def _entries(forms: memoryview, starts: memoryview, octets: memoryview) -> Iterator[tuple[int, bytes]]:
    raw = bytes(octets)
    places = pairwise(unpack(f"<{len(starts) // 4}i", starts))
    return ((form, raw[begin:end]) for form, (begin, end) in zip(forms, places, strict=True))


def _dictionary(texts: Texts) -> Dictionary:
    filled = [text or b"" for text in texts]
    valid = bitmap([text is not None for text in texts]) if None in texts else b""
    return valid, offsets(list(map(len, filled))), b"".join(filled)


def _address_texts(form: int, octets: bytes) -> Texts:
    return _unframed(octets) if form == TEXTS else _known_address(form, octets)


def _set_text(form: int, octets: bytes) -> bytes | None:
    if form == TEXTS:
        return _unframed(octets)[0]
    return _known_set(form, octets) if len(octets) <= REMEMBERED_OCTETS else _read_set(form, octets)


def _message_id(form: int, octets: bytes) -> bytes | None:
    if form == TEXTS:
        return _unframed(octets)[1]
    return _known_id(form, octets) if len(octets) <= REMEMBERED_OCTETS else _read_id(form, octets)


@lru_cache(REMEMBERED)
def _known_address(form: int, octets: bytes) -> Texts:
    return words_of(_writer_of(form).read_address(octets))


def _writer_of(form: int) -> Dialect:
    if form not in WRITERS:
        raise DamageError(f"an entry has the unknown form {form}")
    return WRITERS[form]


def _read_set(form: int, octets: bytes) -> bytes | None:
    try:
        found = _writer_of(form).unread_set(octets)
    except RemoteProtocolError:
        return MALFORMED[0]
    return recorded(found)[0]


def _read_id(form: int, octets: bytes) -> bytes | None:
    try:
        found = _writer_of(form).message_id(octets)
    except RemoteProtocolError:
        return None
    return None if found is None else octets_of(found)


_known_set: Final = lru_cache(REMEMBERED)(_read_set)
_known_id: Final = lru_cache(REMEMBERED)(_read_id)
