"""The topic tree: who subscribed to what, what each topic retains, and which sessions exist."""

from __future__ import annotations

from collections.abc import Callable

from gateway.broker.mqtt.retained import Retained
from gateway.broker.mqtt.session import (
    Grant,
    Session,
    SessionLimits,
    SessionTally,
    SubscriptionOptions,
)
from gateway.broker.topics import Trie
from gateway.model.address import Address, MqttAddress
from gateway.model.batch import Sink
from gateway.model.message import Message


class MqttNamespace:
    """Subscriptions, retained messages and sessions of one gateway."""

    def __init__(
        self,
        changed: Callable[[], None],
        limits: SessionLimits | None = None,
        *,
        sessions_max: int = 100_000,
        retained: Retained | None = None,
    ) -> None:
        self.limits = limits or SessionLimits()
        self.sessions_max = sessions_max
        self.retained = Retained() if retained is None else retained
        self.tally = SessionTally()
        self.sessions: dict[str, Session] = {}
        self._changed = changed
        self._trie: Trie[tuple[Session, SubscriptionOptions]] = Trie("+", "#")
        self._wills: dict[Session, tuple[float, Callable[[], None]]] = {}

    @property
    def subscriptions(self) -> int:
        """How many subscriptions exist."""
        return len(self._trie)

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """The sessions that get messages of this topic, each once."""
        assert isinstance(address, MqttAddress)
        levels = address.topic.split("/")
        merged: dict[Session, list[SubscriptionOptions]] = {}
        for session, options in self._trie.match(levels, hidden=levels[0].startswith("$")):
            merged.setdefault(session, []).append(options)
        return tuple(Grant(session, options) for session, options in merged.items())

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """MQTT never looks beyond the address."""
        return self.sinks(message.address)

    def subscribe(self, session: Session, topic_filter: str, options: SubscriptionOptions) -> list[Message]:
        """Add or replace a subscription; returns the retained messages that it must be sent."""
        pattern = topic_filter.split("/")
        before = session.subscriptions.get(topic_filter)
        if before is not None:
            self._trie.remove(pattern, (session, before))
        session.subscriptions[topic_filter] = options
        self._trie.add(pattern, (session, options))
        self._changed()
        if options.retain_handling == 2 or (options.retain_handling == 1 and before is not None):
            return []
        return self.retained.find(pattern)

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove a subscription; False when there was none."""
        options = session.subscriptions.pop(topic_filter, None)
        if options is None:
            return False
        self._trie.remove(topic_filter.split("/"), (session, options))
        self._changed()
        return True

    def open(self, client_id: str, *, clean: bool, persistent: bool) -> tuple[Session, bool]:
        """The session of `client_id`, and whether it is an earlier one that is resumed.

        A will that waits for its delay is not published when the session goes on (5: 3.1.3.2.2).
        """
        session = self.sessions.get(client_id)
        if session is not None and clean:
            self.discard(session)
            session = None
        present = session is not None
        if session is None:
            session = Session(client_id, self.limits, self.tally)
            self.sessions[client_id] = session
        self._wills.pop(session, None)
        session.persistent = persistent
        return session, present

    def discard(self, session: Session) -> None:
        """End the session: its subscriptions and what it was owed go, a will that waits is published."""
        for topic_filter in list(session.subscriptions):
            self.unsubscribe(session, topic_filter)
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
        if session in self._wills:
            self._wills.pop(session)[1]()

    def delay_will(self, session: Session, at: float, publish: Callable[[], None]) -> None:
        """Have `publish` called at `at` (monotonic seconds), or when the session ends before."""
        self._wills[session] = (at, publish)

    def expire(self, now: float) -> None:
        """Publish the wills and discard the disconnected sessions whose time has come (monotonic `now`)."""
        for session in [session for session, (at, _) in self._wills.items() if at <= now]:
            self._wills.pop(session)[1]()
        due = [
            session
            for session in self.sessions.values()
            if session.outlet is None and 0 < session.expires_at <= now
        ]
        for session in due:
            self.discard(session)
