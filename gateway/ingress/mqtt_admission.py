"""What a CONNECT asks for, and what it is given: refusals, session expiry, properties of the CONNACK."""

from __future__ import annotations

from typing import Any, Final

from gateway.protocols.mqtt.packets import Connect
from gateway.protocols.mqtt.spec import Property, ReasonCode, Version
from gateway.settings import Limits

NO_EXPIRY: Final = 0xFFFF_FFFF  # MQTT 5 §3.1.2.11.2: the session does not expire
KEEP_ALIVE_MOST: Final = 65_535


def identifier_refused(packet: Connect) -> bool:
    """Is the identifier missing? It may be absent in 5, and in 3.1.1 for a session that ends (§3.1.3.1)."""
    if packet.client_id or packet.version >= Version.V5:
        return False
    return packet.version < Version.V311 or not packet.clean_start


def expiry_secs(packet: Connect, limits: Limits) -> float:
    """How long the session outlives its connection: 0, or at most `limits.session_expiry_secs_max`."""
    if packet.version < Version.V5:
        wanted = 0 if packet.clean_start else NO_EXPIRY
    else:
        wanted = packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0)
    return float(min(wanted, limits.session_expiry_secs_max))


def connack_properties(packet: Connect, assigned: str, limits: Limits) -> dict[Property, Any]:
    """What the CONNACK of MQTT 5 says besides the limits that the machine announces itself (§3.2.2.3)."""
    if packet.version < Version.V5:
        return {}
    properties: dict[Property, Any] = {Property.SHARED_SUBSCRIPTION_AVAILABLE: 0}
    if not packet.client_id:
        properties[Property.ASSIGNED_CLIENT_IDENTIFIER] = assigned
    most = limits.keep_alive_secs_max
    if most < KEEP_ALIVE_MOST and not 0 < packet.keep_alive <= most:
        properties[Property.SERVER_KEEP_ALIVE] = most
    if packet.properties.get(Property.SESSION_EXPIRY_INTERVAL, 0) > limits.session_expiry_secs_max:
        properties[Property.SESSION_EXPIRY_INTERVAL] = limits.session_expiry_secs_max
    return properties


def reason_name(reason: int) -> str:
    """A reason code as a metric's label."""
    known = reason in ReasonCode.__members__.values()
    return ReasonCode(reason).name.lower() if known else "other"
