"""The keys that tokens are signed with: out of a file, or from an address where they are fetched again and
again, for their owner changes them.

An address that does not answer for a while does no harm: the keys that it gave last serve on, for as long as
`kept_secs` says. A token that names a key which is not known makes them fetched at once, but strangers can
invent such names: not more often than every `AGAIN_SECS`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jwt
import orjson
import structlog
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from gateway.access.asking import Asker, Unanswered
from gateway.errors import ConfigurationError
from gateway.reloads import LOOK_SECS, Reloaded
from gateway.settings import masked_url

KEYS_MAX: Final = 100
KEY_OCTETS_MAX: Final = 1_048_576
AGAIN_SECS: Final = 10.0
PEM: Final = b"-----BEGIN "

log = structlog.get_logger(limited=True)


class Key:
    """One of them, for the algorithms that it is for."""

    __slots__ = ("algorithm", "key", "kid")

    def __init__(self, kid: str | None, key: Any, algorithm: str | None) -> None:
        self.kid = kid
        self.key = key
        self.algorithm = algorithm

    def fits(self, kid: str | None, algorithm: str) -> bool:
        """Whether a token with this head may be signed with it."""
        return (kid is None or self.kid is None or kid == self.kid) and self.algorithm in (None, algorithm)


def parse_jwks(text: bytes) -> list[Key]:
    """The public keys of a JWKS document for signatures. Raises ValueError when there is none of use."""
    document = orjson.loads(text)
    given = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(given, list):
        raise ValueError("it has no list of keys")
    found: list[Key] = []
    for one in given[:KEYS_MAX]:
        if not isinstance(one, dict) or one.get("kty") == "oct" or one.get("use", "sig") != "sig":
            continue  # a secret is no public key; others may stand there for other uses
        try:
            key = jwt.PyJWK(one)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # of a kind that we do not know
        found.append(Key(_text(one.get("kid")), key.key, _text(one.get("alg"))))
    if not found:
        raise ValueError("no key in it can be used")
    return found


def _text(given: object) -> str | None:
    return given if isinstance(given, str) else None


def parse_keys(text: bytes, *, symmetric: bool) -> list[Key]:
    """Keys out of a file: a secret, PEM or JWKS. Raises ValueError."""
    if symmetric:
        secret = text.strip()
        if len(secret) < 32:
            raise ValueError("a secret needs 32 octets")
        return [Key(None, secret, None)]
    if not text.lstrip().startswith(PEM):
        return parse_jwks(text)
    if b"PRIVATE" in text:
        raise ValueError("this is a private key; the public one is enough, and all that should be here")
    if b"BEGIN CERTIFICATE" in text:
        certificates = x509.load_pem_x509_certificates(text)
        return [Key(None, one.public_key(), None) for one in certificates]
    return [Key(None, serialization.load_pem_public_key(text), None)]


class KeysFile:
    """Keys of a file, read again when it changes; one that cannot be used leaves the old ones in force."""

    def __init__(self, path: Path, *, symmetric: bool) -> None:
        """Raises ConfigurationError when they cannot be used at the start."""
        self._path = path
        self._symmetric = symmetric
        try:
            self._file = Reloaded([path], self._read, taken=self._report_taken, refused=self._report_refused)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{path}: these keys cannot be used: {error}") from error

    def _read(self) -> list[Key]:
        with open(self._path, "rb") as file:
            return parse_keys(file.read(KEY_OCTETS_MAX), symmetric=self._symmetric)

    @property
    def there(self) -> bool:
        """Whether there is any key."""
        return True

    def fitting(self, kid: str | None, algorithm: str) -> list[Key]:
        """Those that may have signed such a token."""
        return [key for key in self._file.value if key.fits(kid, algorithm)]

    @property
    def may_change(self) -> bool:
        """Whether waiting for `fetched` could bring others."""
        return False

    async def fetched(self) -> None:
        """There is nothing to wait for."""

    def look(self) -> None:
        """Reload the file if it has changed and nobody is writing to it."""
        self._file.look_settled()

    def reload(self) -> None:
        """Reload the file at once."""
        self._file.reload()

    def _report_taken(self, keys: list[Key]) -> None:
        log.info("keys of tokens were read again", path=str(self._path), keys=len(keys))

    def _report_refused(self, error: Exception) -> None:
        log.error("keys of tokens cannot be read again", path=str(self._path), error=str(error))

    async def run(self) -> None:
        """Look now and then."""
        while True:
            await trio.sleep(LOOK_SECS)
            self.look()


class KeysUrl:
    """Keys of an address. `run` fetches them."""

    def __init__(
        self,
        url: str,
        asker: Asker,
        *,
        refresh_secs: float,
        kept_secs: float,
        again_secs: float = AGAIN_SECS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failures = 0
        self._url = url
        self._asker = asker
        self._refresh_secs = refresh_secs
        self._kept_secs = kept_secs
        self._again_secs = again_secs
        self._clock = clock
        self._keys: list[Key] = []
        self._fetched_at = self._tried_at = -math.inf
        self._wanted = trio.Event()
        self._tried = trio.Event()

    @property
    def age_secs(self) -> float:
        """How long ago they were fetched; infinite: never."""
        return self._clock() - self._fetched_at

    @property
    def there(self) -> bool:
        """Whether there is any key that still serves."""
        return bool(self._keys) and self.age_secs <= self._refresh_secs + self._kept_secs

    def fitting(self, kid: str | None, algorithm: str) -> list[Key]:
        """Those that may have signed such a token."""
        return [key for key in self._keys if key.fits(kid, algorithm)] if self.there else []

    @property
    def may_change(self) -> bool:
        """Whether waiting for `fetched` could bring others."""
        return self._wanted.is_set() or self._clock() - self._tried_at >= self._again_secs

    async def fetched(self) -> None:
        """Wait until they have been fetched once more, or could not be."""
        self._wanted.set()
        await self._tried.wait()

    async def run(self) -> None:
        """Fetch them, and again, and whenever somebody waits for it."""
        while True:
            well = await self._fetch()
            tried, self._tried = self._tried, trio.Event()
            tried.set()
            self._wanted = trio.Event()
            pause = self._refresh_secs if well else min(self._again_secs, self._refresh_secs)
            with trio.move_on_after(pause):
                await self._wanted.wait()

    async def _fetch(self) -> bool:
        try:
            keys = parse_jwks(await self._asker.get(self._url))
        except (Unanswered, ValueError) as error:
            self.failures += 1
            serving = self.there
            log.error(
                "keys of tokens cannot be fetched",
                url=masked_url(self._url),
                error=str(error),
                serving=len(self._keys) if serving else 0,
            )
            self._tried_at = self._clock()
            return False
        if {key.kid for key in keys} != {key.kid for key in self._keys}:
            log.info("keys of tokens were fetched", url=masked_url(self._url), keys=len(keys))
        self._keys = keys
        self._fetched_at = self._tried_at = self._clock()
        return True
