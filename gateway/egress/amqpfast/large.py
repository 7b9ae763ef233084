"""Large messages of a link: sent one at a time, on a channel of their own, in fragments.

A fragment is written whenever the stream has room. If the server accepts restartable transfers, a message
that a lost connection interrupted continues where it stopped: the server knows it by the client-name and the
head, which both stay the same. A server without restartable transfers says so once per connection, or never
replies. The owner of the connections (publisher.py) handles servers that drop the connection instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway import clock
from gateway.egress.amqpfast.login import open_for_sending, outcome_of
from gateway.egress.amqpfast.upload import Upload, content_hash
from gateway.errors import LocalProtocolError
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.protocols.amqpfast.client import ClientConnection
from gateway.protocols.amqpfast.spec import ReplyCode
from gateway.transport.stream import Stream

LARGE_BYTES: Final = 1_048_576  # larger bodies are sent in fragments by LargeSender
READY_SECS: Final = 30.0  # PREPARE is answered from memory; a server that takes longer never replies
# Codes of servers that do not know PREPARE.
UNKNOWN: Final = frozenset((ReplyCode.COMMAND_NOT_VALID, ReplyCode.NOT_IMPLEMENTED))

SettledCallback = Callable[[Outcome, int], None]


class LargeSender:
    """Sender of large messages on a channel of its own, one at a time.

    `settled` is called with the outcome of a message and the code of the server's reply or close; 200 is
    success. If `restartable`, messages are announced by PREPARE, so that an interrupted one can be continued.
    """

    def __init__(
        self, machine: ClientConnection, stream: Stream, settled: SettledCallback, *, restartable: bool = True
    ) -> None:
        self.channel = 0
        self._machine = machine
        self._stream = stream
        self._settled = settled
        self._restartable = restartable
        self._announced_at = 0.0
        self._upload: Upload | None = None
        self._message: Message | None = None
        self._head = b""

    @property
    def busy(self) -> bool:
        """True while a message is being sent."""
        return self._message is not None

    @property
    def announced(self) -> bool:
        """True if PREPARE was sent and the server has not responded yet."""
        return self._upload is not None and self._upload.prepared

    def tick(self, now: float) -> None:
        """Send the message without PREPARE, if the server has not replied to PREPARE within READY_SECS.

        `now` is in loop-clock seconds.
        """
        if self.announced and now - self._announced_at >= READY_SECS:
            assert self._upload is not None
            self._machine.close_handle(self._upload.handle)
            self._resend(restartable=False)

    def send(self, message: Message, head: bytes) -> None:
        """Begin to send a message with the encoded content header `head`; its outcome goes to `settled`.

        Raises LocalProtocolError if the server has no channel or handle left for it.
        """
        address, body = message.address, message.body
        machine = self._machine
        if not self.channel:
            self.channel = machine.open_channel(restartable=self._restartable, confirm=False)
        handle, name = open_for_sending(machine, self.channel, address.scope, address.name)
        digest = content_hash(body) if self._restartable else b""
        upload = Upload(
            machine,
            self.channel,
            handle,
            head,
            len(body),
            lambda at, size: memoryview(body)[at : at + size],
            name=name,
            digest=digest,
        )
        upload.begin(restartable=self._restartable)
        self._announced_at = clock.now()
        self._message, self._head, self._upload = message, head, upload
        self.write()

    def ready(self, handle: int, held_bytes: int) -> None:
        """Process READY: send the body without the `held_bytes` bytes that the server already has."""
        upload = self._upload
        if upload is None or upload.handle != handle:
            return
        try:
            upload.ready(held_bytes)
        except LocalProtocolError:
            return  # it has been closed since; that event follows
        self.write()

    def write(self) -> None:
        """Write as many fragments as the stream accepts now."""
        upload, stream = self._upload, self._stream
        while upload is not None and upload.writable and not stream.congested:
            stream.queued += upload.write()
            stream.mark_for_flush()

    def handle_reply(self, handle: int, code: int, text: str) -> None:
        """Settle the message by the code and text of the server's reply, if it was sent on this handle."""
        upload = self._upload
        if upload is not None and upload.handle == handle:
            self._finish(ACCEPTED if code < ReplyCode.MESSAGE_NOT_FOUND else outcome_of(code, text), code)

    def handle_closed(self, handle: int, code: int, text: str) -> None:
        """Process the server's close of a handle, if the message was being sent on it.

        The message is sent again if the server does not know PREPARE, or had part of another body; otherwise
        it is settled by `code` and `text`.
        """
        upload = self._upload
        if upload is None or upload.handle != handle:
            return
        if upload.prepared and code in UNKNOWN:
            self._resend(restartable=False)
        elif upload.resumed_at and code == ReplyCode.MESSAGE_CONTENTS_INVALID:
            self._resend(restartable=True)  # the server's part was of another body; now it has none
        else:
            self._upload = None
            self._finish(outcome_of(code, text), code)

    def channel_closed(self, code: int, text: str) -> None:
        """Process the server's close of the channel: send the message again, or settle it.

        It is sent again, without PREPARE, if `code` shows that the server does not know PREPARE. Otherwise
        `code` and `text` determine the outcome.
        """
        upload, self.channel = self._upload, 0
        if upload is None:
            return
        if upload.prepared and code in UNKNOWN:
            self._resend(restartable=False)
        else:
            self._upload = None
            self._finish(outcome_of(code, text), code)

    def _resend(self, *, restartable: bool) -> None:
        message = self._message
        assert message is not None
        self._restartable = restartable
        self._upload = None
        try:
            self.send(message, self._head)
        except LocalProtocolError as error:
            self._finish(Outcome(Verdict.RELEASED, Reason.TARGET_DOWN, str(error)), ReplyCode.SUCCESS)

    def _finish(self, outcome: Outcome, code: int) -> None:
        upload, self._upload = self._upload, None
        self._message = None
        if upload is not None:
            self._machine.close_handle(upload.handle)
        self._settled(outcome, code)
