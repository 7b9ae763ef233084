"""`$SYS`: what the gateway tells about itself, as retained messages that nobody published.

| topic below `$SYS/broker/` | text |
|---|---|
| `version` | `gateway` and the version |
| `uptime` | seconds since the start, with ` seconds` behind them |
| `clients/connected` | MQTT clients that are connected |
| `messages/received`, `messages/sent` | PUBLISH packets of all MQTT listeners |
| `subscriptions/count` | subscriptions of all sessions |
| `retained messages/count` | topics with a retained message, these included |

The figures are refreshed while somebody subscribes to a filter that begins with `$SYS`, and otherwise do not
exist but for the last ones. Only what has changed is sent. The disk never sees them.

Bridges say on `connection/NAME/state` whether they are connected, with a retained message and a will. That is
the one topic below `$SYS` for clients to publish to, for any of them, as Mosquitto has it; what is published
there is a message like any other.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

from gateway import __version__
from gateway.broker.mqtt.retained import Retained
from gateway.broker.mqtt.session import Grant, Session
from gateway.broker.mqtt.shared import SharedGroup
from gateway.model.address import Address
from gateway.model.batch import Sink
from gateway.model.message import Message
from gateway.protocols.mqtt.dialect import topic_address
from gateway.telemetry.stats import ListenerStats

SYS: Final = "$SYS"
ROOT: Final = "$SYS/broker/"


class Shown(Protocol):
    """The namespace that is told of."""

    sessions: dict[str, Session]

    retained: Retained

    @property
    def subscriptions(self) -> int:
        """How many there are."""

    def asked_for(self, level: str) -> bool:
        """Whether anybody subscribes to topics that begin with this level."""

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Who gets messages of a topic."""


class System:
    """The `$SYS` topics of one namespace."""

    def __init__(self, namespace: Shown) -> None:
        self._namespace = namespace
        self._began = time.monotonic()
        self._listeners: list[ListenerStats] = []
        self._said: dict[str, bytes] = {}
        self._due = 0.0

    def add(self, stats: ListenerStats) -> None:
        """Count what this listener counts."""
        self._listeners.append(stats)

    def tick(self, now: float, interval_secs: float) -> None:
        """Refresh, if it is time (monotonic `now`) and somebody subscribes. 0: never."""
        if not interval_secs or now < self._due or not self._namespace.asked_for(SYS):
            return
        self._due = now + interval_secs
        for message in self.show():
            for sink in self._namespace.sinks(message.address):
                if isinstance(sink, SharedGroup):
                    sink.offer(message)
                elif isinstance(sink, Grant):
                    sink.session.offer([message], sink)

    def show(self) -> list[Message]:
        """Retain what has changed, and return it."""
        changed = []
        for name, text in self._figures().items():
            body = text.encode()
            if self._said.get(name) != body:
                self._said[name] = body
                message = Message(topic_address(ROOT + name), body, retain=True)
                self._namespace.retained.show(message)
                changed.append(message)
        return changed

    def _figures(self) -> dict[str, str]:
        namespace, listeners = self._namespace, self._listeners
        connected = sum(session.outlet is not None for session in namespace.sessions.values())
        return {
            "version": f"gateway {__version__}",
            "uptime": f"{time.monotonic() - self._began:.0f} seconds",
            "clients/connected": str(connected),
            "messages/received": str(sum(one.messages_in for one in listeners)),
            "messages/sent": str(sum(one.messages_out for one in listeners)),
            "subscriptions/count": str(namespace.subscriptions),
            "retained messages/count": str(len(namespace.retained)),
        }
