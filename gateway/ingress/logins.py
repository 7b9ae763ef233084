"""Logins that take time: verification of a password, or the delay after a failed login.

Meanwhile a `Login` replaces the stream's owner. It stores further data and reads little of it. When the
client disconnects, which is not noticed without reading, the login is cancelled, so that no client waits
behind those that have left. If data arrived together with the login, reading stops at once, so that a
disconnection is not noticed and the data is processed: a device may send everything at once and disconnect.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import structlog
import trio

from gateway import clock
from gateway.access.authentication import Access
from gateway.access.backends import Denial
from gateway.access.certificates import from_balancer, from_bytes
from gateway.access.credentials import Certificate, Credentials
from gateway.access.places import is_loopback
from gateway.access.principal import Principal
from gateway.model.spooled_bodies import Piece
from gateway.telemetry.audit import audit
from gateway.telemetry.stats import ListenerStats
from gateway.transport.stream import Stream, StreamOwner
from gateway.transport.tasks import Tasks
from gateway.transport.websocket import opened_by_foreign_page

ABANDONED: Final = "abandoned"
ACCEPTED: Final = "accepted"
T = TypeVar("T")

log = structlog.get_logger(limited=True)


class Login:
    """Temporary owner of a stream, which replaces the connection while its client is being verified."""

    def __init__(self, stream: Stream, *, behind: bool) -> None:
        """Become the stream's owner.

        `behind` True means that the client has already sent data after its login request, so reading stops at
        once.
        """
        assert stream.owner is not None
        self.stream = stream
        self.scope = trio.CancelScope()
        self._owner: StreamOwner = stream.owner
        self._buffer = b""
        self._paused = False
        stream.owner = self
        if behind:
            self._hold()

    def _hold(self) -> None:
        if not self._paused:
            self._paused = True
            self.stream.hold()

    def check_disconnected(self) -> None:
        """Abort the connection if the client has disconnected already.

        Called before the login is queued for verification.
        """
        if self._paused or self.is_over:
            return
        try:
            is_disconnected = not self.stream.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return  # no data, or an error that reading will report
        if is_disconnected:
            self.stream.abort("closed by the peer")

    def resume(self, then: Callable[[], None]) -> None:
        """Restore the stream's owner, call `then`, and pass on data received during the login."""
        stream, owner = self.stream, self._owner
        stream.owner = owner
        if self._paused:
            stream.release()
        then()
        if self._buffer and stream.owner is owner:
            owner.receive(self._buffer, clock.now())
        stream.mark_for_flush()

    @property
    def is_over(self) -> bool:
        """True if the connection has ended or is ending, or the login is complete."""
        return self.stream.owner is not self

    # Interface to the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Store data that the client sends before it gets the login's response, and stop reading.

        If `data` is empty, the stream has packets that the connection has postponed: they are processed after
        the login.
        """
        self._hold()
        if data:
            self._buffer += data
        else:
            self.stream.request_turn()

    def data_to_send(self) -> bytes | list[Piece]:
        """Return the output of the connection that the login replaces."""
        return self._owner.data_to_send()

    def resume_writing(self) -> None:
        """Tell the connection that the login replaces to resume deliveries."""
        self._owner.resume_writing()

    def connection_lost(self, reason: str) -> None:
        """Cancel the login, and notify the connection of its end."""
        self.scope.cancel()
        self._owner.connection_lost(reason)


class Logins:
    """Logins of one listener. `flush` writes output that was encoded outside a pass of the event loop."""

    def __init__(self, access: Access, stats: ListenerStats, tasks: Tasks, flush: Callable[[], None]) -> None:
        self.access = access
        self.failures = access.failures
        self._stats = stats
        self._tasks = tasks
        self._flush = flush

    def credentials(
        self,
        stream: Stream,
        user: str,
        password: bytes,
        *,
        client: str = "",
        backend: str = "",
        method: str = "",
    ) -> Credentials:
        """Return the credentials of a client with the identifier `client`.

        They include its certificate if an authentication back end reads certificates. `backend` and `method`,
        unless empty, restrict the back ends that verify the credentials.
        """
        certificate = certificate_of(stream) if self.access.reads_certificates else None
        return Credentials(user, password, remote_of(stream), certificate, client, backend, method)

    def verify(
        self,
        stream: Stream,
        credentials: Credentials,
        then: Callable[[Principal | Denial], None],
        *,
        behind: bool = False,
    ) -> None:
        """Verify credentials in a task, then call `then` with the result, unless the client has disconnected.

        `behind` True means that the client has already sent data after its login request. A user who was
        removed meanwhile is denied.
        """

        def verified(found: Principal | Denial) -> None:
            if isinstance(found, Principal) and self.access.is_removed(found):
                found = Denial.WRONG
            then(found)

        look = partial(self.access.verify, credentials)
        self._tasks.start_soon(self._wait, Login(stream, behind=behind), look, verified)

    def call_later(self, stream: Stream, secs: float, then: Callable[[], None], *, behind: bool) -> None:
        """Call `then` after `secs` seconds, unless the client has disconnected.

        `behind` True means that the client has already sent data after its login request.
        """

        def on_timeout(_: None) -> None:
            then()

        wait = partial(trio.sleep, secs)
        self._tasks.start_soon(self._wait, Login(stream, behind=behind), wait, on_timeout)

    async def _wait(self, login: Login, work: Callable[[], Awaitable[T]], then: Callable[[T], None]) -> None:
        """Run `work`, make the connection the stream's owner again, and call `then` with the result."""
        try:
            login.check_disconnected()
            with login.scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                found = await work()
            if login.is_over:
                self._stats.logins.add(ABANDONED)
            else:
                login.resume(partial(then, found))
                self._flush()
        except Exception as error:
            login.stream.fail(error)

    def count_accepted(self) -> None:
        """Count an accepted login."""
        self._stats.logins.add(ACCEPTED)

    def log_denied(self, stream: Stream, user: str, why: Denial, client: str = "") -> None:
        """Log and count a denied login; `why` is the reason, `client` the client's identifier."""
        self._stats.logins.add(why.value)
        self.audit_refusal(stream, user, why.value, client)
        user, listener = self.access.loggable(user), self._stats.name
        log.warning("login refused", listener=listener, remote=stream.remote, user=user, why=why.text)

    def audit_refusal(
        self, stream: Stream, user: str, reason: str, client: str = "", *, proved: bool = False
    ) -> None:
        """Write to the audit log that a client was refused, for example by a limit.

        `reason` is a short label. If `proved` is True, `user` has been authenticated; otherwise a name that
        could be a password is not logged.
        """
        name = self._stats.name
        user = user if proved else self.access.loggable(user)
        audit("refused", endpoint=name, user=user, client=client, remote=stream.remote, reason=reason)


def remote_of(stream: Stream) -> str:
    """Return the client address that counts for a login.

    A connection that a web page of another origin opened in a local browser does not count as local.
    """
    if is_loopback(stream.remote) and opened_by_foreign_page(stream.layer):
        return f"page {stream.remote}"
    return stream.remote


def certificate_of(stream: Stream) -> Certificate | None:
    """Return the client's certificate, from TLS or as announced by a balancer; None without one."""
    announced = stream.secured
    if announced is not None:  # a certificate in TLS would be the balancer's own
        return from_balancer(announced.common_name, announced.data)
    data = b"" if stream.layer is None else stream.layer.certificate
    return from_bytes(data) if data else None
