"""What goes on beside the messages of a row: retained messages and wills, which have promises of their own.

One client sets, changes and clears retained messages, each after the one before was acknowledged, and often
loses its connection before that. Other clients connect with a will and vanish; a watcher with a persistent
session gets the wills. In the end a new subscriber must be sent exactly what was retained last, and each will
of a client that was let in must have arrived. Properties and times to live are compared, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any, Final, NamedTuple

from gateway.protocols.mqtt.packets import Connack, Connect, Suback, Subscription, Will
from gateway.protocols.mqtt.runs import Acks, Publishes
from gateway.protocols.mqtt.spec import FAILURE, RETAIN, Property, Version
from gateway.protocols.mqtt.translate import FIELDS
from tests.chaos.checker import (
    MARK,
    Carried,
    History,
    Id,
    Interval,
    body_of,
    carried_by,
    carries,
    judge,
    owed,
)
from tests.chaos.workers.common import SILENCE_SECS_MAX, Worker
from tests.chaos.workers.mqtt import Device, MqttReceiver, carried_of, listed, opened

RETAINED: Final = "kept"
WILLS: Final = "wills"
TOPICS: Final = 7
CLEARED_EVERY: Final = 11
BETWEEN_SECS: Final = 0.04
CONNECTED_SECS: Final = (0.0, 0.3)
SHOWN_SECS_MAX: Final = 10.0
PROBABILITY_OF_LOSS: Final = 0.1


class Kept(NamedTuple):
    """A retained message, with the monotonic time when it was first sent, or received."""

    body: bytes
    carried: Carried
    at: float
    is_flagged: bool = True  # RETAIN is set

    def is_as(self, sent: Kept, clock_error_secs: float) -> bool:
        """Return True if this is what a new subscriber must be sent of `sent`."""
        passed = self.at - sent.at
        return (
            self.is_flagged
            and self.body == sent.body
            and carries(self.carried, sent.carried, passed, clock_error_secs)
        )


class Retainer(Worker):
    """Publishes retained messages, one at a time; `retained` is what the broker must have."""

    def __init__(self, port: int, chance: Random) -> None:
        super().__init__("retainer", port)
        self.retained: dict[str, Kept] = {}
        self.done = False  # told to end, and the last one was acknowledged
        self._number = 0
        self._begun = time.monotonic()  # when the present one was first sent
        self._chance = Random(chance.getrandbits(64))
        self._finishing = False

    def finish(self) -> None:
        """Publish no new one; what is unacknowledged is still published again."""
        self._finishing = True

    def converse(self) -> None:
        """One connection."""
        device, _ = opened(self, Version.V5)
        with device:
            while self.going and not self.done:
                self._publish(device)
                if self._chance.random() < PROBABILITY_OF_LOSS:
                    return
                acks = device.next(Acks)
                ((_, reason),) = acks.rows
                if reason < FAILURE:
                    self._accepted()
                time.sleep(BETWEEN_SECS)

    def _publish(self, device: Device) -> None:
        topic, body = self._current()
        device.publish(topic, body, 1, 1, retain=True, properties=listed(self._carried()))

    def _carried(self) -> Carried:
        return carried_by(Id("retainer", "a0", self._number))

    def _current(self) -> tuple[str, bytes]:
        is_cleared = self._number % CLEARED_EVERY == CLEARED_EVERY - 1
        body = b"" if is_cleared else b"%d" % self._number
        return f"{RETAINED}/{self._number % TOPICS}", body

    def _accepted(self) -> None:
        topic, body = self._current()
        if body:
            self.retained[topic] = Kept(body, self._carried(), self._begun)
        else:
            self.retained.pop(topic, None)
        self._number += 1
        self._begun = time.monotonic()
        self.done = self._finishing


class Mortals(Worker):
    """Clients that connect one after the other, each with a will, and vanish."""

    def __init__(self, port: int, history: History, chance: Random) -> None:
        super().__init__("mortals", port)
        self.history = history
        self._number = 0
        self._chance = Random(chance.getrandbits(64))

    def converse(self) -> None:
        """One client, from its CONNECT until it vanishes."""
        id = Id("mortals", "a0", self._number)
        self._number += 1
        device = Device(self.port)
        try:
            device.sock.settimeout(SILENCE_SECS_MAX)
            self.history.sent(id, carried_by(id))
            delay_secs = id.number % 2
            lasting = {Property.SESSION_EXPIRY_INTERVAL: 60 * delay_secs}
            client = f"chaos-mortal-{id.number}"
            device.say(Connect(client, Version.V5, True, 0, will=will_of(id, delay_secs), properties=lasting))
            if device.next(Connack).reason < FAILURE:
                self.history.acked(id)
                self._stopped.wait(self._chance.uniform(*CONNECTED_SECS))
        finally:
            device.cut()


def will_of(id: Id, delay_secs: int) -> Will:
    """Return the will of one of the mortals."""
    carried = carried_by(id)
    assert carried.message_id is not None
    pairs = [(FIELDS["message_id"], carried.message_id)]
    properties: dict[Property, Any] = {Property.WILL_DELAY_INTERVAL: delay_secs}
    if carried.mark is not None and carried.life_secs is not None:
        pairs.append((MARK, carried.mark))
        properties[Property.CONTENT_TYPE] = carried.content_type
        properties[Property.MESSAGE_EXPIRY_INTERVAL] = int(carried.life_secs)
    properties[Property.USER_PROPERTY] = tuple(pairs)
    return Will(f"{WILLS}/{id.address}", body_of(id), 1, properties=properties)


class Beside:
    """The clients beside a row's, at the MQTT listener at `port`."""

    def __init__(self, port: int, chance: Random) -> None:
        self._port = port
        self.history = History()
        self.retainer = Retainer(port, chance)
        self.mortals = Mortals(port, self.history, chance)
        self.watcher = MqttReceiver("watcher", port, self.history, prefix=WILLS, qos=1, version=Version.V5)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Who is connected to the gateway."""
        return (self.retainer, self.mortals, self.watcher)

    def start(self) -> None:
        """Retain and die from now on; the watcher runs already."""
        self.retainer.start()
        self.mortals.start()

    def finish(self) -> None:
        """Publish nothing new and lose no client any more."""
        self.retainer.finish()
        self.mortals.stop()

    def is_complete(self, excused: Sequence[Interval]) -> bool:
        """Return True if the last retained message was acknowledged and each will has arrived, but those of
        clients that were let in at an `excused` time."""
        return self.retainer.done and owed(self.history.records, excused) <= self.watcher.heard

    def faults(self, clock_error_secs: float, excused: Sequence[Interval]) -> list[str]:
        """Return what is wrong with wills and with what is retained, a line each."""
        verdict = judge(
            self.history.records, ordered=False, excused=excused, clock_error_secs=clock_error_secs
        )
        wills = [f"wills: {line}" for line in str(verdict._replace(stuck=())).splitlines()[1:]]
        if not self.retainer.done:
            return [*wills, f"retained: publish {self.retainer.why or 'not acknowledged'}"]
        found = self._shown(clock_error_secs)
        if self._is_right(found, clock_error_secs):
            return wills
        return [*wills, f"retained: {found}, and not {self.retainer.retained}"]

    def _is_right(self, found: dict[str, Kept], clock_error_secs: float) -> bool:
        wanted = self.retainer.retained
        return found.keys() == wanted.keys() and all(
            one.is_as(wanted[topic], clock_error_secs) for topic, one in found.items()
        )

    def _let_in(self, end: float) -> Device:
        """Return a new client that is connected; a replica that has just woken up refuses it for a while."""
        while True:
            device = Device(self._port)
            device.sock.settimeout(SILENCE_SECS_MAX)
            device.say(Connect("chaos-shown", Version.V5, True, 0))
            reason = device.next(Connack).reason
            if reason < FAILURE:
                return device
            device.cut()
            assert time.monotonic() < end, f"no replica serves: {reason}"
            time.sleep(BETWEEN_SECS)

    def _shown(self, clock_error_secs: float) -> dict[str, Kept]:
        """Return what a new subscriber is sent, once that is what was retained or for long enough."""
        found: dict[str, Kept] = {}
        end = time.monotonic() + SHOWN_SECS_MAX
        with self._let_in(end) as device:
            device.machine.subscribe(1, [Subscription(f"{RETAINED}/#", 0)], {})
            device.flush()
            device.next(Suback)
            while True:
                device.ping()
                now = time.monotonic()
                rows = [row for some in (*device.heard, *device.events(Publishes)) for row in some.rows]
                found = {
                    topic.decode(): Kept(body, carried_of(raw), now, bool(flags & RETAIN))
                    for flags, topic, _, raw, body in rows
                }
                if self._is_right(found, clock_error_secs) or now > end:
                    break
            device.machine.disconnect()
            device.flush()
        return found
