"""Logins that take their time: a password waits for its hash, or a failure before it for its delay.

Meanwhile a stand-in has the place of the connection's owner. It keeps what the client says and reads
little of it; and when the client goes, which would not be noticed without reading, the login ends: nobody
waits behind those who are not there any more. Only what came in one piece with the login is looked at all
the same, for a device may say all that it has to say, and leave.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import structlog
import trio

from gateway.access.authentication import Access
from gateway.access.backends import Denial
from gateway.access.certificates import from_balancer, from_octets
from gateway.access.credentials import Certificate, Credentials
from gateway.access.places import is_loopback
from gateway.access.principal import Principal
from gateway.model.spooled import Piece
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
    """Stands in for the owner of a stream."""

    def __init__(self, stream: Stream, *, behind: bool) -> None:
        """`behind`: more than the login has been read already."""
        assert stream.owner is not None
        self.stream = stream
        self.scope = trio.CancelScope()
        self._owner: StreamOwner = stream.owner
        self._given = b""
        self._held = False
        stream.owner = self
        if behind:
            self._hold()

    def _hold(self) -> None:
        if not self._held:
            self._held = True
            self.stream.hold()

    def look(self) -> None:
        """Many come and go at once: who has gone already is not to take a place in a queue before that is
        read.
        """
        if self._held or self.over:
            return
        try:
            gone = not self.stream.sock.recv(1, socket.MSG_PEEK)
        except OSError:
            return  # nothing has come, or what is wrong will be read
        if gone:
            self.stream.abort("closed by the peer")

    def go_on(self, then: Callable[[], None]) -> None:
        """It is decided: the owner goes on, by `then`, and with what has come since."""
        stream, owner = self.stream, self._owner
        stream.owner = owner
        if self._held:
            stream.release()
        then()
        if self._given and stream.owner is owner:
            owner.receive(self._given, trio.current_time())
        stream.mark()

    @property
    def over(self) -> bool:
        """The connection has ended, or begun to."""
        return self.stream.owner is not self

    # What the stream asks.

    def receive(self, data: bytes, now: float) -> None:
        """The client does not wait for its answer: it has to wait with what comes behind that."""
        if data:
            self._given += data
            self._hold()

    def data_to_send(self) -> bytes | list[Piece]:
        """What the owner says."""
        return self._owner.data_to_send()

    def drained(self) -> None:
        """What it said has been written."""
        self._owner.drained()

    def lost(self, reason: str) -> None:
        """Nobody waits for this login any more."""
        self.scope.cancel()
        self._owner.lost(reason)


class Logins:
    """The logins of one listener. `flush` writes what was encoded outside a wake-up."""

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
        """What a client says of itself, with the certificate that it has shown, if anybody cares for it.
        `backend` and `method`: only such back ends are asked.
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
        """Look at a password beside the loop, then call `then`, unless the client has gone."""
        look = partial(self.access.verify, credentials)
        self._tasks.start_soon(self._wait, Login(stream, behind=behind), look, then)

    def later(self, stream: Stream, secs: float, then: Callable[[], None], *, behind: bool) -> None:
        """Call `then` when the delay of a failure is over, unless the client has gone."""

        def waited(_: None) -> None:
            then()

        wait = partial(trio.sleep, secs)
        self._tasks.start_soon(self._wait, Login(stream, behind=behind), wait, waited)

    async def _wait(self, login: Login, work: Callable[[], Awaitable[T]], then: Callable[[T], None]) -> None:
        try:
            login.look()
            with login.scope:
                await trio.lowlevel.checkpoint_if_cancelled()
                found = await work()
            if login.over:
                self._stats.logins.add(ABANDONED)
            else:
                login.go_on(partial(then, found))
                self._flush()
        except Exception as error:
            login.stream.fail(error)

    def accepted(self) -> None:
        """A client is let in."""
        self._stats.logins.add(ACCEPTED)

    def denied(self, stream: Stream, user: str, why: Denial, client: str = "") -> None:
        """A client is not; say so in the log."""
        self._stats.logins.add(why.value)
        self.turned_away(stream, user, why.value, client)
        user, listener = self.access.loggable(user), self._stats.name
        log.warning("login refused", listener=listener, remote=stream.remote, user=user, why=why.value)

    def turned_away(
        self, stream: Stream, user: str, reason: str, client: str = "", *, proved: bool = False
    ) -> None:
        """Write into the audit log that a client is not let in. `reason` is a constant of ours; `proved`: the
        client has proved to be this user."""
        name = self._stats.name
        user = user if proved else self.access.loggable(user)
        audit("refused", endpoint=name, user=user, client=client, remote=stream.remote, reason=reason)


def remote_of(stream: Stream) -> str:
    """Return the address that counts for a login: not this machine's, if a web page from elsewhere has opened
    the connection in a browser that runs here."""
    if is_loopback(stream.remote) and opened_by_foreign_page(stream.layer):
        return f"page {stream.remote}"
    return stream.remote


def certificate_of(stream: Stream) -> Certificate | None:
    """The certificate that a client has shown, to us or to the balancer that announces it; None: none."""
    announced = stream.secured
    if announced is not None:  # with us only the balancer itself may have shown one
        return from_balancer(announced.common_name, announced.octets)
    octets = b"" if stream.layer is None else stream.layer.certificate
    return from_octets(octets) if octets else None
