"""Operations on queues of AMQP 0-9-1 and AMQP/Fast, and on durable subscriptions of AMQP/Fast.

`kind` is `queue` or `subscription`; the name of a subscription is CLIENT/IDENTIFIER. A queue is in use when
it has consumers or belongs to a connection. A queue in use is removed only with `in_use`; one that belongs to
a connection never is. Queues of the configuration are declared again at a restart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway import clock
from gateway.admin.admission import hosts_of
from gateway.admin.messages import Hide, hide_for_caller, hide_nothing, message_shown, parse_request, plain
from gateway.admin.models import (
    ConsumerRow,
    PeekRequest,
    PeekResult,
    QueuePurgeResult,
    QueueRemovalResult,
    QueueRow,
)
from gateway.admin.object_history import ObjectHistory
from gateway.admin.operations import ServedOperation
from gateway.admin.rates import Meter
from gateway.admin.responses import AbsentError, json_body, json_response
from gateway.admin.selection import (
    RemovalPace,
    load_messages,
    name_matcher,
    page_of,
    query_of,
    removal_of,
    slices,
    wait_until_durable,
)
from gateway.broker.amqp091.arguments import QueueArguments
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqpfast.destinations import FastQueue
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.queue import Consumer, Queue
from gateway.mapping.conditions import plain_headers
from gateway.model.message import Sender
from gateway.operations import CONSUMERS, PEEK, PURGE_QUEUES, QUEUES, REMOVE_QUEUES
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.store.store import Store

MOST: Final = 10**15  # More messages than any queue has.
PEEKED_MAX: Final = 100
NO_ARGUMENTS: Final = QueueArguments()

log = structlog.get_logger()


class ListedQueue(NamedTuple):
    """Queue or durable subscription, with the name of its virtual host.

    `kind` is `queue` or `subscription`. `locked` is True for a queue that belongs to an open connection, and
    for a subscription with an attached client. Calling `remove` deletes the queue or subscription.
    """

    protocol: str
    virtual_host: str
    kind: str
    name: str
    queue: Queue
    locked: bool
    remove: Callable[[], object]

    @property
    def key(self) -> str:
        """Sort key of the queue in paged lists."""
        return "\n".join(self[:4])

    @property
    def in_use(self) -> bool:
        """True if the queue has a consumer, or belongs to an open connection."""
        return self.locked or bool(self.queue.consumers)

    @property
    def idle_secs(self) -> float | None:
        """Seconds since an AMQP 0-9-1 queue was last used. None while it is in use, and for AMQP/Fast."""
        if self.in_use or not isinstance(self.queue, AmqpQueue):
            return None
        return clock.monotonic() - self.queue.used


class ConsumerDetails(NamedTuple):
    """Data of a client's consumer: tag, prefetch and channel.

    `tag` identifies the consumer on its connection; for AMQP/Fast it is the number of the handle.
    `acknowledges` is False if messages count as consumed when they are sent. `prefetch` is the maximum number
    of unacknowledged messages, `outstanding` the present number. `sender` identifies the client.
    """

    tag: str
    acknowledges: bool
    prefetch: int
    outstanding: int
    channel: int
    sender: Sender

    @property
    def address(self) -> str:
        """Address of the consuming client, as `host:port`."""
        return self.sender.address


class ListedConsumer(NamedTuple):
    """Consumer of a connected client, with the queue that it consumes from."""

    listed: ListedQueue
    consuming: ConsumerDetails

    @property
    def key(self) -> str:
        """Sort key of the consumer in paged lists."""
        one = self.consuming
        return f"{self.listed.key}\n{one.address}\n{one.channel:05}\n{one.tag}"

    def to_row(self) -> dict[str, Any]:
        """Return the consumer as a JSON object of the API (ConsumerRow)."""
        one = self.consuming
        return {
            "protocol": self.listed.protocol,
            "virtual_host": self.listed.virtual_host,
            "kind": self.listed.kind,
            "queue": self.listed.name,
            "tag": one.tag,
            "channel": one.channel,
            "acknowledges": one.acknowledges,
            "prefetch": one.prefetch,
            "unacknowledged": one.outstanding,
            **one.sender.to_dict(),
        }


class QueuesApi:
    """API operations on queues and durable subscriptions of the embedded broker.

    While `history.run` runs, it records the message counts of each queue.
    """

    def __init__(
        self,
        hosts: AmqpHosts,
        fast_hosts: FastHosts,
        store: Store | None,
        flush: Callable[[], None],
        *,
        hide: Hide = hide_nothing,
        consuming: Callable[[Consumer], ConsumerDetails | None] = lambda _: None,
    ) -> None:
        """Build the operations on queues.

        The queues are those of the virtual hosts `hosts` (AMQP 0-9-1) and `fast_hosts` (AMQP/Fast). `store`
        has their messages; None means that nothing is stored. `flush` passes changes to the store and writes
        to sockets. `hide` removes private fields from messages before they are shown. `consuming` returns
        tag, prefetch and client of a consumer, or None if the consumer is a route.
        """
        self._hosts = hosts
        self._fast_hosts = fast_hosts
        self._store = store
        self._flush = flush
        self._hide = hide
        self._consuming = consuming
        self._meter = Meter()
        self.history = ObjectHistory(
            self.all, _key, _numbers, levels=("ready", "unacknowledged"), counts=("in", "out")
        )

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on queues and consumers, each with the function that serves it."""
        return [
            ServedOperation(QUEUES, self._list, QueueRow),
            ServedOperation(REMOVE_QUEUES, self._remove, QueueRemovalResult),
            ServedOperation(PURGE_QUEUES, self._purge, QueuePurgeResult),
            ServedOperation(PEEK, self._peek, PeekResult, PeekRequest),
            ServedOperation(CONSUMERS, self._consumers, ConsumerRow),
        ]

    async def _peek(self, request: Request) -> Response:
        """Return the first messages of the queue that the body names, without consuming them."""
        choice = parse_request(await json_body(request), PeekRequest)
        several: dict[str, Mapping[str, Any]] = {AMQP091.name: self._hosts, AMQPFAST.name: self._fast_hosts}
        host = several.get(choice.protocol, {}).get(choice.virtual_host)
        queue: Queue | None = None
        if host is not None and hosts_of(request)(choice.virtual_host):
            queue = host.queues.get(choice.queue)
        if queue is None:
            where = f"{choice.protocol} in {choice.virtual_host!r}"
            raise AbsentError(f"no queue {choice.queue!r} of {where}")
        queue.dispatch()  # begins to load: after a start all messages are on the disk
        await load_messages(queue)
        found = islice(queue.browse(), min(max(choice.count, 0), PEEKED_MAX))
        visible = hide_for_caller(request, self._hide, choice.virtual_host)
        rows = [message_shown(visible("", message)) for _, message in found]
        return json_response({"messages": len(queue), "shown": rows})

    def all(self) -> Iterator[ListedQueue]:
        """Yield every queue and durable subscription of all virtual hosts."""
        for host in list(self._hosts.values()):
            for queue in list(host.queues.values()):
                locked = queue.owner is not None
                remove = partial(host.delete_queue, queue)
                yield ListedQueue(AMQP091.name, host.name, "queue", queue.name, queue, locked, remove)
        for fast in list(self._fast_hosts.values()):
            for one in list(fast.queues.values()):
                locked = one.owner is not None
                remove_fast = partial(fast.delete_queue, one)
                yield ListedQueue(AMQPFAST.name, fast.name, "queue", one.name, one, locked, remove_fast)
            for (client, identifier), subscription in list(fast.durable.items()):
                name = f"{client}/{identifier}"
                end = partial(fast.unsubscribe, subscription)
                yield ListedQueue(
                    AMQPFAST.name, fast.name, "subscription", name, subscription, subscription.attached, end
                )

    async def _consumers(self, request: Request) -> Response:
        choice, count, after = await query_of(request, CONSUMERS.words)
        mine, address = hosts_of(request), choice.pop("address", None)
        holder = (choice.get("protocol"), choice.get("virtual_host"), None, choice.get("queue"))

        async def consumer_pages() -> AsyncIterator[list[ListedConsumer]]:
            async for some in slices(self.all()):
                fitting = [
                    one
                    for one in some
                    if mine(one.virtual_host)
                    and all(want in (None, has) for want, has in zip(holder, one[:4], strict=True))
                ]
                yield [
                    ListedConsumer(one, client)
                    for one in fitting
                    for consumer in one.queue.consumers
                    if (client := self._consuming(consumer)) is not None
                ]

        def is_selected(one: ListedConsumer) -> bool:
            return address in (None, one.consuming.address)

        page = await page_of(
            consumer_pages(), is_selected, lambda one: one.key, ListedConsumer.to_row, count, after
        )
        return page.to_response()

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, QUEUES.words)
        key = _length_key if choice.get("sort") == "messages" else _key
        show = partial(self._queue_row, choice.get("history", False))
        page = await page_of(self.all(), _chooser(choice, hosts_of(request)), key, show, count, after)
        return page.to_response()

    def _queue_row(self, with_history: bool, one: ListedQueue) -> dict[str, Any]:
        """Return a queue as a JSON object of the API (QueueRow), with its history if requested."""
        queue, idle = one.queue, one.idle_secs
        own = queue.options if isinstance(queue, AmqpQueue) else NO_ARGUMENTS
        return {
            "protocol": one.protocol,
            "virtual_host": one.virtual_host,
            "kind": one.kind,
            "queue": one.name,
            "messages": len(queue),
            "messages_bytes": queue.byte_count,
            "unacknowledged": queue.unacknowledged,
            "in_per_sec": self._meter.rate(f"in {one.key}", queue.next),
            "out_per_sec": self._meter.rate(f"out {one.key}", count_removed(queue)),
            "messages_max": _effective_limit(queue.messages_max, own.length_max),
            "messages_bytes_max": _effective_limit(queue.bytes_max, own.bytes_max),
            "consumers": len(queue.consumers),
            "durable": queue.durable,
            "in_use": one.in_use,
            "idle_secs": None if idle is None else round(idle, 3),
            "temporary": isinstance(queue, FastQueue | AmqpQueue) and queue.owner is not None,
            "arguments": plain(plain_headers(queue.arguments)) if isinstance(queue, AmqpQueue) else {},
            "history": self.history.shown(one) if with_history else None,
        }

    async def _remove(self, request: Request) -> Response:
        """Delete the queues that the body selects, and return three numbers.

        Queues of open connections are never deleted; queues with consumers only if the body has `in_use:
        true`. The numbers are those of the deleted queues, of the messages in them, and of the queues in use
        that were not deleted.
        """
        choice = await removal_of(request, REMOVE_QUEUES)
        in_use = choice.pop("in_use", False)
        chosen = _chooser(choice, hosts_of(request))
        pace = RemovalPace(self._flush)
        removed = messages = busy = 0
        async for some in slices(self.all()):
            for one in some:
                if one.queue.deleted or not chosen(one):
                    continue
                if one.locked or (one.in_use and not in_use):
                    busy += 1
                    continue
                messages += len(one.queue)
                one.remove()
                removed += 1
                await pace.spend(20)
        for host in self._hosts.values():
            host.has_durable_changes = False  # This function waits for the disk itself.
        if removed:
            await wait_until_durable(self._store, self._flush)
            log.info("operator removed queues", count=removed, messages=messages, **choice)
        return json_response({"removed": removed, "messages": messages, "in_use": busy})

    async def _purge(self, request: Request) -> Response:
        choice = await removal_of(request, PURGE_QUEUES)
        chosen = _chooser(choice, hosts_of(request))
        pace = RemovalPace(self._flush)
        purged = messages = 0
        async for some in slices(self.all()):
            for one in some:
                if not one.queue.deleted and len(one.queue) and chosen(one):
                    messages += one.queue.purge()
                    purged += 1
                    await pace.spend(20)
        if purged:
            await wait_until_durable(self._store, self._flush)
            log.info("operator purged queues", count=purged, messages=messages, **choice)
        return json_response({"purged": purged, "messages": messages})


def _key(one: ListedQueue) -> str:
    return one.key


def _numbers(one: ListedQueue) -> tuple[int, int, int, int]:
    """Return the numbers of a queue that are recorded in the history of the last hour.

    They are ready messages, unacknowledged messages, received messages and removed messages.
    """
    queue = one.queue
    return len(queue), queue.unacknowledged, queue.next, count_removed(queue)


def _length_key(one: ListedQueue) -> str:
    """Return a sort key by which longer queues come first.

    Lengths change between requests, so that a queue may be on two pages of a list, or on none.
    """
    return f"{MOST - len(one.queue):016}\n{one.key}"


def _chooser(choice: Mapping[str, Any], mine: Callable[[str], bool]) -> Callable[[ListedQueue], bool]:
    """Return a predicate: True for queues that the filters in `choice` select and that the caller may see.

    `mine` returns True for a virtual host that the caller may see.
    """
    queue = name_matcher(choice, "queue")
    exact = [(word, choice[word]) for word in ("protocol", "virtual_host", "kind") if word in choice]
    empty, in_use, idle = (choice.get(word) for word in ("empty", "in_use", "idle_longer_than"))

    def is_selected(one: ListedQueue) -> bool:
        return (
            mine(one.virtual_host)
            and queue(one.name)
            and all(getattr(one, word) == value for word, value in exact)
            and (empty is None or empty is not bool(len(one.queue)))
            and (in_use is None or in_use is one.in_use)
            and (idle is None or ((secs := one.idle_secs) is not None and secs > idle))
        )

    return is_selected


def count_removed(queue: Queue) -> int:
    """Return how many messages have been removed from a queue, for example consumed, expired or purged.

    The count starts when the queue is created or the process starts, whichever is later.
    """
    return queue.next - len(queue) - queue.unacknowledged


def _effective_limit(limit: int, own: int | None) -> int:
    """Return the smaller one of two limits of a queue: the general `limit`, and `own` if it is not None."""
    return limit if own is None else min(limit, own)
