"""Rights at the console and the HTTP API: what a caller may read and change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, Protocol

from gateway.access.principal import Principal

Right = Literal["none", "read", "write"]
Hosts = frozenset[str] | None
"""Names of virtual hosts; None: all virtual hosts, and objects that belong to none."""
ORDER: Final[tuple[Right, ...]] = ("none", "read", "write")


class WithConsole(Protocol):
    """Role, with the fields that concern the console."""

    @property
    def console(self) -> Right:
        """Right at the console that the role gives: `none`, `read` or `write`."""

    @property
    def console_bodies(self) -> bool:
        """True if the role permits reading the bodies of messages."""

    @property
    def console_virtual_hosts(self) -> tuple[str, ...] | None:
        """Names of the virtual hosts to which the right is limited; None means no limit."""


class ConsoleRights(NamedTuple):
    """Rights of one caller at the console and the HTTP API.

    `right` is the highest right in any virtual host. The caller may read objects in `read_hosts` and change
    objects in `write_hosts`. If `bodies` is True, it may also read bodies of messages in `body_hosts`. None
    stands for all virtual hosts, and for objects that belong to no virtual host.
    """

    right: Right
    bodies: bool = False
    read_hosts: Hosts = None
    write_hosts: Hosts = None
    body_hosts: Hosts = None

    def hosts(self, *, reading: bool) -> Hosts:
        """Return the virtual hosts that a request may read (`reading`) or change; None means all."""
        return self.read_hosts if reading else self.write_hosts

    def shows_bodies(self, host: str | None) -> bool:
        """Return True if the caller may read bodies of messages in the virtual host `host`.

        None stands for messages that may be in any virtual host, or in none.
        """
        return self.bodies and (self.body_hosts is None or host in self.body_hosts)

    def intersection(self, other: ConsoleRights) -> ConsoleRights:
        """Return the rights that both these rights and `other` include."""
        return ConsoleRights(
            min(self.right, other.right, key=ORDER.index),
            self.bodies and other.bodies,
            _common(self.read_hosts, other.read_hosts),
            _common(self.write_hosts, other.write_hosts),
            _common(self.body_hosts, other.body_hosts),
        )


NOTHING: Final = ConsoleRights("none")
EVERYTHING: Final = ConsoleRights("write", bodies=True)


def console_rights(principal: Principal, roles: Mapping[str, WithConsole]) -> ConsoleRights:
    """Return the combined console rights of a principal's roles. Roles that do not exist are ignored."""
    own_roles = [roles[name] for name in principal.roles if name in roles and roles[name].console != "none"]
    if not own_roles:
        return NOTHING
    showing = [role for role in own_roles if role.console_bodies]
    return ConsoleRights(
        max([role.console for role in own_roles], key=ORDER.index),
        bool(showing),
        _hosts_of(own_roles),
        _hosts_of(role for role in own_roles if role.console == "write"),
        _hosts_of(showing) if showing else None,
    )


def _hosts_of(roles: Iterable[WithConsole]) -> Hosts:
    """Return all virtual hosts to which the roles are limited, or None if one role has no limit."""
    found: set[str] = set()
    for role in roles:
        if role.console_virtual_hosts is None:
            return None
        found.update(role.console_virtual_hosts)
    return frozenset(found)


def _common(one: Hosts, other: Hosts) -> Hosts:
    if one is None or other is None:
        return other if one is None else one
    return one & other
