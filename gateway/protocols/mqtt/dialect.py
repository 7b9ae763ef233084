"""MQTT dialect for the other packages: topics, topic filters, ports, and readers of property lists.

It holds no state and no codec: `MqttDialect` maps the general interface of `Dialect` to constants and to
functions of this package. Section numbers are those of MQTT 5.0.
"""

from __future__ import annotations

from typing import Final

from gateway.model.address import Address
from gateway.model.dialect import Dialect, FrameCount, NameRefused, Scheme, Word, quote_short
from gateway.model.message import Message
from gateway.model.properties import PropertySet
from gateway.protocols.mqtt.server import connack_unavailable
from gateway.protocols.mqtt.spec import PacketType
from gateway.protocols.mqtt.translate import losses, message_id_in, publish_essentials, unread_list

TOPIC_BYTES_MAX: Final = 65_535  # 1.5.4: the length has two bytes


class MqttDialect(Dialect):
    """Dialect of MQTT 5.0, 3.1.1 and 3.1."""

    name = "mqtt"
    title = "MQTT"
    name_word = "topic"
    pattern_word = "topic"
    words = {  # noqa: RUF012 - a ClassVar of the base
        "topic": Word("MQTT topic filter with captures.", "Template of an MQTT topic.")
    }
    assurance_max = 2
    message_id_field = "the user property amqp-message-id, which needs MQTT 5"
    target_options = frozenset(("qos", "retain"))
    name_bytes_max = TOPIC_BYTES_MAX
    wire_form = 1
    wire_is_name = True
    separator = "/"
    one = "+"
    rest_is_last = True  # 4.7.1.2
    hidden = "$"  # 4.7.2
    forbidden = "/+#\0"
    guarded = ""
    wild = "/+#\0"
    return_prefix = "$gateway/reply/"  # no wildcard of a subscription or route matches it (4.7.2)
    listener = "gateway.ingress.mqtt.connection:MqttListenerSource"
    on_engine = True
    link = "gateway.egress.mqtt.session:MqttLinkSession"
    listener_settings = "gateway.settings.mqtt:MqttListener"
    link_settings = "gateway.settings.mqtt:MqttLink"
    client = "gateway.clients.mqtt:MqttClient"
    trials = "gateway.cli.mqtt.trials:trials"
    schemes = (
        Scheme("mqtt", "plain", 1883),
        Scheme("mqtts", "tls", 8883),
        Scheme("ws", "websocket", 8083),
        Scheme("wss", "websocket+tls", 8084),
    )
    meeting = "gateway"
    subprotocols = ("mqtt", "mqttv3.1")  # MQTT-6.0.0-3
    first_bytes = (b"\x10",)  # CONNECT
    frame_names = tuple(
        PacketType(number).name.lower() if number in PacketType.__members__.values() else ""
        for number in range(16)
    )
    frame_count = FrameCount(1, None, (0, 1, 3))

    def address(self, scope: str, name: str) -> Address:
        """Return the address of a topic name (1.5.4, 4.7).

        Raises NameRefused if the name is empty, contains a wildcard or NUL, or is longer than 65 535 bytes.
        """
        if not name or any(character in name for character in "+#\0"):
            raise NameRefused(
                f"{quote_short(name)} is not a topic name: it is empty or contains a wildcard or NUL"
            )
        made = topic_address(name)
        if len(made.wire) > TOPIC_BYTES_MAX:
            raise NameRefused(f"a topic of {len(made.wire)} bytes; at most {TOPIC_BYTES_MAX} are allowed")
        return made

    def read_address(self, wire: bytes) -> Address:
        """Return the address of a topic that is encoded as UTF-8."""
        return topic_address(wire.decode(), wire)

    def property_set(self, data: bytes) -> PropertySet:
        """Return a property set for an encoded PUBLISH property list.

        Raises RemoteProtocolError if the list is malformed.
        """
        return publish_essentials(data)

    def unread_set(self, data: bytes) -> PropertySet:
        """Return a property set for an encoded PUBLISH property list that was read from disk.

        The set is not cached.
        """
        return unread_list(data)

    def message_id(self, data: bytes) -> str | None:
        """Return the message id in an encoded PUBLISH property list, or None if there is none."""
        return message_id_in(data)

    def refusal(self, data: bytes, text: str) -> bytes:
        """Return an encoded CONNACK "server unavailable" if `data` has a complete CONNECT, otherwise b"".

        In MQTT 5 `text` is its reason string.
        """
        return connack_unavailable(data, text)

    def losses(self, message: Message) -> tuple[str, ...]:
        """Return the names of the parts of `message` that MQTT cannot express."""
        return losses(message)

    def impossible_reason(self, first: str) -> str:
        """Return the reason why no topic can begin with the level `first`, or "" if a topic can.

        Only the level `$share` is impossible.
        """
        if first != "$share":
            return ""
        return "no topic begins with $share; the group of a link is links.NAME.share"

    def levels(self, name: str) -> tuple[str, ...]:
        """Return the levels of a topic name. The empty name has one level, ""."""
        return tuple(name.split("/"))


def topic_address(topic: str, wire: bytes | None = None) -> Address:
    """Return the address of a topic name that has been validated.

    `wire` is the topic in UTF-8 without its length, or None to encode it here.
    """
    return Address("mqtt", "", topic, topic.encode() if wire is None else wire)


MQTT: Final = MqttDialect()
