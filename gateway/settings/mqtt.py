"""MQTT options of listeners and links.

`MqttListener` and `MqttLink` extend the common `ListenerSettings` and `LinkSettings` of
`gateway/settings/endpoints.py` with options that only MQTT has. The module holds and checks the values only;
`gateway/ingress` and `gateway/egress` use them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gateway.settings.endpoints import AnonymousListener, LinkSettings, WebListener, parse_url

MqttVersion = Annotated[
    Literal["auto", "5.0", "3.1.1", "3.1", "mqipdp"],
    BeforeValidator(
        lambda value: f"{float(value)}" if isinstance(value, int | float) else value,
        json_schema_input_type=Literal["auto", "5.0", "3.1.1", "3.1", "mqipdp"] | float,
    ),
]
ByteOrder = Literal["auto", "little", "big"]


class MqttListener(WebListener, AnonymousListener):
    """Listener for MQTT clients, with the options for this protocol."""

    qos_max: Literal[0, 1, 2] = 2
    """Highest QoS that clients may publish and subscribe with."""
    retain: bool = True
    """True if clients may publish retained messages."""
    response_information: str | None = None
    """Response Information (MQTT 5) for clients that request it, for instance `reply/{client_id}`."""
    server_reference: str | None = Field(None, min_length=1)
    """Server Reference (MQTT 5) that clients receive when this gateway stops: `host:port`, several separated
    by spaces. Their wills are not published then."""
    server_moved: bool = False
    """True if the reason code with `server_reference` is 0x9D, server moved, instead of 0x9C, use another
    server."""
    sys_interval_secs: float = Field(10.0, ge=0)
    """Interval in seconds at which the `$SYS` topics are published while a client subscribes to them; 0
    disables them."""

    byte_order: ByteOrder = "auto"
    """Byte order of keep-alive and packet identifiers of older MQTT clients. `auto` uses little-endian for
    level 2 and big-endian for level 3 (3.1), unless the packet identifiers show otherwise; see [MQTT
    clients](../guides/mqtt-clients.md#byte-order-of-old-clients)."""

    @model_validator(mode="after")
    def _check_server_reference(self) -> Self:
        if self.server_moved and self.server_reference is None:
            raise ValueError("server_moved needs a server_reference")
        return self

    @field_validator("response_information")
    @classmethod
    def _a_topic(cls, topic: str | None) -> str | None:
        if topic is not None and (not topic or set(topic) & set("+#\0")):
            raise ValueError("must be a topic without wildcards, such as reply/{client_id}")
        return topic


class MqttLink(LinkSettings):
    """Link to an MQTT broker, with the options for this protocol."""

    version: MqttVersion = "auto"
    """Protocol version. `auto` tries 5.0 and falls back to 3.1.1, but not for a broker that has used 5.0
    before. `mqipdp` is the protocol before 3.1 (level 2), which has no user name and no password."""
    byte_order: ByteOrder = "auto"
    """Byte order of keep-alive and packet identifiers with a broker of version `3.1` or `mqipdp`. `auto` is
    little-endian for `mqipdp` and big-endian for `3.1`."""
    authentication: Literal["password", "scram-sha-256"] = "password"
    """Authentication method. `scram-sha-256` (MQTT 5) proves the password in AUTH packets instead of sending
    it, and the broker proves that it knows it, too."""
    qos: Literal[0, 1, 2] = 1
    """QoS of the subscriptions that routes need."""
    bridge: bool = False
    """True if the link identifies itself as a bridge in CONNECT (MQTT 3.x), which Mosquitto and RSMB support:
    messages that the link publishes do not return to it, and live messages keep their retain flag. MQTT 5 has
    subscription options for both."""
    share: str | None = Field(None, min_length=1, pattern=r"^[^/+#\x00]+$")
    """Group of shared subscriptions: the link subscribes to `$share/GROUP/FILTER`, and the members of the
    group divide the messages among them."""
    session_expiry_secs: int = Field(3_600, ge=0, le=0xFFFF_FFFF)
    """Time in seconds that the broker stores the session while the link is disconnected. 0: a clean session
    at each connection."""

    @model_validator(mode="after")
    def _check_version(self) -> Self:
        """Check that the link's MQTT version supports the options that are set. Raises ValueError."""
        if self.authentication != "password":
            if self.version not in ("auto", "5.0"):
                raise ValueError(f"authentication {self.authentication} is for MQTT 5.0 only")
            if not all(self.username or parse_url(url).username for url in self.all_urls):
                raise ValueError(f"authentication {self.authentication} needs a username")
        old = self.version in ("3.1", "mqipdp")
        if self.share is not None and old:
            raise ValueError("share needs MQTT 3.1.1 or later")
        if self.byte_order != "auto" and not old:
            raise ValueError("byte_order is for brokers of MQTT 3.1 and before: set version to 3.1 or mqipdp")
        if self.version == "mqipdp":
            self._check_oldest()
        return self

    def _check_oldest(self) -> None:
        """Check that version `mqipdp`, older than MQTT 3.1, supports the options. Raises ValueError."""
        credentials = [self.username, self.password, self.password_file]
        if any(one is not None for one in credentials) or any(
            parse_url(url).username for url in self.all_urls
        ):
            raise ValueError("version mqipdp has no user name and no password")
        if self.bridge:
            raise ValueError("bridge is for MQTT 3.1 and 3.1.1")

    @property
    def proves_password(self) -> bool:
        """True if the link authenticates by SCRAM in AUTH packets, and does not send the password."""
        return self.authentication != "password"

    def divides(self, queue: str | None) -> bool:
        """Return True if each message reaches only one of the replicas that consume over this link.

        This is true for an elected link, and for shared subscriptions, whose messages the broker divides
        among the subscribers. `queue` is ignored.
        """
        return self.share is not None or self.elected
