"""Login and logout at the console, and tokens for programs.

The body of a login must be JSON, which an HTML form of another origin cannot send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway import clock
from gateway.access.backends import Denial
from gateway.access.console import EVERYTHING, ConsoleRights
from gateway.access.console_tokens import ADMINISTRATOR, TokenConflictError, TokenRefused, TokenShareFull
from gateway.access.credentials import Credentials
from gateway.access.principal import Principal
from gateway.admin.admission import COOKIE, Admission, Caller, remote_address_of, remote_of
from gateway.admin.messages import parse_request
from gateway.admin.models import (
    LoginRequest,
    LogoutResult,
    NewToken,
    RevocationResult,
    SessionOfCaller,
    TokenList,
    TokenName,
    TokenRequest,
)
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import (
    BadChoiceError,
    ConflictError,
    ShareFullError,
    UnavailableError,
    json_body,
    json_response,
    problem_response,
)
from gateway.operations import LOG_IN, LOG_OUT, MAKE_TOKEN, OWN_SESSION, REVOKE_TOKEN, TOKENS
from gateway.telemetry.audit import audit

DAY_SECS: Final = 86_400.0
SECRET_MAX: Final = 16_384
WORDS: Final = ({"user", "password"}, {"token"}, {"code"})


def _session_document(principal: Principal, rights: ConsoleRights, csrf: str | None) -> dict[str, object]:
    """Return the JSON response to a login or `GET /session`: user, right, CSRF token and virtual hosts.

    `csrf` is the CSRF token of the session; None without a session.
    """
    hosts = None if rights.read_hosts is None else sorted(rights.read_hosts)
    return {"user": principal.name, "right": rights.right, "csrf": csrf, "virtual_hosts": hosts}


class LoginsApi:
    """API operations on console logins and on tokens for programs."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on logins and tokens, each with the function that serves it."""
        leave = admitted_to_leave(self._admission, self._log_out)
        return [
            ServedOperation(LOG_IN, self._log_in, SessionOfCaller, LoginRequest),
            ServedOperation(LOG_OUT, leave, LogoutResult),
            ServedOperation(OWN_SESSION, self._session, SessionOfCaller),
            ServedOperation(TOKENS, self._tokens, TokenList),
            ServedOperation(MAKE_TOKEN, self._create_token, NewToken, TokenRequest),
            ServedOperation(REVOKE_TOKEN, self._revoke, RevocationResult, TokenName),
        ]

    async def _log_in(self, request: Request) -> Response:
        """Begin a session and return its cookie, or refuse the login with 400, 401, 403 or 415."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            return problem_response(415, "a login must be JSON")
        try:
            choice = await json_body(request)
        except BadChoiceError as error:
            return problem_response(400, str(error))
        if (
            not isinstance(choice, dict)
            or set(choice) not in WORDS
            or not all(isinstance(value, str) and len(value) <= SECRET_MAX for value in choice.values())
        ):
            return problem_response(400, 'give {"user", "password"}, {"token"} or {"code"}')
        found = await self._authenticate_login(request, choice)
        if isinstance(found, str):
            audit(
                "refused",
                endpoint="http",
                user=self._loggable(choice.get("user", "")),
                remote=remote_of(request),
                reason=found,
            )
            return problem_response(401, found)
        principal, everything, how = found
        admission = self._admission
        token = admission.find_token(choice["token"].strip()) if how == "token" else None
        rights = EVERYTHING if everything else admission.rights_of(principal)
        if token is not None:
            rights = admission.rights_of_token(token)
        right = rights.right
        if right == "none":
            why = f"no role of user {principal.name!r} permits the console"
            audit(
                "refused",
                endpoint="http",
                user=principal.name,
                remote=remote_of(request),
                reason="console: none",
            )
            return problem_response(403, why)
        text, session = admission.sessions.begin(
            principal,
            is_unrestricted=everything,
            token="" if token is None else token.digest,
            stamp=admission.stamp(principal),
        )
        audit("logged_in", user=principal.name, remote=remote_of(request), backend=how)
        response = json_response(_session_document(principal, rights, session.csrf))
        response.set_cookie(
            COOKIE, text, path="/", httponly=True, samesite="strict", secure=_is_secure(request)
        )
        return response

    def _loggable(self, user: str) -> str:
        access = self._admission.access
        return "" if access is None else access.loggable(user)

    async def _authenticate_login(
        self, request: Request, choice: dict[str, str]
    ) -> tuple[Principal, bool, str] | str:
        """Authenticate a login. `choice` is its JSON body.

        Return the reason as text if the login is refused. Otherwise return the principal, True if it has all
        rights regardless of its roles, and the kind of login (`link`, `token`, or the name of an
        authentication backend).
        """
        admission = self._admission
        if "code" in choice:
            if not admission.sessions.use_link(choice["code"]):
                return "the login link was used already or has expired"
            return Principal(ADMINISTRATOR), True, "link"
        if "token" in choice:
            token = admission.find_token(choice["token"].strip())
            if token is not None and token.console == "write":
                return token.principal, True, "token"
            if token is not None:
                return "a token without write access cannot log in to the console"
        access = admission.access
        if access is None:
            return "the name or password is wrong"
        backend = "jwt" if "token" in choice else ""
        secret = choice.get("password", choice.get("token", "")).encode(errors="replace")
        credentials = Credentials(choice.get("user", ""), secret, remote_address_of(request), backend=backend)
        if not backend and not credentials.user:
            return "the name or password is wrong"
        found = access.verify_nowait(credentials) or await access.verify(credentials)
        if isinstance(found, Principal):
            return found, False, found.backend
        return DENIED[found]

    async def _log_out(self, request: Request) -> Response:
        cookie = request.cookies.get(COOKIE, "")
        self._admission.sessions.end(cookie)
        caller: Caller = request.state.caller
        audit("logged_out", user=caller.principal.name, remote=remote_of(request))
        response = json_response({"logged_out": True})
        response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")
        return response

    async def _session(self, request: Request) -> Response:
        caller: Caller = request.state.caller
        csrf = None if caller.session is None else caller.session.csrf
        return json_response(_session_document(caller.principal, caller.rights, csrf))

    async def _tokens(self, _: Request) -> Response:
        return json_response({"tokens": [token.to_document() for token in self._admission.tokens.all()]})

    async def _create_token(self, request: Request) -> Response:
        """Create an API token and return its text.

        The token expires after the number of days in the request, and not later than the credential of the
        request.
        """
        choice = parse_request(await json_body(request), TokenRequest)
        caller: Caller = request.state.caller
        ends = [] if choice.days is None else [clock.unix_time() + choice.days * DAY_SECS]
        if caller.principal.expires is not None:  # Expiry of a token, or JSON Web Token.
            ends.append(caller.principal.expires)
        try:
            text = self._admission.tokens.make(
                choice.name,
                choice.console,
                by=caller.principal.name,
                expires=min(ends, default=None),
                bodies=choice.bodies,
                maker=caller.maker,
            )
        except TokenConflictError as error:
            raise ConflictError(str(error)) from error
        except TokenShareFull as error:
            raise ShareFullError(str(error)) from error
        except TokenRefused as error:
            raise BadChoiceError(str(error)) from error
        except OSError as error:
            raise UnavailableError(f"the token cannot be stored: {error.strerror or error}") from error
        await trio.lowlevel.checkpoint()
        return json_response({"token": text, "name": choice.name})

    async def _revoke(self, request: Request) -> Response:
        choice = parse_request(await json_body(request), TokenName)
        try:
            revoked = self._admission.tokens.revoke(choice.name)
        except OSError as error:
            raise UnavailableError(f"the tokens cannot be stored: {error.strerror or error}") from error
        return json_response({"revoked": int(revoked)})


DENIED: Final = {
    Denial.WRONG: "the name or password is wrong",
    Denial.EXPIRED: "the token has expired",
    Denial.UNAVAILABLE: "authentication is temporarily unavailable",
    Denial.REFUSED: "too many logins have failed; wait a minute",
    Denial.BUSY: "too many logins are waiting; try again later",
}


def admitted_to_leave(admission: Admission, serve: Any) -> Any:
    """Return a function that checks the caller of a logout, and then calls `serve`.

    The caller needs a valid credential and, with a session, its CSRF token, but no right.
    """

    async def serve_or_refuse(request: Request) -> Response:
        caller = await admission.caller(request, leaving=True)
        if isinstance(caller, Response):
            return caller
        request.state.caller = caller
        response: Response = await serve(request)
        return response

    return serve_or_refuse


def _is_secure(request: Request) -> bool:
    """Return True if the browser uses TLS, to the gateway or to a proxy in front of it.

    A proxy reports this in a header, which may be forged. That does no harm, since the result only decides if
    the session's cookie gets the attribute `Secure`.
    """
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
