"""Return addresses: reply addresses that lead from one protocol to a requester in another, without a route.

A request names its reply address in the words of its own protocol: a topic, a queue. When it crosses into
another protocol by a route with `answers: direct`, it gets a return address instead: a name to which programs
there publish as usual, and which holds all that is needed to deliver the reply, so that no state has to be
stored for a request. Behind the prefix of its dialect such a name is

    CODE FLAG ENDPOINT : TEXT

ENDPOINT is the requester's endpoint, TEXT its reply address in its own words. FLAG is `-` if programs see the
request's correlation unchanged, `b` if they see it in base64 because it is no text; then the correlation of
the reply is in base64, too. CODE is a keyed digest of the rest: without the key a client cannot forge a name
that leads to an address that no requester named. Characters that the dialect forbids inside a level are
percent-encoded, and so are control characters and the percent sign itself.

A return address that crosses again is not nested in another one: it is parsed, and built again for the next
target; in the requester's own domain it becomes the original reply address.
"""

from __future__ import annotations

import re
from base64 import b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, NamedTuple

from gateway.model.dialect import CONTROLS, Dialect, NameRefused, quote_short
from gateway.model.properties import is_unicode

DIGEST_BYTES: Final = 12  # 96 bits, and no padding in base64
CODE_LENGTH: Final = DIGEST_BYTES * 4 // 3
AS_IT_IS, BASE64 = "-", "b"
_ENCODED: Final = re.compile("%([0-9A-F]{2})")

End = tuple[Dialect, str]
"""Dialect of an endpoint, and the endpoint's name."""


class Return(NamedTuple):
    """Requester of a return address: the endpoint and reply address (`text`) of the program that waits.

    `coded` is True if the program that replies receives the correlation of the request in base64.
    """

    endpoint: str
    text: str
    coded: bool


class ReturnAddresses:
    """Builder and parser of return addresses: names that lead replies back to a requester's protocol.

    `key` is the secret for the digests in return addresses: a client that has it can forge them. `domains`
    has the domain of each listener, by name: clients of listeners in one domain reach each other without a
    route.
    """

    def __init__(self, key: bytes, domains: Mapping[str, str]) -> None:
        self._key = key
        self._domains = domains

    def build(
        self, source: End, target: End, text: str, correlation: bytes | None
    ) -> tuple[str, bytes | None]:
        """Return the reply address and the correlation that a request gets in the target's protocol.

        `source` and `target` are the dialects and names of two endpoints. `text` is the request's reply
        address and `correlation` its correlation, both as in the source. Raises NameRefused if `text` is not
        Unicode, if the return address would be too long for the target, if `text` looks like a return address
        that this gateway has not built, or if the target's protocol has no return addresses.
        """
        dialect, endpoint = target
        there = Return(source[1], text, False)
        if source[0].return_prefix and text.startswith(source[0].return_prefix):
            parsed = self.read(text.removeprefix(source[0].return_prefix))
            if parsed is None:
                raise NameRefused(f"{quote_short(text)} begins like a return address but is not a valid one")
            correlation = decode_correlation(correlation) if parsed.coded else correlation
            if self._domains[endpoint] == self._domains.get(parsed.endpoint):
                return parsed.text, correlation
            there = parsed
        coded = dialect.correlation_is_text and correlation is not None and not _is_text(correlation)
        return self._name(dialect, there._replace(coded=coded)), correlation

    def read(self, rest: str) -> Return | None:
        """Return the requester in a return address, or None if this gateway has not built the address.

        `rest` is the return address without its prefix.
        """
        code, flag, place = rest[:CODE_LENGTH], rest[CODE_LENGTH : CODE_LENGTH + 1], rest[CODE_LENGTH + 1 :]
        endpoint, colon, text = place.partition(":")
        found = Return(_decoded(endpoint), _decoded(text), flag == BASE64)
        if not colon or flag not in (AS_IT_IS, BASE64) or not is_unicode(rest):
            return None
        return found if compare_digest(code.encode(), self._code(found).encode()) else None

    def _name(self, dialect: Dialect, there: Return) -> str:
        """Build a return address in the protocol `dialect` for the requester `there`. Raises NameRefused."""
        if not dialect.return_prefix:
            raise NameRefused(f"{dialect.title} has no return addresses")
        if not is_unicode(there.text):
            raise NameRefused(f"{quote_short(there.text)} is not valid Unicode text")
        forbidden = dialect.forbidden + CONTROLS + "%"
        endpoint, text = _encoded(there.endpoint, forbidden + ":"), _encoded(there.text, forbidden)
        flag = BASE64 if there.coded else AS_IT_IS
        name = f"{dialect.return_prefix}{self._code(there)}{flag}{endpoint}:{text}"
        byte_count = len(name.encode())
        if byte_count > dialect.name_bytes_max:
            raise NameRefused(
                f"the return address of {quote_short(there.text)} would have {byte_count} bytes,"
                f" at most {dialect.name_bytes_max} are allowed"
            )
        return name

    def _code(self, there: Return) -> str:
        """Return the digest that authenticates a return address for the requester `there`."""
        tail = f"{BASE64 if there.coded else AS_IT_IS}{there.endpoint}\0{there.text}"
        data = tail.encode(errors="surrogatepass")
        return urlsafe_b64encode(blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()).decode()


def decode_correlation(correlation: bytes | None) -> bytes | None:
    """Decode a correlation from base64.

    If it is not base64, return it unchanged, because some programs reply with a correlation of their own.
    """
    try:
        return None if correlation is None else b64decode(correlation, validate=True)
    except Base64Error:
        return correlation


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encoded(text: str, characters: str) -> str:
    return re.sub(f"[{re.escape(characters)}]", lambda found: f"%{ord(found[0]):02X}", text)


def _decoded(text: str) -> str:
    return _ENCODED.sub(lambda found: chr(int(found[1], 16)), text)
