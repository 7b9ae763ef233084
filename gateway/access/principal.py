"""Who a connection acts for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Principal:
    """An identity that has been established; "" is the name of the anonymous user.

    `roles` are the names of the roles that whoever established it gave it beside those of the configuration,
    `scopes` a token's (`read:vhost/name/key`), `fields` what templates of rules may use beside `{user}`
    (`cn`, a certificate's names, claims), and `expires` when it ends (seconds since 1970), None: never.
    `backend` is the kind of the one that established it, "" for the anonymous user.
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
