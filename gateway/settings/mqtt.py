"""What is MQTT's own in a listener and in a link."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gateway.settings.endpoints import AnonymousListener, Link, WebListener, parse_url

MqttVersion = Annotated[
    Literal["auto", "5.0", "3.1.1", "3.1", "mqipdp"],
    BeforeValidator(
        lambda given: f"{float(given)}" if isinstance(given, int | float) else given,
        json_schema_input_type=Literal["auto", "5.0", "3.1.1", "3.1", "mqipdp"] | float,
    ),
]
ByteOrder = Literal["auto", "little", "big"]


class MqttListener(WebListener, AnonymousListener):
    """A listener for MQTT clients: what they may ask for, and are told."""

    qos_max: Literal[0, 1, 2] = 2
    """The highest QoS that clients may publish and subscribe with."""
    retain: bool = True
    """Whether clients may publish retained messages."""
    response_information: str | None = None
    """Where clients that ask for it are told to have responses sent (MQTT 5), `{client_id}` filled in: for
    instance `reply/{client_id}`."""
    server_reference: str | None = Field(None, min_length=1)
    """Where clients are told to go when this gateway stops (MQTT 5): `host:port`, several with blanks. Their
    wills are not published then."""
    server_moved: bool = False
    """They are told that it is for good (0x9D, server moved, instead of 0x9C, use another server)."""
    sys_interval_secs: float = Field(10.0, ge=0)
    """How often the `$SYS` topics are refreshed, while somebody subscribes to them; 0: never."""

    byte_order: ByteOrder = "auto"
    """Of keep-alive and packet identifiers of older MQTT clients: `auto` takes level 2 for little-endian and
    level 3 (3.1) for big-endian, unless its packet identifiers show that it is not; see [MQTT
    clients](../guides/mqtt-clients.md#byte-order-of-old-clients)."""

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        if self.server_moved and self.server_reference is None:
            raise ValueError("server_moved needs a server_reference")
        return self

    @field_validator("response_information")
    @classmethod
    def _a_topic(cls, given: str | None) -> str | None:
        if given is not None and (not given or set(given) & set("+#\0")):
            raise ValueError("a topic without wildcards, as reply/{client_id}")
        return given


class MqttLink(Link):
    """A link to an MQTT broker."""

    version: MqttVersion = "auto"
    """`auto` tries 5.0 and falls back to 3.1.1, but not for a broker that has spoken 5.0. `mqipdp` is the
    protocol before 3.1 (level 2), which has no user name and no password."""
    byte_order: ByteOrder = "auto"
    """Of keep-alive and packet identifiers with a broker of `3.1` or `mqipdp`: `auto` is little-endian for
    `mqipdp` and big-endian for `3.1`."""
    authentication: Literal["password", "scram-sha-256"] = "password"
    """MQTT 5: say the password, or prove it in AUTH packets; the broker proves then that it knows it, too."""
    qos: Literal[0, 1, 2] = 1
    """Of the subscriptions that routes need."""
    bridge: bool = False
    """MQTT 3.x: say in CONNECT that we are a bridge, which Mosquitto and RSMB understand: what we publish
    does not come back, and the retain flag of live messages is kept. MQTT 5 has options for both."""
    share: str | None = Field(None, min_length=1, pattern=r"^[^/+#\x00]+$")
    """Subscriptions are `$share/GROUP/FILTER`; all members of the group divide the messages among them."""
    session_expiry_secs: int = Field(3_600, ge=0, le=0xFFFF_FFFF)
    """How long the broker keeps our session while we are away; 0: a clean one at each connection."""

    @model_validator(mode="after")
    def _says_what_its_version_has(self) -> Self:
        if self.authentication != "password":
            if self.version not in ("auto", "5.0"):
                raise ValueError(f"authentication {self.authentication} is for MQTT 5.0 only")
            if not all(self.username or parse_url(url).username for url in self.all_urls):
                raise ValueError(f"authentication {self.authentication} needs a username")
        old = self.version in ("3.1", "mqipdp")
        if self.share is not None and old:
            raise ValueError("share is for MQTT from version 3.1.1 on")
        if self.byte_order != "auto" and not old:
            raise ValueError("byte_order is for brokers of MQTT 3.1 and before: set version to 3.1 or mqipdp")
        if self.version == "mqipdp":
            self._check_oldest()
        return self

    def _check_oldest(self) -> None:
        """Raise ValueError for options that MQTT before 3.1 cannot state."""
        named = [self.username, self.password, self.password_file]
        if any(one is not None for one in named) or any(parse_url(url).username for url in self.all_urls):
            raise ValueError("version mqipdp has no user name and no password")
        if self.bridge:
            raise ValueError("bridge is for MQTT 3.1 and 3.1.1")

    @property
    def proves_password(self) -> bool:
        """In AUTH packets."""
        return self.authentication != "password"

    def divides(self, queue: str | None) -> bool:
        """The broker does, of shared subscriptions; or one replica alone has them."""
        return self.share is not None or self.elected
