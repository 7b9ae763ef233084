"""Listeners and links, put together from the configuration: one place for each protocol."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from gateway.broker.switch import Namespace
from gateway.egress.amqp091.conversation import AmqpConversation
from gateway.egress.amqpfast.conversation import FastConversation
from gateway.egress.link import Link
from gateway.egress.mqtt.conversation import MqttConversation
from gateway.ingress.amqp091.ingress import AmqpIngress
from gateway.ingress.amqpfast.ingress import FastIngress
from gateway.ingress.front.layers import front_of
from gateway.ingress.listener import Listener
from gateway.ingress.mqtt.ingress import MqttIngress
from gateway.protocols.amqpfast.commands import FRAME_NAMES
from gateway.protocols.mqtt.spec import PacketType
from gateway.telemetry.stats import ListenerStats
from gateway.transport.tasks import Tasks

if TYPE_CHECKING:
    from gateway.app.gateway import Gateway

MQTT_FRAMES: Final = tuple(
    PacketType(number).name.lower() if number in PacketType.__members__.values() else ""
    for number in range(16)
)
CONVERSATIONS: Final[dict[str, type[MqttConversation] | type[AmqpConversation] | type[FastConversation]]] = {
    "mqtt": MqttConversation,
    "amqp091": AmqpConversation,
    "amqpfast": FastConversation,
}
FRAMES: Final = {"mqtt": MQTT_FRAMES, "amqp091": (), "amqpfast": FRAME_NAMES}


def add_listener(gateway: Gateway, name: str, tasks: Tasks) -> None:
    """Make the listener `name`; it is not open yet."""
    given = gateway.settings.listeners[name]
    limits = gateway.settings.limits_of(name)
    stats = gateway.metrics.listener(name, given.protocol, FRAMES[given.protocol])
    ingress: MqttIngress | AmqpIngress | FastIngress
    namespace: Namespace
    if given.protocol == "mqtt":
        namespace = gateway.mqtt
        ingress = MqttIngress(
            name,
            namespace=gateway.mqtt,
            switch=gateway.switch,
            access=gateway.access,
            limits=limits,
            stats=stats,
            dead_letters=gateway.dead_letters,
            tasks=tasks,
            anonymous=given.anonymous,
            byte_order=given.byte_order,
            options=given,
        )
    elif given.protocol == "amqp091":
        hosts = [gateway.hosts[host] for host in given.virtual_hosts]
        namespace = hosts[0]
        ingress = AmqpIngress(
            name,
            hosts=hosts,
            switch=gateway.switch,
            access=gateway.access,
            limits=limits,
            stats=stats,
            dead_letters=gateway.dead_letters,
            tasks=tasks,
            store=gateway.store,
            certificates=given.tls is not None and given.tls.client_ca_file is not None,
            announced=given.announce,
        )
    else:
        ingress = _fast_ingress(gateway, name, stats, tasks)
        namespace = ingress.hosts[0]
    listener = Listener(
        name,
        given.host,
        given.port,
        ingress,
        gateway.writes,
        stats,
        connections_max=limits.connections_max,
        front=front_of(name, given),
        users=gateway.settings.users,
    )
    ingress.listener = listener
    gateway.switch.namespaces[name] = namespace
    gateway.listeners[name] = listener
    gateway.readiness.require(f"listener {name}")


def _fast_ingress(gateway: Gateway, name: str, stats: ListenerStats, tasks: Tasks) -> FastIngress:
    given = gateway.settings.listeners[name]
    return FastIngress(
        name,
        hosts=[gateway.fast_hosts[host] for host in given.virtual_hosts],
        switch=gateway.switch,
        access=gateway.access,
        limits=gateway.settings.limits_of(name),
        stats=stats,
        dead_letters=gateway.dead_letters,
        tasks=tasks,
        options=given,
        anonymous=given.anonymous,
        spool=gateway.fast_hosts.spool,
        partials=gateway.fast_hosts.partials,
        store=gateway.store,
    )


def add_link(gateway: Gateway, name: str) -> None:
    """Make the link `name`; it is not connected yet."""
    given = gateway.settings.links[name]
    stats = gateway.metrics.link(name, given.protocol, FRAMES[given.protocol])
    conversation = CONVERSATIONS[given.protocol](
        name,
        given,
        gateway.switch,
        gateway.settings.limits,
        stats,
        client_id=gateway.settings.client_id_of(name),
    )
    link = Link(name, given, conversation, gateway.writes, stats)
    conversation.link = link
    link.when_up = partial(gateway.backstop.link_up, name)
    gateway.backstop.add_link(name, given, conversation, lambda: link.up)
    gateway.switch.namespaces[name] = conversation
    gateway.links[name] = link
    if given.required:
        gateway.readiness.require(f"link {name}")
