"""What becomes of a will when its connection is gone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gateway.broker.mqtt.session import Session
from gateway.model.message import Sender
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.spec import Property

if TYPE_CHECKING:
    from gateway.ingress.mqtt.ingress import MqttIngress


def leave_will(ingress: MqttIngress, session: Session, will: Will | None, sender: Sender) -> None:
    """Publish the will, if there is one, now, or when its delay is over or the session ends (5: 3.1.2.5)."""
    client_id = session.client_id
    if will is None:
        ingress.namespace.forget_will(client_id)
        return
    publish = partial(ingress.publish_will, will, sender)
    delay = will.properties.get(Property.WILL_DELAY_INTERVAL, 0)
    if delay and session.persistent:
        ingress.namespace.delay_will(client_id, ingress.now() + delay, publish)
    else:
        publish()
        ingress.namespace.forget_will(client_id)
