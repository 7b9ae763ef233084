"""Admission control of the console, and the temporary token for the command line of this machine."""

from __future__ import annotations

from pathlib import Path

import structlog

from gateway.access.authentication import Access
from gateway.access.authorization import Authorization
from gateway.access.console import ConsoleRights, console_rights
from gateway.access.console_sessions import ConsoleSessions
from gateway.access.console_tokens import COMMAND_LINE, ConsoleTokens, leave_token
from gateway.access.principal import Principal
from gateway.admin import Admission
from gateway.broker.shares import UserQuotas
from gateway.settings import Settings

log = structlog.get_logger()


class Console:
    """Admission control of the web console, built from the configuration.

    While HTTP is served, this object also has a temporary token, with which the command line on this machine
    logs in.
    """

    def __init__(
        self,
        settings: Settings,
        access: Access,
        authorization: Authorization,
        quotas: UserQuotas,
    ) -> None:
        """Build the admission control from the settings.

        `access` checks logins, `authorization` has the roles. `quotas` has the limits of each user for
        console sessions, tokens and unread responses. Raises ConfigurationError if the tokens cannot be read
        or written.
        """
        http = settings.http

        def rights_of(principal: Principal) -> ConsoleRights:
            roles = authorization.roles  # Read at each call, because roles may be reloaded.
            return console_rights(Principal(principal.name, roles=roles.of(principal)), roles.roles)

        self.admission = Admission(
            ConsoleTokens(settings.tokens_path() if http.enabled else None, quotas.tokens),
            ConsoleSessions(
                quotas.console, idle_secs=http.session_idle_secs, longest_secs=http.session_secs_max
            ),
            access=access,
            rights_of=rights_of,
            token_file=http.token_file,
            unsent=quotas.responses,
        )
        self._token_path: Path | None = None

    def open(self, port: int) -> None:
        """Write a temporary token for the command line to a file. HTTP must be served at `port`."""
        self._token_path = leave_token(port, self.admission.tokens.make_temporary(COMMAND_LINE))

    def close(self) -> None:
        """Delete the file with the temporary token of the command line."""
        if self._token_path is not None:
            self._token_path.unlink(missing_ok=True)

    def link(self) -> str:
        """Return a relative URL of the console, such as `login#code=...`, that permits one login."""
        return f"login#code={self.admission.sessions.make_link()}"
