"""Virtual hosts of AMQP/Fast: destinations by service and name, and the meaning of names (3.5.2.3).

A name stands for the destination of that name. If a command adds nothing to the name of its handle, a name
without a destination stands for all destinations whose names begin with it. If there is neither,
`auto_create` creates a queue or topic. A name that is empty or ends in a dot is never created: by convention
it is a prefix, which for topics includes future ones. Names are plain texts in which dots have no other
meaning.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Final, TypedDict

import structlog

from gateway.broker.amqpfast.definitions import QUEUE, SUBSCRIPTION, TOPIC, FastDefinitions
from gateway.broker.amqpfast.destinations import FastQueue, Interest, Topic, TopicSubscription
from gateway.broker.pressure import FullQueues
from gateway.broker.scheduler import CallScheduler
from gateway.broker.selection_work import UNBOUNDED, SelectionWork
from gateway.broker.shares import Shares, share_of, text_bytes
from gateway.errors import GatewayError
from gateway.model.address import Address
from gateway.model.batch import Sink, SubBatch
from gateway.model.message import Message
from gateway.model.outcome import Outcome, Reason, Verdict
from gateway.model.shares import ROUTES, UserShares
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.amqpfast.spec import SHORT_STRING_MAX, ReplyCode
from gateway.settings.limits import Limits
from gateway.store.recovery import contain_failure

# 3.5.2.3: names hold no `/ # &`; and nothing that a person could not see.
log = structlog.get_logger(limited=True)
INVALID: Final = re.compile(r"[/#&\x00-\x20\x7f]")
INVALID_BUT_SLASH: Final = re.compile(r"[#&\x00-\x20\x7f]")
TEMPORARY: Final = "tmp-"
ANOTHER_USERS: Final = "the durable subscription belongs to another user"
NOWHERE: Final = Outcome(
    Verdict.REJECTED, Reason.NO_ROUTE, "no such destination, and the user may not create it"
)

NamedDestination = FastQueue | Topic


class QueueLimits(TypedDict):
    """Keyword arguments of queues and subscriptions that limit their content."""

    messages_max: int
    bytes_max: int
    full_queues: FullQueues
    work: SelectionWork
    alarms: CallScheduler


class FastRefused(GatewayError):
    """Refusal of a client's request for a destination; the reply closes the handle."""

    def __init__(self, code: ReplyCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class MissingDestination:
    """End of a route whose target destination does not exist. It refuses all messages."""

    def publish(self, sub_batch: SubBatch) -> None:
        """Refuse the messages with the reason that there is no route."""
        sub_batch.settle(NOWHERE)


class FastHost:
    """Destinations of one AMQP/Fast virtual host: queues, topics, subscriptions and peers."""

    def __init__(
        self,
        name: str,
        changed: Callable[[], None],
        *,
        queues: Iterable[str] = (),
        topics: Iterable[str] = (),
        peers: Iterable[str] = (),
        auto_create: bool = True,
        limits: Limits | None = None,
        definitions: FastDefinitions | None = None,
        full_queues: FullQueues | None = None,
        definition_shares: UserShares | None = None,
        work: SelectionWork = UNBOUNDED,
        alarms: CallScheduler | None = None,
    ) -> None:
        """Create the virtual host with its declared and its stored destinations.

        `changed` is called when routing may have changed. `queues`, `topics` and `peers` are the declared
        names, and `definitions` has the stored records. `full_queues` is shared by the queues of all hosts.
        `definition_shares` counts the bytes of what clients create. `work` limits the time of selectors.
        """
        self.name = name
        self.auto_create = auto_create
        self.queues: dict[str, FastQueue] = {}
        self.topics: dict[str, Topic] = {}
        self.peers = tuple(peers)
        self.durable: dict[tuple[str, str], TopicSubscription] = {}  # by client and identifier
        self._changed = changed
        limits = Limits() if limits is None else limits
        self._most = {
            "queue": limits.queues_max,
            "topic": limits.topics_max,
            "session": limits.sessions_max,
        }
        self._per_user = {
            "queue": share_of(limits.queues_max, limits.queues_per_user_max),
            "topic": share_of(limits.topics_max, limits.queues_per_user_max),
            "session": share_of(limits.sessions_max, limits.sessions_per_user_max),
        }
        self.shares = UserShares("definitions") if definition_shares is None else definition_shares
        self._made = {"queue": Shares(), "topic": Shares(), "session": Shares()}  # by user
        self._queue_limits = QueueLimits(
            messages_max=limits.queue_messages_max,
            bytes_max=limits.queue_bytes_max,
            full_queues=FullQueues() if full_queues is None else full_queues,
            work=work,
            alarms=CallScheduler() if alarms is None else alarms,
        )
        self._definitions = definitions
        self._exact: dict[str, dict[TopicSubscription, None]] = {}
        self._prefixes: dict[TopicSubscription, None] = {}
        self._nowhere = MissingDestination()
        if definitions is not None:
            self._restore(definitions, set(queues), set(topics))
        for one in queues:
            if one not in self.queues:
                self._add_queue(one)
        for one in topics:
            if one not in self.topics:
                self._add_topic(one)

    def _restore(self, definitions: FastDefinitions, queues: set[str], topics: set[str]) -> None:
        """Restore the queues, topics and durable subscriptions that an earlier process stored."""
        for name, maker in definitions.names(QUEUE):
            with contain_failure(QUEUE, name):
                queue = FastQueue(name, durable=True, maker=maker, **self._queue_limits)
                definitions.persist(queue, QUEUE, name)
                if self.auto_create or name in queues or len(queue):
                    self.queues[name] = queue
                    self._count("queue", queue)
                else:
                    definitions.remove(QUEUE, name)
                    queue.delete()
        for name, maker in definitions.names(TOPIC):
            if self.auto_create or name in topics:
                topic = self.topics[name] = Topic(name, maker=maker)
                self._count("topic", topic)
            else:
                definitions.remove(TOPIC, name)
        for client, identifier, interest, maker in definitions.subscriptions():
            with contain_failure(SUBSCRIPTION, (client, identifier)):
                found = TopicSubscription(
                    interest, key=(client, identifier), maker=maker, **self._queue_limits
                )
                definitions.persist(found, SUBSCRIPTION, client, identifier)
                self.durable[client, identifier] = found
                self._count("session", found)
                self._add_subscription(found)

    def note_untouched(self) -> None:
        """Record at the end of the process which stored messages were never delivered.

        The next process does not mark them as redelivered.
        """
        if self._definitions is not None:
            for queue in self.queues.values():
                self._definitions.note_untouched(queue, QUEUE, queue.name)
            for key, subscription in self.durable.items():
                self._definitions.note_untouched(subscription, SUBSCRIPTION, *key)

    # Routing: the interface for the dispatcher.

    def sinks(self, address: Address) -> tuple[Sink, ...]:
        """Return the destinations (sinks) for an address: its queue (created if missing) or subscriptions."""
        name = address.name
        if address.scope == "topic":
            found = dict(self._exact.get(name, ()))
            for one in self._prefixes:
                if one.interest.covers(name):
                    found[one] = None
            return tuple(found)
        queue = self.queues.get(name) if address.scope == "queue" else None
        if queue is None and address.scope == "queue":
            try:
                made = self._create("queue", name, INVALID, ROUTES)
            except FastRefused as error:
                log.warning("queue for route not created", queue=name, reason=str(error))
                made = None
            queue = made if isinstance(made, FastQueue) else None
        return (self._nowhere,) if queue is None else (queue,)

    def has_no_receivers(self, scope: str) -> bool:
        """Return True if the scope is "topic" and there are no subscriptions at all."""
        return scope == "topic" and not self._exact and not self._prefixes

    def choose(self, message: Message) -> tuple[Sink, ...]:
        """Return the destinations (sinks) of a message, which its address alone determines."""
        return self.sinks(message.address)

    @property
    def retained(self) -> None:
        """Destination of retained messages: None, because AMQP/Fast retains nothing.

        The header that marks retained messages is passed on.
        """

    # Names.

    def find(
        self,
        service: str,
        name: str,
        *,
        whole: bool,
        slashes: bool = False,
        creates: bool = True,
        maker: str | None = None,
    ) -> list[NamedDestination]:
        """Return the destinations of a name in a command that sends, consumes or queries.

        `service` is "queue" or "topic". With `whole`, a name that no destination has stands for all
        destinations whose names begin with it. `slashes` allows a new name to contain "/". With `creates`, a
        missing destination is created where that is allowed, for the user `maker`. Raises FastRefused with
        404, 502 or 506.
        """
        destinations: dict[str, FastQueue] | dict[str, Topic] = (
            self.queues if service == "queue" else self.topics
        )
        found = destinations.get(name)
        if found is not None:
            return [found]
        if whole and self._may_begin(name):
            several = [one for key, one in destinations.items() if key.startswith(name)]
            if several:
                return several
        invalid = INVALID_BUT_SLASH if slashes else INVALID
        made = self._create(service, name, invalid, maker) if creates else None
        if made is None:
            raise FastRefused(ReplyCode.DESTINATION_NOT_FOUND, f"no {service} {name!r}")
        return [made]

    def means_several(self, service: str, name: str) -> bool:
        """Return True if `name` stands for all destinations whose names begin with it.

        That is so if no destination has exactly this name, and it is allowed as a prefix.
        """
        destinations: dict[str, FastQueue] | dict[str, Topic] = (
            self.queues if service == "queue" else self.topics
        )
        return name not in destinations and (
            self._begins(name)
            or (self._may_begin(name) and any(one.startswith(name) for one in destinations))
        )

    def would_create(self, service: str, name: str) -> bool:
        """Return True if a command with this name would create a destination."""
        destinations: dict[str, FastQueue] | dict[str, Topic] = (
            self.queues if service == "queue" else self.topics
        )
        return self.auto_create and name not in destinations and not self._begins(name)

    def check_open(self, service: str, name: str, *, slashes: bool = False, maker: str | None = None) -> None:
        """Check that a handle may be opened for this name, and create its destination if that is allowed.

        `slashes` and `maker` are as in `find`, and so are the errors.
        """
        if service == "peer":
            self.find_peers(name, whole=True)
        elif name.startswith(AMQPFAST.return_prefix):
            return  # there is no such destination, but it can be sent to
        elif not (self.auto_create and self._begins(name)):
            self.find(service, name, whole=True, slashes=slashes, maker=maker)

    def find_peers(self, name: str, *, whole: bool) -> list[str]:
        """Return the peers with this name or, if `whole` allows prefixes, whose names begin with it.

        Raises FastRefused with 404 if there are none.
        """
        if name in self.peers:
            return [name]
        found = [one for one in self.peers if one.startswith(name)] if whole else []
        if not found:
            raise FastRefused(ReplyCode.DESTINATION_NOT_FOUND, f"no peer {name!r}")
        return found

    def _may_begin(self, name: str) -> bool:
        """Return True if a name without a destination may be used as a prefix of existing names.

        Always True in this class.
        """
        return True

    @staticmethod
    def _begins(name: str) -> bool:
        return not name or name.endswith(".")

    def _create(
        self, service: str, name: str, invalid: re.Pattern[str], maker: str | None = None
    ) -> NamedDestination | None:
        if not self.auto_create or self._begins(name):
            return None
        self._check_name(name, invalid)
        if service == "queue":
            return self._add_queue(name, maker=maker)
        return self._add_topic(name, maker=maker)

    @staticmethod
    def _check_name(name: str, invalid: re.Pattern[str]) -> None:
        if invalid.search(name):
            raise FastRefused(
                ReplyCode.BAD_FIELD_VALUE,
                f"dest-name: {name!r} contains a character that is not allowed in a name",
            )
        if name.startswith(AMQPFAST.return_prefix):
            raise FastRefused(
                ReplyCode.ACCESS_REFUSED, f"dest-name: {name!r} is reserved for return addresses"
            )
        if len(name.encode()) > SHORT_STRING_MAX:
            text = f"dest-name: more than {SHORT_STRING_MAX} bytes"
            raise FastRefused(ReplyCode.BAD_FIELD_VALUE, text)

    def _check_room(
        self,
        service: str,
        count: int,
        maker: str | None,
        byte_count: int,
        replaced: TopicSubscription | None = None,
    ) -> None:
        """Check the limits of the host and of the user `maker` before a definition is added.

        `count` is the number of existing definitions of this kind, and `byte_count` the size of the new one.
        A durable subscription that it replaces is not counted. Raises FastRefused with 506 at a limit.
        """
        own = 0
        if replaced is not None:
            count -= 1
            if replaced.maker == maker:
                own = 1
                byte_count -= _defined_bytes(replaced)
        if count >= self._most[service]:
            text = f"limits.{service}s_max ({self._most[service]}) is reached"
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, text)
        if maker is not None and self._made[service][maker] - own >= self._per_user[service]:
            limit = "sessions_per_user_max" if service == "session" else "queues_per_user_max"
            text = f"limits.{limit} ({self._per_user[service]}) is reached"
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, text)
        if maker is not None and (reached := self.shares.refuse_if_full(maker, byte_count)):
            raise FastRefused(ReplyCode.INSUFFICIENT_RESOURCES, f"{reached} is reached")

    def _count(self, service: str, made: NamedDestination | TopicSubscription) -> None:
        """Count a new destination or subscription for the user who created it."""
        if made.maker is not None:
            self._made[service].add(made.maker)
            self.shares.add(made.maker, _defined_bytes(made))

    def _uncount(self, service: str, made: NamedDestination | TopicSubscription) -> None:
        """Stop counting a deleted destination or subscription for its user."""
        if made.maker is not None:
            self._made[service].remove(made.maker)
            self.shares.remove(made.maker, _defined_bytes(made))
            made.maker = None

    def _add_queue(self, name: str, owner: str | None = None, maker: str | None = None) -> FastQueue:
        self._check_room("queue", len(self.queues), maker, text_bytes(name))
        queue = self._new_queue(name, owner, maker)
        if owner is None and self._definitions is not None:
            self._definitions.add(QUEUE, name, maker)
            self._definitions.persist(queue, QUEUE, name)
        self.queues[name] = queue
        self._count("queue", queue)
        self._changed()
        return queue

    def _new_queue(self, name: str, owner: str | None, maker: str | None) -> FastQueue:
        return FastQueue(name, durable=owner is None, owner=owner, maker=maker, **self._queue_limits)

    def _new_subscription(
        self, interest: Interest, key: tuple[str, str] | None, maker: str | None
    ) -> TopicSubscription:
        return TopicSubscription(interest, key=key, maker=maker, **self._queue_limits)

    def _add_topic(self, name: str, owner: str | None = None, maker: str | None = None) -> Topic:
        self._check_room("topic", len(self.topics), maker, text_bytes(name))
        topic = self.topics[name] = Topic(name, owner, maker)
        self._count("topic", topic)
        if owner is None and self._definitions is not None:
            self._definitions.add(TOPIC, name, maker)
        self._changed()
        return topic

    def delete_queue(self, queue: FastQueue) -> int:
        """Delete a queue and its messages. Return the number of messages that were ready."""
        self.queues.pop(queue.name, None)
        self._uncount("queue", queue)
        if queue.owner is None and self._definitions is not None:
            self._definitions.remove(QUEUE, queue.name)
        self._changed()
        return queue.delete()

    # Temporary destinations, 3.5.2.2.

    def create_temporary(
        self,
        service: str,
        name: str,
        client: str,
        channel: object,
        *,
        slashes: bool = False,
        maker: str | None = None,
    ) -> NamedDestination:
        """Create a queue or topic of the client `client`, which is deleted with `channel`.

        An empty `name` is replaced by a generated one. An existing queue of the same client is emptied and
        returned. `slashes` is as in `find`. Raises FastRefused with 502 or 506, or with 403 if the name
        belongs to another client.
        """
        destinations: dict[str, FastQueue] | dict[str, Topic] = (
            self.queues if service == "queue" else self.topics
        )
        name = name or TEMPORARY + secrets.token_hex(8)
        found: NamedDestination | None = destinations.get(name)
        if found is None:
            self._check_name(name, INVALID_BUT_SLASH if slashes else INVALID)
            add = self._add_queue if service == "queue" else self._add_topic
            found = add(name, client, maker)
        elif found.owner != client:
            raise FastRefused(ReplyCode.ACCESS_REFUSED, f"{service} {name!r} belongs to another client")
        elif isinstance(found, FastQueue):
            found.purge()
        found.channel = channel
        return found

    def delete_temporary_destinations(self, channel: object) -> None:
        """Delete the temporary destinations of a closed channel."""
        for queue in [one for one in self.queues.values() if one.channel is channel]:
            del self.queues[queue.name]
            self._uncount("queue", queue)
            queue.delete()
            self._changed()
        for topic in [one for one in self.topics.values() if one.channel is channel]:
            del self.topics[topic.name]
            self._uncount("topic", topic)
            self._changed()

    # Subscriptions.

    def is_prefix(self, name: str, *, whole: bool, slashes: bool = False, maker: str | None = None) -> bool:
        """Return True if a CONSUME of this topic name means all topics with this prefix, also future ones.

        Otherwise the name means one topic, which is created if it is missing. `whole`, `slashes` and the
        errors are as in `find`.
        """
        if name in self.topics:
            return False
        if whole and (
            (self.auto_create and self._begins(name))
            or (self._may_begin(name) and any(one.startswith(name) for one in self.topics))
        ):
            return True
        self.find("topic", name, whole=False, slashes=slashes, maker=maker)
        return False

    def subscribe(
        self, interest: Interest, key: tuple[str, str] | None = None, maker: str | None = None
    ) -> TopicSubscription:
        """Return a new subscription, or the existing durable one of `key` if its interest is equal.

        `key` is (client, identifier) of a durable subscription, None for others; `maker` is the user. A
        durable subscription to the same topics with another selector is replaced. Raises FastRefused: 507 if
        the existing one is being consumed or is to other topics, so that its messages stay until it is
        cancelled; 506 at a limit.
        """
        before = self.durable.get(key) if key is not None else None
        if key is not None and before is not None:
            if before.attached:
                text = f"subscription {before.key} is in use"
                raise FastRefused(ReplyCode.TEMPORARILY_FORBIDDEN, text)
            if before.interest == interest:
                return before
            if not before.interest.is_of(interest.name, prefix=interest.prefix):
                text = (
                    f"identifier: {key[1]!r} subscribes to {before.interest.name!r}; cancel that"
                    " subscription first"
                )
                raise FastRefused(ReplyCode.TEMPORARILY_FORBIDDEN, text)
        if key is not None:
            self._check_room("session", len(self.durable), maker, _interest_bytes(interest, key), before)
        if before is not None:
            self.unsubscribe(before)
        found = self._new_subscription(interest, key, maker)
        if key is not None:
            self.durable[key] = found
            self._count("session", found)
            if self._definitions is not None:
                self._definitions.add_subscription(*key, interest, maker)
                self._definitions.persist(found, SUBSCRIPTION, *key)
        self._add_subscription(found)
        self._changed()
        return found

    def find_durable(self, key: tuple[str, str], user: str | None = None) -> TopicSubscription | None:
        """Return the durable subscription with the key (client, identifier), or None.

        Raises FastRefused with 403 if it belongs to a user other than `user`; None skips that check.
        """
        return self.known_durable(key, user)

    def known_durable(self, key: tuple[str, str], user: str | None = None) -> TopicSubscription | None:
        """Return the durable subscription with the key (client, identifier) in this process, or None.

        Raises FastRefused with 403 if the subscription belongs to a user other than `user`; None skips that
        check.
        """
        found = self.durable.get(key)
        if found is not None and user is not None and found.maker != user:
            raise FastRefused(ReplyCode.ACCESS_REFUSED, ANOTHER_USERS)
        return found

    def _add_subscription(self, found: TopicSubscription) -> None:
        if found.interest.prefix:
            self._prefixes[found] = None
        else:
            self._exact.setdefault(found.interest.name, {})[found] = None

    def unsubscribe(self, subscription: TopicSubscription) -> None:
        """Delete a subscription with all its messages."""
        self._withdraw(subscription)
        if subscription.key is not None and self._definitions is not None:
            self._definitions.remove_subscription(*subscription.key)
        self._changed()
        subscription.delete()

    def _withdraw(self, subscription: TopicSubscription) -> None:
        """Remove a subscription from the indexes of this host."""
        self._prefixes.pop(subscription, None)
        name = subscription.interest.name
        same = self._exact.get(name)
        if same is not None:
            same.pop(subscription, None)
            if not same:
                del self._exact[name]
        if subscription.key is not None and self.durable.get(subscription.key) is subscription:
            del self.durable[subscription.key]
            self._uncount("session", subscription)

    @property
    def subscriptions(self) -> list[TopicSubscription]:
        """All subscriptions, durable or not."""
        return [*self._prefixes, *(one for same in self._exact.values() for one in same)]


def _interest_bytes(interest: Interest, key: tuple[str, str]) -> int:
    return text_bytes(interest.name, interest.mime_type, *key) + 2 * len(interest.selector)


def _defined_bytes(made: NamedDestination | TopicSubscription) -> int:
    if isinstance(made, TopicSubscription):
        assert made.key is not None
        return _interest_bytes(made.interest, made.key)
    return text_bytes(made.name)
