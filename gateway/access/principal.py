"""Principals: the authenticated identities of clients and callers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Principal:
    """Authenticated identity of a client or caller.

    `name` is the user name, or "" for an anonymous client. `roles` are role names that the back end gave, in
    addition to those of the configuration. `scopes` are the scopes of a token (`read:vhost/name/key`).
    `fields` are values for placeholders in rules other than `{user}`: names in a certificate, such as `cn`,
    and claims of a token. `expires` is the time at which the identity becomes invalid, in seconds since 1970,
    or None. `backend` is the kind of the back end that authenticated the identity, "" for an anonymous
    client.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes that determine the rights, except the name, as JSON values."""
        return {
            "backend": self.backend,
            "roles": list(self.roles),
            "scopes": list(self.scopes),
            "fields": dict(self.fields),
        }

    @classmethod
    def from_dict(cls, name: str, values: Mapping[str, Any] | None) -> Principal:
        """Return the principal with this name, and with values that `to_dict` returned.

        `values` is None for a record of an earlier version, which stored no values: the principal then has
        only its name.
        """
        values = values or {}
        return cls(
            name,
            roles=tuple(map(str, values.get("roles", ()))),
            scopes=tuple(map(str, values.get("scopes", ()))),
            fields={str(key): str(value) for key, value in values.get("fields", {}).items()},
            backend=str(values.get("backend", "")),
        )
