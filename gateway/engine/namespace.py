"""MQTT's topics on the shared engine: subscriptions are this replica's clients', everything else is
everybody's.

A session ends with its connection, for there is no queue of its own on the cluster; shared subscriptions are
not offered. Wills are this replica's to publish: they are in its store, as the embedded broker has them, and
those of a replica that was killed are published when it is back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import structlog

from gateway.broker.mqtt.namespace import MqttNamespace, Offers, SessionShares
from gateway.broker.mqtt.session import Session, SessionLimits, SubscriptionOptions
from gateway.broker.mqtt.system import SYS
from gateway.engine.session import EngineSession
from gateway.ingress.mqtt.guest import MqttGuest
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.outcome import ACCEPTED, Outcome
from gateway.store.store import Store

log = structlog.get_logger(limited=True)


class EngineNamespace(MqttNamespace):
    """Sessions and subscriptions of one replica."""

    def __init__(
        self,
        engine: EngineSession,
        limits: SessionLimits,
        *,
        shares: SessionShares,
        sessions_max: int,
        store: Store | None,
    ) -> None:
        """`store` has the wills."""
        self._engine = engine
        self._shown = 0  # what clients wait for, since the start
        self._walks: list[
            tuple[Session, str, SubscriptionOptions]
        ] = []  # that begin when the log has been read
        super().__init__(
            self._changed_filter,
            limits,
            shares=shares,
            sessions_max=sessions_max,
            retained=engine.kept,
            store=store,
        )
        self.offers = Offers(persistent=False, shared=False)
        engine.clients = self

    def _changed_filter(self, levels: list[str]) -> None:
        self._engine.forget_entries()

    # What clients are told, and when.

    @property
    def recorded(self) -> int:
        """Moves with whatever a client must not be told before the cluster, or the disk, knows it."""
        return super().recorded + self._shown

    @property
    def unavailable(self) -> str:
        """Why no client can be let in now."""
        return self._engine.why_not

    def unsaid(self, before: int) -> bool:
        """Since `recorded` was `before` something has changed that a client must not be told yet."""
        return self.recorded != before

    def after_recorded(self, done: Callable[[Outcome], None]) -> None:
        """`done` hears ACCEPTED when the disk has what it must, and then the cluster."""
        if self.store is None or self.failing:
            self._engine.after_recorded(partial(self._recorded, done))
        else:
            super().after_recorded(partial(self._on_disk, done))

    def _on_disk(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        if outcome is ACCEPTED:
            self._engine.after_recorded(partial(self._recorded, done))
        else:
            done(outcome)

    def _recorded(self, done: Callable[[Outcome], None], outcome: Outcome) -> None:
        walks, self._walks = self._walks, []
        for session, topic_filter, options in walks:
            if session.subscriptions.get(topic_filter) is options:
                self._owe(session, topic_filter, options)
        done(outcome)

    # Topics.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """The cluster; `$SYS` is this replica's own."""
        return super().sinks(address) if address.name.startswith(SYS) else self._engine.sinks(address)

    def wanting(self, address: Address) -> tuple[Sink, ...]:
        """Who of this replica's clients gets messages of a topic."""
        return super().sinks(address)

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        """Add or replace a subscription; what is retained is owed when the log has been read up to now."""
        before = session.subscriptions.get(topic_filter)
        self._enter(session, topic_filter, options)
        self._shown += 1
        if topic_filter.split("/", 1)[0] == SYS:
            self.system.show()
        if options.retain_handling == 0 or (options.retain_handling == 1 and before is None):
            self._walks.append((session, topic_filter, options))

    def _enter(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> None:
        if topic_filter not in session.subscriptions:
            self._engine.bind(topic_filter.split("/"))
        super()._enter(session, topic_filter, options)

    def _remove(self, session: Session, topic_filter: str) -> None:
        super()._remove(session, topic_filter)
        self._engine.unbind(topic_filter.split("/"))

    # Sessions.

    def open(
        self, client_id: str, *, clean: bool, expiry_secs: float, user: str = "", place: str = ""
    ) -> tuple[Session, bool]:
        """A session of `client_id`, of which every replica hears."""
        opened = super().open(client_id, clean=clean, expiry_secs=expiry_secs, user=user, place=place)
        self._shown += 1
        self._engine.opened(client_id)
        return opened

    def opened_elsewhere(self, client: str) -> bool:
        """Another replica has a client by that identifier now. True: it was here."""
        session = self.sessions.get(client)
        outlet: object = None if session is None else session.outlet
        if not isinstance(outlet, MqttGuest):
            return False
        log.info("a client has gone to another replica", client=client)
        try:
            outlet.taken_over()
        except Exception as error:  # of this one alone
            outlet.stream.fail(error)
        return True

    def opening_lost(self) -> None:
        """Nobody knows whether others have heard of clients that have just come: they come again."""
        for client, session in list(self.sessions.items()):
            outlet: object = session.outlet
            if isinstance(outlet, MqttGuest) and self._engine.opening(client):
                outlet.stream.abort("the cluster was lost before it knew of this client")
