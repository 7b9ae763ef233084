"""The console's door, as the configuration has it, and what the command line of this machine finds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog

from gateway.access.authentication import Access
from gateway.access.console import Right, WithConsole, console_right
from gateway.access.console_sessions import Sessions
from gateway.access.console_tokens import COMMAND_LINE, ConsoleTokens, leave_token
from gateway.access.principal import Principal
from gateway.admin import Admission
from gateway.settings import Settings, User

NO_ROLES: Final[Mapping[str, WithConsole]] = {}

log = structlog.get_logger()


class Console:
    """Its door, and the token that is left for the command line while there is a port."""

    def __init__(self, settings: Settings, access: Access, users: Mapping[str, User]) -> None:
        """Raises ConfigurationError when the tokens cannot be read or written."""
        http = settings.http
        roles = getattr(settings, "roles", NO_ROLES)

        def right_of(principal: Principal) -> Right:
            own = getattr(users.get(principal.name), "roles", ())
            return console_right(Principal(principal.name, roles=(*own, *principal.roles)), roles)

        self.admission = Admission(
            ConsoleTokens(settings.tokens_path() if http.enabled else None),
            Sessions(http.sessions_max, idle_secs=http.session_idle_secs, longest_secs=http.session_secs_max),
            access=access,
            right_of=right_of,
            token_file=http.token_file,
        )
        self._left: Path | None = None

    def open(self, port: int) -> None:
        """HTTP answers at this port: leave a token for the command line."""
        self._left = leave_token(port, self.admission.tokens.make_temporary(COMMAND_LINE))

    def close(self) -> None:
        """The process ends, and the token with it."""
        if self._left is not None:
            self._left.unlink(missing_ok=True)

    def link(self) -> str:
        """The end of an address that logs in once."""
        return f"login#code={self.admission.sessions.make_link()}"
