"""Password hashes as RabbitMQ stores and exports them: a salt of four bytes and a digest, in base64.

The gateway writes them as `rabbitmq-sha256$BASE64`. These hashes are fast to compute, so passwords are easy
to guess: users who stay should get a hash by `gateway passwd`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Final

PREFIX: Final = "rabbitmq-"
SALT_BYTES: Final = 4
DIGESTS: Final[dict[str, Callable[[bytes], Any]]] = {
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
    "md5": lambda data: hashlib.md5(data, usedforsecurity=False),
}
MODULE: Final = "rabbit_password_hashing_"  # prefix of the digest's name in exports


def imported_hash(password_hash: str, algorithm: str) -> str:
    """Convert a password hash from a RabbitMQ export to the gateway's notation.

    Return "" if `password_hash` is empty. Raises ValueError if the hash is malformed or its algorithm is
    unknown.
    """
    if not password_hash:
        return ""
    text = f"{PREFIX}{algorithm.removeprefix(MODULE)}${password_hash}"
    _parts(text)
    return text


def is_rabbit_hash(text: str) -> bool:
    """Return True if the text is a well-formed RabbitMQ password hash in the gateway's notation."""
    try:
        _parts(text)
    except ValueError:
        return False
    return True


def matches(text: str, password: bytes) -> bool:
    """Return True if `text` is the hash of `password`, and the password is not empty.

    Raises ValueError for a malformed hash.
    """
    digest, salt, expected = _parts(text)
    return bool(password) and hmac.compare_digest(digest(salt + password).digest(), expected)


def _parts(text: str) -> tuple[Callable[[bytes], Any], bytes, bytes]:
    name, _, encoded = text.removeprefix(PREFIX).partition("$")
    digest = DIGESTS.get(name)
    if not text.startswith(PREFIX) or digest is None:
        raise ValueError(f"not a RabbitMQ password hash: write {PREFIX}sha256$...")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None
    if len(data) != SALT_BYTES + digest(b"").digest_size:
        raise ValueError("not a salt of four bytes and a digest")
    return digest, data[:SALT_BYTES], data[SALT_BYTES:]
