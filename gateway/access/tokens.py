"""JSON Web Tokens as passwords: a token identifies its bearer if a trusted key has signed it.

PyJWT parses and verifies tokens; this module selects the keys and claims to use. Each login verifies its
token again, because the key may have been withdrawn. That takes 0.1 ms and is done at once; only for an
unknown key a login waits until keys are fetched (keys.py).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, Protocol

import jwt
import orjson

from gateway.access.backends import Denial
from gateway.access.credentials import Credentials
from gateway.access.keys import SignatureKey
from gateway.access.principal import Principal
from gateway.settings.identity import JwtBackend

TOKEN_BYTES_MAX: Final = 16_384
NAME_MAX: Final = 256  # characters of a user's or role's name, or of a field
NAMES_MAX: Final = 256  # roles, or scopes
TRIED_MAX: Final = 16  # keys tried for a token that names none; each takes 0.1 ms


class KeySource(Protocol):
    """Source of the keys that verify tokens: a file or a URL (see keys.py)."""

    @property
    def has_keys(self) -> bool:
        """True if there are keys that may be used."""

    @property
    def may_change(self) -> bool:
        """True if `fetch_keys` may bring other keys."""

    def matching_keys(self, kid: str | None, algorithm: str) -> list[SignatureKey]:
        """Return the keys that may verify a token with this `kid` and algorithm in its header."""

    async def fetch_keys(self) -> None:
        """Fetch the keys, and wait until the fetch has succeeded or failed."""


class Tokens:
    """Back end that authenticates clients by JSON Web Tokens.

    A user name that a client sends with its token is ignored.
    """

    kind: Final = "jwt"

    def __init__(self, options: JwtBackend, keys: KeySource) -> None:
        self.method = options.method
        self._options = options
        self._keys = keys

    def supports_method(self, method: str) -> bool:
        """Return True for "" (a token as password), and for the configured method of MQTT 5 AUTH packets."""
        return method in ("", self.method)

    def recognizes_login(self, credentials: Credentials) -> bool:
        """Return True if the password has the form of a token."""
        return _head(credentials.password) is not None

    def authenticate_nowait(self, credentials: Credentials) -> Principal | Denial | None:
        """Return the principal or denial of a login with a token.

        Return None if the token's key is unknown but could be fetched; the caller must then call
        `authenticate`.
        """
        head = _head(credentials.password)
        if head is None:
            return Denial.WRONG
        kid, algorithm = head.get("kid"), head.get("alg")
        if algorithm not in self._options.algorithms or not (kid is None or isinstance(kid, str)):
            return Denial.WRONG
        found = self._keys.matching_keys(kid, algorithm)
        if not found and self._keys.may_change:
            return None
        if not found:
            return Denial.WRONG if self._keys.has_keys else Denial.UNAVAILABLE
        return self._verify_token(credentials.password, found, algorithm)

    async def authenticate(self, credentials: Credentials) -> Principal | Denial:
        """Fetch the keys, and then return the principal or denial of a login with a token."""
        await self._keys.fetch_keys()
        found = self.authenticate_nowait(credentials)
        if found is None:
            found = Denial.WRONG if self._keys.has_keys else Denial.UNAVAILABLE
        return found

    def _verify_token(self, token: bytes, keys: list[SignatureKey], algorithm: str) -> Principal | Denial:
        """Verify a token, and return its principal or denial.

        `keys` are tried in order until one fits the signature.
        """
        options = self._options
        required = ["exp"] if options.expiry_required else []
        for key in keys[:TRIED_MAX]:
            try:
                claims = jwt.decode(
                    token,
                    key.key,
                    algorithms=[algorithm],
                    audience=options.audience,
                    issuer=options.issuer,
                    leeway=options.leeway_secs,
                    options={
                        "require": required,
                        "verify_aud": options.audience is not None,
                        "verify_iss": options.issuer is not None,
                        "verify_sub": False,
                    },
                )
            except jwt.ExpiredSignatureError:
                return Denial.EXPIRED
            except (jwt.InvalidSignatureError, jwt.InvalidKeyError, TypeError):
                continue  # another key without a name may fit
            except (jwt.PyJWTError, ValueError, OverflowError):
                return Denial.WRONG
            return self._principal(claims)
        return Denial.WRONG

    def _principal(self, claims: Mapping[str, Any]) -> Principal | Denial:
        """Return the principal that the claims of a verified token describe.

        Return Denial.WRONG if the claim for the user name or the claim `exp` cannot be used.
        """
        options = self._options
        name = _claim(claims, options.user_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX or not name.isprintable():
            return Denial.WRONG
        scopes = _names(_claim(claims, options.scope_claim)) if options.scope_claim else ()
        prefix = options.scope_prefix
        fields = {}
        for field, path in options.fields.items():
            value = _claim(claims, path)
            if isinstance(value, str | int) and not isinstance(value, bool) and len(str(value)) <= NAME_MAX:
                fields[field] = str(value)
        try:
            expires = None if claims.get("exp") is None else float(claims["exp"]) + options.leeway_secs
        except (OverflowError, TypeError, ValueError):
            return Denial.WRONG
        return Principal(
            name,
            roles=_names(_claim(claims, options.roles_claim)) if options.roles_claim else (),
            scopes=tuple(one.removeprefix(prefix) for one in scopes if one.startswith(prefix)),
            fields=fields,
            expires=expires,
            backend=self.kind,
        )


def _head(password: bytes) -> dict[str, Any] | None:
    """Return the decoded header of a JSON Web Token, or None if the password does not look like a token."""
    if not password.startswith(b"ey") or len(password) > TOKEN_BYTES_MAX or password.count(b".") != 2:
        return None
    first = password.partition(b".")[0]
    try:
        head = orjson.loads(base64.urlsafe_b64decode(first + b"=" * (-len(first) % 4)))
    except ValueError:
        return None
    return head if isinstance(head, dict) else None


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """Return the claim at `path`, or None if there is no such claim.

    The path `a.b` selects the claim whose name is `a.b`, or else the member `b` of the claim `a`.
    """
    if path in claims:
        return claims[path]
    found: Any = claims
    for step in path.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _names(claim: Any) -> tuple[str, ...]:
    """Return the names in a claim, which is a list or a text with blanks between the names.

    Names that are too long are omitted.
    """
    listed = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
    return tuple(one for one in listed if isinstance(one, str) and 0 < len(one) <= NAME_MAX)[:NAMES_MAX]
