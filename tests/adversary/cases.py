"""What an attack is: its limits, and where they stand until it is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tests.adversary.arena import Arena

MIB: Final = 1_048_576


class Case(NamedTuple):
    """One attack. `grown_mib`: by how much the gateway may grow meanwhile; `configuration`: keys of
    gateway.yaml, of which the defaults are what is attacked if nothing is said. `internal`: an error of the
    gateway's own is provoked on purpose."""

    name: str
    attack: Callable[[Arena], None]
    grown_mib: int
    configuration: Mapping[str, Any]


CASES: Final[dict[str, Case]] = {}


def case(
    *, grown_mib: int = 64, **configuration: Any
) -> Callable[[Callable[[Arena], None]], Callable[[Arena], None]]:
    """Register an attack under its name."""

    def register(attack: Callable[[Arena], None]) -> Callable[[Arena], None]:
        name = f"{attack.__module__.rpartition('.')[2]}.{attack.__name__}"
        CASES[name] = Case(name, attack, grown_mib, configuration)
        return attack

    return register
