"""Messages that come back to the gateway that sent them, in versions of MQTT that cannot count hops.

Two gateways that are joined both ways by links in MQTT 3.x would pass a message around for ever: what goes
out through one link comes in through the other as if it were new. So each such link remembers for ECHO_SECS
what it has sent, by topic and body. The same from another sender within that time may be an echo.

It is one for certain, and has crossed more routes than any message may, when the remote broker still owes the
acknowledgement of what we sent: it waits for ours. So no circle of confirmed messages goes round twice, which
would fill both windows with messages that wait for each other. What nobody confirms, or a broker in between
has confirmed, is taken and goes round again, until the same sender has brought it back QUICK_MAX times within
QUICK_SECS each. That sender has then proved to be the other end of a circle, and for PROVEN_SECS whatever it
brings back is an echo for certain. Slower circles end, too: every ROUNDS_PER_HOP rounds count as a hop.
`limits.hops_max` ends all of them, in the words and with the counters that there are for hops.

Two clients may say the same within ten seconds without any circle. That the second does so before the first
is confirmed, or several times a second, or in turn and without end, is what it takes to be mistaken for one;
and who repeats himself never is, for an echo comes from somebody else than the original. As many as were sent
can be echoes, and no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from gateway.model.message import Message, Sender

ECHO_SECS: Final = 10.0  # an echo has crossed two gateways and their brokers; more than that is no circle
ROUNDS_PER_HOP: Final = 8  # chance may repeat a message a few times
QUICK_SECS: Final = 1.0
QUICK_MAX: Final = 3
PROVEN_SECS: Final = 600.0
PROVEN_MAX: Final = 1_000  # senders; who is proved anew is remembered anew
HOPS_CERTAIN: Final = 255  # the most that `limits.hops_max` can be
KEYS_MAX: Final = 10_000  # different messages that one link remembers; the oldest are forgotten first
EACH_MAX: Final = 64  # the same message on its way so many times at once

log = structlog.get_logger(limited=True)


class Sent(NamedTuple):
    """A message that was sent: when (monotonic seconds), who brought it first, how often it came back, and
    how often of that quickly in a row, by whom. `packet_id`: 0 when no acknowledgement is due.
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
    """What one link has sent, and what of it has come back and not been sent again.

    `unconfirmed` finds the message that was sent under a packet id and is not acknowledged.
    """

    def __init__(self, link: str, unconfirmed: Unconfirmed) -> None:
        self.link = link
        self.sent: Memory = {}
        self._unconfirmed = unconfirmed
        self._came: Memory = {}
        self._proven: dict[tuple[str, str], float] = {}  # by endpoint and client

    def send(self, messages: Iterable[Message], now: float, packet_ids: Sequence[int]) -> None:
        """These go out, each under its packet id; 0 at QoS 0."""
        for message, packet_id in zip(messages, packet_ids, strict=False):
            key = key_of(message)
            known = _take(self._came, key) if key in self._came else None
            if known is not None and now - known.at < ECHO_SECS:
                _note(self.sent, key, known._replace(at=now, packet_id=packet_id))
            else:
                _note(self.sent, key, Sent(now, message.sender, packet_id=packet_id))

    def hops(self, key: int, sender: Sender, now: float) -> int:
        """Of a message that `sender` brings: how far it has come, if this link has sent it."""
        sent = self.sent
        while key in sent and now - sent[key][0].at >= ECHO_SECS:
            _take(sent, key)
        others = [one for one in sent.get(key, ()) if not _same(one.origin, sender)]
        if not others:
            return 0
        unconfirmed = next((one for one in others if self._is_unconfirmed(one, key)), None)
        known = unconfirmed or others[0]
        _remove(sent, key, known)
        quick = 0
        if now - known.at < QUICK_SECS:
            quick = known.quick + 1 if known.by is not None and _same(known.by, sender) else 1
        if quick >= QUICK_MAX:  # a proof, whether or not the last round was an echo for certain by itself
            self._prove(sender, now)
            return HOPS_CERTAIN
        if unconfirmed is not None or self._is_proven(sender, now):
            return HOPS_CERTAIN
        known = known._replace(at=now, rounds=known.rounds + 1, quick=quick, by=sender)
        _note(self._came, key, known)
        return known.rounds // ROUNDS_PER_HOP

    def _is_unconfirmed(self, one: Sent, key: int) -> bool:
        """Its acknowledgement is due; an id that is confirmed may have come to be another message's."""
        message = self._unconfirmed(one.packet_id) if one.packet_id else None
        return message is not None and key_of(message) == key

    def _is_proven(self, sender: Sender, now: float) -> bool:
        """The sender has shown that it brings back what this link sends."""
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
        """Forget what is too old for an echo."""
        for memory in (self.sent, self._came):
            late = [key for key, found in memory.items() if now - found[-1].at >= ECHO_SECS]
            for key in late:
                del memory[key]


def key_of(message: Message) -> int:
    """What an echo has in common with what was sent."""
    return hash((message.address.wire, message.body))


def _same(one: Sender, other: Sender) -> bool:
    return one.client == other.client and one.endpoint == other.endpoint


def _take(memory: Memory, key: int) -> Sent:
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


class Echoes:
    """The ledgers of all links that speak MQTT 3.x."""

    def __init__(self) -> None:
        self._ledgers: list[Ledger] = []

    def ledger(self, link: str, unconfirmed: Unconfirmed) -> Ledger:
        """A new one."""
        found = Ledger(link, unconfirmed)
        self._ledgers.append(found)
        return found

    @property
    def awaited(self) -> bool:
        """Something was sent that could come back."""
        return any(ledger.sent for ledger in self._ledgers)

    def hops(self, topic: bytes, body: bytes, sender: Sender, now: float) -> int:
        """Of a message that `sender` brings in a version without hops."""
        key = hash((topic, body))
        most = 0
        for ledger in self._ledgers:
            if key in ledger.sent and (found := ledger.hops(key, sender, now)) > most:
                most = found
                log.warning(
                    "what a link sends comes back: a circle?",
                    link=ledger.link,
                    endpoint=sender.endpoint,
                    client=sender.client,
                )
        return most
