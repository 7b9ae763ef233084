"""The queues of sessions, as one connection consumes them.

A queue is looked for before it is consumed: one that is not there is declared, with its bindings. Many
consumers share a few channels. To end one is to cancel it, to give back what it has not acknowledged, and to
look at the queue until that has it again. A quorum queue takes back some three dozen messages as they come,
and the others together when these are on its log; more than 32 together it puts in an order of its own
(RabbitMQ 3.10). So it is given back half as many at a time. What is published to it meanwhile is counted as
if it were that, so nobody can be sure: whoever consumes it next is told what was given back (given_back.py).
What it has handed out before it heard of the cancel comes, and goes back, with the rest.

Queues have a single active consumer, so whoever comes before the last one is known to be gone waits in the
broker.

A replica that stops closes the channels: all that was delivered over one goes back in one step.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

import structlog

from gateway import clock
from gateway.model.properties import Headers
from gateway.model.spooled import Body
from gateway.model.times import Monotonic
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.client import ClientConnection
from gateway.protocols.amqp091.codec import encode_short_string

log = structlog.get_logger(limited=True)

UNREACHABLE: Final = "inaccessible"  # how RabbitMQ words that the home of a classic queue is down
# A queue that does not get back what it was given back may have had no room for it: so many looks, and so
# long, without a change. A broker that is busy takes its time.
LOOKS_MAX: Final = 100
RETURN_SECS_MAX: Final = 2.0
RETURNED_MAX: Final = 16  # messages at a time
LOOKS_MIN: Final = 3  # after each time
REMOVING_MAX: Final = 16  # queues that are being deleted at a time
PREFETCH_MAX: Final = 65_535  # basic.qos has two octets for it
CHANNELS: Final = 8  # a broker looks for an acknowledged delivery among those of its channel
Done = Callable[[], None]
Freed = Callable[[Sequence["Content"]], None]
"""Hears what a queue was given back, in its order."""


class Target(Protocol):
    """Whoever consumes a queue."""

    queue: str
    prefetch: int
    arguments: Headers
    fresh: bool  # the queue is not there yet
    unbound: dict[str, tuple[bool, Done]]  # keys that have to be bound, or unbound, and who hears of it

    @property
    def is_wanted(self) -> bool:
        """Return False for one whose queue another owner has, who may have deleted it."""

    def confirm(self, done: Callable[[bool], None]) -> None:
        """The queue is not there: call `done` with True if it is still this replica's, and to be declared."""

    @property
    def keys(self) -> Iterable[str]:
        """What the queue is bound to."""

    def deliver(self, consumer: Consumer, tag: int, redelivered: bool, content: Content) -> None:
        """A message has come; it is to be settled by its tag."""

    def waits(self, count: int) -> None:
        """So many messages are in the queue already."""

    def unreachable(self) -> None:
        """The node that has the queue is down: it is not consumed."""


Content = tuple[bytes, bytes, Body]
"""The octets of its address, of its content header, and its body."""


class Broker(Protocol):
    """The connection."""

    machine: ClientConnection

    def wake(self) -> None:
        """Something is to be written."""

    def ask(self, method: m.Method, done: Done | None = None) -> None:
        """On the channel for declarations; `done` when it is answered."""

    def open_channel(self) -> int:
        """A further channel."""

    def decided(self) -> None:
        """Of no queue it is open any more whether it is there."""


class Consumer:
    """One queue that is consumed, or about to be."""

    __slots__ = (
        "_consumers",
        "_unsettled",
        "asked",
        "channel",
        "ending",
        "given_back",
        "name",
        "names",
        "returning",
        "target",
        "then",
    )

    def __init__(self, consumers: Consumers, target: Target, name: str) -> None:
        self.target = target
        self.name = name  # "": it is wanted, and nothing of its queue is for now
        self.names: set[str] = set()  # for which something may still come
        self.channel = 0
        self.asked = False  # to consume
        self.ending = False
        self.given_back: list[Content] = []  # when it is over
        self.returning: Returning | None = None  # to the queue
        self.then: Freed | None = None
        self._consumers = consumers
        self._unsettled: dict[int, Content] = {}

    def take(self, tag: int, content: Content) -> None:
        """A message has come that has to be settled."""
        self._unsettled[tag] = content

    def settle(self, tag: int) -> None:
        """Acknowledge it. A tag that has been given back, or of a connection that is gone, says nothing."""
        if tag in self._unsettled:
            del self._unsettled[tag]
            self._consumers.acknowledge(self.channel, tag)

    def give_back(self, tag: int) -> None:
        """Somebody else is to have it."""
        if tag in self._unsettled:
            del self._unsettled[tag]
            self._consumers.give_back(self.channel, [tag])

    def over(self) -> None:
        """Its queue is free."""
        if self.then is not None:
            self.then(self.given_back)

    def order(self, tag: int) -> None:
        """It stands behind all that has come until now."""
        content = self._unsettled.pop(tag, None)
        if content is not None:
            self._unsettled[tag] = content

    def drain(self) -> dict[int, Content]:
        """What has not been settled, in order; it is not ours any more."""
        unsettled, self._unsettled = self._unsettled, {}
        return unsettled


class Returning:
    """A queue is given back what a consumer held, and is looked at until it has that."""

    __slots__ = ("consumer", "count", "looks", "looks_since", "queue", "since", "tags", "wanted")

    def __init__(self, consumer: Consumer, tags: list[int], since: Monotonic) -> None:
        self.consumer = consumer
        self.queue = consumer.target.queue
        self.tags = tags  # that it has not been given yet
        self.wanted = -1  # messages that have to be in the queue; it has not been counted yet
        self.count = -1  # that were there
        self.looks = 0  # that saw as many
        self.looks_since = LOOKS_MIN  # it was last given something
        self.since = since


class Removal(NamedTuple):
    """A queue that is to be deleted; `done` hears when it is."""

    method: m.QueueDelete
    done: Done | None


Check = Consumer | Returning | Removal | m.Method


class Consumers:
    """All of one connection."""

    def __init__(self, broker: Broker, exchange: str, direct: str = "") -> None:
        """`exchange`: what queues are bound to. `direct`: by which they are reached by their names, too; "":
        they are not."""
        self._broker = broker
        self._exchange = exchange
        self._direct = direct
        self._channels: list[int] = []
        # What is not known to be consumed yet, by channel and name, and whether it is to be cancelled then:
        # RabbitMQ (3.10) ends the connection over a cancel that overtakes its own consume-ok.
        self._beginning: dict[tuple[int, str], bool] = {}
        self._checking = 0
        self._checks: deque[Check] = deque()
        self._lacking: set[Consumer] = set()  # whose queues are not there, while their owners are looked up
        self._removals: deque[Removal] = deque()  # that are not sent yet: each that fails costs a channel
        self._removing = 0  # that are
        self._own: tuple[m.Method, Callable[[bool], None]] | None = None  # the replica's queue is looked for
        self._consumers: dict[Target, Consumer] = {}
        self._by_name: dict[tuple[int, bytes], Consumer] = {}
        self._numbers = 0
        self._turn = 0
        self._waiting: list[Consumer] = []  # for channels
        self._acks: list[tuple[int, int]] = []
        self._live = True
        self._closed = False  # no queue is consumed any more

    # Channels.

    def open(self) -> None:
        """The connection stands."""
        self._checking = self._broker.open_channel()
        for _ in range(CHANNELS):
            self._channels.append(self._broker.open_channel())

    def opened(self, channel: int) -> bool:
        """A channel can be used. False: it is none of these."""
        if channel == self._checking:
            for what in self._checks:
                self._look(what)
            return True
        return channel in self._channels

    def closed(self, channel: int, text: str) -> bool:
        """The broker has closed a channel: what was looked for first is not there, or is still used by
        others. False: that is not why."""
        if channel != self._checking or not self._checks:
            return False
        lacking = self._checks.popleft()
        self._checking = self._broker.open_channel()  # the others are looked for again there
        self._found(lacking, there=False)
        if isinstance(lacking, Consumer):
            self._lacks(lacking, text)
        elif isinstance(lacking, Returning):
            self._over(lacking.consumer)
        elif isinstance(lacking, Removal):
            log.info("queue not deleted yet", queue=lacking.method.queue, why=text)
            self._removed()
        if not self._checks:
            self._broker.decided()
        return True

    def _lacks(self, consumer: Consumer, text: str) -> None:
        target = consumer.target
        if UNREACHABLE in text:
            log.warning("queue unreachable", queue=target.queue, why=text)
            consumer.ending = True
            self._over(consumer)
            target.unreachable()
            return
        if consumer.ending or not target.is_wanted:  # its session may be over
            self._over(consumer)
            return
        self._lacking.add(consumer)
        target.confirm(partial(self._confirmed, consumer))

    def _confirmed(self, consumer: Consumer, is_ours: bool) -> None:
        """Declare a queue that is not there, unless its session has ended, or is another owner's."""
        if consumer not in self._lacking:
            return  # the connection is gone
        self._lacking.discard(consumer)
        if consumer.ending or self._closed or not is_ours:
            self._over(consumer)
            return
        log.info("queue missing, declared", queue=consumer.target.queue)
        self._declare(consumer)

    def answered(self, channel: int, method: m.Method) -> bool:
        """A method has come. False: it is for somebody else."""
        if channel == self._checking:
            if self._checks and isinstance(method, m.QueueDeclareOk | m.QueueDeleteOk):
                found = self._checks.popleft()
                self._found(found, there=True)
                if isinstance(found, Consumer) and isinstance(method, m.QueueDeclareOk):
                    found.target.waits(method.message_count)
                    self._bind(found, list(found.target.unbound))
                    self._consume(found)
                elif isinstance(found, Returning) and isinstance(method, m.QueueDeclareOk):
                    self._return(found, method.message_count)
                elif isinstance(found, Removal):
                    self._removed()
                    if found.done is not None:
                        found.done()
                if not self._checks:
                    self._broker.decided()
            return True
        if channel not in self._channels:
            return False
        if isinstance(method, m.BasicConsumeOk):
            if self._beginning.pop((channel, method.consumer_tag), False):
                self._ask(channel, m.BasicCancel(method.consumer_tag))
        elif isinstance(method, m.BasicCancel):
            self._cancelled_by_broker(channel, method.consumer_tag)
        elif isinstance(method, m.BasicCancelOk):
            self._cancelled(channel, method.consumer_tag)
        return True

    def lose(self) -> None:
        """The connection is gone: nothing that was taken from it can be settled."""
        self._live = False
        consumers = list(self._consumers.values())
        self._consumers.clear()
        self._lacking.clear()
        for consumer in consumers:
            consumer.drain()
            consumer.over()

    # Consuming.

    @property
    def undecided(self) -> bool:
        """Keys wait to be bound until it is known whether their queues are there."""
        return any(isinstance(one, Consumer) and one.target.unbound for one in self._checks)

    def consumes(self, target: Target) -> bool:
        """It has been begun, and not ended."""
        return target in self._consumers

    def begin(self, target: Target) -> None:
        """Consume its queue."""
        if target in self._consumers or not self._live or self._closed:
            return
        self._numbers += 1
        consumer = self._consumers[target] = Consumer(self, target, str(self._numbers))
        if target.fresh:
            self._declare(consumer)
        else:
            self._check(consumer)

    def end(self, target: Target, then: Freed | None) -> None:
        """Free its queue; `then` is called when it is free, with what that was given back."""
        consumer = self._consumers.get(target)
        if consumer is None:
            if then is not None:
                then(())
            return
        if consumer.ending:
            consumer.then = _both(consumer.then, then)
            return
        consumer.ending = True
        consumer.then = then
        if consumer.asked:
            name = consumer.name
            self._cancel(consumer)
            self._free(consumer, name)

    def renew(self, target: Target) -> None:
        """How many messages of its queue may be unsettled has changed: it is consumed anew, or not at all
        when that is 0. What has come stays."""
        consumer = self._consumers.get(target)
        if consumer is None or not consumer.asked or consumer.ending:
            return
        self._cancel(consumer)
        if target.prefetch:
            self._numbers += 1
            consumer.name = str(self._numbers)
            self._consume_on(consumer)

    def close(self) -> None:
        """Free all queues, in one step each: the replica stops."""
        self._closed = True
        self.flush()
        consumers = list(self._consumers.values())
        self._consumers.clear()
        self._by_name.clear()
        for channel in self._channels:
            self._broker.machine.close_channel(channel)
        self._channels.clear()
        self._broker.wake()
        for consumer in consumers:
            consumer.drain()
            consumer.ending = True
            consumer.over()

    def touch(self, queue: str) -> None:
        """A queue is still wanted, though nobody consumes it: its time begins anew."""
        self._check(m.QueueDeclare(queue, passive=True))

    def look_for(self, queue: str, found: Callable[[bool], None]) -> None:
        """Is there a queue that is not consumed here?"""
        method = m.QueueDeclare(queue, passive=True)
        self._own = method, found
        self._check(method)

    def _found(self, what: Check, *, there: bool) -> None:
        if self._own is not None and what is self._own[0]:
            found, self._own = self._own[1], None
            found(there)

    def remove(self, queue: str) -> None:
        """A queue goes unless others consume it."""
        self._check(m.QueueDelete(queue, if_unused=True))

    def delete(self, queue: str, done: Done | None) -> None:
        """Delete a queue, and call `done` then. One whose node is down stays, which costs a channel."""
        self._removals.append(Removal(m.QueueDelete(queue), done))
        self._send_removals()

    def _removed(self) -> None:
        self._removing -= 1
        self._send_removals()

    def _send_removals(self) -> None:
        while self._removals and self._removing < REMOVING_MAX:
            self._removing += 1
            self._check(self._removals.popleft())

    def _check(self, what: Check) -> None:
        self._checks.append(what)
        self._look(what)

    def _look(self, what: Check) -> None:
        """On a channel that is not open yet this is done when it is."""
        if isinstance(what, Consumer):
            method: m.Method = m.QueueDeclare(what.target.queue, passive=True)
        elif isinstance(what, Returning):
            method = m.QueueDeclare(what.queue, passive=True)
        else:
            method = what.method if isinstance(what, Removal) else what
        self._broker.machine.send_method(self._checking, method)
        self._broker.wake()

    def _declare(self, consumer: Consumer) -> None:
        target = consumer.target
        target.fresh = False

        keys = dict.fromkeys([*target.keys, *target.unbound])
        declare = m.QueueDeclare(target.queue, durable=True, arguments=target.arguments)
        bound = bool(keys or self._direct)
        self._broker.ask(declare, None if bound else partial(self._consume, consumer))
        if self._direct:
            self._broker.ask(m.QueueBind(target.queue, self._direct, target.queue))
        self._bind(consumer, keys)
        if bound:
            self._broker.ask(m.QueueDeclare(target.queue, passive=True), partial(self._consume, consumer))

    def bind(self, target: Target, key: str) -> None:
        """Its queue is to get what has such keys, or no longer; if it is not known yet whether that is there,
        when it is."""
        consumer = self._consumers.get(target)
        if consumer is not None and consumer not in self._checks and consumer not in self._lacking:
            self._bind(consumer, [key])

    def _bind(self, consumer: Consumer, keys: Iterable[str]) -> None:
        target = consumer.target
        for key in keys:
            on, done = target.unbound.get(key, (True, _nobody))
            self._broker.ask(_binding(target, self._exchange, key, on), _answered(target, key, done))

    def _consume(self, consumer: Consumer) -> None:
        if consumer.ending:
            self._over(consumer)
            return
        self._turn = (self._turn + 1) % len(self._channels)
        consumer.channel = self._channels[self._turn]
        consumer.asked = True
        if consumer.target.prefetch:
            self._consume_on(consumer)
        else:
            consumer.name = ""

    def _consume_on(self, consumer: Consumer) -> None:
        """Consume on the channel that it has."""
        channel, target = consumer.channel, consumer.target
        self._by_name[channel, encode_short_string(consumer.name)] = consumer
        consumer.names.add(consumer.name)
        self._beginning[channel, consumer.name] = False
        self._ask(channel, m.BasicQos(prefetch_count=target.prefetch))
        self._ask(channel, m.BasicConsume(target.queue, consumer.name))

    def _cancel(self, consumer: Consumer) -> None:
        """What its queue has is not wanted any more under the name that it has now, if it has one."""
        channel, name = consumer.channel, consumer.name
        consumer.name = ""
        if (channel, name) in self._beginning:
            self._beginning[channel, name] = True
        elif name:
            self._ask(channel, m.BasicCancel(name))

    def _cancelled(self, channel: int, name: str) -> None:
        """The queue has heard of it: nothing comes under that name any more."""
        consumer = self._by_name.pop((channel, encode_short_string(name)), None)
        if consumer is not None:
            consumer.names.discard(name)
            if consumer.ending:
                self._free(consumer, name)

    def _ask(self, channel: int, method: m.Method) -> None:
        self._broker.machine.send_method(channel, method)
        self._broker.wake()

    def _free(self, consumer: Consumer, name: str) -> None:
        """It gives back what it has, if nothing can come any more but by that name, what is late."""
        if consumer.names:
            return
        unsettled = consumer.drain()
        consumer.given_back = list(unsettled.values())
        if unsettled:
            consumer.names.add(name)
            self._by_name[consumer.channel, encode_short_string(name)] = consumer
            consumer.returning = Returning(consumer, list(unsettled), clock.now())
            self._check(consumer.returning)
        else:
            self._over(consumer)

    def _return(self, returning: Returning, count: int) -> None:
        """A queue has so many messages that nobody holds."""
        if self._closed:
            return
        now = clock.now()
        if count != returning.count:
            returning.count, returning.looks, returning.since = count, 0, now
        returning.looks += 1
        returning.looks_since += 1
        vain = returning.looks > LOOKS_MAX and now - returning.since > RETURN_SECS_MAX
        if (count >= returning.wanted and returning.looks_since >= LOOKS_MIN) or vain:
            some = len(returning.tags) if vain else RETURNED_MAX
            tags, returning.tags = returning.tags[:some], returning.tags[some:]
            self.give_back(returning.consumer.channel, tags)
            if vain or not tags:
                self._over(returning.consumer)
                return
            returning.wanted = min(count + len(tags), _room_of(returning.consumer.target))
            returning.looks_since = 0
        self._check(returning)

    def _over(self, consumer: Consumer) -> None:
        for name in consumer.names:
            self._by_name.pop((consumer.channel, encode_short_string(name)), None)
            if (consumer.channel, name) in self._beginning:
                self._beginning[consumer.channel, name] = True
        if self._consumers.get(consumer.target) is consumer:
            del self._consumers[consumer.target]
            consumer.over()

    def _cancelled_by_broker(self, channel: int, name: str) -> None:
        """The queue is gone, or has another home: it is looked for again."""
        self._beginning.pop((channel, name), None)
        consumer = self._by_name.pop((channel, encode_short_string(name)), None)
        if consumer is None:
            return
        consumer.drain()
        target = consumer.target
        self._over(consumer)
        if not consumer.ending and target.is_wanted:
            log.warning("consumer cancelled by cluster, restarting", queue=target.queue)
            self.begin(target)

    # Messages.

    def delivered(self, channel: int, name: bytes, tag: int, redelivered: bool, content: Content) -> None:
        """A message has come."""
        consumer = self._by_name.get((channel, name))
        if consumer is None:
            self.give_back(channel, [tag])
            return
        if consumer.returning is not None:
            consumer.returning.tags.append(tag)
            consumer.given_back.append(content)
            return
        consumer.take(tag, content)
        if not consumer.ending:
            consumer.target.deliver(consumer, tag, redelivered, content)

    def acknowledge(self, channel: int, tag: int) -> None:
        """A message has been dealt with."""
        if self._live and not self._closed:
            self._acks.append((channel, tag))
            self._broker.wake()

    def give_back(self, channel: int, tags: list[int]) -> None:
        """Somebody else is to have these."""
        if self._live and tags and not self._closed:
            self.flush()
            for tag in tags:
                self._broker.machine.nack(channel, tag, requeue=True)
            self._broker.wake()

    def flush(self) -> None:
        """Encode the acknowledgements that have gathered."""
        acks, self._acks = self._acks, []
        for channel, tag in acks:
            self._broker.machine.ack(channel, tag)


def _room_of(target: Target) -> int:
    """How many messages its queue may have: of more it loses some."""
    value = dict(target.arguments).get("x-max-length")
    return value.value if value is not None and isinstance(value.value, int) else sys.maxsize


def _both(first: Freed | None, second: Freed | None) -> Freed | None:
    """One after the other, as far as they are there."""
    if first is None or second is None:
        return first or second

    def call(given_back: Sequence[Content]) -> None:
        first(given_back)
        second(given_back)

    return call


def _nobody() -> None:
    """Nobody waits for it."""


def _binding(target: Target, exchange: str, key: str, on: bool) -> m.Method:
    return m.QueueBind(target.queue, exchange, key) if on else m.QueueUnbind(target.queue, exchange, key)


def _answered(target: Target, key: str, done: Done) -> Done:
    def call() -> None:
        if target.unbound.get(key, (True, None))[1] is done:
            del target.unbound[key]
        done()

    return call
