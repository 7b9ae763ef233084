"""Return addresses: reply addresses that lead from one protocol to a requester in another, without a route.

A request says where its answer is wanted in words that only its own protocol has: a topic, a queue. Where it
crosses into another protocol by a route with `answers: direct`, it gets a return address instead: a name to
which programs there publish as they always do, and which holds all that is needed to bring the answer home,
so that nothing has to be remembered for a request. Behind the prefix of its dialect such a name is

    CODE FLAG ENDPOINT : TEXT

ENDPOINT is where the requester is, TEXT its reply address in its own words. FLAG says whether programs see
the request's correlation as it is (`-`), or in base64 (`b`), for it is no text; then so is that of the
answer. CODE is a keyed digest of the rest: without the key nobody can make a name that leads where no
requester has asked to be answered. What the dialect forbids inside a level is percent-encoded, and so are
control characters and the percent sign itself.

A return address that crosses again is not packed into another one: it is opened, and made anew for where it
goes; in the requester's own world it is the text that it was.
"""

from __future__ import annotations

import re
from base64 import b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping
from hashlib import blake2b
from hmac import compare_digest
from typing import Final, NamedTuple

from gateway.model.dialect import CONTROLS, Dialect, NameRefused, short
from gateway.model.properties import is_unicode

DIGEST_OCTETS: Final = 12  # 96 bits, and no padding in base64
CODE_LENGTH: Final = DIGEST_OCTETS * 4 // 3
AS_IT_IS, BASE64 = "-", "b"
_ENCODED: Final = re.compile("%([0-9A-F]{2})")

End = tuple[Dialect, str]
"""What is spoken at an endpoint, and its name."""


class Return(NamedTuple):
    """Whom an answer is for: the requester's endpoint and reply address; whether its correlation is coded."""

    endpoint: str
    text: str
    coded: bool


class ReturnAddresses:
    """Makes return addresses and reads them. Who has `key` can make them too. `worlds`: see Router."""

    def __init__(self, key: bytes, worlds: Mapping[str, str]) -> None:
        self._key = key
        self._worlds = worlds

    def make(
        self, source: End, target: End, text: str, correlation: bytes | None
    ) -> tuple[str, bytes | None]:
        """What reply address and correlation of a message are where it crosses to.

        Raises NameRefused for a reply address that would be too long there, for a return address of the
        source that is none of ours, and where the target's protocol has none.
        """
        dialect, endpoint = target
        there = Return(source[1], text, False)
        if source[0].return_prefix and text.startswith(source[0].return_prefix):
            known = self.read(text.removeprefix(source[0].return_prefix))
            if known is None:
                raise NameRefused(f"{short(text)} looks like a return address, and is none")
            correlation = restored(correlation) if known.coded else correlation
            if self._worlds[endpoint] == self._worlds.get(known.endpoint):
                return known.text, correlation
            there = known
        coded = dialect.correlation_is_text and correlation is not None and not _is_text(correlation)
        return self._name(dialect, there._replace(coded=coded)), correlation

    def read(self, rest: str) -> Return | None:
        """Whom an answer to a return address is for, by what stands behind the prefix; None: it is none."""
        code, flag, place = rest[:CODE_LENGTH], rest[CODE_LENGTH : CODE_LENGTH + 1], rest[CODE_LENGTH + 1 :]
        endpoint, colon, text = place.partition(":")
        found = Return(_decoded(endpoint), _decoded(text), flag == BASE64)
        if not colon or flag not in (AS_IT_IS, BASE64) or not is_unicode(rest):
            return None
        return found if compare_digest(code.encode(), self._code(found).encode()) else None

    def _name(self, dialect: Dialect, there: Return) -> str:
        if not dialect.return_prefix:
            raise NameRefused(f"{dialect.title} has no return addresses")
        if not is_unicode(there.text):
            raise NameRefused(f"{short(there.text)} is no text")
        forbidden = dialect.forbidden + CONTROLS + "%"
        endpoint, text = _encoded(there.endpoint, forbidden + ":"), _encoded(there.text, forbidden)
        flag = BASE64 if there.coded else AS_IT_IS
        name = f"{dialect.return_prefix}{self._code(there)}{flag}{endpoint}:{text}"
        octets = len(name.encode())
        if octets > dialect.name_octets_max:
            raise NameRefused(
                f"the return address of {short(there.text)} would have {octets} octets,"
                f" at most {dialect.name_octets_max} are allowed"
            )
        return name

    def _code(self, there: Return) -> str:
        said = f"{BASE64 if there.coded else AS_IT_IS}{there.endpoint}\0{there.text}"
        octets = said.encode(errors="surrogatepass")
        return urlsafe_b64encode(blake2b(octets, digest_size=DIGEST_OCTETS, key=self._key).digest()).decode()


def restored(correlation: bytes | None) -> bytes | None:
    """What a correlation in base64 says. What is none is itself: a program has copied more than the text."""
    try:
        return None if correlation is None else b64decode(correlation, validate=True)
    except Base64Error:
        return correlation


def _is_text(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


def _encoded(text: str, characters: str) -> str:
    return re.sub(f"[{re.escape(characters)}]", lambda found: f"%{ord(found[0]):02X}", text)


def _decoded(text: str) -> str:
    return _ENCODED.sub(lambda found: chr(int(found[1], 16)), text)
