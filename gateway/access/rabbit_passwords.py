"""Hashes of passwords as RabbitMQ keeps and exports them: a salt of four octets and a digest, in base64.

They are written here as `rabbitmq-sha256$BASE64`. They cost nothing to compute, and so little to guess:
whoever is to stay better gets a hash of `gateway passwd`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Callable
from typing import Any, Final

PREFIX: Final = "rabbitmq-"
SALT_OCTETS: Final = 4
DIGESTS: Final[dict[str, Callable[[bytes], Any]]] = {
    "sha256": hashlib.sha256,
    "sha512": hashlib.sha512,
    "md5": lambda octets: hashlib.md5(octets, usedforsecurity=False),
}
MODULE: Final = "rabbit_password_hashing_"  # what exports say before the digest's name


def imported_hash(password_hash: str, algorithm: str) -> str:
    """A hash of an export, as it is kept here; "" for a user without a password. Raises ValueError."""
    if not password_hash:
        return ""
    text = f"{PREFIX}{algorithm.removeprefix(MODULE)}${password_hash}"
    _parts(text)
    return text


def is_rabbit_hash(text: str) -> bool:
    """Whether a password can be compared with it."""
    try:
        _parts(text)
    except ValueError:
        return False
    return True


def matches(text: str, password: bytes) -> bool:
    """Whether the password is the one of a hash that `is_rabbit_hash`."""
    digest, salt, expected = _parts(text)
    return bool(password) and hmac.compare_digest(digest(salt + password).digest(), expected)


def _parts(text: str) -> tuple[Callable[[bytes], Any], bytes, bytes]:
    name, _, encoded = text.removeprefix(PREFIX).partition("$")
    digest = DIGESTS.get(name)
    if not text.startswith(PREFIX) or digest is None:
        raise ValueError(f"no hash of RabbitMQ: {PREFIX}sha256$... is wanted")
    try:
        octets = base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from None
    if len(octets) != SALT_OCTETS + digest(b"").digest_size:
        raise ValueError("not a salt of four octets and a digest")
    return digest, octets[:SALT_OCTETS], octets[SALT_OCTETS:]
