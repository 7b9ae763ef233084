"""`$SYS` topics: statistics of the gateway, as retained messages without a publisher.

| topic below `$SYS/broker/` | text |
|---|---|
| `version` | `gateway` and the version |
| `uptime` | seconds since the start, followed by ` seconds` |
| `clients/connected` | MQTT clients that are connected |
| `messages/received`, `messages/sent` | PUBLISH packets of all MQTT listeners |
| `subscriptions/count` | subscriptions of all sessions |
| `retained messages/count` | topics with a retained message, these included |

The statistics are refreshed while some filter begins with `$SYS`; otherwise only the latest exist. Only
what has changed is sent, and nothing is written to disk.

Bridges report on `connection/NAME/state` if they are connected, with a retained message and a will. That is
the only topic below `$SYS` to which clients may publish, any of them, as in Mosquitto; what is published
there is an ordinary message.
"""

from __future__ import annotations

from typing import Final, Protocol

from gateway import __version__, clock
from gateway.broker.mqtt.retained import RetainedTopics
from gateway.broker.mqtt.session import Grant, Session
from gateway.broker.mqtt.shared_subscriptions import SharedGroup
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.protocols.mqtt.dialect import topic_address
from gateway.telemetry.stats import ListenerStats

SYS: Final = "$SYS"
ROOT: Final = "$SYS/broker/"


class PublishedFigures(Protocol):
    """Interface of the MQTT namespace that `$SYS` topics use."""

    sessions: dict[str, Session]

    retained: RetainedTopics

    @property
    def subscriptions(self) -> int:
        """Number of subscriptions."""

    def has_filters_below(self, level: str) -> bool:
        """Return True if some topic filter has this name, not a wildcard, as its first level."""

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Return the grants and shared groups that match a topic."""


class System:
    """Publisher of the `$SYS` topics of one namespace."""

    def __init__(self, namespace: PublishedFigures) -> None:
        self._namespace = namespace
        self._began = clock.monotonic()
        self._listeners: list[ListenerStats] = []
        self._published: dict[str, bytes] = {}
        self._next_at = 0.0

    def add(self, stats: ListenerStats) -> None:
        """Add the counters of a listener to those that are published."""
        self._listeners.append(stats)

    def tick(self, now: float, interval_secs: float) -> None:
        """Publish changed statistics if `interval_secs` have passed and a client subscribes to `$SYS`.

        `now` is in monotonic seconds. An interval of 0 publishes nothing.
        """
        if not interval_secs or now < self._next_at or not self._namespace.has_filters_below(SYS):
            return
        self._next_at = now + interval_secs
        for message in self.show():
            for sink in self._namespace.sinks(message.address):
                if isinstance(sink, SharedGroup):
                    sink.offer(message)
                elif isinstance(sink, Grant):
                    sink.session.offer([message], sink)

    def show(self) -> list[Message]:
        """Set changed statistics as retained messages, without sending them. Return these messages."""
        changed = []
        for name, text in self._figures().items():
            body = text.encode()
            if self._published.get(name) != body:
                self._published[name] = body
                message = Message(topic_address(ROOT + name), body, retain=True)
                self._namespace.retained.show(message)
                changed.append(message)
        return changed

    def _figures(self) -> dict[str, str]:
        namespace, listeners = self._namespace, self._listeners
        connected = sum(session.outlet is not None for session in namespace.sessions.values())
        return {
            "version": f"gateway {__version__}",
            "uptime": f"{clock.monotonic() - self._began:.0f} seconds",
            "clients/connected": str(connected),
            "messages/received": str(sum(one.messages_in for one in listeners)),
            "messages/sent": str(sum(one.messages_out for one in listeners)),
            "subscriptions/count": str(namespace.subscriptions),
            "retained messages/count": str(len(namespace.retained)),
        }
