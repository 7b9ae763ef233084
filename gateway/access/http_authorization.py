"""Authorization by an HTTP server, with the requests of RabbitMQ's `rabbitmq_auth_backend_http`.

There are three kinds of requests: may this user enter a virtual host (`vhost`), may the user configure, write
or read a queue or an exchange (`resource`), and may the user do so with a routing key at a topic exchange
(`topic`). The response is `allow` or `deny`. Any other response, or none in time, counts as `deny`.

A request takes time, but a check of rights is synchronous: without a cached response the check raises
Pending, and is repeated when the response has arrived. Responses are cached for a while.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Protocol

import structlog
import trio

from gateway import clock
from gateway.access.http_client import BackendHttpClient, BackendResponseError
from gateway.access.login_queue import LoginQueue, LoginQueueFull
from gateway.model.shares import UserEntries, UserShares
from gateway.settings.access import HttpAuthorizer

KNOWN_SECS_MIN: Final = 1.0  # with less, a repeated check would find no response and wait for ever
ENTRY_BYTES: Final = 1_024  # of one cached response on average, with its request
DENIED_SHARE: Final = 0.1  # of the time that `allow` is cached: a denied client may be allowed soon

log = structlog.get_logger(limited=True)


class AuthorizerRequest(NamedTuple):
    """Request to an authorizer about one right: its kind, and its form fields as pairs of name and value."""

    kind: Literal["vhost", "resource", "topic"]
    fields: tuple[tuple[str, str], ...]

    @property
    def user(self) -> str:
        """Name of the user in the request."""
        return dict(self.fields).get("username", "")

    @property
    def byte_count(self) -> int:
        """Approximate memory of the request and its cached response, in bytes.

        A topic in the request may have 64 KiB.
        """
        texts = [value for _, value in self.fields]
        return ENTRY_BYTES // 2 + sum([len(text) * (1 if text.isascii() else 4) for text in texts])


class Authorizer(Protocol):
    """External service that decides on rights that the roles neither allow nor deny."""

    mqtt_host: str
    """Name of the virtual host in which rights for MQTT are checked."""

    def cached_decision(self, request: AuthorizerRequest) -> bool | None:
        """Return the stored decision: True if the action is allowed, False if it is denied.

        Return None if no decision is stored; the caller must then call `query`.
        """

    async def query(self, request: AuthorizerRequest) -> None:
        """Query the service, unless a decision is stored. Return when `cached_decision` has the decision."""


class AuthorizerResponse:
    """Response of an authorizer that has not arrived yet (`Pending.awaited`).

    A check that has raised Pending waits for it, and is then repeated.
    """

    def __init__(self, request: AuthorizerRequest, authorizer: Authorizer) -> None:
        self._request = request
        self._authorizer = authorizer

    async def wait(self) -> None:
        """Wait until the authorizer has responded."""
        await self._authorizer.query(self._request)


class HttpAuthorizerClient:
    """Authorizer that queries an HTTP server, and caches its responses.

    `options` are the settings of the authorizer, `client` is the HTTP client. `failures` counts requests
    without a usable response.
    """

    def __init__(self, options: HttpAuthorizer, client: BackendHttpClient) -> None:
        self.failures = 0
        self.mqtt_host = options.mqtt_virtual_host
        self._options = options
        self._client = client
        self._urls = {
            "vhost": options.vhost_url,
            "resource": options.resource_url,
            "topic": options.topic_url,
        }
        self._answers: dict[AuthorizerRequest, tuple[bool, float]] = {}
        entries_max = options.cache_entries_max
        self._entries: UserEntries[AuthorizerRequest] = UserEntries(
            UserShares("authorizer responses", count_max=entries_max, bytes_max=entries_max * ENTRY_BYTES)
        )
        self._in_flight: dict[AuthorizerRequest, trio.Event] = {}
        self._turns = LoginQueue(options.connections_max, options.waiting_max)
        self._down = False

    @property
    def cached_count(self) -> int:
        """Number of cached responses, including expired ones."""
        return len(self._answers)

    def cached_decision(self, request: AuthorizerRequest) -> bool | None:
        """Return the cached decision: True if the action is allowed, False if it is denied.

        Return None if no decision is cached, or if it has expired.
        """
        found = self._answers.get(request)
        return None if found is None or found[1] <= clock.monotonic() else found[0]

    async def query(self, request: AuthorizerRequest) -> None:
        """Query the server and cache its decision, unless a decision is cached.

        Concurrent calls with equal requests share one query.
        """
        while self.cached_decision(request) is None and request in self._in_flight:
            await self._in_flight[request].wait()
        if self.cached_decision(request) is not None:
            return
        done = self._in_flight[request] = trio.Event()
        try:
            allowed, secs = await self._answer(request)
            self._remember(request, allowed, secs)
        finally:
            del self._in_flight[request]
            done.set()

    async def _answer(self, request: AuthorizerRequest) -> tuple[bool, float]:
        """Query the server. Return its decision, and for how many seconds to cache this decision.

        A failed request counts as a denial.
        """
        options = self._options
        try:
            await self._turns.acquire("", request.user)
        except LoginQueueFull:
            self._report_failure("too many requests to the authorization server are waiting")
            return False, KNOWN_SECS_MIN
        try:
            url = self._urls[request.kind]
            body = await self._client.request(url, dict(request.fields), method=options.method)
            allowed = read_verdict(body)
        except BackendResponseError as error:
            self._report_failure(str(error))
            return False, KNOWN_SECS_MIN
        finally:
            self._turns.release()
        if self._down:
            self._down = False
            log.info("authorization server responding again")
        secs = options.cache_secs if allowed else options.cache_secs * DENIED_SHARE
        return allowed, max(secs, KNOWN_SECS_MIN)

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()

    def _remember(self, request: AuthorizerRequest, allowed: bool, secs: float) -> None:
        """Cache a response for `secs` seconds.

        If the cache then exceeds its limits, its oldest responses are dropped, but never the new one: the
        check that waits for it would otherwise query the server again and again.
        """
        self._entries.discard(request)
        self._entries.add(request, request.user, request.byte_count)
        self._answers[request] = (allowed, clock.monotonic() + secs)
        while (oldest := self._entries.entry_to_evict(request.user)) not in (None, request):
            assert oldest is not None
            self._entries.discard(oldest)
            self._answers.pop(oldest, None)

    def _report_failure(self, why: str) -> None:
        self.failures += 1
        self._down = True
        log.error("authorization server not responding, client requests refused", error=why)


def read_verdict(body: bytes) -> bool:
    """Parse the response of the server: return True for `allow`, False for `deny`.

    Raises BackendResponseError for any other response.
    """
    word = body.decode(errors="replace").split(maxsplit=1)[:1]
    if word and word[0].lower() in ("allow", "deny"):
        return word[0].lower() == "allow"
    raise BackendResponseError("the response is neither allow nor deny")
