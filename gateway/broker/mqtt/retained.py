"""Retained messages: the last one of each topic, for whoever subscribes later. It is a sink of the switch."""

from __future__ import annotations

import time

from gateway.broker.topics import topic_matches
from gateway.model.address import MqttAddress
from gateway.model.batch import Part
from gateway.model.message import Message


class Retained:
    """The retained messages of one topic tree, by topic."""

    def __init__(self, *, messages_max: int = 100_000, octets_max: int = 256 * 1024 * 1024) -> None:
        """Each keeps a body: beyond the limits a new topic is not retained, and counted in `refused`."""
        self.messages_max = messages_max
        self.octets_max = octets_max
        self.octets = 0
        self.refused = 0
        self._messages: dict[str, Message] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def __contains__(self, topic: str) -> bool:
        return topic in self._messages

    def publish(self, part: Part) -> None:
        """Keep each message for its topic."""
        for message in part.messages:
            self.keep(message)
        part.accept()

    def keep(self, message: Message) -> None:
        """Keep `message` for its topic; an empty body forgets the topic (5: 3.3.1.3)."""
        assert isinstance(message.address, MqttAddress)
        topic = message.address.topic
        before = self._messages.pop(topic, None)
        if before is not None:
            self.octets -= len(before.body)
        size = len(message.body)
        if not size:
            return
        if len(self._messages) < self.messages_max and self.octets + size <= self.octets_max:
            self._messages[topic] = message
            self.octets += size
        else:
            self.refused += 1

    def find(self, pattern: list[str]) -> list[Message]:
        """The messages whose topics match the levels of a filter, without expired ones."""
        utc = time.time()
        kept = self._messages
        topic = "/".join(pattern)
        if "+" not in pattern and "#" not in pattern:
            found = [kept[topic]] if topic in kept else []
        else:
            found = [message for name, message in kept.items() if topic_matches(pattern, name.split("/"))]
        return [message for message in found if not message.expires or message.expires > utc]
