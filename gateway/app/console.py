"""The console's door, as the configuration has it, and what the command line of this machine finds."""

from __future__ import annotations

from pathlib import Path

import structlog

from gateway.access.authentication import Access
from gateway.access.authorization import Authorization
from gateway.access.console import ConsoleRights, console_rights
from gateway.access.console_sessions import Sessions
from gateway.access.console_tokens import COMMAND_LINE, ConsoleTokens, leave_token
from gateway.access.principal import Principal
from gateway.admin import Admission
from gateway.model.shares import UserShares
from gateway.settings import Settings

log = structlog.get_logger()


class Console:
    """Its door, and the token that is left for the command line while there is a port."""

    def __init__(
        self, settings: Settings, access: Access, authorization: Authorization, sessions: UserShares
    ) -> None:
        """`sessions` has the places of sessions, by user. Raises ConfigurationError when the tokens
        cannot be read or written."""
        http = settings.http

        def rights_of(principal: Principal) -> ConsoleRights:
            roles = authorization.roles  # as they are now
            return console_rights(Principal(principal.name, roles=roles.of(principal)), roles.roles)

        self.admission = Admission(
            ConsoleTokens(settings.tokens_path() if http.enabled else None),
            Sessions(sessions, idle_secs=http.session_idle_secs, longest_secs=http.session_secs_max),
            access=access,
            rights_of=rights_of,
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
