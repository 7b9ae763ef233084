"""What the console and the HTTP interface show a principal, and whether they let it change anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Protocol

from gateway.access.principal import Principal

Right = Literal["none", "read", "write"]
ORDER: Final[tuple[Right, ...]] = ("none", "read", "write")


class WithConsole(Protocol):
    """A role, as far as it is about the console."""

    @property
    def console(self) -> Right:
        """What it allows."""


def console_right(principal: Principal, roles: Mapping[str, WithConsole]) -> Right:
    """The most that one of the principal's roles allows; a role that is not known allows nothing."""
    found = [roles[name].console for name in principal.roles if name in roles]
    return max(found, key=ORDER.index, default="none")
