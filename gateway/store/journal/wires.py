"""Addresses and property sets as encoded entries (format.py, kind 9), and the texts that readers see.

The journal stores the received bytes: writing JSON for each new property set would cost more than everything
else that the journal does with a message, and most rows are never read. For a reader that requests such a
column this module derives the texts from the bytes, as the gateway itself would have. A byte before the entry
(FORMS) names the protocol. The form TEXTS has the texts themselves, for entries without the bytes of a
built-in protocol.
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
from gateway.store.journal.entries import BlockDictionary, bitmap, bytes_of, offsets
from gateway.store.journal.format import Buffer, Bytes, DamageError, Repeated
from gateway.store.properties import encode_properties, encode_texts

Texts = tuple[bytes | None, ...]
AddressTexts = tuple[bytes, bytes | None, bytes]
SetTexts = tuple[bytes, bytes | None, bytes | None, bytes | None]
"""Texts of a property set: all properties as JSON, message id, correlation id, content type."""
TEXTS: Final = 0
U32: Final = Struct("<I").pack
NULL: Final = U32(0xFFFF_FFFF)  # instead of a length
FORM_OF: Final = {name: dialect.wire_form for name, dialect in DIALECTS.items() if dialect.wire_form}
WRITERS: Final = {dialect.wire_form: dialect for dialect in DIALECTS.values() if dialect.wire_form}
PROPERTIES_BYTES_MAX: Final = 65_536  # of one set; a larger one is recorded as {"omitted": bytes}
MALFORMED: Final[SetTexts] = (b'{"malformed":true}', None, None, None)
RECORDED: Final = "journal"  # key in PropertySet.forms
ROWS_APART: Final = 65_536
APART_FROM: Final = 64  # rows of a block, of which half must be new
REMEMBERED: Final = 4_096  # sets and addresses cached for readers of block after block
REMEMBERED_BYTES: Final = 1_024  # bytes of the largest cached one


def words_of(address: Address) -> AddressTexts:
    """Return the texts of an address in the journal: the whole address, its scope and its name, in UTF-8.

    The scope is None for a protocol without scopes.
    """
    dialect = dialect_of(address)
    scope = None if dialect.scope_word is None else bytes_of(address.scope)
    return bytes_of(dialect.show(address)), scope, bytes_of(address.name)


def recorded_texts(found: PropertySet) -> SetTexts:
    """Return the texts of a property set in the journal: JSON, message id, correlation id, content type.

    A missing text is None; a correlation id that is not UTF-8 is only in the JSON. The result is cached in
    the set's `forms`, except for sets of text headers, which are fast to encode and mostly occur once.
    """
    if found.read_texts is not None:
        made = encode_texts(found.read_texts, found.raw)
        if made is not None and len(made) <= PROPERTIES_BYTES_MAX:
            return made, None, None, None
    form: SetTexts | None = found.forms.get(RECORDED)
    if form is None:
        form = found.forms[RECORDED] = _recorded(found)
    return form


def _recorded(found: PropertySet) -> SetTexts:
    """Return the texts of the property set `found`, without the cache; MALFORMED if it cannot be decoded."""
    try:
        properties = found.properties
    except RemoteProtocolError:
        return MALFORMED
    made = encode_properties(properties) or b"{}"
    if len(made) > PROPERTIES_BYTES_MAX:
        made = b'{"omitted":%d}' % len(made)
    name, kind = properties.message_id, properties.content_type
    return (
        made,
        None if name is None else bytes_of(name),
        _text_of(properties.correlation),
        None if kind is None else bytes_of(kind),
    )


def _text_of(correlation: bytes | None) -> bytes | None:
    """Return the correlation id, or None if it is missing or not UTF-8."""
    if correlation is not None:
        try:
            correlation.decode()
        except UnicodeDecodeError:
            return None
    return correlation


def framed(texts: Texts) -> bytes:
    """Return texts as one byte string, each preceded by its length as uint32.

    A text that is None becomes only the length NULL.
    """
    return b"".join([NULL if text is None else U32(len(text)) + text for text in texts])


NOWHERE_TEXTS: Final = framed((None, None, None))  # of a missing address


def _unframed(data: bytes) -> Texts:
    """Return the texts that `framed` encoded."""
    found: list[bytes | None] = []
    at = 0
    while at < len(data):
        length, at = data[at : at + 4], at + 4
        if length == NULL:
            found.append(None)
        else:
            end = at + int.from_bytes(length, "little")
            found.append(data[at:end])
            at = end
    return tuple(found)


Entered = tuple[bytes, list[bytes]]
"""Encoded addresses or property sets: the encoding of each as one byte, and the bytes of each."""
NOWHERE_ENTRY: Final[Entered] = bytes((TEXTS,)), [NOWHERE_TEXTS]


def address_entries(addresses: list[Address]) -> Entered:
    """Encode each address for a dictionary of addresses; all must be of one protocol.

    Return their encodings (one byte each: the protocol's number, or 0 for texts) and their bytes.
    """
    form = FORM_OF.get(addresses[0].protocol, TEXTS)
    if form == TEXTS:
        return bytes(len(addresses)), [framed(words_of(one)) for one in addresses]
    return bytes((form,)) * len(addresses), [one.wire for one in addresses]


def set_entries(sets: list[PropertySet]) -> Entered:
    """Encode each property set for a dictionary of property sets.

    Return their encodings (one byte each: the protocol's number, or 0 for texts) and their bytes.
    """
    if not sets:
        return b"", []
    protocol = sets[0].protocol
    common = FORM_OF.get(protocol, TEXTS)
    data = [one.raw for one in sets if one.protocol is protocol and 0 < len(one.raw) <= PROPERTIES_BYTES_MAX]
    if common and len(data) == len(sets):
        return bytes((common,)) * len(data), data
    forms: list[int] = []
    data = []
    for one in sets:
        raw = one.raw
        form = FORM_OF.get(one.protocol, TEXTS) if raw and len(raw) <= PROPERTIES_BYTES_MAX else TEXTS
        forms.append(form)
        data.append(raw if form else framed(recorded_texts(one)))
    return bytes(forms), data


class WireDictionary:
    """Dictionary of encoded addresses or property sets, which persists from block to block.

    Where most entries are new, looking them up costs more than writing them again. Then `differ` is True for
    the next ROWS_APART rows, which are encoded without a look-up; after that, entries are looked up again.
    """

    __slots__ = ("_apart", "_differ", "_entries", "_forms")

    def __init__(self) -> None:
        self._entries = BlockDictionary(1)
        self._forms = bytearray()
        self._differ = False  # most rows of the last block that was looked up
        self._apart = 0  # remaining rows that are not looked up

    def begin(self, rows: int) -> bool:
        """Begin a block of `rows` rows with look-ups. Return True if the dictionary was cleared."""
        if not self._entries.begin(rows) and not self._differ:
            return False
        self._entries = BlockDictionary(1)
        self._forms.clear()
        return True

    def add_all(self, forms: bytes, data: Sequence[bytes]) -> list[bytes]:
        """Add encoded addresses or property lists to the dictionary. Return the index of each as four bytes.

        `forms` has one byte for each entry of `data`: the protocol of its encoding, or 0 for texts (see
        format.py).
        """
        self._forms += forms
        return self._entries.add_all([(one,) for one in data])

    def end(self, rows: int, fresh: int) -> list[Buffer]:
        """End a block of `rows` rows with `fresh` new entries. Return the dictionary's buffers."""
        self._differ = rows >= APART_FROM and fresh > rows // 2
        if self._differ:
            self._apart = ROWS_APART
        return [_forms_buffer(bytes(self._forms)), *self._entries.end(rows)]

    @property
    def differ(self) -> bool:
        """True if the next rows should be encoded without a look-up in the dictionary."""
        return self._apart > 0

    def passed(self, rows: int) -> None:
        """Count rows that were encoded without a look-up in the dictionary."""
        self._apart = max(self._apart - rows, 0)


def wire_buffers(forms: bytes, data: list[bytes]) -> list[Buffer]:
    """Return a dictionary's buffers (encodings, offsets, bytes) for the entries in `data`.

    `forms` has one byte for each entry, the number of its encoding.
    """
    return held_buffers(forms, list(map(len, data)), b"".join(data))


def held_buffers(forms: bytes, sizes: list[int], data: Bytes) -> list[Buffer]:
    """Return a dictionary's buffers (encodings, offsets, bytes) for the joined entries in `data`.

    `forms` has one byte for each entry, the number of its encoding; `sizes` are the entries' sizes in bytes.
    """
    return [_forms_buffer(forms), offsets(sizes), data]


def _forms_buffer(forms: bytes) -> Buffer:
    """Return the buffer of `forms`, as a single run if all are equal."""
    return Repeated(forms[:1], 1, [len(forms)]) if forms.count(forms[0]) == len(forms) else forms


# --- for readers

Dictionary = tuple[Bytes, ...]
"""Buffers of a dictionary of texts: validity, offsets and bytes."""


def address_dictionaries(forms: memoryview, starts: memoryview, data: memoryview) -> list[Dictionary]:
    """Decode the addresses of a dictionary, and return the dictionaries of the columns that show their texts.

    These are, in order: the address, its scope, its name. `forms` has the encoding of each, `starts` the
    offsets in `data`. Raises DamageError for an unknown encoding.
    """
    kinds = set(forms)
    if len(kinds) == 1 and (form := kinds.pop()) != TEXTS and _writer_of(form).wire_is_name:
        plain: Dictionary = b"", starts, data
        return [plain, (bytes((len(forms) + 7) // 8), bytes(len(starts)), b""), plain]
    texts = [_address_texts(form, entry) for form, entry in _entries(forms, starts, data)]
    return [_dictionary(column) for column in zip(*texts, strict=True)]


def set_dictionaries(forms: memoryview, starts: memoryview, data: memoryview) -> list[Dictionary]:
    """Decode the property sets of a dictionary, and return the dictionaries of the columns that show them.

    These are, in order: JSON, message id, correlation id, content type. `forms` has the encoding of each,
    `starts` the offsets in `data`. Raises DamageError for an unknown encoding.
    """
    texts = [_set_texts(form, entry) for form, entry in _entries(forms, starts, data)]
    return [_dictionary(column) for column in zip(*texts, strict=True)]


def id_dictionary(forms: memoryview, starts: memoryview, data: memoryview) -> Dictionary:
    """Return the dictionary of the message ids of a dictionary's property sets.

    It is faster than `set_dictionaries`, because it decodes nothing else. `forms` has the encoding of each
    set, `starts` the offsets in `data`. Raises DamageError for an unknown encoding.
    """
    return _dictionary(tuple([_message_id(form, entry) for form, entry in _entries(forms, starts, data)]))


def _entries(forms: memoryview, starts: memoryview, data: memoryview) -> Iterator[tuple[int, bytes]]:
    raw = bytes(data)
    places = pairwise(unpack(f"<{len(starts) // 4}i", starts))
    return ((form, raw[begin:end]) for form, (begin, end) in zip(forms, places, strict=True))


def _dictionary(texts: Texts) -> Dictionary:
    filled = [text or b"" for text in texts]
    valid = bitmap([text is not None for text in texts]) if None in texts else b""
    return valid, offsets(list(map(len, filled))), b"".join(filled)


def _address_texts(form: int, data: bytes) -> Texts:
    return _unframed(data) if form == TEXTS else _known_address(form, data)


def _set_texts(form: int, data: bytes) -> SetTexts:
    if form == TEXTS:
        made, *ids = _unframed(data)
        name, correlation, kind = [*ids, None, None][:3]  # the first gateways wrote no more than the id
        return made or b"", name, correlation, kind
    return _known_set(form, data) if len(data) <= REMEMBERED_BYTES else _read_set(form, data)


def _message_id(form: int, data: bytes) -> bytes | None:
    if form == TEXTS:
        return _unframed(data)[1]
    return _known_id(form, data) if len(data) <= REMEMBERED_BYTES else _read_id(form, data)


@lru_cache(REMEMBERED)
def _known_address(form: int, data: bytes) -> Texts:
    return words_of(_writer_of(form).read_address(data))


def _writer_of(form: int) -> Dialect:
    if form not in WRITERS:
        raise DamageError(f"an entry has the unknown format {form}")
    return WRITERS[form]


def _read_set(form: int, data: bytes) -> SetTexts:
    try:
        found = _writer_of(form).unread_set(data)
    except RemoteProtocolError:
        return MALFORMED
    return recorded_texts(found)


def _read_id(form: int, data: bytes) -> bytes | None:
    try:
        found = _writer_of(form).message_id(data)
    except RemoteProtocolError:
        return None
    return None if found is None else bytes_of(found)


_known_set: Final = lru_cache(REMEMBERED)(_read_set)
_known_id: Final = lru_cache(REMEMBERED)(_read_id)
