"""Reload of users, secrets and roles while the gateway runs.

Files are watched: the configuration (`users`, `roles`, `default_roles`), the users file, the files of
secrets, and RabbitMQ exports. Other changed sections are reported, since they need a restart. All changes
take effect together or not at all: an invalid, empty or shortened file leaves the old users and roles in
force, and the last role or user cannot be removed. New requests are checked by the new rules at once, and
clients of removed users are disconnected. Existing subscriptions and consumers are checked in slices, so that
other clients do not wait even with ten thousand connections.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import structlog
import trio

from gateway import clock
from gateway.access.authorization import Authorization, Roles
from gateway.access.principal import Principal
from gateway.app.access import DefinedUsers, Identities, roles_of
from gateway.app.clients import revoke
from gateway.app.state import SharedState
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.dispatcher import Dispatcher
from gateway.broker.mqtt.namespace import MqttNamespace
from gateway.broker.mqtt.session import SubscriptionOptions
from gateway.containment import contained
from gateway.documents import refuse_lost_end
from gateway.engine.absent_sessions import AbsentReview
from gateway.engine.session import EngineSession
from gateway.errors import ConfigurationError
from gateway.ingress.client import IngressClient
from gateway.ingress.listener import Listener
from gateway.model.pending import RESULTS_MAX, Pending, completed
from gateway.reloads import ChangeDetector, Stamp, stamp_if_there
from gateway.settings import Settings, load_settings
from gateway.telemetry.audit import audit
from gateway.telemetry.metrics import Metrics
from gateway.transport.computation import computed
from gateway.transport.stream import WriteSet

log = structlog.get_logger()

CHECK_SECS: Final = 0.25  # Interval between two checks of the files: a revoked right ends within a second.
SLICE: Final = 200  # Clients that are checked in one step, which takes some milliseconds.

RELOADED: Final = ("roles", "default_roles", "users")  # Sections of the configuration that are reloaded.

Fingerprint = dict[Path, Stamp | None]


class RuledGateway(Protocol):
    """Gateway, with the attributes that the reload of users and roles uses."""

    settings: Settings
    metrics: Metrics
    identities: Identities
    authorization: Authorization
    dispatcher: Dispatcher
    mqtt: MqttNamespace
    engine: EngineSession | None
    state: SharedState | None
    hosts: AmqpHosts
    fast_hosts: FastHosts
    listeners: dict[str, Listener]
    writes: WriteSet


class Rules:
    """Reload of users and roles whenever their files change."""

    def __init__(self, gateway: RuledGateway) -> None:
        self._gateway = gateway
        self._started = self._settings = gateway.settings
        self._reloading = trio.Lock()
        self._reported: tuple[str, ...] = ()  # Sections that differ from those at the start.
        self._watched = ChangeDetector(self._fingerprint)
        self.absent: AbsentReview | None = None  # sessions of absent clients of a cluster
        if gateway.engine is not None and gateway.state is not None:
            self.absent = AbsentReview(gateway.state.store, gateway.engine, self._forbidden)
            gateway.engine.sessions.on_keys_to_unbind = self.absent.unbind_later
        self._warn_without_roles()

    def _warn_without_roles(self) -> None:
        """Log a warning if there are users but no roles, because every client may then do everything."""
        if self._gateway.settings.users and not self._gateway.authorization.is_configured:
            log.warning("users configured without roles, everything permitted")

    async def watch(self) -> None:
        """Reload users, roles and certificates whenever a file has changed, until cancelled.

        Check the sessions of disconnected clients first, because their rights may have changed while the
        process did not run. With an authorizer these sessions are checked when their clients reconnect,
        because the authorizer may not be reachable yet.
        """
        if self._gateway.authorization.is_configured and self._started.authorizer is None:
            await self._recheck_permissions()
        again = clock.now()
        while True:
            await trio.sleep(CHECK_SECS)
            if self._watched.has_changed():
                await self.reload()
            self._check_certificates()
            authorizer = self._started.authorizer
            if authorizer is not None and clock.now() >= again:
                again = clock.now() + authorizer.cache_secs
                # Drops cached routing, so that the authorizer is queried again.
                self._gateway.dispatcher.invalidate()

    def _check_certificates(self) -> None:
        """Reload changed certificates of listeners, and log invalid ones before a client connects."""
        for listener in self._gateway.listeners.values():
            if listener.front.tls is not None:
                listener.front.tls()

    async def reload(self) -> bool:
        """Read users and roles again, and put them in force.

        Return False if a file is unusable; the previous users and roles then stay in force.
        """
        async with self._reloading:
            self._watched.accept()
            return await self._reload()

    async def _reload(self) -> bool:
        """Do what `reload` does; the caller holds the lock."""
        reloads, identities = self._gateway.metrics.rule_reloads, self._gateway.identities
        try:
            settings, found, roles = await computed(self._read)
            self._refuse_none(found, roles)
        except ConfigurationError as error:
            reloads["refused"] += 1
            log.error("users and roles not reloaded, previous ones in force", error=str(error))
            return False
        except Exception as error:
            reloads["refused"] += 1
            contained("reload", error)
            return False
        reloads["taken"] += 1
        self._settings = settings
        self._report_restart(settings)
        replaced, changed = identities.use(found), self._replace(roles)  # Both, before anything is awaited.
        if replaced is not None:
            log.info("users reloaded", users=replaced.total, removed=len(replaced.removed))
            path = self._started.users_file() or self._started.file
            audit("users_changed", path=str(path or ""), users=replaced.total)
            revoke(self._gateway.listeners, replaced.removed)
            self._gateway.writes.flush()
        if changed:
            await self._recheck_permissions()
        return True

    def _read(self) -> tuple[Settings, DefinedUsers, Roles]:
        """Read the configuration again. Return it with the users and roles that it defines now.

        Raises ConfigurationError if a file is unusable, or if the configuration file is cut off or has lost a
        whole section since the last reload.
        """
        before = self._settings
        settings = before if before.file is None else load_settings(before.file, os.environ)
        if before.file is not None:
            refuse_lost_end(before.text, settings.text, str(before.file))
            if lost := [name for name in before.sections if name not in settings.sections]:
                raise ConfigurationError(
                    f"{lost[0]}: the section was removed; if that is intended, restart the gateway",
                    file=str(before.file),
                )
        values = {name: getattr(settings, name) for name in RELOADED}
        now = self._started.model_copy(update=values)
        found = self._gateway.identities.candidate(now)
        return settings, found, roles_of(now, found.users)

    def _refuse_none(self, found: DefinedUsers, roles: Roles) -> None:
        """Raise ConfigurationError if all roles, or all users, have been removed since the last reload.

        Without roles every client could do everything; without users it could connect under any name.
        """
        for word, before, now in (
            ("roles", self._gateway.authorization.roles.roles, roles.roles),
            ("users", self._gateway.identities.access.users.names, found.hashes),
        ):
            if before and not now:
                raise ConfigurationError(
                    f"{word}: the section is empty; if that is intended, restart the gateway"
                )

    def _report_restart(self, settings: Settings) -> None:
        """Log a warning with the changed sections of the configuration that need a restart.

        The same sections are not logged twice in succession.
        """
        before, now = self._started.sections, settings.sections
        changed = tuple(
            sorted(
                name
                for name in before.keys() | now.keys()
                if name not in RELOADED and before.get(name) != now.get(name)
            )
        )
        if changed and changed != self._reported:
            log.warning("configuration sections changed, restart needed", sections=list(changed))
        self._reported = changed

    async def use(self, roles: Roles) -> None:
        """Put `roles` in force. If they have changed, check existing subscriptions and consumers again."""
        if self._replace(roles):
            await self._recheck_permissions()

    def _replace(self, roles: Roles) -> bool:
        """Put `roles` in force for new requests. Return True, or False if the roles have not changed."""
        gateway = self._gateway
        if not gateway.authorization.use(roles):
            return False
        gateway.dispatcher.invalidate()  # Drops routing that was resolved by the old rules.
        log.info("roles reloaded", roles=len(roles.roles))
        audit("rules_changed", roles=sorted(roles.roles))
        return True

    async def _recheck_permissions(self) -> None:
        """End the subscriptions and consumers that the roles in force no longer permit.

        The event loop serves other tasks after every SLICE checks.
        """
        gateway = self._gateway
        if self.absent is not None:
            self.absent.begin()
        for at, check in enumerate(self._permission_checks()):
            await _run_check(check)
            if at % SLICE == SLICE - 1:
                gateway.writes.flush()
                await trio.lowlevel.checkpoint()
        gateway.writes.flush()

    def _permission_checks(self) -> Iterator[Callable[[], None]]:
        """Yield a check for each connection, session and queue, as a function without arguments.

        The check ends the subscriptions and consumers that are not permitted any more.
        """
        for listener in self._gateway.listeners.values():
            for connection in list(listener.connections):
                yield partial(_recheck_connection, connection)
        for client_id in list(self._gateway.mqtt.sessions):
            yield partial(self._recheck_detached_session, client_id)
        gateway = self._gateway
        for holder in (
            *gateway.mqtt.sessions.values(),
            *gateway.hosts.queues(),
            *gateway.hosts.delays(),
            *gateway.fast_hosts.queues(),
        ):
            yield holder.review_hold

    def _recheck_detached_session(self, client_id: str) -> None:
        """End the subscriptions of a disconnected client that the roles in force do not permit."""
        gateway = self._gateway
        session = gateway.mqtt.sessions.get(client_id)
        if session is None or session.outlet is not None:
            return
        for topic_filter in self._forbidden(session.user, client_id, session.subscriptions):
            gateway.mqtt.unsubscribe(session, topic_filter)

    def _forbidden(
        self, user: str, client_id: str, subscriptions: Mapping[str, SubscriptionOptions]
    ) -> list[str]:
        """Return the filters of `subscriptions` that the user of a disconnected client may not subscribe to.

        Only users with roles in the configuration are checked. For others the list is empty: their roles come
        from an authentication back end and are known only when the client reconnects.
        """
        authorization = self._gateway.authorization
        if user and user not in authorization.roles.users:
            return []
        rights = authorization.rights_of(Principal(user), client_id)
        return [
            topic_filter
            for topic_filter, options in subscriptions.items()
            if not rights.mqtt_subscribe(topic_filter, options.qos).allowed
        ]

    def _fingerprint(self) -> Fingerprint:
        files = [self._started.file, *self._gateway.identities.files()]
        return {path: stamp_if_there(path) for path in files if path is not None}


def _recheck_connection(connection: IngressClient) -> None:
    """End the subscriptions and consumers of a connection that the roles in force no longer permit.

    Raises Pending while the authorizer's decision is missing. Any other error closes the connection.
    """
    try:
        if not connection.stream.closed:
            connection.rules_changed()
    except Pending:
        raise
    except Exception as error:  # Concerns one client only.
        connection.stream.fail(error)


async def _run_check(check: Callable[[], None]) -> None:
    """Run the permission check `check`, and repeat it until no decision of the authorizer is missing.

    An error in the check is logged, and has no effect on the checks of other clients.
    """
    try:
        if not await completed(check):
            log.error(
                "client's rights not checked again after roles reload, too many decisions needed",
                decisions=RESULTS_MAX,
            )
    except Exception as error:
        contained("reload", error)
