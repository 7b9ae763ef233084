"""Processing of a client's acknowledgements: their effect on its session, and the responses to them.

The response to PUBREC is PUBREL, and to PUBREL it is PUBCOMP. Either lets the client forget the packet
identifier. For a session that survives a restart, they are therefore sent only when the change that they
confirm is stored: on the local disk, or in the log that replicas share. PUBACK and PUBCOMP end a delivery and
have no response.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.broker.mqtt.session import Session
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.data_types import violation
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import FAILURE, PacketType, ReasonCode, Version
from gateway.transport.stream import Stream

PUBREL = PacketType.PUBREL
PUBCOMP = PacketType.PUBCOMP


class DelayedAcknowledgements:
    """PUBREL and PUBCOMP packets of one connection that are sent when the session's changes are stored."""

    __slots__ = ("_after", "_machine", "_on_refused", "_stream", "_unsaid")

    def __init__(
        self,
        after: Callable[[Callable[[Outcome], None]], None],
        machine: ServerConnection,
        stream: Stream,
        on_refused: Callable[[], None],
    ) -> None:
        """Create an empty object.

        `after` registers a function that is called when all session changes made so far have been stored,
        with the outcome. `on_refused` is called after a failed write: `tick` must be called once a second
        until `is_waiting` is False.
        """
        self._after = after
        self._on_refused = on_refused
        self._machine = machine
        self._stream = stream
        self._unsaid: list[tuple[PacketType, list[int]]] = []

    def send_when_stored(self, kind: PacketType, packet_ids: list[int]) -> None:
        """Send PUBREL or PUBCOMP packets (`kind`) when all session changes made so far are stored."""
        self._after(partial(self._committed, kind, packet_ids))

    def _committed(self, kind: PacketType, packet_ids: list[int], outcome: Outcome) -> None:
        """Send the acknowledgements if the session's changes have been stored.

        After a failed write they stay in this object, and `tick` tries again.
        """
        if outcome is not ACCEPTED:
            self._unsaid.append((kind, packet_ids))
            self._on_refused()
        elif self._machine.state is State.OPEN:
            self._machine.acknowledge(kind, packet_ids)
            self._stream.mark_for_flush()

    @property
    def is_waiting(self) -> bool:
        """True if there are acknowledgements whose write has failed."""
        return bool(self._unsaid)

    def tick(self) -> None:
        """Try again to send the acknowledgements whose write had failed.

        The session changes are still in memory and may be on disk by now.
        """
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            for kind, packet_ids in unsaid:
                self.send_when_stored(kind, packet_ids)


def acknowledged(
    session: Session,
    machine: ServerConnection,
    answers: DelayedAcknowledgements | None,
    kind: PacketType,
    rows: list[tuple[int, int]],
) -> None:
    """Process a client's acknowledgements of one kind, such as PUBACK, and send the responses to them.

    A row is a packet identifier and a reason code (5: 4.3). `answers` delays the responses until the
    session's changes are stored; None sends them at once. A PUBREC gets no response while its message is
    still being loaded after a restart: the client repeats it when the message is resent. Raises
    RemoteProtocolError if a delivery awaits another kind of acknowledgement.
    """
    if kind is not PUBREL and any(not session.expects_ack(kind, packet_id) for packet_id, _ in rows):
        raise violation(f"{kind.name} for a delivery that needs another acknowledgement")
    if kind is PUBREL:
        _answer(machine, answers, PUBCOMP, [packet_id for packet_id, _ in rows], session.received_ids.release)
        return
    if kind is PacketType.PUBREC:
        answered_ids = []
        for packet_id, reason in rows:
            if reason >= FAILURE:
                session.complete_delivery(packet_id)
            elif not session.may_resend(packet_id):  # otherwise it would be a new message to the client
                answered_ids.append(packet_id)
        _answer(machine, answers, PUBREL, answered_ids, session.handle_pubrec)
    else:
        for packet_id, _ in rows:
            session.complete_delivery(packet_id)
    session.pump()


def _answer(
    machine: ServerConnection,
    answers: DelayedAcknowledgements | None,
    kind: PacketType,
    packet_ids: list[int],
    is_known: Callable[[int], bool],
) -> None:
    """Send responses of one kind, such as PUBREL, to acknowledgements.

    They are sent at once or, with `answers`, when the session's changes are stored. `is_known` applies an
    acknowledgement to the session, and returns False if its packet identifier is not in use. In MQTT 5 the
    response then has reason code 0x92, in older versions it is the normal one (3.1.1: 4.3.3).
    """
    waiting = []
    for packet_id in packet_ids:
        found = is_known(packet_id)
        if found and answers is not None:
            waiting.append(packet_id)
        elif machine.state is State.OPEN:  # otherwise the client sent DISCONNECT right behind
            succeeds = found or machine.version < Version.V5
            reason = ReasonCode.SUCCESS if succeeds else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
            machine.send_ack(kind, packet_id, reason)
    if waiting and answers is not None:
        answers.send_when_stored(kind, waiting)
