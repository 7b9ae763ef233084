"""Operations that list exchanges, bindings, destinations and transfers of the embedded broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.admission import hosts_of
from gateway.admin.messages import moment, plain
from gateway.admin.models import BindingRow, DestinationRow, ExchangeRow, TransferRow
from gateway.admin.operations import ServedOperation
from gateway.admin.selection import name_matcher, page_of, query_of
from gateway.broker.amqp091.exchange import Exchange
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.amqpfast.hosts import FastHosts
from gateway.broker.amqpfast.partials import Partial
from gateway.broker.queue import Queue
from gateway.mapping.conditions import plain_headers
from gateway.model.properties import Headers
from gateway.operations import BINDINGS, DESTINATIONS, EXCHANGES, TRANSFERS


class ListedExchange(NamedTuple):
    """AMQP 0-9-1 exchange with the name of its virtual host."""

    virtual_host: str
    exchange: Exchange

    @property
    def name(self) -> str:
        """Name of the exchange."""
        return self.exchange.name

    @property
    def key(self) -> str:
        """Sort key of the exchange in paged lists."""
        return f"{self.virtual_host}\n{self.name}"


class ListedBinding(NamedTuple):
    """AMQP 0-9-1 binding of a queue or exchange to the exchange `source`."""

    virtual_host: str
    source: str
    destination: Queue | Exchange
    routing_key: str
    arguments: Headers

    @property
    def kind(self) -> str:
        """Kind of the bound object: `exchange` or `queue`."""
        return "exchange" if isinstance(self.destination, Exchange) else "queue"

    @property
    def key(self) -> str:
        """Sort key of the binding in paged lists."""
        words = (self.virtual_host, self.source, self.kind, self.destination.name, self.routing_key)
        return "\n".join((*words, repr(self.arguments)))


class ListedDestination(NamedTuple):
    """AMQP/Fast destination: a queue or topic. `service` is `queue` or `topic`."""

    virtual_host: str
    service: str
    name: str
    temporary: bool

    @property
    def key(self) -> str:
        """Sort key of the destination in paged lists."""
        return "\n".join(self[:3])


def exchanges_of(hosts: Mapping[str, VirtualHost]) -> Iterator[ListedExchange]:
    """Yield every declared exchange of the virtual hosts."""
    for host in list(hosts.values()):
        for exchange in list(host.exchanges.values()):
            yield ListedExchange(host.name, exchange)


def bindings_of(hosts: Mapping[str, VirtualHost]) -> Iterator[ListedBinding]:
    """Yield every declared binding of the virtual hosts.

    Bindings of queues to the default exchange, which exist without a declaration, are not among them.
    """
    for host, exchange in exchanges_of(hosts):
        for destination, key, arguments in exchange.bindings():
            yield ListedBinding(host, exchange.name, destination, key, arguments)


class NamespacesApi:
    """API operations that list exchanges, bindings, destinations and transfers of the embedded broker."""

    def __init__(self, hosts: AmqpHosts, fast_hosts: FastHosts) -> None:
        self._hosts = hosts
        self._fast_hosts = fast_hosts

    def operations(self) -> Sequence[ServedOperation]:
        """Return the list operations of this class, each with the function that serves it."""
        return [
            ServedOperation(EXCHANGES, self._exchanges, ExchangeRow),
            ServedOperation(BINDINGS, self._bindings, BindingRow),
            ServedOperation(TRANSFERS, self._transfers, TransferRow),
            ServedOperation(DESTINATIONS, self._destinations, DestinationRow),
        ]

    async def _exchanges(self, request: Request) -> Response:
        choice, count, after = await query_of(request, EXCHANGES.words)
        every, chosen = exchanges_of(self._hosts), _named(choice, hosts_of(request))
        page = await page_of(every, chosen, lambda one: one.key, _exchange, count, after)
        return page.to_response()

    async def _bindings(self, request: Request) -> Response:
        choice, count, after = await query_of(request, BINDINGS.words)
        mine = hosts_of(request)

        def is_selected(one: ListedBinding) -> bool:
            values = {
                "source": one.source,
                "destination": one.destination.name,
                "virtual_host": one.virtual_host,
            }
            return mine(one.virtual_host) and all(values[word] == value for word, value in choice.items())

        every = bindings_of(self._hosts)
        return (await page_of(every, is_selected, lambda one: one.key, _binding, count, after)).to_response()

    async def _destinations(self, request: Request) -> Response:
        choice, count, after = await query_of(request, DESTINATIONS.words)
        page = await page_of(
            self._all_destinations(),
            _named(choice, hosts_of(request)),
            lambda one: one.key,
            ListedDestination._asdict,
            count,
            after,
        )
        return page.to_response()

    async def _transfers(self, request: Request) -> Response:
        choice, count, after = await query_of(request, TRANSFERS.words)
        host, mine = choice.get("virtual_host"), hosts_of(request)
        page = await page_of(
            self._fast_hosts.partials,
            lambda one: host in (None, one.sender[0]) and mine(one.sender[0]),
            lambda one: one.key,
            _transfer,
            count,
            after,
        )
        return page.to_response()

    def _all_destinations(self) -> Iterator[ListedDestination]:
        for host in list(self._fast_hosts.values()):
            for queue in list(host.queues.values()):
                yield ListedDestination(host.name, "queue", queue.name, queue.owner is not None)
            for topic in list(host.topics.values()):
                yield ListedDestination(host.name, "topic", topic.name, topic.owner is not None)


def _named(
    choice: Mapping[str, Any], mine: Callable[[str], bool]
) -> Callable[[ListedExchange | ListedDestination], bool]:
    """Return a predicate that selects exchanges or destinations by name and virtual host.

    `choice` has the requested `name` and `virtual_host`; both are optional. `mine` returns True for a virtual
    host that the caller may see; objects of other virtual hosts are never selected.
    """
    name, host = name_matcher(choice, "name"), choice.get("virtual_host")
    return lambda one: name(one.name) and host in (None, one.virtual_host) and mine(one.virtual_host)


def _exchange(one: ListedExchange) -> dict[str, Any]:
    exchange = one.exchange
    return {
        "virtual_host": one.virtual_host,
        "name": exchange.name,
        "type": exchange.kind,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "alternate": exchange.alternate,
        "bindings": len(exchange.destinations),
    }


def _transfer(one: Partial) -> dict[str, Any]:
    host, client = one.sender
    return {
        "virtual_host": host,
        "client": client,
        "body_bytes": one.body_size,
        "received_bytes": one.file.size,
        "under_way": one.busy,
        "heard": moment(one.utc),
    }


def _binding(one: ListedBinding) -> dict[str, Any]:
    return {
        "virtual_host": one.virtual_host,
        "source": one.source,
        "destination": one.destination.name,
        "destination_kind": one.kind,
        "key": one.routing_key,
        "arguments": plain(plain_headers(one.arguments)),
    }
