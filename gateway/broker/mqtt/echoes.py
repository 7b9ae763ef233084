"""Messages that come back to the gateway that sent them, in versions of MQTT that cannot count hops.

Two gateways that are joined both ways by links in MQTT 3.x would pass a message around for ever: what goes
out through one link comes in through the other as if it were new. So each such link remembers for ECHO_SECS
what it has sent, by topic and body. The same from another sender within that time may be an echo: it is
taken, and remembered as having gone round once more when it is sent again. Every ROUNDS_PER_HOP rounds count
as a hop, so that `limits.hops_max` ends a circle, in the words and with the counters that there are for hops.

Two clients may say the same within ten seconds without any circle. That they do so in turn, without end and
faster than the memory forgets, is what it takes to be mistaken for one; and who repeats himself never is, for
an echo comes from somebody else than the original.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import structlog

from gateway.model.message import Message, Sender

ECHO_SECS: Final = 10.0  # an echo has crossed two gateways and their brokers; more than that is no circle
ROUNDS_PER_HOP: Final = 8  # chance may repeat a message a few times
KEYS_MAX: Final = 10_000  # different messages that one link remembers; the oldest are forgotten first
EACH_MAX: Final = 64  # the same message on its way so many times at once

log = structlog.get_logger(limited=True)


class Sent(NamedTuple):
    """A message that was sent: when (monotonic seconds), who brought it first, how often it came back."""

    at: float
    origin: Sender
    rounds: int


Memory = dict[int, deque[Sent]]


class Ledger:
    """What one link has sent, and what of it has come back and not been sent again."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.sent: Memory = {}
        self._came: Memory = {}

    def send(self, messages: Iterable[Message], now: float) -> None:
        """These go out."""
        for message in messages:
            key = hash((message.address.wire, message.body))
            known = _take(self._came, key) if key in self._came else None
            if known is not None and now - known.at < ECHO_SECS:
                _note(self.sent, key, Sent(now, known.origin, known.rounds + 1))
            else:
                _note(self.sent, key, Sent(now, message.sender, 0))

    def rounds(self, key: int, sender: Sender, now: float) -> int:
        """How often a message that `sender` brings has come back from this link."""
        sent = self.sent
        while key in sent and now - sent[key][0].at >= ECHO_SECS:
            _take(sent, key)
        if key not in sent:
            return 0
        origin = sent[key][0].origin
        if origin.client == sender.client and origin.endpoint == sender.endpoint:
            return 0
        known = _take(sent, key)
        _note(self._came, key, known._replace(at=now))
        return known.rounds + 1

    def tick(self, now: float) -> None:
        """Forget what is too old for an echo."""
        for memory in (self.sent, self._came):
            late = [key for key, found in memory.items() if now - found[-1].at >= ECHO_SECS]
            for key in late:
                del memory[key]


def _take(memory: Memory, key: int) -> Sent:
    found = memory[key]
    one = found.popleft()
    if not found:
        del memory[key]
    return one


def _note(memory: Memory, key: int, one: Sent) -> None:
    found = memory.get(key)
    if found is None:
        if len(memory) >= KEYS_MAX:
            del memory[next(iter(memory))]
        memory[key] = deque((one,), EACH_MAX)
    else:
        found.append(one)


class Echoes:
    """The ledgers of all links that speak MQTT 3.x."""

    def __init__(self) -> None:
        self._ledgers: list[Ledger] = []

    def ledger(self, link: str) -> Ledger:
        """A new one."""
        found = Ledger(link)
        self._ledgers.append(found)
        return found

    @property
    def awaited(self) -> bool:
        """Something was sent that could come back."""
        return any(ledger.sent for ledger in self._ledgers)

    def hops(self, topic: bytes, body: bytes, sender: Sender, now: float) -> int:
        """Of a message that `sender` brings in a version without hops."""
        key = hash((topic, body))
        rounds = 0
        for ledger in self._ledgers:
            if key in ledger.sent and (found := ledger.rounds(key, sender, now)) > rounds:
                rounds = found
                if rounds == ROUNDS_PER_HOP:
                    log.warning("what a link sends comes back: a circle?", link=ledger.link)
        return rounds // ROUNDS_PER_HOP
