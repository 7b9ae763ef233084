"""SUBSCRIBE and UNSUBSCRIBE: each filter is granted or refused by itself; retained messages follow in pieces.

A client that sent DISCONNECT right behind gets no answer; what it asked for is done: its session may stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.access.questions import Undecided
from gateway.broker.mqtt.session import Session, SubscriptionOptions
from gateway.broker.mqtt.shared import shared_pattern
from gateway.errors import RemoteProtocolError
from gateway.protocols.mqtt.connection import State
from gateway.protocols.mqtt.octets import is_filter
from gateway.protocols.mqtt.packets import Subscribe, Subscription, Unsubscribe
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version

if TYPE_CHECKING:
    from gateway.access.rights import Decision, Rights
    from gateway.ingress.mqtt.connection import MqttConnection
    from gateway.ingress.mqtt.ingress import MqttIngress
    from gateway.model.message import Sender
    from gateway.protocols.mqtt.server import ServerConnection


def subscribe(ingress: MqttIngress, connection: MqttConnection, session: Session, packet: Subscribe) -> None:
    """Answer with a SUBACK, then owe the retained messages. Raises RemoteProtocolError for 3.x filters."""
    machine, rights = connection.machine, connection.current_rights()
    assert machine.connect is not None
    if len(ingress.batch):
        ingress.turn_done()  # what was published before and is retained must be found
    bridge = machine.connect.bridge  # of Mosquitto's kind: levels 0x83 and 0x84
    identifier = packet.properties.get(Property.SUBSCRIPTION_IDENTIFIER, (0,))[0]
    reasons: list[int] = []
    decisions = [rights.mqtt_subscribe(one.filter, one.qos) for one in packet.subscriptions]  # or Undecided
    for wanted, decision in zip(packet.subscriptions, decisions, strict=True):
        refused = _refusal(ingress, session, connection, decision, wanted)
        if refused is not None:
            if machine.version < Version.V5 and not is_filter(wanted.filter):
                raise RemoteProtocolError(f"topic filter {wanted.filter!r} is malformed", reason=refused)
            ingress.tell_unsubscribed(session.client_id, wanted.filter, refused)
            reasons.append(refused)  # before MQTT 5 the codec says 0x80 for all of them
            continue
        qos = wanted.qos if connection.offer is None else min(wanted.qos, connection.offer.qos_max)
        options = SubscriptionOptions(
            qos,
            wanted.no_local or (bridge and shared_pattern(wanted.filter) is None),
            wanted.retain_as_published or bridge,
            wanted.retain_handling,
            identifier,
        )
        ingress.namespace.subscribe(session, wanted.filter, options)
        reasons.append(qos)
    if machine.state is State.OPEN:
        machine.send_suback(packet.packet_id, reasons)
    ingress.owe_retained(session)


def _refusal(
    ingress: MqttIngress,
    session: Session,
    connection: MqttConnection,
    decision: Decision,
    wanted: Subscription,
) -> ReasonCode | None:
    if wanted.filter.count("/") >= ingress.limits.topic_levels_max or not is_filter(wanted.filter):
        return ReasonCode.TOPIC_FILTER_INVALID
    if not decision.allowed:
        ingress.denied(connection.sender, "subscribe", wanted.filter, decision.rule)
        return ReasonCode.NOT_AUTHORIZED
    if session.kept and ingress.namespace.failing:
        return ReasonCode.QUOTA_EXCEEDED  # it could not be recorded
    known = wanted.filter in session.subscriptions
    if not known and len(session.subscriptions) >= ingress.limits.subscriptions_max:
        return ReasonCode.QUOTA_EXCEEDED
    if not known and ingress.namespace.subscriptions_full(session.user):
        return ReasonCode.QUOTA_EXCEEDED
    return None


def drop_forbidden(
    ingress: MqttIngress, session: Session, rights: Rights, sender: Sender, *, patient: bool = False
) -> bool:
    """End the subscriptions that are not allowed; True: there were some. What is not known without asking
    somebody is kept if `patient`; otherwise this raises Undecided."""
    found = False
    for topic_filter, options in list(session.subscriptions.items()):
        try:
            decision = rights.mqtt_subscribe(topic_filter, options.qos)
        except Undecided:
            if patient:
                continue
            raise
        if not decision.allowed:
            found = True
            ingress.denied(sender, "subscribe", topic_filter, decision.rule)
            ingress.namespace.unsubscribe(session, topic_filter)
    return found


def unsubscribe(
    ingress: MqttIngress, session: Session, machine: ServerConnection, packet: Unsubscribe
) -> None:
    """Answer with an UNSUBACK."""
    reasons = [
        ReasonCode.SUCCESS
        if ingress.namespace.unsubscribe(session, topic_filter)
        else ReasonCode.NO_SUBSCRIPTION_EXISTED
        for topic_filter in packet.filters
    ]
    if machine.state is State.OPEN:
        machine.send_unsuback(packet.packet_id, reasons)
