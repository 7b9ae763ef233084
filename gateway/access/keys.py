"""Keys that verify the signatures of JSON Web Tokens, from a file or from a URL.

Keys of a URL are fetched regularly, because their owner changes them. If the server does not respond, the
last keys stay valid for `kept_secs`. If a token names an unknown key, the keys are fetched immediately, but
at most every `AGAIN_SECS`, because unauthenticated clients can invent names of keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jwt
import orjson
import structlog
import trio
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from gateway import clock as clocks
from gateway.access.http_client import BackendHttpClient, BackendResponseError
from gateway.errors import ConfigurationError
from gateway.reloads import LOOK_SECS, ReloadedValue
from gateway.settings import masked_url

KEYS_MAX: Final = 100
KEY_BYTES_MAX: Final = 1_048_576
AGAIN_SECS: Final = 10.0
PEM: Final = b"-----BEGIN "

log = structlog.get_logger(limited=True)


class SignatureKey:
    """Key that verifies signatures of tokens.

    `kid` is the identifier of the key, or None if it has none. `algorithm` is the only algorithm for which
    the key may be used; None permits all.
    """

    __slots__ = ("algorithm", "key", "kid")

    def __init__(self, kid: str | None, key: Any, algorithm: str | None) -> None:
        self.kid = kid
        self.key = key
        self.algorithm = algorithm

    def may_have_signed(self, kid: str | None, algorithm: str) -> bool:
        """Return True if the key may verify a token that has this `kid` and algorithm in its header."""
        return (kid is None or self.kid is None or kid == self.kid) and self.algorithm in (None, algorithm)


def parse_jwks(text: bytes) -> list[SignatureKey]:
    """Return the public keys for signatures in a JWKS document.

    Raises ValueError if the document has no usable key.
    """
    document = orjson.loads(text)
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("the key set has no list `keys`")
    found: list[SignatureKey] = []
    for one in entries[:KEYS_MAX]:
        if not isinstance(one, dict) or one.get("kty") == "oct" or one.get("use", "sig") != "sig":
            continue  # a secret is no public key; keys for other uses may be listed too
        try:
            key = jwt.PyJWK(one)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # of an unsupported kind
        found.append(SignatureKey(_text(one.get("kid")), key.key, _text(one.get("alg"))))
    if not found:
        raise ValueError("the key set has no usable key")
    return found


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def parse_keys(text: bytes, *, symmetric: bool) -> list[SignatureKey]:
    """Return the keys in the content of a key file.

    With `symmetric`, the content is a secret, otherwise PEM or JWKS. Raises ValueError if the content cannot
    be used, is a private key, or is a secret of less than 32 bytes.
    """
    if symmetric:
        secret = text.strip()
        if len(secret) < 32:
            raise ValueError("the secret must have at least 32 bytes")
        return [SignatureKey(None, secret, None)]
    if not text.lstrip().startswith(PEM):
        return parse_jwks(text)
    if b"PRIVATE" in text:
        raise ValueError("the file contains a private key; replace it with the public key")
    if b"BEGIN CERTIFICATE" in text:
        certificates = x509.load_pem_x509_certificates(text)
        return [SignatureKey(None, one.public_key(), None) for one in certificates]
    return [SignatureKey(None, serialization.load_pem_public_key(text), None)]


class KeysFile:
    """Keys in a file, which is read again when it changes.

    If the changed file cannot be used, the previous keys stay valid.
    """

    def __init__(self, path: Path, *, symmetric: bool) -> None:
        """Read the keys. Raises ConfigurationError if the file cannot be used."""
        self._path = path
        self._symmetric = symmetric
        try:
            self._file = ReloadedValue(
                [path], self._read, report_loaded=self._log_reload, refused=self._report_refused
            )
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"{path}: the keys cannot be used: {error}") from error

    def _read(self) -> list[SignatureKey]:
        with open(self._path, "rb") as file:
            return parse_keys(file.read(KEY_BYTES_MAX), symmetric=self._symmetric)

    @property
    def has_keys(self) -> bool:
        """Always True, because a key file without a key cannot be read."""
        return True

    def matching_keys(self, kid: str | None, algorithm: str) -> list[SignatureKey]:
        """Return the keys that may verify a token with this `kid` and algorithm in its header."""
        return [key for key in self._file.value if key.may_have_signed(kid, algorithm)]

    @property
    def may_change(self) -> bool:
        """Always False: `fetch_keys` never brings other keys."""
        return False

    async def fetch_keys(self) -> None:
        """Return immediately, because the keys of a file are not fetched."""

    def reload_if_settled(self) -> None:
        """Read the file again if it has changed and is no longer being written."""
        self._file.reload_if_settled()

    def reload(self) -> None:
        """Read the file again immediately."""
        self._file.reload()

    def _log_reload(self, keys: list[SignatureKey]) -> None:
        log.info("token keys reloaded", path=str(self._path), keys=len(keys))

    def _report_refused(self, error: Exception) -> None:
        log.error("token keys not reloaded", path=str(self._path), error=str(error))

    async def run(self) -> None:
        """Check the file for changes every LOOK_SECS seconds, until cancelled."""
        while True:
            await trio.sleep(LOOK_SECS)
            self.reload_if_settled()


class KeysUrl:
    """Keys from a URL, which the method `run` fetches as a task.

    The keys are fetched every `refresh_secs` seconds, and are valid for `kept_secs` seconds more. Fetches
    that `fetch_keys` requests are at least AGAIN_SECS seconds apart. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        url: str,
        client: BackendHttpClient,
        *,
        refresh_secs: float,
        kept_secs: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.failures = 0
        self._url = url
        self._client = client
        self._refresh_secs = refresh_secs
        self._kept_secs = kept_secs
        self._clock = clock or clocks.monotonic
        self._keys: list[SignatureKey] = []
        self._fetched_at = self._tried_at = -math.inf
        self._refresh = trio.Event()
        self._tried = trio.Event()

    @property
    def age_secs(self) -> float:
        """Seconds since the keys were fetched, or infinity if they have never been fetched."""
        return self._clock() - self._fetched_at

    @property
    def has_keys(self) -> bool:
        """True if keys have been fetched and are not too old to be used."""
        return bool(self._keys) and self.age_secs <= self._refresh_secs + self._kept_secs

    def matching_keys(self, kid: str | None, algorithm: str) -> list[SignatureKey]:
        """Return the keys that may verify a token with this `kid` and algorithm in its header."""
        return [key for key in self._keys if key.may_have_signed(kid, algorithm)] if self.has_keys else []

    @property
    def may_change(self) -> bool:
        """True if `fetch_keys` may bring other keys, because the last fetch was long enough ago."""
        return self._refresh.is_set() or self._clock() - self._tried_at >= AGAIN_SECS

    async def fetch_keys(self) -> None:
        """Make `run` fetch the keys, and wait until the fetch has succeeded or failed."""
        self._refresh.set()
        await self._tried.wait()

    async def run(self) -> None:
        """Fetch the keys at the start, regularly, and whenever `fetch_keys` is called, until cancelled."""
        while True:
            well = await self._fetch()
            tried, self._tried = self._tried, trio.Event()
            tried.set()
            self._refresh = trio.Event()
            pause = self._refresh_secs if well else min(AGAIN_SECS, self._refresh_secs)
            with trio.move_on_after(pause):
                await self._refresh.wait()

    async def _fetch(self) -> bool:
        """Fetch the keys once. If this fails, log the error and return False."""
        try:
            keys = parse_jwks(await self._client.request(self._url))
        except (BackendResponseError, ValueError) as error:
            self.failures += 1
            serving = self.has_keys
            log.error(
                "token keys not fetched",
                url=masked_url(self._url),
                error=str(error),
                keys_in_use=len(self._keys) if serving else 0,
            )
            self._tried_at = self._clock()
            return False
        if {key.kid for key in keys} != {key.kid for key in self._keys}:
            log.info("token keys fetched", url=masked_url(self._url), keys=len(keys))
        self._keys = keys
        self._fetched_at = self._tried_at = self._clock()
        return True
