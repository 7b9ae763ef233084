"""What is MQTT's own in a listener."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from gateway.settings.limits import Section


class MqttOptions(Section):
    """The part of a listener that is about what MQTT clients may ask for, and are told."""

    qos_max: Literal[0, 1, 2] = 2
    """MQTT: the highest QoS that clients may publish and subscribe with."""
    retain: bool = True
    """MQTT: whether clients may publish retained messages."""
    response_information: str | None = None
    """Where clients that ask for it are told to have responses sent (MQTT 5), `{client_id}` filled in: for
    instance `reply/{client_id}`."""
    server_reference: str | None = Field(None, min_length=1)
    """Where clients are told to go when this gateway stops (MQTT 5): `host:port`, several with blanks. Their
    wills are not published then."""
    sys_interval_secs: float = Field(10.0, ge=0)
    """MQTT: how often the `$SYS` topics are refreshed, while somebody subscribes to them; 0: never."""

    @field_validator("response_information")
    @classmethod
    def _a_topic(cls, given: str | None) -> str | None:
        if given is not None and (not given or set(given) & set("+#\0")):
            raise ValueError("a topic without wildcards, as reply/{client_id}")
        return given
