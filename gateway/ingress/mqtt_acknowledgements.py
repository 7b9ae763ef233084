"""Acknowledgements from a client: what they free in its session, and what they are answered with."""

from __future__ import annotations

from gateway.broker.mqtt.session import Session
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.server import ServerConnection
from gateway.protocols.mqtt.spec import FAILURE, PacketType, ReasonCode, Version


def acknowledged(
    session: Session, machine: ServerConnection, kind: PacketType, rows: list[tuple[int, int]]
) -> None:
    """Take a run of acknowledgements of one kind; a row is a packet id and a reason code (5: 4.3)."""
    if kind is PacketType.PUBREL:
        for packet_id, _ in rows:
            known = session.incoming.pop(packet_id, None) is not None
            _answer(machine, PacketType.PUBCOMP, packet_id, known=known)
        return
    if kind is PacketType.PUBREC:
        for packet_id, reason in rows:
            if reason >= FAILURE:
                session.finish(packet_id)
            else:
                _answer(machine, PacketType.PUBREL, packet_id, known=session.received(packet_id))
    else:
        for packet_id, _ in rows:
            session.finish(packet_id)
    session.pump()


def _answer(machine: ServerConnection, kind: PacketType, packet_id: int, *, known: bool) -> None:
    """Before MQTT 5 an unknown packet id is answered like a known one (3.1.1: 4.3.3)."""
    if machine.state is not State.OPEN:
        return  # it sent DISCONNECT right behind
    said = known or machine.version < Version.V5
    reason = ReasonCode.SUCCESS if said else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
    machine.send_ack(kind, packet_id, reason)
