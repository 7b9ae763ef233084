"""Trials of what routes need at a link's broker, before anything runs; each protocol yields its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gateway.mapping.linter import Severity


class Trial(NamedTuple):
    """One action that routes need at a broker, `action`, and the severity of the finding if it is refused.

    `act` performs the action with the protocol's blocking client.
    """

    action: str
    severity: Severity
    act: Callable[[Any], object]
