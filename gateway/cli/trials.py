"""Type of a test action at the broker of a link, which `gateway check --connect` performs.

Each protocol has a module that yields such actions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.mapping.linter import Severity


class Trial(NamedTuple):
    """Action at the broker of a link, which tests one thing that the routes need there.

    `action` describes the trial. `act` performs it with the protocol's blocking client, and raises LinkError
    if the broker refuses it; `severity` is the severity of the finding in this case.
    """

    action: str
    severity: Severity
    act: Callable[[Any], object]
