"""Base of connections whose protocol has not begun: received bytes are collected until it can begin.

A subclass decides by the collected bytes: it hands the stream to another owner, or refuses the client. A
connection that sends too little within limits.connect_timeout_secs is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import structlog

from gateway.ingress.client import CloseReason, InFlight, IngressClient
from gateway.ingress.clients import IngressClients
from gateway.model.message import Sender
from gateway.transport.stream import Stream

log = structlog.get_logger(limited=True)


class PendingConnection(IngressClient):
    """First owner of an accepted stream, until the received bytes show which object has to own it.

    The bytes are collected in `data`. The method `examine` of a subclass checks them: it hands the stream to
    another owner, refuses the client, or waits for more. The bytes count in the statistics of this listener,
    unless another owner takes over the stream.
    """

    def __init__(self, ingress_clients: IngressClients, stream: Stream, accepted_at: float) -> None:
        """Create the owner of a stream that was accepted at `accepted_at`, in loop-clock seconds."""
        self.stream = stream
        self.sender = Sender(ingress_clients.name)
        self.accepted_at = accepted_at
        self.data = b""
        self.received: Any = ()
        self.sent: Any = ()
        self._clients = ingress_clients
        self._answer = b""

    def examine(self, now: float) -> None:
        """Check the bytes in `data`: hand the stream over, refuse the client, or wait for more bytes."""
        raise NotImplementedError

    def detach(self) -> bytes:
        """Stop being the stream's owner, for another owner to take over. Return the bytes received so far."""
        self._clients.forget(self)
        data, self.data = self.data, b""
        return data

    def refuse(self, word: str, text: str, answer: bytes = b"") -> None:
        """Refuse the client: send the bytes `answer`, close the connection, and log `text`.

        The refusal is counted in the statistics under the key `word`.
        """
        self._clients.stats.refused.add(word)
        self._refuse(text, answer)

    def break_off(self, word: str, text: str) -> None:
        """Close the connection for a protocol error, and log `text`.

        The error is counted in the statistics under the key `word`.
        """
        self._clients.stats.protocol_errors.add(word)
        self._refuse(text, b"")

    def answer(self, data: bytes) -> None:
        """Send a response and close the connection."""
        self._answer = data
        self.stream.end("answered")

    def _refuse(self, text: str, answer: bytes) -> None:
        log.warning(
            "connection refused", listener=self.sender.endpoint, remote=self.stream.remote, error=text
        )
        self._answer = answer
        self.stream.end(text)

    # Interface to the stream.

    def receive(self, data: bytes, now: float) -> None:
        """Append received bytes to `data` and call `examine`, which decides about the connection."""
        self.data += data
        self.examine(now)

    def data_to_send(self) -> bytes:
        """Return the response, if there is one."""
        answer, self._answer = self._answer, b""
        return answer

    def resume_writing(self) -> None:
        """Do nothing: no output is withheld."""

    def connection_lost(self, reason: str) -> None:
        """Remove the closed connection, and count its bytes for this listener."""
        self.stream.count_with(self._clients.stats)
        self._clients.forget(self)

    # Interface to the listener.

    @property
    def frames(self) -> Self:
        """Object that counts the connection's frames: this object, which counts none."""
        return self

    @property
    def idle(self) -> bool:
        """True, because the client has published nothing."""
        return True

    def in_flight(self) -> InFlight:
        """Return zero counts: no messages have been exchanged."""
        return InFlight()

    def hold(self) -> Callable[[], None] | None:
        """Return None: the client has published nothing, so reading from it need not stop."""
        return None

    def tick(self, now: float) -> None:
        """Close the connection if its protocol has not begun within limits.connect_timeout_secs."""
        if now >= self.accepted_at + self._clients.limits.connect_timeout_secs:
            self._clients.stats.protocol_errors.add("connect_timeout")
            self.stream.abort("no protocol was recognized in time")

    def rules_changed(self) -> None:
        """Do nothing: the client has no rights yet."""

    def shut_down(self, close_reason: CloseReason) -> None:
        """Close the stream without a message, as no protocol has begun."""
        self.stream.end(close_reason.value)
