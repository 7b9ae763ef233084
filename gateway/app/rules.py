"""Roles and rules while the gateway runs: read again when the configuration changes, and put into force.

Of a changed configuration only what clients may do is taken: `roles`, `default_roles`, and the roles of
users. A faulty one leaves the old rules in force. From the moment that others are in force nothing new is
allowed by the old ones; what clients hold already (subscriptions, consumers) is gone through in slices, so
that with ten thousand clients nobody else waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.access.authorization import Authorization, Roles
from gateway.access.files import Stamp, Watched, stamp_if_there
from gateway.access.principal import Principal
from gateway.access.questions import Undecided
from gateway.app.access import Identities, roles_of
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.containment import contained
from gateway.errors import ConfigurationError
from gateway.ingress.guest import Guest
from gateway.ingress.listener import Listener
from gateway.settings import Settings, User, load_settings
from gateway.telemetry.audit import audit
from gateway.telemetry.metrics import Metrics
from gateway.transport.computing import computed
from gateway.transport.stream import WriteSet

log = structlog.get_logger()

LOOK_SECS: Final = 0.25  # between two looks at the files: a right that is gone lasts no second
QUESTIONS_MAX: Final = 10_000  # about one client; answers that are forgotten at once would be asked for ever
SLICE: Final = 200  # clients that are gone through in one go: some milliseconds

Fingerprint = tuple[Stamp | None, ...]


class Ruled(Protocol):
    """A gateway, as far as rules are put into force in it."""

    settings: Settings
    metrics: Metrics
    identities: Identities
    authorization: Authorization
    dispatcher: Dispatcher
    mqtt: MqttNamespace
    hosts: AmqpHosts
    fast_hosts: FastHosts
    listeners: dict[str, Listener]
    writes: WriteSet


class Rules:
    """What is in force at a gateway, and the files that say it."""

    def __init__(self, gateway: Ruled) -> None:
        self._gateway = gateway
        self._file = gateway.settings.file
        declared = gateway.settings.declare
        self._files = (*filter(None, [self._file]), *(declared.definitions if declared.users else ()))
        self._watched = Watched(self._fingerprint)
        self._tell()

    def _tell(self) -> None:
        """Say loudly that there are none, once somebody has begun to say who may connect."""
        if self._gateway.settings.users and not self._gateway.authorization.in_force:
            log.warning("users are configured and no role: whoever may connect may do everything")

    async def watch(self) -> None:
        """Take the rules again whenever their file is not what was read."""
        again = clock.now()
        while True:
            await trio.sleep(LOOK_SECS)
            if self._watched.changed():
                await self.reload()
            authorizer = self._gateway.settings.authorizer
            if authorizer is not None and clock.now() >= again:
                again = clock.now() + authorizer.cache_secs
                self._gateway.dispatcher.changed()  # where decisions are kept is asked anew

    async def reload(self) -> bool:
        """Read the rules again; bad ones leave the old ones in force. False: they do."""
        reloads = self._gateway.metrics.rule_reloads
        try:
            settings = self._gateway.settings
            if self._file is not None:
                settings = await computed(partial(load_settings, self._file, os.environ))
            roles = roles_of(settings, self._users(settings))
        except ConfigurationError as error:
            reloads["refused"] += 1
            log.error("rules not reloaded, the old ones stay in force", error=str(error))
            return False
        except Exception as error:
            reloads["refused"] += 1
            contained("reload", error)
            return False
        reloads["taken"] += 1
        await self.use(roles)
        return True

    def _users(self, settings: Settings) -> dict[str, User]:
        """Those of the configuration as it is now, and of the users' file."""
        mine = self._gateway.settings.users
        others = {name: user for name, user in self._gateway.identities.users.items() if name not in mine}
        return {**others, **settings.users}

    async def use(self, roles: Roles) -> None:
        """Put these rules into force."""
        gateway = self._gateway
        if not gateway.authorization.use(roles):
            return
        gateway.dispatcher.changed()  # what was decided by address is decided anew
        log.info("rules reloaded", roles=len(roles.roles))
        audit("rules_changed", roles=sorted(roles.roles))
        for at, look in enumerate(self._held()):
            await _look(look)
            if at % SLICE == SLICE - 1:
                gateway.writes.flush()
                await trio.lowlevel.checkpoint()
        gateway.writes.flush()

    def _held(self) -> Iterator[Callable[[], None]]:
        """Whoever may hold something by a right that is gone."""
        for listener in self._gateway.listeners.values():
            for connection in list(listener.connections):
                yield partial(_look_at, connection)
        for client_id in list(self._gateway.mqtt.sessions):
            yield partial(self._look_at_away, client_id)
        gateway = self._gateway
        for holder in (
            *gateway.mqtt.sessions.values(),
            *gateway.hosts.queues(),
            *gateway.fast_hosts.queues(),
        ):
            yield holder.review_hold

    def _look_at_away(self, client_id: str) -> None:
        """A session whose client is away: by the configuration's roles of its user. Of one whose roles come
        from elsewhere it is known when it returns."""
        gateway = self._gateway
        session = gateway.mqtt.sessions.get(client_id)
        if session is None or session.outlet is not None:
            return
        if session.user and session.user not in gateway.authorization.roles.users:
            return
        rights = gateway.authorization.rights_of(Principal(session.user), client_id)
        for topic_filter, options in list(session.subscriptions.items()):
            if not rights.mqtt_subscribe(topic_filter, options.qos).allowed:
                gateway.mqtt.unsubscribe(session, topic_filter)

    def _fingerprint(self) -> Fingerprint:
        return (
            *map(stamp_if_there, self._files),
            (self._gateway.identities.access.users.times_replaced, 0, 0),
        )


def _look_at(connection: Guest) -> None:
    try:
        if not connection.stream.closed:
            connection.rules_changed()
    except Undecided:
        raise
    except Exception as error:  # of one client
        connection.stream.fail(error)


async def _look(look: Callable[[], None]) -> None:
    """What nobody knows without asking is asked for, and looked at again; what has ended until then stays
    ended. A fault costs this look alone: behind it wait all other clients, and the next change of rules."""
    try:
        for _ in range(QUESTIONS_MAX):
            try:
                look()
            except Undecided as question:
                await question.ask()
            else:
                return
    except Exception as error:
        contained("reload", error)
