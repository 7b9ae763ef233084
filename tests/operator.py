"""What tests show to the HTTP interface of a gateway: the token that it has left for the command line."""

from __future__ import annotations

from gateway.access.console_sessions import ConsoleSessions
from gateway.access.console_tokens import ConsoleTokens, left_tokens
from gateway.admin import Admission
from gateway.model.shares import UserShares


def bearer(port: int) -> dict[str, str]:
    """Headers for a gateway of this user whose console is at this port."""
    (path,) = left_tokens(port)[:1]
    return {"Authorization": f"Bearer {path.read_text().strip()}"}


def admitting(**given: object) -> tuple[Admission, dict[str, str]]:
    """A door, and headers with which it opens."""
    tokens = ConsoleTokens()
    text = tokens.make("a test", "write", by="a test")
    sessions = ConsoleSessions(
        UserShares("console sessions", count_max=10), idle_secs=60.0, longest_secs=600.0
    )
    return Admission(tokens, sessions, **given), {"Authorization": f"Bearer {text}"}  # type: ignore[arg-type]
