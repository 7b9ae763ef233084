"""Workers of the embedded broker: each is a broker of its own, so clients of different workers never meet.

That is right where nobody could tell: clients that only publish, and routes that take all of it to links.
What would need a common broker (subscriptions, retained messages, QoS 2 that a client goes on with at another
worker) is refused, with the key that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gateway.settings.access import HttpAuthorizer, Role
from gateway.settings.endpoints import Listener, SharedListener
from gateway.settings.identity import Backend, CertificatesBackend, UsersBackend
from gateway.settings.mqtt import MqttListener


def common_world(
    listeners: Mapping[str, Listener],
    roles: Mapping[str, Role],
    authentication: Iterable[Backend],
    authorizer: HttpAuthorizer | None,
) -> Iterator[str]:
    """What needs one broker for all workers, and how it would not."""
    for name, listener in listeners.items():
        if isinstance(listener, SharedListener):
            continue
        at = f"listeners.{name}"
        if not isinstance(listener, MqttListener):
            yield f"{at}: protocol {listener.protocol} has queues"
            continue
        if listener.retain:
            yield f"{at}.retain: say false"
        if listener.qos_max > 1:
            yield f"{at}.qos_max: say 1 or 0"
    if not roles:
        yield "roles: without any clients may subscribe"
    for name, role in roles.items():
        if role.mqtt.subscribe:
            yield f"roles.{name}.mqtt.subscribe: leave it out"
        if role.mqtt.as_virtual_host is not None:
            yield f"roles.{name}.mqtt.as_virtual_host: leave it out"
    if authorizer is not None:
        yield "authorizer: it could let clients subscribe"
    for number, backend in enumerate(authentication):
        if not isinstance(backend, UsersBackend | CertificatesBackend):
            yield f"authentication[{number}]: it could let clients subscribe"
