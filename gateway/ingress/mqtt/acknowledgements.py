"""Acknowledgements from a client: what they free in its session, and what they are answered with.

PUBREL and PUBCOMP make the other side forget. Those of a session that survives a restart are said when what
led to them is on disk, or wherever it survives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from gateway.broker.mqtt.session import Session
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.octets import violation
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import FAILURE, PacketType, ReasonCode, Version
from gateway.transport.stream import Stream

PUBREL = PacketType.PUBREL
PUBCOMP = PacketType.PUBCOMP


class Answers:
    """Acknowledgements of one connection that wait for the disk, or the log of the engine."""

    __slots__ = ("_after", "_machine", "_stream", "_unsaid")

    def __init__(
        self, after: Callable[[Callable[[Outcome], None]], None], machine: ServerConnection, stream: Stream
    ) -> None:
        """`after` calls back when everything that was said before is safe."""
        self._after = after
        self._machine = machine
        self._stream = stream
        self._unsaid: list[tuple[PacketType, list[int]]] = []

    def say_when_safe(self, kind: PacketType, packet_ids: list[int]) -> None:
        """Say them when everything that was handed over before is safe."""
        self._after(partial(self._committed, kind, packet_ids))

    def _committed(self, kind: PacketType, packet_ids: list[int], outcome: Outcome) -> None:
        if outcome is not ACCEPTED:
            self._unsaid.append((kind, packet_ids))
        elif self._machine.state is State.OPEN:
            self._machine.acknowledge(kind, packet_ids)
            self._stream.mark()

    def tick(self) -> None:
        """What the disk did not take was kept, and is tried again: perhaps it is written by now."""
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            for kind, packet_ids in unsaid:
                self.say_when_safe(kind, packet_ids)


def acknowledged(
    session: Session,
    machine: ServerConnection,
    answers: Answers | None,
    kind: PacketType,
    rows: list[tuple[int, int]],
) -> None:
    """Take a run of acknowledgements of one kind; a row is a packet id and a reason code (5: 4.3).

    `answers`: None when nothing waits for the disk. Raises RemoteProtocolError for one of the wrong kind.
    """
    if kind is not PUBREL and any(not session.awaits(kind, packet_id) for packet_id, _ in rows):
        raise violation(f"{kind.name} for a delivery that another acknowledgement is due for")
    if kind is PUBREL:
        _answer(machine, answers, PUBCOMP, [packet_id for packet_id, _ in rows], session.received_ids.release)
        return
    if kind is PacketType.PUBREC:
        taken = []
        for packet_id, reason in rows:
            if reason >= FAILURE:
                session.finish(packet_id)
            else:
                taken.append(packet_id)
        _answer(machine, answers, PUBREL, taken, session.received)
    else:
        for packet_id, _ in rows:
            session.finish(packet_id)
    session.pump()


def _answer(
    machine: ServerConnection,
    answers: Answers | None,
    kind: PacketType,
    packet_ids: list[int],
    known: Callable[[int], bool],
) -> None:
    """Before MQTT 5 an unknown packet id is answered like a known one (3.1.1: 4.3.3)."""
    waiting = []
    for packet_id in packet_ids:
        found = known(packet_id)
        if found and answers is not None:
            waiting.append(packet_id)
        elif machine.state is State.OPEN:  # otherwise it sent DISCONNECT right behind
            given = found or machine.version < Version.V5
            reason = ReasonCode.SUCCESS if given else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
            machine.send_ack(kind, packet_id, reason)
    if waiting and answers is not None:
        answers.say_when_safe(kind, waiting)
