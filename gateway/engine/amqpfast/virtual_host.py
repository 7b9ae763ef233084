"""A virtual host of AMQP/Fast at a replica: names as the embedded broker has them, and destinations on the
cluster.

What is named is asked for there, and whoever named it waits for the answer (Pending). What a replica knows
of names is what its own clients have used, and the configuration: a name that is a beginning means those.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import structlog

from gateway import clock
from gateway.broker.amqpfast.destinations import FastQueue, Interest, Subscription
from gateway.broker.amqpfast.virtual_host import ANOTHER_USERS, TEMPORARY, FastHost, Named, Refused
from gateway.engine.amqpfast.destinations import ELSEWHERE, EngineQueue, EngineSubscription
from gateway.engine.amqpfast.looking import Looking, Seen
from gateway.engine.amqpfast.names import (
    MARK,
    QUEUE_MARK,
    TOPIC_OCTETS_MAX,
    binding_key,
    current_mark,
    digest,
    subscription_mark,
    temporary_mark,
    topic_key,
)
from gateway.engine.amqpfast.session import FastEngineSession
from gateway.engine.amqpfast.storage import ClusterStorage, Failure
from gateway.model.address import Address
from gateway.model.batch import Sink, SubBatch
from gateway.model.caches import make_room
from gateway.model.message import Message
from gateway.model.outcome import ACCEPTED, Outcome, Reason, Verdict
from gateway.model.pending import Awaited, Pending
from gateway.model.properties import Headers
from gateway.protocols.amqp091 import methods as m
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqp091.spec import ReplyCode as ClusterCode
from gateway.protocols.amqpfast.spec import ReplyCode

log = structlog.get_logger(limited=True)

FOREIGN_MAX: Final = 1_000  # temporary queues of others that are remembered
MAKING_MAX: Final = 1_000  # temporary queues that are asked for and that nobody has heard of again
SEEN_MAX: Final = 16  # queues of which is remembered what was seen, for
SEEN_SECS: Final = 60.0
EXPIRES: Final = "'x-expires'"  # what a temporary queue says otherwise than one that stays
CODES: Final[dict[int, ReplyCode]] = {
    ClusterCode.ACCESS_REFUSED: ReplyCode.ACCESS_REFUSED,
    ClusterCode.NOT_FOUND: ReplyCode.DESTINATION_NOT_FOUND,
}
NAME_TOO_LONG: Final = Outcome(
    Verdict.REJECTED, Reason.NAME_INVALID, f"on the cluster a topic has {TOPIC_OCTETS_MAX} octets at most"
)


class TopicSink:
    """The sink of every topic of a virtual host."""

    def __init__(self, engine: FastEngineSession, host: str, addresses_max: int) -> None:
        self._engine = engine
        self._host = host
        self._addresses: dict[str, Address] = {}
        self._addresses_max = addresses_max

    def publish(self, part: SubBatch) -> None:
        """To the cluster with them."""
        part_messages = part.messages
        long = [
            at for at, one in enumerate(part_messages) if len(one.address.name.encode()) > TOPIC_OCTETS_MAX
        ]
        if long:
            part.settle_at(long, NAME_TOO_LONG)
            return self._publish_others(part, set(long))
        self._engine.send(part, part_messages, self._address_of)
        return None

    def _publish_others(self, part: SubBatch, long: set[int]) -> None:
        others = SubBatch(part.batch, part.recipient)
        kept = [at for at in range(len(part.messages)) if at not in long]
        others.messages = [part.messages[at] for at in kept]
        others.slots = [part.slots[at] for at in kept]
        if kept:
            self._engine.send(others, others.messages, self._address_of)

    def _address_of(self, message: Message) -> Address:
        name = message.address.name
        found = self._addresses.get(name)
        if found is None:
            make_room(self._addresses, self._addresses_max)
            found = self._addresses[name] = amqp_address(self._engine.exchange, topic_key(self._host, name))
        return found


class Lookup:
    """Lookup of a durable subscription at the cluster: whether its queue exists, and its owner."""

    def __init__(self, engine: FastEngineSession, queue: str, user: str | None, arguments: Headers) -> None:
        """`arguments`: with a mark of `user`, None: it does not matter whose the queue is."""
        self.there: bool | None = None
        self.owned = user is None
        self._engine = engine
        self._queue = queue
        self._user = user
        self._arguments = arguments

    async def wait(self) -> None:
        """Find out. Whose it is the cluster says when other arguments are declared."""
        code, _ = await self._engine.answer(m.QueueDeclare(self._queue, passive=True))
        if not code and self._user is not None:
            declare = m.QueueDeclare(self._queue, durable=True, arguments=self._arguments)
            code, text = await self._engine.answer(declare)
            if code:
                self.owned = current_mark(text).partition(".")[0] == digest(self._user)
                self.there = True
                return
            self._engine.ask(m.QueueDelete(self._queue))  # it was gone meanwhile, and this one is nobody's
            code = ClusterCode.NOT_FOUND
        self.there = not code


class EngineFastHost(FastHost):
    """The destinations of one name, over the cluster."""

    def __init__(
        self, name: str, changed: Callable[[], None], *, engine: FastEngineSession, **options: Any
    ) -> None:
        """`options` are those of FastHost."""
        self.engine = engine
        self._topics = TopicSink(engine, name, engine.limits.cache_entries_max)
        self._foreign: dict[EngineQueue, None] = {}  # temporary queues of clients elsewhere
        self._making: dict[object, EngineQueue] = {}  # temporary queues, by the channel that asks for them
        self._looking: dict[object, Looking] = {}  # by handle
        self._seen: dict[EngineQueue, float] = {}  # queues of which is remembered what was seen, and when
        self._looked_up: dict[tuple[str | None, str, str], Lookup] = {}  # by user: subscriptions asked for
        super().__init__(name, changed, **options)

    # Routing.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """The queue, or the cluster's topics."""
        if address.scope == "topic":
            return (self._topics,)
        queue = self.queues.get(address.name)
        if isinstance(queue, EngineQueue) and queue.cluster.failure is not None:
            self._forget(queue)
        return super().sinks(address)

    def nobody_at(self, scope: str) -> bool:
        """Nobody knows who subscribes elsewhere."""
        return False

    # Queues.

    def find(
        self,
        service: str,
        name: str,
        *,
        whole: bool,
        slashes: bool = False,
        creates: bool = True,
        maker: str | None = None,
    ) -> list[Named]:
        """As there, when the cluster has it; Pending before."""
        if service == "topic" and len(name.encode()) > TOPIC_OCTETS_MAX:
            raise Refused(ReplyCode.BAD_FIELD_VALUE, f"dest-name: {NAME_TOO_LONG.text}")
        found = super().find(service, name, whole=whole, slashes=slashes, creates=creates, maker=maker)
        for one in found:
            if isinstance(one, EngineQueue):
                self._wait_for(one)
        return found

    def _may_begin(self, name: str) -> bool:
        """What else there is on the cluster is not known here, so a name must not mean one thing at one
        replica and another at the next: only one that by custom is a beginning stands for others."""
        return not self.auto_create or self._begins(name)

    def _wait_for(self, queue: EngineQueue) -> None:
        failure = queue.cluster.failure
        if failure is not None:
            self._forget(queue)
            raise _refused(failure)
        if not queue.cluster.there:
            raise Pending(queue.cluster)

    def _new_queue(self, name: str, owner: str | None, maker: str | None) -> FastQueue:
        cluster = self.engine.names.queue(self.name, name)
        mark = QUEUE_MARK if owner is None else temporary_mark(owner)

        def storage(queue: EngineQueue) -> ClusterStorage:
            return ClusterStorage(
                self.engine,
                queue,
                _anything,
                cluster,
                amqp_address(self.engine.direct, cluster),
                self.engine.arguments(
                    mark,
                    messages_max=self._queue_limits["messages_max"],
                    octets_max=self._queue_limits["octets_max"],
                    drops=False,
                    ends=owner is not None,
                ),
                missing=partial(self._missing, queue),
            )

        made = EngineQueue(name, self._queue_limits, storage, owner, maker)
        if owner is None and name.startswith(TEMPORARY):
            self.engine.question(m.QueueDeclare(cluster, passive=True), partial(self._found_temporary, made))
        else:
            made.cluster.declare(partial(self._heard, made))
        return made

    def _found_temporary(self, queue: EngineQueue, code: int, text: str) -> None:
        """What a server has named is there, or has been."""
        if code:
            queue.cluster.fail(code, text)
        else:
            self._is_foreign(queue)

    def _heard(self, queue: EngineQueue, code: int, text: str) -> None:
        """The cluster has made a queue, or says what is there."""
        storage, temporary = queue.cluster, queue.owner is not None
        if not code and temporary and not queue.name.startswith(TEMPORARY):
            self.engine.question(m.QueuePurge(storage.queue), lambda code, text: storage.found(ends=True))
        elif not code:
            storage.found(ends=temporary)
        elif code != ClusterCode.PRECONDITION_FAILED:
            storage.fail(code, text)
        elif temporary and current_mark(text) == "" and MARK not in text and EXPIRES not in text:
            storage.found(ends=True)  # it is the same, with limits of another time
        elif temporary:
            storage.fail(ClusterCode.ACCESS_REFUSED, f"queue {queue.name!r} belongs to somebody else")
        elif EXPIRES in text or current_mark(text).startswith("temporary."):
            self._is_foreign(queue)
        else:
            log.info("a queue of the cluster has other limits", queue=storage.queue, why=text)
            storage.found(ends=False)

    def _is_foreign(self, queue: EngineQueue) -> None:
        """It is temporary, and of a client elsewhere: it can be sent to."""
        queue.owner = ELSEWHERE
        self._foreign[queue] = None
        while len(self._foreign) > FOREIGN_MAX:
            self._forget(next(iter(self._foreign)))
        queue.cluster.found(ends=False, consumed=False)

    def _forget(self, queue: EngineQueue) -> None:
        """It is not known here any more."""
        self._foreign.pop(queue, None)
        if self.queues.get(queue.name) is queue:
            del self.queues[queue.name]
            self._uncount("queue", queue)
            self._changed()

    def _missing(self, queue: EngineQueue) -> None:
        """A message came back: the queue is gone."""
        if queue.owner is not None:
            self._forget(queue)
        elif queue.cluster.there and not queue.deleted:
            log.warning("a queue is not there any more, it is declared", queue=queue.cluster.queue)
            queue.cluster.lack()
            queue.cluster.declare(partial(self._heard, queue))

    def check_selecting(self) -> None:
        """What one consumer does not want would stay in front of all others."""
        text = "a queue of the cluster has no selectors"
        raise Refused(ReplyCode.NOT_IMPLEMENTED, text)

    def look(self, asker: object, queues: list[FastQueue]) -> None:
        """What waits in these; Pending until they have been looked at."""
        looking = self._looking.pop(asker, None)
        if looking is None:
            looking = Looking(len(queues))
            for queue in queues:
                assert isinstance(queue, EngineQueue)
                self.engine.look(queue.cluster.queue, partial(self._see, queue, looking))
        if not looking.over:
            make_room(self._looking, MAKING_MAX)
            self._looking[asker] = looking
            raise Pending(looking)

    def _see(self, queue: EngineQueue, looking: Looking, seen: Seen) -> None:
        self._seen.pop(queue, None)
        queue.seen = seen
        self._seen[queue] = clock.now()
        while len(self._seen) > SEEN_MAX:
            self._unsee(next(iter(self._seen)))
        looking.one_less()

    def sweep(self, now: float) -> None:
        """What was seen some time ago is forgotten."""
        for queue, at in list(self._seen.items()):
            if now - at >= SEEN_SECS:
                self._unsee(queue)

    def _unsee(self, queue: EngineQueue) -> None:
        del self._seen[queue]
        queue.seen = {}

    # Temporary destinations.

    def create_temporary(
        self,
        service: str,
        name: str,
        client: str,
        channel: object,
        *,
        slashes: bool = False,
        maker: str | None = None,
    ) -> Named:
        """As there, when the cluster has it; Pending before."""
        making = self._making.pop(channel, None)
        if making is None:
            made = super().create_temporary(
                service,
                name or TEMPORARY + secrets.token_hex(8),
                client,
                channel,
                slashes=slashes,
                maker=maker,
            )
            if not isinstance(made, EngineQueue):
                return made
            making = made
        if not making.cluster.there and making.cluster.failure is None:
            make_room(self._making, MAKING_MAX)
            self._making[channel] = making
        self._wait_for(making)
        return making

    def channel_gone(self, channel: object) -> None:
        """The temporary destinations of a channel end with it."""
        self._making.pop(channel, None)
        super().channel_gone(channel)

    def is_prefix(self, name: str, *, whole: bool, slashes: bool = False, maker: str | None = None) -> bool:
        """As there. What the server of another replica has named is somebody's temporary topic."""
        if name.startswith(TEMPORARY):
            topic = self.topics.get(name)
            if topic is None or topic.owner is None:
                raise Refused(ReplyCode.ACCESS_REFUSED, f"topic {name!r} belongs to somebody else")
        return super().is_prefix(name, whole=whole, slashes=slashes, maker=maker)

    # Subscriptions.

    def subscribe(
        self, interest: Interest, key: tuple[str, str] | None = None, maker: str | None = None
    ) -> Subscription:
        """As there. A durable one may be on the cluster already; if it is for something else it is made anew.
        Whoever asks waits until it is there (`awaited`)."""
        before = None if key is None else self.durable.get(key)
        if isinstance(before, EngineSubscription) and before.cluster.failure is not None:
            self._withdraw(before)
        return super().subscribe(interest, key, maker)

    def _new_subscription(
        self, interest: Interest, key: tuple[str, str] | None, maker: str | None
    ) -> Subscription:
        made = self._subscription(interest, key, maker)
        made.cluster.declare(partial(self._heard_subscription, made))
        return made

    def _subscription(
        self, interest: Interest, key: tuple[str, str] | None, maker: str | None
    ) -> EngineSubscription:
        names = self.engine.names
        cluster = names.listener(secrets.token_hex(8)) if key is None else names.subscription(self.name, *key)

        def storage(subscription: EngineSubscription) -> ClusterStorage:
            return ClusterStorage(
                self.engine,
                subscription,
                subscription.wants,
                cluster,
                amqp_address(self.engine.direct, cluster),
                self.engine.arguments(
                    subscription_mark(maker or "", interest.said),
                    messages_max=self._queue_limits["messages_max"],
                    octets_max=self._queue_limits["octets_max"],
                    drops=True,
                    ends=key is None,
                ),
                (binding_key(self.name, interest.name, prefix=interest.prefix),),
                missing=_nothing,
            )

        return EngineSubscription(interest, self._queue_limits, storage, key, maker)

    def _heard_subscription(self, made: EngineSubscription, code: int, text: str) -> None:
        """The cluster has the queue of a subscription, or says what is there."""
        storage = made.cluster
        if code == ClusterCode.PRECONDITION_FAILED and MARK in text:
            owner, _, _ = current_mark(text).partition(".")
            if owner == digest(made.maker or ""):  # it was for something else
                self.engine.ask(m.QueueDelete(storage.queue))
                storage.declare(partial(self._heard_subscription, made))
            else:
                storage.fail(ClusterCode.ACCESS_REFUSED, ANOTHER_USERS)
        elif code and code != ClusterCode.PRECONDITION_FAILED:
            storage.fail(code, text)
        else:
            storage.bind(partial(self._bound, made))

    @staticmethod
    def _bound(made: EngineSubscription, code: int, text: str) -> None:
        if code:
            made.cluster.fail(code, text)
        else:
            made.cluster.found(ends=made.key is None)

    def awaited(self, subscription: Subscription) -> Awaited | None:
        """It is one when its queue gets what it is for."""
        assert isinstance(subscription, EngineSubscription)
        return None if subscription.cluster.there else subscription.cluster

    def outcome_of(self, subscription: Subscription) -> Outcome:
        """Whether the cluster has it."""
        assert isinstance(subscription, EngineSubscription)
        failure = subscription.cluster.failure
        if failure is None:
            return ACCEPTED
        refused = failure.code == ClusterCode.ACCESS_REFUSED
        reason = Reason.NOT_AUTHORIZED if refused else Reason.TARGET_DOWN
        return Outcome(Verdict.REJECTED, reason, failure.text)

    def find_durable(self, key: tuple[str, str], user: str | None = None) -> Subscription | None:
        """As there, also of one that is known to the cluster alone. Raises Pending."""
        known = self.known_durable(key, user)
        if known is not None:
            return known
        unknown = self._subscription(Interest("", prefix=False), key, user)
        asked = (user, *key)
        lookup = self._looked_up.pop(asked, None)
        if lookup is None or lookup.there is None:
            make_room(self._looked_up, MAKING_MAX)
            lookup = Lookup(self.engine, unknown.cluster.queue, user, unknown.cluster.arguments)
            self._looked_up[asked] = lookup
            raise Pending(lookup)
        if lookup.there and not lookup.owned:
            raise Refused(ReplyCode.ACCESS_REFUSED, ANOTHER_USERS)
        return unknown if lookup.there else None

    def client_gone(self, client: str) -> None:
        """A client has left: what it has at the cluster, it may go on with elsewhere."""
        for key, found in list(self.durable.items()):
            if key[0] == client:
                self._withdraw(found)
                assert isinstance(found, EngineSubscription)
                self.engine.let_go(found.cluster)


def _refused(failure: Failure) -> Refused:
    return Refused(CODES.get(failure.code, ReplyCode.TEMPORARILY_FORBIDDEN), failure.text)


def _anything(message: Message) -> bool:
    return True


def _nothing() -> None:
    """A subscription is never published to."""
