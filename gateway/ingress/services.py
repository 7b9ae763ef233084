"""Parts of the gateway that listeners of all protocols share.

The composition root creates one `Services` object and passes it to each listener's protocol side, which uses
its settings, broker, access control and store. The object has no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.access.authentication import Access
from gateway.access.authorization import Authorization
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.bodies import SpooledBodies
from gateway.broker.dead_letters import DeadLetters
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.model.shares import UserShares
from gateway.settings import Settings, User
from gateway.store.store import Store
from gateway.transport.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Services:
    """Objects of a gateway that its listeners share, and the settings.

    `store` is None if nothing survives a restart. `opened` limits the memory for channels and handles that
    connections open, in total and for each user.
    """

    settings: Settings
    dispatcher: Dispatcher
    access: Access
    users: Mapping[str, User]
    authorization: Authorization
    dead_letters: DeadLetters
    tasks: Tasks
    store: Store | None
    mqtt: MqttNamespace
    hosts: Mapping[str, VirtualHost]
    fast_hosts: FastHosts
    bodies: SpooledBodies
    opened: UserShares
