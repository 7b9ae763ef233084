"""Principals: authenticated identities for which connections act."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Principal:
    """Authenticated identity; "" is the name of the anonymous user.

    `roles` are role names from the back end, in addition to those of the configuration; `scopes` are a
    token's (`read:vhost/name/key`); `fields` are values that templates of rules may use beside `{user}`
    (`cn`, a certificate's names, claims). `expires` is the time when the identity ends (seconds since 1970),
    None: never. `backend` is the kind of the back end that authenticated it, "" for the anonymous user.
    """

    __slots__ = ("backend", "expires", "fields", "name", "roles", "scopes")

    def __init__(
        self,
        name: str,
        *,
        roles: tuple[str, ...] = (),
        scopes: tuple[str, ...] = (),
        fields: Mapping[str, str] = NOTHING,
        expires: float | None = None,
        backend: str = "",
    ) -> None:
        self.name = name
        self.roles = roles
        self.scopes = scopes
        self.fields = fields
        self.expires = expires
        self.backend = backend
