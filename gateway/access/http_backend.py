"""Authentication by an HTTP server, with the requests of RabbitMQ's `rabbitmq_auth_backend_http`.

The server receives `username`, `password`, and `client_id` where it is known (MQTT), as a form or a query. It
responds with status 200 and `allow`, followed by tags, or `deny`, which a reason may follow. Tags are roles.
Any other response, or none in time, denies the login as unavailable.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import Final

import structlog
import trio

from gateway import clock
from gateway.access.backends import Denial, LoginResultCache
from gateway.access.credentials import Credentials
from gateway.access.http_client import BackendHttpClient, BackendResponseError
from gateway.access.login_queue import LoginQueue, LoginQueueFull
from gateway.access.places import place_of
from gateway.access.principal import Principal
from gateway.settings.identity import HttpBackend

DENIED_SHARE: Final = 0.1  # of the time that `allow` is cached: a denied client may be allowed soon
UNAVAILABLE_SECS: Final = 1.0
TAGS_MAX: Final = 64

log = structlog.get_logger(limited=True)


class HttpUsers:
    """Back end that authenticates users with passwords by requests to an HTTP server.

    `options` are the settings of the back end, `client` is the HTTP client.
    """

    kind: Final = "http"

    def __init__(self, options: HttpBackend, client: BackendHttpClient) -> None:
        self.failures = 0
        self._options = options
        self._client = client
        self._key = os.urandom(32)
        self._allowed = LoginResultCache(options.cache_entries_max)
        self._denied = LoginResultCache(options.cache_entries_max)
        self._turns = LoginQueue(options.connections_max, options.waiting_max)
        self._in_flight: dict[bytes, trio.Event] = {}
        self._down = False

    def supports_method(self, method: str) -> bool:
        """Return True if `method` is empty, because only passwords are supported."""
        return not method

    def recognizes_login(self, credentials: Credentials) -> bool:
        """Return False, because a login without a user name is never accepted."""
        return False

    def authenticate_nowait(self, credentials: Credentials) -> Principal | Denial | None:
        """Return the cached result of this login, or None if no result is cached.

        Return Denial.WRONG for a login without a user name.
        """
        if not credentials.user:
            return Denial.WRONG
        key, now = self._digest(credentials), clock.monotonic()
        return self._allowed.find(key, now) or self._denied.find(key, now)

    async def authenticate(self, credentials: Credentials) -> Principal | Denial:
        """Query the server for a login, and return the principal or denial.

        Return Denial.BUSY if too many logins wait. Concurrent logins with the same credentials share one
        request.
        """
        key = self._digest(credentials)
        while (found := self.authenticate_nowait(credentials)) is None and key in self._in_flight:
            await self._in_flight[key].wait()
        if found is not None:
            return found
        done = self._in_flight[key] = trio.Event()
        try:
            await self._turns.acquire(place_of(credentials.remote), credentials.user)
            try:
                return await self._ask(key, credentials)
            finally:
                self._turns.release()
        except LoginQueueFull:
            return Denial.BUSY
        finally:
            del self._in_flight[key]
            done.set()

    async def _ask(self, key: bytes, credentials: Credentials) -> Principal | Denial:
        """Query the server for a login. Cache the result under `key`, and return it."""
        options = self._options
        fields = {
            "username": credentials.user.encode(errors="replace").decode(),
            "password": credentials.password.decode(errors="replace"),
            "client_id": credentials.client.encode(errors="replace").decode(),
        }
        stated = {name: text for name, text in fields.items() if text or name in ("username", "password")}
        try:
            body = await self._client.request(options.user_url, stated, method=options.method)
            found = read_answer(credentials.user, body)
        except BackendResponseError as error:
            self._report_failure(str(error))
            # Logins that wait for this request get its result, and do not each wait for their own timeout.
            self._denied.add(key, Denial.UNAVAILABLE, clock.monotonic() + UNAVAILABLE_SECS)
            return Denial.UNAVAILABLE
        if self._down:
            self._down = False
            log.info("authentication server responding again", backend=self.kind)
        now = clock.monotonic()
        if not options.cache_secs:
            return found
        if isinstance(found, Principal):
            self._allowed.add(key, found, now + options.cache_secs)
        else:
            self._denied.add(key, found, now + options.cache_secs * DENIED_SHARE)
        return found

    def _report_failure(self, why: str) -> None:
        self.failures += 1
        self._down = True
        log.error("authentication server not responding, logins refused", backend=self.kind, error=why)

    def _digest(self, credentials: Credentials) -> bytes:
        parts = [text.encode(errors="surrogatepass") for text in (credentials.user, credentials.client)]
        data = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, data + credentials.password, hashlib.sha256)


def read_answer(user: str, body: bytes) -> Principal | Denial:
    """Parse the server's response to the login of `user`: `allow` is a principal, `deny` a denial.

    Words after `allow` are role names of the principal. Raises BackendResponseError for any other response.
    """
    words = body.decode(errors="replace").split()
    verdict = words[0].lower() if words else ""
    if verdict == "allow":
        return Principal(user, roles=tuple(words[1 : 1 + TAGS_MAX]), backend=HttpUsers.kind)
    if verdict == "deny":
        return Denial.WRONG
    raise BackendResponseError("the response is neither allow nor deny")
