"""Rights at the console and the HTTP interface: what a caller sees, and whether it may change anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, Protocol

from gateway.access.principal import Principal

Right = Literal["none", "read", "write"]
Hosts = frozenset[str] | None
"""Names of virtual hosts; None: all of them, and what belongs to none."""
ORDER: Final[tuple[Right, ...]] = ("none", "read", "write")


class WithConsole(Protocol):
    """A role, as far as it is about the console."""

    @property
    def console(self) -> Right:
        """What it allows."""

    @property
    def console_bodies(self) -> bool:
        """Whether it shows the bodies of messages."""

    @property
    def console_virtual_hosts(self) -> tuple[str, ...] | None:
        """The virtual hosts that it is about; None: everything."""


class ConsoleRights(NamedTuple):
    """What one caller may do, whether it sees bodies, and which virtual hosts it sees and changes."""

    right: Right
    bodies: bool = False
    read_hosts: Hosts = None
    write_hosts: Hosts = None

    def hosts(self, *, reading: bool) -> Hosts:
        """Return the virtual hosts of a request that reads, or changes something."""
        return self.read_hosts if reading else self.write_hosts

    def within(self, other: ConsoleRights) -> ConsoleRights:
        """Return what both allow."""
        return ConsoleRights(
            min(self.right, other.right, key=ORDER.index),
            self.bodies and other.bodies,
            _common(self.read_hosts, other.read_hosts),
            _common(self.write_hosts, other.write_hosts),
        )


NOTHING: Final = ConsoleRights("none")
EVERYTHING: Final = ConsoleRights("write", bodies=True)


def console_rights(principal: Principal, roles: Mapping[str, WithConsole]) -> ConsoleRights:
    """Return what the principal's roles allow together; a role that is not known allows nothing."""
    given = [roles[name] for name in principal.roles if name in roles and roles[name].console != "none"]
    if not given:
        return NOTHING
    return ConsoleRights(
        max([role.console for role in given], key=ORDER.index),
        any(role.console_bodies for role in given),
        _hosts_of(given),
        _hosts_of(role for role in given if role.console == "write"),
    )


def _hosts_of(roles: Iterable[WithConsole]) -> Hosts:
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
