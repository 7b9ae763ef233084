"""How a client leaves: what its DISCONNECT says, and what becomes of its will."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gateway.broker.mqtt.session import Session
from gateway.errors import RemoteProtocolError
from gateway.ingress.mqtt.admission import expiry_secs_max
from gateway.model.message import Sender
from gateway.protocols.mqtt.packets import Disconnect, Will
from gateway.protocols.mqtt.spec import Property, ReasonCode

if TYPE_CHECKING:
    from gateway.access.principal import Principal
    from gateway.ingress.mqtt.connection import MqttConnection
    from gateway.ingress.mqtt.ingress import MqttIngress


def disconnect(ingress: MqttIngress, connection: MqttConnection, packet: Disconnect) -> None:
    """A client says goodbye; in MQTT 5 it may want its will published, or its session kept for another time
    (5: 3.14.2). Raises RemoteProtocolError when the session was to end with the connection."""
    session = connection.session
    if packet.reason != ReasonCode.DISCONNECT_WITH_WILL:
        connection.will = None
    expiry = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL)
    if expiry is not None and session is not None:
        if expiry and not session.persistent:
            raise RemoteProtocolError(
                "a session that was to end with its connection cannot be prolonged",
                reason=ReasonCode.PROTOCOL_ERROR,
            )
        most = expiry_secs_max(ingress.limits, connection.current_rights())
        session.expiry_secs = float(min(expiry, most))
    connection.stream.end("DISCONNECT")


def leave_will(
    ingress: MqttIngress, session: Session, will: Will | None, sender: Sender, principal: Principal | None
) -> None:
    """Publish the will, if there is one, now, or when its delay is over or the session ends (5: 3.1.2.5)."""
    client_id = session.client_id
    if will is None:
        ingress.namespace.forget_will(client_id)
        return
    publish = partial(ingress.publish_will, will, sender, principal)
    delay = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
    if delay and session.persistent:
        ingress.namespace.delay_will(client_id, ingress.now() + delay, publish)
    else:
        publish()
        ingress.namespace.forget_will(client_id)
