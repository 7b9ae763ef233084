"""Check of configurations with several workers of the embedded broker.

Each worker has a broker of its own, so clients of different workers cannot exchange messages. The gateway
therefore accepts several workers only if clients just publish, and all messages leave by links. Options that
need a common broker are refused with their key: subscriptions, retained messages, and QoS 2, whose exchange
of packets a client could continue at another worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.settings.access import HttpAuthorizer, Role
from gateway.settings.endpoints import ListenerSettings, SharedListener
from gateway.settings.identity import Backend, CertificatesBackend, UsersBackend
from gateway.settings.mqtt import MqttListener


def single_broker_options(
    listeners: Mapping[str, ListenerSettings],
    roles: Mapping[str, Role],
    authentication: Iterable[Backend],
    authorizer: HttpAuthorizer | None,
) -> Iterator[str]:
    """Yield an error text for each option that several workers with embedded brokers cannot support.

    Such an option needs one broker for all clients. The text has the configuration key, and how to change it.
    """
    for name, listener in listeners.items():
        if isinstance(listener, SharedListener):
            continue
        at = f"listeners.{name}"
        if not isinstance(listener, MqttListener):
            yield f"{at}: protocol {listener.protocol} lets clients consume from queues; remove this listener"
            continue
        if listener.retain:
            yield f"{at}.retain: workers do not share retained messages; set false"
        if listener.qos_max > 1:
            yield f"{at}.qos_max: workers do not share QoS 2 state; set 1 or 0"
    if not roles:
        yield "roles: without roles, clients may subscribe; configure roles"
    for name, role in roles.items():
        if role.mqtt.subscribe:
            yield f"roles.{name}.mqtt.subscribe: permits clients to subscribe; remove it"
        if role.mqtt.as_virtual_host is not None:
            yield f"roles.{name}.mqtt.as_virtual_host: permits clients to subscribe; remove it"
    if authorizer is not None:
        yield "authorizer: may permit clients to subscribe; remove it"
    for number, backend in enumerate(authentication):
        if not isinstance(backend, UsersBackend | CertificatesBackend):
            yield f"authentication[{number}]: may permit clients to subscribe; remove it"
