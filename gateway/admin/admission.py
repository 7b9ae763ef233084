"""Admission control of the console and the API.

It identifies the caller, and decides what the caller may see and change. No address is trusted, not even this
machine's, because a proxy makes remote callers local. A caller presents one of these: a bearer token that was
created in the console, the secret of `http.token_file`, a JSON Web Token, a name and password (HTTP Basic),
or the cookie of a session. Every method but GET and HEAD needs the right `write`; with a cookie it also needs
the session's CSRF token, which pages of other origins do not know.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.access.authentication import Access
from gateway.access.backends import Denial
from gateway.access.console import EVERYTHING, NOTHING, ConsoleRights, Right
from gateway.access.console_sessions import ConsoleSession, ConsoleSessions
from gateway.access.console_tokens import ADMINISTRATOR, ConsoleTokens, Maker, StoredToken
from gateway.access.credentials import Credentials
from gateway.access.places import place_of_host
from gateway.access.principal import Principal
from gateway.access.tokens import Tokens
from gateway.admin.responses import PROBLEMS, problem_response, with_etag
from gateway.admin.unread_responses import UnsentResponses
from gateway.errors import ConfigurationError
from gateway.model.shares import UserShares
from gateway.settings import secret_from
from gateway.telemetry.audit import audit

SCHEME: Final = "bearer "
BASIC: Final = "basic "
COOKIE: Final = "gateway_session"
CSRF: Final = "x-csrf-token"
READING: Final = frozenset(("GET", "HEAD"))
# Counts in responses that are copied to the audit log.
COUNTED: Final = ("disconnected", "removed", "redriven", "purged", "revoked")
BODIES: Final = frozenset(("body", "payload"))
TARGET_MAX: Final = 10  # Parameters of a request that are written to the audit log.
ELSEWHERE: Final = "has rights only in some virtual hosts, but the request concerns others"
LOGIN: Final = {"WWW-Authenticate": "Bearer"}

Serve = Callable[[Request], Awaitable[Response]]


class Caller(NamedTuple):
    """Authenticated caller of an HTTP request.

    `principal` is the identity that the credential proves. `credential` is the kind of credential for the
    audit log, such as `jwt` or `token NAME`. `session` is the console session, or None if the request has no
    session cookie. `maker` is the user who is responsible for the request; None stands for an administrator.
    A token that the caller creates becomes invalid when the user `maker` is deleted or changes its password.
    """

    principal: Principal
    rights: ConsoleRights
    credential: str
    session: ConsoleSession | None = None
    maker: Maker | None = None

    @property
    def right(self) -> Right:
        """Right of the caller: `none`, `read` or `write`."""
        return self.rights.right


class Admission:
    """Admission control of HTTP requests to the console and the API.

    `tokens` are the API tokens that users created in the console, `sessions` the console sessions. `access`
    authenticates users and JSON Web Tokens; None refuses both. `rights_of` returns the rights that a
    principal's roles give. `token_file` is the file with an administrator's secret. `unsent` counts the bytes
    of responses that each user has requested and not yet read, and limits them.
    """

    def __init__(
        self,
        tokens: ConsoleTokens,
        sessions: ConsoleSessions,
        *,
        access: Access | None = None,
        rights_of: Callable[[Principal], ConsoleRights] = lambda _: NOTHING,
        token_file: Path | None = None,
        unsent: UserShares | None = None,
    ) -> None:
        self.tokens = tokens
        self.sessions = sessions
        self.access = access
        self.rights_of = rights_of
        self.unsent = UnsentResponses(unsent)
        self._token_file = token_file

    def with_admission_control(self, serve: Serve, *, by_host: bool = False) -> Serve:
        """Return a function that checks the caller of a request, and then calls `serve`.

        The function responds with 401 or 403 to callers without rights, and with a problem document if
        `serve` raises an error of the API. Set `by_host` to True only if `serve` limits its response to the
        virtual hosts of the caller (`hosts_of`): then callers with rights in some virtual hosts are admitted
        too. Otherwise they receive 403.
        """

        async def serve_or_refuse(request: Request) -> Response:
            caller = await self.caller(request)
            if isinstance(caller, Response):
                return caller
            request.state.caller = caller
            if not by_host and caller.rights.hosts(reading=request.method in READING) is not None:
                return self._refused(request, f"{caller.principal.name!r} {ELSEWHERE}", 403)
            try:
                self.unsent.check(caller.principal.name)
                response = await serve(request)
            except tuple(PROBLEMS) as error:  # Changes made before the error are in the audit log.
                response = problem_response(PROBLEMS[type(error)], str(error))
            if request.method in READING:
                response = with_etag(request, response)
            else:
                await self._note(request, caller, response)
            return self.unsent.count_until_sent(caller.principal.name, response)

        return serve_or_refuse

    async def is_still_admitted(self, request: Request) -> bool:
        """Check again that the caller of an admitted request has rights in all virtual hosts.

        Return True if it has, and store the caller with its present rights in `request.state.caller`.
        """
        caller = await self.caller(request, quiet=True)
        if isinstance(caller, Response) or caller.rights.hosts(reading=request.method in READING) is not None:
            return False
        request.state.caller = caller
        return True

    async def caller(
        self, request: Request, *, leaving: bool = False, quiet: bool = False
    ) -> Caller | Response:
        """Return the caller of a request, or the response 401 or 403 that refuses it.

        Set `leaving` for a logout: it needs no right, because it only ends the caller's own session. With
        `quiet` no refusal for an invalid credential or a missing right is written to the audit log.
        """
        found = await self._identify(request)
        if found is None:
            return problem_response(
                401, "authentication required: log in, or send a token as `Authorization: Bearer`", LOGIN
            )
        if isinstance(found, str):
            return self._refused(request, found, 401, quiet=quiet)
        reading = request.method in READING
        if not leaving and (found.right == "none" or (found.right == "read" and not reading)):
            action = "read anything here" if found.right == "none" else "change anything"
            return self._refused(request, f"{found.principal.name!r} may not {action}", 403, quiet=quiet)
        if (
            not reading
            and found.session is not None
            and not found.session.is_csrf_secret(_header(request, CSRF))
        ):
            return self._refused(request, "the CSRF token is missing or wrong", 403)
        return found

    @staticmethod
    def _refused(request: Request, why: str, code: int, *, quiet: bool = False) -> Response:
        """Return a response with HTTP status `code` and the reason `why`, and write it to the audit log.

        With `quiet` nothing is written.
        """
        if not quiet:
            audit("refused", endpoint="http", remote=remote_of(request), reason=why)
        return problem_response(code, why, LOGIN if code == 401 else None)

    async def _identify(self, request: Request) -> Caller | str | None:
        """Find the caller of a request by its Authorization header or session cookie.

        Return the caller, the reason as text if the credential is invalid, or None if the request has neither
        a known credential nor a valid session.
        """
        header = _header(request, "authorization")
        if header.lower().startswith(SCHEME):
            return await self._bearer(request, header[len(SCHEME) :].strip())
        if header.lower().startswith(BASIC):
            return await self._basic(request, header[len(BASIC) :].strip())
        cookie = request.cookies.get(COOKIE)
        session = None if cookie is None else self.sessions.find(cookie)
        if session is None or not self._is_session_valid(session):
            return None
        principal = session.principal
        if session.token:
            token = self.tokens.by_digest(session.token)
            rights = NOTHING if token is None else self.rights_of_token(token)
            maker = None if token is None else token.maker
        elif session.is_unrestricted:
            rights, maker = EVERYTHING, None
        else:
            rights = self.rights_of(principal)
            maker = Maker(principal.name, principal.backend, principal.roles, session.stamp)
        return Caller(principal, rights, "session", session, maker)

    def _is_session_valid(self, session: ConsoleSession) -> bool:
        """Return True if the user of a session, or the token with which it began, is still valid."""
        if session.token:
            token = self.tokens.by_digest(session.token)
            return token is not None and self._is_maker_valid(token.maker)
        return (
            session.is_unrestricted
            or self.access is None
            or self.access.is_valid(session.principal, session.stamp)
        )

    def _is_maker_valid(self, maker: Maker | None) -> bool:
        """Return True if the user `maker` still exists and has not changed its password since.

        Always return True if `maker` is None, which stands for an administrator.
        """
        return maker is None or (
            self.access is not None and self.access.is_valid(maker.principal, maker.stamp)
        )

    def find_token(self, text: str) -> StoredToken | None:
        """Return the API token whose secret is `text`, if it was created in the console and is still valid.

        Return None if no such token exists, if it has expired, or if the user who created it is no longer
        valid.
        """
        token = self.tokens.find(text)
        return token if token is not None and self._is_maker_valid(token.maker) else None

    def rights_of_token(self, token: StoredToken) -> ConsoleRights:
        """Return the rights of a token, which are at most the present rights of the user who created it."""
        own = EVERYTHING if token.console == "write" else ConsoleRights("read", token.bodies)
        return own if token.maker is None else own.intersection(self.rights_of(token.maker.principal))

    def stamp(self, principal: Principal) -> str:
        """Return a text that changes whenever the user `principal` or its password is changed.

        Return "" if the gateway authenticates no users. Sessions and tokens store the text, to find out later
        if their user has changed.
        """
        return "" if self.access is None else self.access.stamp(principal)

    def _user(self, principal: Principal, credential: str) -> Caller:
        """Return an authenticated user as a Caller, with the rights of the user's roles.

        `credential` is the kind of credential, for the audit log.
        """
        maker = Maker(principal.name, principal.backend, principal.roles, self.stamp(principal))
        return Caller(principal, self.rights_of(principal), credential, None, maker)

    def _token(self, token: StoredToken) -> Caller:
        rights = self.rights_of_token(token)
        return Caller(token.principal, rights, f"token {token.name}", None, token.maker)

    async def _bearer(self, request: Request, secret: str) -> Caller | str:
        """Authenticate a bearer token: one created in the console, the secret of `http.token_file`, or a JWT.

        Return the caller, or the reason as text if the token is refused. `secret` is the text of the token.
        """
        token = self.find_token(secret)
        if token is not None:
            return self._token(token)
        if self._token_file is not None and is_secret(secret, self._token_file):
            return Caller(Principal(ADMINISTRATOR), EVERYTHING, "http.token_file")
        if self.access is not None and any(one.kind == Tokens.kind for one in self.access.backends):
            credentials = Credentials(
                "", secret.encode(errors="replace"), remote_address_of(request), backend=Tokens.kind
            )
            found = self.access.verify_nowait(credentials) or await self.access.verify(credentials)
            if isinstance(found, Principal):
                return self._user(found, "jwt")
            if found is Denial.EXPIRED:
                return "the token has expired"
        return "the token is invalid"

    async def _basic(self, request: Request, encoded: str) -> Caller | str:
        """Authenticate a name and password in base64 (HTTP Basic), as programs for RabbitMQ send them.

        `encoded` is the base64 text. The password may be the text of an API token whose name is the user
        name. Return the reason as text if the caller is refused. Browsers are never asked for a password, so
        pages of other origins cannot use one that a browser has stored.
        """
        try:
            name, colon, secret = base64.b64decode(encoded, validate=True).decode().partition(":")
        except ValueError:
            return "the Authorization header does not contain a name and a password"
        if not colon or not name:
            return "the Authorization header does not contain a name and a password"
        token = self.find_token(secret)
        if token is not None and token.name == name:
            return self._token(token)
        if self.access is None:
            return "the name or password is wrong"
        credentials = Credentials(name, secret.encode(), remote_address_of(request))
        found = self.access.verify_nowait(credentials) or await self.access.verify(credentials)
        if isinstance(found, Principal):
            return self._user(found, "password")
        return "the name or password is wrong"

    @staticmethod
    async def _note(request: Request, caller: Caller, response: Response) -> None:
        """Write the caller, path, parameters and result of a request to the audit log."""
        try:
            choice = orjson.loads(await request.body())
        except (orjson.JSONDecodeError, ClientDisconnect):
            choice = None
        try:
            document = orjson.loads(bytes(response.body))
        except orjson.JSONDecodeError:
            document = None
        counts = (
            [document[word] for word in COUNTED if word in document] if isinstance(document, dict) else []
        )
        audit(
            "administered",
            user=caller.principal.name,
            credential=caller.credential,
            remote=remote_of(request),
            action=request.url.path,
            target=target_of(choice),
            count=counts[0] if counts and isinstance(counts[0], int) else None,
            status=response.status_code,
        )


def hosts_of(request: Request) -> Callable[[str], bool]:
    """Return a function that returns True for the virtual hosts to which the request's caller has rights."""
    caller: Caller = request.state.caller
    hosts = caller.rights.hosts(reading=request.method in READING)
    return (lambda _: True) if hosts is None else hosts.__contains__


def shows_secret(request: Request, file: Path) -> bool:
    """Return True if the bearer token of the request is the secret stored in `file`."""
    header = _header(request, "authorization")
    return header.lower().startswith(SCHEME) and is_secret(header[len(SCHEME) :].strip(), file)


def is_secret(text: str, file: Path) -> bool:
    """Return True if `text` is the secret stored in `file`.

    The file is read at each call, so that a changed secret takes effect. Return False if it cannot be read.
    """
    try:
        secret = secret_from(file).strip()
    except ConfigurationError:
        return False
    return bool(secret) and hmac.compare_digest(secret.encode(), text.encode(errors="replace"))


def target_of(choice: Any) -> str:
    """Return the fields of `choice`, the parsed JSON body of a request, as one line for the audit log.

    The first TARGET_MAX fields are included. A list is replaced by its length, and a message body by its
    number of characters. Return "" if the JSON body is not an object.
    """
    if not isinstance(choice, Mapping):
        return ""
    words = []
    for word, value in list(choice.items())[:TARGET_MAX]:
        text = f"{len(value)} items" if isinstance(value, list | dict) else value
        if word in BODIES and isinstance(value, str):  # of a message, which only its receivers may read
            text = f"{len(value)} characters"
        words.append(f"{word}={text}")
    return " ".join(words)


def remote_of(request: Request) -> str:
    """Return the caller's address as `host:port`."""
    return "" if request.client is None else f"{request.client.host}:{request.client.port}"


def address_owner(request: Request) -> str:
    """Return the name under which the resources of a caller without a login are counted and limited.

    The name is derived from the caller's IP address. It starts with a NUL character, so that it never equals
    a user name.
    """
    host = "" if request.client is None else request.client.host
    return f"\0address {place_of_host(host)}"


def remote_address_of(request: Request) -> str:
    """Return the caller's address as `http HOST:PORT`, for the throttling of failed logins.

    The prefix `http` prevents an exemption of local addresses: failed logins also count if they come from
    this machine, which may run a proxy. HOST is the 64-bit network of an IPv6 address (access/places.py).
    """
    host, _, port = remote_of(request).rpartition(":")
    return f"http {place_of_host(host)}:{port}"


def _header(request: Request, name: str) -> str:
    return request.headers.get(name, "")
