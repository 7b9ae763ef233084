"""SCRAM-SHA-256 (RFC 5802, RFC 7677), both sides: a client proves a password without sending it.

The data stored for a user is derived from the password and cannot be used to log in elsewhere: a salt, a
number of iterations, and two keys, written `SCRAM-SHA-256$4096:salt$stored:server` with the three in base64.
An authentication does not disclose which users exist: an unknown user gets a salt as well, and fails at the
end. Channel binding is not offered.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import stringprep
import unicodedata
from collections.abc import Callable
from typing import Final, NamedTuple

METHOD: Final = "SCRAM-SHA-256"
ITERATIONS: Final = 4_096  # the minimum of RFC 7677 (section 4); the server's keys cost more to steal
ITERATIONS_MAX: Final = 10_000_000
SALT_BYTES: Final = 16
ITERATIONS_OF_OTHERS_MAX: Final = 100_000  # more, if a server requests it, would delay all other work here
MESSAGE_BYTES_MAX: Final = 4_096


class ScramError(Exception):
    """Error for a malformed SCRAM message, or for a peer that has not proved that it knows the password."""


class Keys(NamedTuple):
    """SCRAM data stored for a user.

    `stored` is the StoredKey and `server` the ServerKey of RFC 5802, 32 bytes each.
    """

    salt: bytes
    iterations: int
    stored: bytes
    server: bytes

    def __str__(self) -> str:
        salt, stored, server = (
            base64.b64encode(one).decode() for one in (self.salt, self.stored, self.server)
        )
        return f"{METHOD}${self.iterations}:{salt}${stored}:{server}"


def parse_keys(text: str) -> Keys:
    """Parse the SCRAM data of a user, in the form that `str(keys)` returns.

    Raises ValueError if the text is malformed.
    """
    method, _, rest = text.partition("$")
    cost, _, keys = rest.partition("$")
    iterations, _, salt = cost.partition(":")
    stored, _, server = keys.partition(":")
    data = [base64.b64decode(one, validate=True) for one in (salt, stored, server)]
    count = int(iterations)
    sizes = [len(one) for one in data[1:]]
    if method != METHOD or not data[0] or sizes != [32, 32] or not ITERATIONS <= count <= ITERATIONS_MAX:
        raise ValueError(f"not {METHOD}$iterations:salt$stored:server")
    return Keys(data[0], count, *data[1:])


def make_keys(password: str, salt: bytes, iterations: int = ITERATIONS) -> Keys:
    """Compute the SCRAM data for a password.

    Raises ValueError if SASLprep (RFC 4013) forbids the password.
    """
    salted = _salted(password, salt, iterations)
    client = _hmac(salted, b"Client Key")
    return Keys(salt, iterations, hashlib.sha256(client).digest(), _hmac(salted, b"Server Key"))


def _salted(password: str, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", saslprep(password).encode(), salt, iterations)


def saslprep(text: str) -> str:
    """Normalize a text by SASLprep (RFC 4013). Raises ValueError if SASLprep forbids the text."""
    mapped = [" " if stringprep.in_table_c12(one) else one for one in text if not stringprep.in_table_b1(one)]
    found = unicodedata.normalize("NFKC", "".join(mapped))
    if any(table(one) for one in found for table in _FORBIDDEN):
        raise ValueError("a character that SASLprep forbids")
    right = [stringprep.in_table_d1(one) for one in found]
    if any(right) and not (right[0] and right[-1] and not any(map(stringprep.in_table_d2, found))):
        raise ValueError("right-to-left and left-to-right characters are mixed")
    return found


_FORBIDDEN: Final = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, hashlib.sha256)


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise ScramError("too long")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise ScramError("not UTF-8") from None


def _attributes(text: str) -> dict[str, str]:
    """Parse a SCRAM message. Return its attributes by their letters. Raises ScramError if it is malformed."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if len(name) != 1 or not equals or name in found:
            raise ScramError("malformed")
        found[name] = value
    return found


def _user(name: str) -> str:
    """Decode the user name in a SCRAM message: `=2C` is a comma, `=3D` an equals sign (RFC 5802, 5.1).

    Raises ScramError if the name is malformed or empty.
    """
    if "=" in name.replace("=2C", "").replace("=3D", "") or not name:
        raise ScramError("malformed user name")
    return name.replace("=2C", ",").replace("=3D", "=")


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(left ^ right for left, right in zip(one, other, strict=False))


class Proof:
    """Client's side of one SCRAM authentication.

    First send `first` to the server. Then pass the server's first message to `answer`, and send the result.
    Finally pass the server's last message to `check`, which verifies that the server knows the password, too.
    """

    __slots__ = ("_bare", "_expected", "_nonce", "_password")

    def __init__(self, user: str, password: str, nonce: str) -> None:
        """Prepare the authentication; `nonce` is a random, printable text without a comma."""
        self._nonce = nonce
        self._bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}"
        self._password = password
        self._expected: bytes | None = None

    @property
    def first(self) -> bytes:
        """First message of the client. It states that the client does not support channel binding."""
        return f"n,,{self._bare}".encode()

    def answer(self, message: bytes) -> bytes:
        """Return the client's last message, with the proof, for the server's first message.

        Raises ScramError if the message is malformed or requests too few or too many iterations, if SASLprep
        forbids the password, and if `answer` is called a second time.
        """
        if self._expected is not None:
            raise ScramError("the client proof was sent twice")
        stated = _attributes(_text(message))
        nonce, count = stated.get("r", ""), stated.get("i", "")
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise ScramError("malformed nonce")
        if not (count.isascii() and count.isdigit() and len(count) < 10):
            raise ScramError("malformed iterations")
        if not ITERATIONS <= int(count) <= ITERATIONS_OF_OTHERS_MAX:
            raise ScramError(
                f"the server requests {int(count)} iterations; the gateway computes {ITERATIONS} to"
                f" {ITERATIONS_OF_OTHERS_MAX}"
            )
        try:
            salt = base64.b64decode(stated.get("s", ""), validate=True)
            if not salt:
                raise ScramError("no salt")
            salted = _salted(self._password, salt, int(count))
        except ValueError as error:
            raise ScramError(str(error)) from None
        without = f"c=biws,r={nonce}"
        whole = f"{self._bare},{message.decode()},{without}".encode()
        client = _hmac(salted, b"Client Key")
        proof = _xor(client, _hmac(hashlib.sha256(client).digest(), whole))
        self._expected = b"v=" + base64.b64encode(_hmac(_hmac(salted, b"Server Key"), whole))
        return f"{without},p={base64.b64encode(proof).decode()}".encode()

    def check(self, message: bytes) -> None:
        """Verify the server's last message.

        Raises ScramError if the message does not prove that the server knows the password.
        """
        if self._expected is None or not hmac.compare_digest(message, self._expected):
            raise ScramError("the server's signature is wrong, so it does not know the password")


class ScramExchange:
    """Server's side of one SCRAM authentication.

    Pass the client's first message to `answer`, and send the result; then do the same with the client's last
    message. When `done` is True, the client has proved the password of `user`.
    """

    __slots__ = ("_bare", "_find", "_first", "_header", "_keys", "_nonce", "done", "user")

    def __init__(self, find: Callable[[str], Keys], nonce: str) -> None:
        """Prepare the authentication.

        `find` returns the SCRAM data of a user, or invented data for an unknown user. `nonce` is a random,
        printable text.
        """
        self.user = ""
        self.done = False
        self._find = find
        self._nonce = nonce
        self._header = self._bare = self._first = ""
        self._keys: Keys | None = None

    def answer(self, message: bytes) -> bytes:
        """Return the response to the next message of the client.

        Raises ScramError if the message is malformed, or if the proof in it is wrong.
        """
        text = _text(message)
        stated = self._begin(text) if self._keys is None else self._finish(text, self._keys)
        return stated.encode()

    def _begin(self, text: str) -> str:
        """Return the response to the client's first message, which has the user name and the client's nonce.

        The response has the combined nonce, the salt and the number of iterations (RFC 5802, section 7).
        """
        binding, _, rest = text.partition(",")
        other, _, bare = rest.partition(",")
        if binding not in ("n", "y"):
            raise ScramError("channel binding is not supported")
        stated = _attributes(bare)
        if list(stated)[:2] != ["n", "r"] or not stated["r"]:
            raise ScramError("malformed")
        self.user = _user(stated["n"])
        if other and other != f"a={stated['n']}":
            raise ScramError("an authorization identity is not supported")
        self._header, self._bare = f"{binding},{other},", bare
        self._nonce = stated["r"] + self._nonce
        self._keys = keys = self._find(self.user)
        self._first = f"r={self._nonce},s={base64.b64encode(keys.salt).decode()},i={keys.iterations}"
        return self._first

    def _finish(self, text: str, keys: Keys) -> str:
        """Verify the proof in the client's last message. Return a message with the server's signature.

        Raises ScramError if the message is malformed, or if the proof is wrong.
        """
        before, _, proof = text.rpartition(",p=")
        stated = _attributes(before)
        channel = base64.b64encode(self._header.encode()).decode()
        if self.done or stated.get("c") != channel or stated.get("r") != self._nonce:
            raise ScramError("malformed")
        whole = f"{self._bare},{self._first},{before}".encode()
        try:
            proved = base64.b64decode(proof, validate=True)
        except ValueError:
            raise ScramError("malformed proof") from None
        signature = _hmac(keys.stored, whole)
        client = _xor(proved, signature)
        if len(proved) != len(signature) or not hmac.compare_digest(
            hashlib.sha256(client).digest(), keys.stored
        ):
            raise ScramError("the client proof is wrong")
        self.done = True
        return f"v={base64.b64encode(_hmac(keys.server, whole)).decode()}"
