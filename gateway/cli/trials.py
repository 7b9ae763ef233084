"""What routes ask of a link's broker, as it is tried before anything runs: each protocol's part yields it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.mapping.linter import Severity


class Trial(NamedTuple):
    """Something that routes ask of a broker, and how bad it is when it refuses. `act` gets the protocol's
    blocking client."""

    what: str
    severity: Severity
    act: Callable[[Any], object]
