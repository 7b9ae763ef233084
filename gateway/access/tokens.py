"""JSON Web Tokens as passwords: who a token says that its bearer is, if a key of ours has signed it.

PyJWT reads and checks it; what stands here is which keys and claims count. A token is looked at anew each
time, for its key may have been taken back; that costs a tenth of a millisecond, and so it happens at once.
Only for a key that is not known it is worth waiting (keys.py).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, Protocol

import jwt
import orjson

from gateway.access.backends import Denial
from gateway.access.credentials import Credentials
from gateway.access.keys import Key
from gateway.access.principal import Principal
from gateway.settings.identity import JwtBackend

TOKEN_OCTETS_MAX: Final = 16_384
NAME_MAX: Final = 256  # characters of a user's or role's name, or a field
NAMES_MAX: Final = 256  # roles, or scopes
TRIED_MAX: Final = 16  # keys for a token that names none: each costs a tenth of a millisecond


class KeySource(Protocol):
    """Where keys are; see keys.py."""

    @property
    def there(self) -> bool:
        """Whether there is any key."""

    @property
    def may_change(self) -> bool:
        """Whether waiting for `fetched` could bring others."""

    def fitting(self, kid: str | None, algorithm: str) -> list[Key]:
        """Those that may have signed such a token."""

    async def fetched(self) -> None:
        """Wait until they have been fetched once more."""


class Tokens:
    """The back end. A name that a client says besides its token means nothing."""

    kind: Final = "jwt"

    def __init__(self, options: JwtBackend, keys: KeySource) -> None:
        self.method = options.method
        self._options = options
        self._keys = keys

    def speaks(self, method: str) -> bool:
        """As a password, or in AUTH by its own method."""
        return method in ("", self.method)

    def claims(self, credentials: Credentials) -> bool:
        """Whether the password looks like a token."""
        return _head(credentials.password) is not None

    def known(self, credentials: Credentials) -> Principal | Denial | None:
        """What a token says; None: its key may be one that has to be fetched."""
        head = _head(credentials.password)
        if head is None:
            return Denial.WRONG
        kid, algorithm = head.get("kid"), head.get("alg")
        if algorithm not in self._options.algorithms or not (kid is None or isinstance(kid, str)):
            return Denial.WRONG
        found = self._keys.fitting(kid, algorithm)
        if not found and self._keys.may_change:
            return None
        if not found:
            return Denial.WRONG if self._keys.there else Denial.UNAVAILABLE
        return self._judge(credentials.password, found, algorithm)

    async def look(self, credentials: Credentials) -> Principal | Denial:
        """The same with the keys of now."""
        await self._keys.fetched()
        found = self.known(credentials)
        if found is None:
            found = Denial.WRONG if self._keys.there else Denial.UNAVAILABLE
        return found

    def _judge(self, token: bytes, keys: list[Key], algorithm: str) -> Principal | Denial:
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
    """The head of a token; None: it is none."""
    if not password.startswith(b"ey") or len(password) > TOKEN_OCTETS_MAX or password.count(b".") != 2:
        return None
    first = password.partition(b".")[0]
    try:
        head = orjson.loads(base64.urlsafe_b64decode(first + b"=" * (-len(first) % 4)))
    except ValueError:
        return None
    return head if isinstance(head, dict) else None


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """The claim of this name, or within others: `a.b`; a name with dots in it comes first."""
    if path in claims:
        return claims[path]
    found: Any = claims
    for step in path.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _names(given: Any) -> tuple[str, ...]:
    """Names out of a list, or a text with blanks."""
    listed = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
    return tuple(one for one in listed if isinstance(one, str) and 0 < len(one) <= NAME_MAX)[:NAMES_MAX]
