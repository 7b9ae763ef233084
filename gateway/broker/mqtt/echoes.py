"""Detection of messages that return to the gateway that sent them, for versions of MQTT without hop counts.

Two gateways that are joined both ways by links in MQTT 3.x would forward a message to each other forever: a
message that is sent through one link is received through the other as if it were new. Each such link
therefore remembers for ECHO_SECS which messages it has sent, by topic and body. An equal message from another
sender within that time may be an echo.

It is certainly an echo, and gets the maximum hop count, if the remote broker has not acknowledged the sent
message, because that broker waits for the gateway's acknowledgement. No loop forwards a confirmed message
twice, therefore, which would fill both windows with messages that wait for each other. An unconfirmed
message, or one confirmed by a broker in between, is accepted and forwarded again, until the same sender has
returned it QUICK_MAX times within QUICK_SECS each. That sender is then proven to be the other end of a loop,
and for PROVEN_SECS every message that it returns is an echo. Slower loops end, too: every ROUNDS_PER_HOP
rounds count as a hop, and `limits.hops_max` ends all of them, with the texts and counters of hops.

Two clients may publish equal messages within ten seconds without a loop. The second message is only mistaken
for an echo if it is published before the first is confirmed, or several times a second, or if the two clients
take turns without end. A sender that repeats itself is never mistaken, because an echo arrives from another
sender than the original. At most as many messages as were sent can be echoes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from gateway.model.message import Message, Sender

ECHO_SECS: Final = 10.0  # an echo has crossed two gateways and their brokers; a longer time is no circle
ROUNDS_PER_HOP: Final = 8  # messages may be equal by chance a few times
QUICK_SECS: Final = 1.0
QUICK_MAX: Final = 3
PROVEN_SECS: Final = 600.0
PROVEN_MAX: Final = 1_000  # senders; a sender that is proven again is remembered longer
HOPS_CERTAIN: Final = 255  # the maximum of `limits.hops_max`
KEYS_MAX: Final = 10_000  # different messages that one link remembers; the oldest are forgotten first
EACH_MAX: Final = 64  # how often an equal message may be in transit at once

log = structlog.get_logger(limited=True)


class Sent(NamedTuple):
    """Record of a message that a link has sent and that may return as an echo.

    `at` is the time of sending in monotonic seconds, and `origin` the sender from whom the gateway received
    the message. `rounds` is how often the message has returned and was sent again. `quick` is how often in
    succession the sender `by` has returned it within QUICK_SECS. `packet_id` is 0 if the remote broker does
    not acknowledge the message.
    """

    at: float
    origin: Sender
    rounds: int = 0
    quick: int = 0
    by: Sender | None = None
    packet_id: int = 0


Memory = dict[int, deque[Sent]]
Unconfirmed = Callable[[int], Message | None]


class Ledger:
    """Messages that one link has sent, to recognise those that return through another connection (echoes).

    Messages that have returned and may be sent again are recorded, too. `unconfirmed` returns the message
    that was sent with a packet id and is not acknowledged, or None.
    """

    def __init__(self, link: str, unconfirmed: Unconfirmed) -> None:
        self.link = link
        self.sent: Memory = {}
        self._unconfirmed = unconfirmed
        self._came: Memory = {}
        self._proven: dict[tuple[str, str], float] = {}  # by endpoint and client

    def send(self, messages: Iterable[Message], now: float, packet_ids: Sequence[int]) -> None:
        """Record messages that the link sends at `now`, each with its packet id (0 at QoS 0)."""
        for message, packet_id in zip(messages, packet_ids, strict=False):
            key = key_of(message)
            entry = _pop(self._came, key) if key in self._came else None
            if entry is not None and now - entry.at < ECHO_SECS:
                _note(self.sent, key, entry._replace(at=now, packet_id=packet_id))
            else:
                _note(self.sent, key, Sent(now, message.sender, packet_id=packet_id))

    def hops(self, key: int, sender: Sender, now: float) -> int:
        """Return the hop count of a message that arrives from `sender`; above 0 only if it may be an echo.

        An echo equals a message of another sender that this link has sent within ECHO_SECS. `key` is the hash
        of topic and body (`key_of`), and `now` is in monotonic seconds.
        """
        sent = self.sent
        while key in sent and now - sent[key][0].at >= ECHO_SECS:
            _pop(sent, key)
        others = [one for one in sent.get(key, ()) if not _same(one.origin, sender)]
        if not others:
            return 0
        unconfirmed = next((one for one in others if self._is_unconfirmed(one, key)), None)
        entry = unconfirmed or others[0]
        _remove(sent, key, entry)
        quick = 0
        if now - entry.at < QUICK_SECS:
            quick = entry.quick + 1 if entry.by is not None and _same(entry.by, sender) else 1
        if quick >= QUICK_MAX:  # proof, even if the last round was not certainly an echo
            self._prove(sender, now)
            return HOPS_CERTAIN
        if unconfirmed is not None or self._is_proven(sender, now):
            return HOPS_CERTAIN
        entry = entry._replace(at=now, rounds=entry.rounds + 1, quick=quick, by=sender)
        _note(self._came, key, entry)
        return entry.rounds // ROUNDS_PER_HOP

    def _is_unconfirmed(self, one: Sent, key: int) -> bool:
        """Return True if the remote broker has not acknowledged the sent message that `one` records.

        `key` is the hash of its topic and body (`key_of`), by which a reused packet id is detected.
        """
        message = self._unconfirmed(one.packet_id) if one.packet_id else None
        return message is not None and key_of(message) == key

    def _is_proven(self, sender: Sender, now: float) -> bool:
        """Return True if the sender is known to return the messages that this link sends.

        That is known for PROVEN_SECS after the last call that returned True.
        """
        if now >= self._proven.get((sender.endpoint, sender.client), 0.0):
            return False
        self._prove(sender, now)
        return True

    def _prove(self, sender: Sender, now: float) -> None:
        name = (sender.endpoint, sender.client)
        self._proven.pop(name, None)
        self._proven[name] = now + PROVEN_SECS
        if len(self._proven) > PROVEN_MAX:
            del self._proven[next(iter(self._proven))]

    def tick(self, now: float) -> None:
        """Remove messages that were sent too long ago to return; `now` is in monotonic seconds."""
        for memory in (self.sent, self._came):
            expired = [key for key, found in memory.items() if now - found[-1].at >= ECHO_SECS]
            for key in expired:
                del memory[key]


def key_of(message: Message) -> int:
    """Return a hash of topic and body, which an echo has in common with the original message."""
    return hash((message.address.wire, message.body))


def _same(one: Sender, other: Sender) -> bool:
    return one.client == other.client and one.endpoint == other.endpoint


def _pop(memory: Memory, key: int) -> Sent:
    one = memory[key][0]
    _remove(memory, key, one)
    return one


def _remove(memory: Memory, key: int, one: Sent) -> None:
    found = memory[key]
    found.remove(one)
    if not found:
        del memory[key]


def _note(memory: Memory, key: int, one: Sent) -> None:
    found = memory.get(key)
    if found is None:
        if len(memory) >= KEYS_MAX:
            del memory[next(iter(memory))]
        memory[key] = deque((one,), EACH_MAX)
    else:
        found.append(one)


class EchoDetector:
    """Detector of messages that the links sent in MQTT 3.x and that return to this gateway (echoes)."""

    def __init__(self) -> None:
        self._ledgers: list[Ledger] = []

    def ledger(self, link: str, unconfirmed: Unconfirmed) -> Ledger:
        """Create and return the record of the messages that one link sends.

        `unconfirmed` gets a packet id, and returns the message sent with it that is not acknowledged, or
        None.
        """
        found = Ledger(link, unconfirmed)
        self._ledgers.append(found)
        return found

    @property
    def has_sent(self) -> bool:
        """True if a link has sent a message that could return as an echo."""
        return any(ledger.sent for ledger in self._ledgers)

    def hops(self, topic: bytes, body: bytes, sender: Sender, now: float) -> int:
        """Return the hop count of a message from `sender` in a version of MQTT without hop counts.

        It is above 0 only if the message may be an echo. `now` is in monotonic seconds.
        """
        key = hash((topic, body))
        most = 0
        for ledger in self._ledgers:
            if key in ledger.sent and (found := ledger.hops(key, sender, now)) > most:
                most = found
                log.warning(
                    "message sent by link came back, possible loop",
                    link=ledger.link,
                    received_by=sender.endpoint,
                    from_client=sender.client,
                )
        return most
