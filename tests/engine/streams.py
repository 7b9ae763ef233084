"""A stream in memory, and replicas that follow it by hand."""

from __future__ import annotations

from typing import Final

from gateway.engine.cluster_clock import ClusterClock
from gateway.engine.logs import LIFE_CHARS, SharedLog
from gateway.model.properties import Properties, Value, ValueType, property_set, string
from gateway.protocols.amqp091.translate import encode_properties
from tests.broker.parts import mqtt

NEXT: Final = string("next")


class Stream:
    """Of each log that follows it: how far that has read."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []
        self.cut = 0  # the first offset that there is
        self.read: dict[SharedLog, int] = {}
        self._lives = 0

    def log(self) -> SharedLog:
        """One of another replica, which is not connected yet."""
        self._lives += 1
        made = SharedLog("gateway.log", (), f"{self._lives:0{LIFE_CHARS}d}", ClusterClock())
        self.read[made] = 0
        return made

    def connect(self, log: SharedLog) -> None:
        """It is read to its end, and what had not come back is written again."""
        self.follow(log)
        while not log.up:
            assert not self.step(log)

    def follow(self, log: SharedLog) -> None:
        """It is consumed from where it asks for, or from the first record that there is."""
        begin = log.begin()
        asked = begin.value if begin.type is ValueType.INT64 else len(self.rows) if begin == NEXT else 0
        assert isinstance(asked, int)
        self.read[log] = max(asked, self.cut)
        log.connected(self.rows.append, lambda: None)

    def step(self, log: SharedLog) -> str:
        """It reads one more record, and says why its connection is no use."""
        at = self.read[log]
        given = Properties(headers=(("x-stream-offset", Value(ValueType.INT64, at)),))
        raw = encode_properties(mqtt(properties=property_set(given)), 0.0)
        self.read[log] = at + 1
        return log.receive(raw, self.rows[at])

    def settle(self) -> None:
        """All that are connected read to the end."""
        while any(log.up and at < len(self.rows) for log, at in self.read.items()):
            for log, at in self.read.items():
                if log.up and at < len(self.rows):
                    self.step(log)
