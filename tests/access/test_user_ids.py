"""The user id that AMQP consumers see is the authenticated user's name, or absent, whatever the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pika
import pytest
from pika.exceptions import ChannelClosedByBroker
from pydantic import SecretStr

from gateway.protocols.amqpfast.codec import decode_head_properties
from gateway.protocols.mqtt.properties import encode_list
from gateway.protocols.mqtt.spec import PacketType, Property
from gateway.settings import Settings, StoreSettings, User
from gateway.settings.amqp091 import AmqpLink
from tests.access.logins import pika_parameters
from tests.ingress.amqpfast.client import TOPIC, Fast, head
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import Running, running, settings_of
from tests.passwords import hashed

USERS: Final = {name: User(password_hash=SecretStr(hashed("right"))) for name in ("bob", "op")}
MAPPING: Final = """version: 1
routes:
  - {name: up, from: {endpoint: mqtt, topic: a}, to: {endpoint: amqp091, exchange: amq.topic, routing_key: a}}
  - name: fast
    from: {endpoint: amqpfast, service: topic, destination: a}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: a}
  - name: over
    from: {endpoint: mqtt, topic: b}
    to: {endpoint: amqpfast, service: topic, destination: a}
  - name: down
    from: {endpoint: amqp091, exchange: amq.direct, binding_key: a}
    to: {endpoint: mqtt, topic: c}
  - name: back
    from: {endpoint: mqtt, topic: d}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: a}
"""


def site(folder: Path) -> Settings:
    mapping = folder / "m.yaml"
    mapping.write_text(MAPPING)
    return settings_of(users=USERS, mappings=(str(mapping),), store=StoreSettings(path=folder / "store"))


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    with running(site(tmp_path)) as one:
        yield one


def amqp(gateway: Running) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika_parameters(gateway.amqp, "bob", "right"))


def bound(connection: pika.BlockingConnection) -> Any:
    """A channel, and the durable queue q that gets what crosses."""
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    channel.queue_bind("q", "amq.topic", "a")
    return channel


def taken(gateway: Running, channel: Any) -> pika.BasicProperties:
    """The properties of the next message in q."""
    gateway.until(lambda: len(gateway.gateway.hosts["/"].queues["q"]) > 0)
    found: pika.BasicProperties = channel.basic_get("q", auto_ack=True)[1]
    return found


def mqtt(gateway: Running) -> Mqtt:
    return connect(gateway, "m", user=("bob", b"right"))[0]


def claims(name: str) -> bytes:
    return encode_list({Property.USER_PROPERTY: (("amqp-user-id", name), ("k", "v"))}, PacketType.PUBLISH)


@pytest.mark.parametrize("claimed", ["op", "bob"])
@pytest.mark.parametrize("restarted", [False, True])
def test_mqtt(tmp_path: Path, claimed: str, restarted: bool) -> None:
    with running(site(tmp_path)) as gateway, closing(amqp(gateway)) as connection, mqtt(gateway) as client:
        channel = bound(connection)
        client.publish("a", qos=1, packet_id=1, properties=claims(claimed))
        assert client.acked(PacketType.PUBACK)[0] == 1
        if not restarted:
            found = taken(gateway, channel)
    if restarted:
        with running(site(tmp_path)) as gateway, closing(amqp(gateway)) as connection:
            found = taken(gateway, connection.channel())
    assert found.user_id is None
    assert found.headers == {"amqp-user-id": claimed, "k": "v", "x-gateway-hops": 1}


def test_amqpfast(gateway: Running) -> None:
    with closing(amqp(gateway)) as connection, Fast(gateway, user="bob", password="right").open() as client:
        channel = bound(connection)
        said = head(persistent=True, headers={"USER_ID": "op", "k": "v"})
        client.put(client.handle("a", TOPIC), b"x", head=said, confirm=True)
        found = taken(gateway, channel)
        assert (found.user_id, found.headers) == (None, {"USER_ID": "op", "k": "v", "x-gateway-hops": 1})


def test_mqtt_to_amqpfast(gateway: Running) -> None:
    with mqtt(gateway) as client, Fast(gateway, user="bob", password="right").open() as reader:
        reader.consume(reader.handle("a", TOPIC))
        client.publish("b", qos=1, packet_id=1, properties=claims("op"))
        names = [name for name, _ in decode_head_properties(reader.rows(1)[0][3]).headers]
        assert "USER_ID" not in names
        assert "k" in names


def test_amqp_itself(gateway: Running) -> None:
    """RabbitMQ's rule: its own name, or 406."""
    with closing(amqp(gateway)) as connection:
        channel = bound(connection)
        channel.basic_publish("amq.topic", "a", b"x", pika.BasicProperties(user_id="bob"))
        assert taken(gateway, channel).user_id == "bob"
        channel.basic_publish("amq.topic", "a", b"x", pika.BasicProperties(user_id="op"))
        with pytest.raises(ChannelClosedByBroker) as refused:
            channel.basic_get("q")
        assert refused.value.reply_code == 406


@pytest.mark.parametrize("given", [{"user_id": "bob"}, {"headers": {"x-user-id": "op"}}])
def test_amqp_by_way_of_mqtt(gateway: Running, given: dict[str, Any]) -> None:
    """MQTT hears what was proved; what comes back from there is not."""
    with closing(amqp(gateway)) as connection, mqtt(gateway) as reader:
        channel = bound(connection)
        assert reader.subscribe("c") == 0
        channel.basic_publish("amq.direct", "a", b"x", pika.BasicProperties(**given))
        raw = reader.row()[3]
        proved = b"amqp-user-id" in raw
        assert proved == ("user_id" in given)
        reader.publish("d", qos=1, packet_id=1, properties=raw)
        assert reader.acked(PacketType.PUBACK)[0] == 1
        assert taken(gateway, channel).user_id is None


@pytest.mark.parametrize("trusted", [False, True])
def test_what_a_link_brings(gateway: Running, tmp_path: Path, trusted: bool) -> None:
    """Users of another broker are none of ours, unless the operator says so."""
    mapping = tmp_path / "link.yaml"
    mapping.write_text(
        "version: 1\nroutes:\n"
        "  - name: in\n    from: {endpoint: erp, queue: q}\n"
        "    to: {endpoint: amqp091, exchange: amq.topic, routing_key: a}\n"
    )
    link = AmqpLink(url=f"amqp://bob:right@127.0.0.1:{gateway.amqp}/", trust_user_id=trusted)
    other = settings_of(users=USERS, mappings=(str(mapping),), links={"erp": link})
    with closing(amqp(gateway)) as far, running(other) as here, closing(amqp(here)) as connection:
        source, channel = bound(far), bound(connection)
        source.basic_publish("amq.topic", "a", b"x", pika.BasicProperties(user_id="bob", app_id="app"))
        found = taken(here, channel)
        assert (found.user_id, found.app_id) == ("bob" if trusted else None, "app")
        assert found.headers.get("x-user-id") == (None if trusted else "bob")


def test_nothing_else_changes(gateway: Running) -> None:
    with mqtt(gateway) as reader, mqtt_other(gateway) as client:
        assert reader.subscribe("e", 1) == 1
        client.publish("e", qos=1, packet_id=1, properties=claims("op"))
        assert b"amqp-user-id" in reader.row()[3], (
            "MQTT passes user properties on as they are [MQTT-3.3.2-17]"
        )


def mqtt_other(gateway: Running) -> Mqtt:
    return connect(gateway, "o", user=("bob", b"right"))[0]
