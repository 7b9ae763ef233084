"""The paths and fields of RabbitMQ's management plug-in that monitoring, `rabbitmqadmin` and the suites of
clients ask for most, of the embedded broker of AMQP 0-9-1.

What is said is said in RabbitMQ's words (https://www.rabbitmq.com/docs/http-api-reference); what the gateway
does not know is left out, as RabbitMQ does where there is none. Rates of queues are over the time since they
were asked for last. Lists come whole or, asked
for with `page`, in pages; `columns` chooses fields, `name` a part of the name.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Final
from urllib.parse import unquote

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.access.authorization import Roles
from gateway.access.console import console_right
from gateway.access.principal import Principal
from gateway.admin.admission import Admission, Caller
from gateway.admin.answers import NEVER_STORE, UnavailableError, answer, problem
from gateway.admin.choosing import Pace, on_disk, slices
from gateway.admin.clients import Connected
from gateway.admin.messages import plain
from gateway.admin.namespaces import ListedBinding, ListedExchange, bindings_of, exchanges_of
from gateway.admin.queues import gone_from
from gateway.admin.rates import Meter
from gateway.broker.amqp091.exchange import TYPES
from gateway.broker.amqp091.hosts import AmqpHosts
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.mapping.conditions import plain_headers
from gateway.model.properties import Headers
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.store.store import Store
from gateway.telemetry.history import History, Key
from gateway.telemetry.metrics import Metrics

TAGS: Final = {"write": ["administrator"], "read": ["monitoring"], "none": []}
PAGE_SIZE: Final = 100
PAGE_SIZE_MAX: Final = 500
METHODS: Final = ("GET", "DELETE")

Fields = dict[str, Any]


class NotThereError(Exception):
    """RabbitMQ would answer 404."""


class RabbitApi:
    """`clients` finds the connections, `why_not` why the gateway is not ready; `flush` ends a wake-up."""

    def __init__(
        self,
        hosts: AmqpHosts,
        clients: Callable[[], Iterable[Connected]],
        metrics: Metrics,
        history: History,
        roles: Callable[[], Roles],
        *,
        why_not: Callable[[], list[str]] = list,
        store: Store | None = None,
        flush: Callable[[], None] = lambda: None,
        node: str = "gateway",
    ) -> None:
        self._hosts = hosts
        self._clients = clients
        self._metrics = metrics
        self._history = history
        self._meter = Meter()
        self._roles = roles
        self._why_not = why_not
        self._store = store
        self._flush = flush
        self._node = f"gateway@{node}"
        self._began = time.monotonic()
        self._words: dict[str, Callable[[Request, Sequence[str]], Awaitable[Any]]] = {
            "overview": self._overview,
            "whoami": self._whoami,
            "nodes": self._nodes,
            "vhosts": self._vhosts,
            "queues": self._queues,
            "exchanges": self._exchanges,
            "bindings": self._bindings,
            "connections": self._connections,
            "channels": self._none,
            "consumers": self._consumers,
            "users": self._users,
            "permissions": self._permissions,
            "policies": self._none,
            "parameters": self._none,
            "definitions": self._definitions,
            "aliveness-test": self._alive,
            "healthchecks": self._healthy,
        }

    def routes(self, admission: Admission) -> list[BaseRoute]:
        """The routes for the application, behind those of `/api/v1`."""
        return [Route("/api/{rest:path}", admission.admitted(self._serve), methods=list(METHODS))]

    async def _serve(self, request: Request) -> Response:
        # An escaped slash, as that of the virtual host `/`, separates nothing.
        raw = bytes(request.scope["raw_path"]).decode("ascii")
        word, *rest = [unquote(one) for one in raw.removeprefix("/api/").rstrip("/").split("/")]
        if word == "v1":
            return problem(404, "there is nothing at this path; see /api/v1/openapi.json")
        try:
            if request.method == "DELETE":
                await self._delete(word, rest)
                return Response(status_code=204)
            serve = self._words.get(word)
            if serve is None:
                raise NotThereError
            found = _chosen(request, await serve(request, rest))
            return await _listed(found) if isinstance(found, list) else answer(found)
        except NotThereError:
            return answer({"error": "Object Not Found", "reason": "Not Found"}, 404)
        except ValueError as error:
            return answer({"error": "bad_request", "reason": str(error)}, 400)

    # What there is.

    async def _overview(self, _: Request, __: Sequence[str]) -> Fields:
        queues = [queue for host in self._hosts.values() for queue in host.queues.values()]
        ready, unacknowledged = sum(map(len, queues)), sum(one.unacknowledged for one in queues)
        version = self._metrics.version
        return {
            "management_version": version,
            "rates_mode": "basic",
            "product_name": "gateway",
            "product_version": version,
            "rabbitmq_version": version,
            "cluster_name": self._node,
            "node": self._node,
            "exchange_types": [{"name": kind, "enabled": True, "description": ""} for kind in TYPES],
            "object_totals": {
                "channels": sum(one.channels for one in self._clients()),
                "connections": sum(1 for _ in self._clients()),
                "consumers": sum(len(one.consumers) for one in queues),
                "exchanges": sum(len(host.exchanges) for host in self._hosts.values()),
                "queues": len(queues),
            },
            "queue_totals": {
                "messages": ready + unacknowledged,
                "messages_ready": ready,
                "messages_unacknowledged": unacknowledged,
            },
            "message_stats": self._all_stats(),
            "listeners": [
                {"node": self._node, "protocol": stats.protocol, "name": name}
                for name, stats in self._metrics.listeners.items()
            ],
            "contexts": [],
        }

    def _all_stats(self) -> Fields:
        found: Fields = {}
        for word, what in (("publish", "in"), ("deliver_get", "out")):
            count, rate = 0, 0.0
            for name, stats in self._metrics.listeners.items():
                if stats.protocol == AMQP091.name:
                    count += stats.messages_in if what == "in" else stats.messages_out
                    rate += self._history.now(Key("listener", name, what))
            found |= _stat(word, count, rate)
        return found

    async def _whoami(self, request: Request, _: Sequence[str]) -> Fields:
        caller: Caller = request.state.caller
        return {"name": caller.principal.name, "tags": TAGS[caller.right]}

    async def _nodes(self, _: Request, rest: Sequence[str]) -> Any:
        gauges = self._metrics.broker()
        node = {
            "name": self._node,
            "type": "disc",
            "running": True,
            "uptime": int((time.monotonic() - self._began) * 1_000),
            "processors": os.cpu_count(),
            "os_pid": str(os.getpid()),
            "mem_used": int(gauges.get("gateway_memory_used_bytes", 0)),
            "mem_limit": int(gauges.get("gateway_memory_limit_bytes", 0)),
            "mem_alarm": any("memory" in one for one in self._why_not()),
            "disk_free_alarm": any("store" in one for one in self._why_not()),
            "partitions": [],
            "rates_mode": "basic",
        }
        if not rest:
            return [node]
        return _only([node], rest[0])

    async def _vhosts(self, _: Request, rest: Sequence[str]) -> Any:
        rows = []
        for host in self._hosts.values():
            ready = sum(len(one) for one in host.queues.values())
            unacknowledged = sum(one.unacknowledged for one in host.queues.values())
            rows.append(
                {
                    "name": host.name,
                    "tracing": False,
                    "messages": ready + unacknowledged,
                    "messages_ready": ready,
                    "messages_unacknowledged": unacknowledged,
                    "cluster_state": {self._node: "running"},
                }
            )
        return _only(rows, rest[0]) if rest else rows

    async def _queues(self, _: Request, rest: Sequence[str]) -> Any:
        if len(rest) > 1:
            host = self._host(rest[0])
            queue = host.queues.get(rest[1])
            if queue is None:
                raise NotThereError
            if rest[2:] == ["bindings"]:
                every = [one for one in bindings_of(self._hosts) if one.destination is queue]
                return [_default_binding(host.name, queue), *map(_binding, every)]
            return self._queue(host, queue)
        hosts = [self._host(rest[0])] if rest else list(self._hosts.values())
        rows: list[Fields] = []
        for host in hosts:
            async for some in slices(list(host.queues.values())):
                rows += [self._queue(host, queue) for queue in some]
        return rows

    def _queue(self, host: VirtualHost, queue: AmqpQueue) -> Fields:
        quorum, gone, key = queue.deliveries is not None, gone_from(queue), f"{host.name} {queue.name}"
        return {
            "name": queue.name,
            "vhost": host.name,
            "type": "quorum" if quorum else "classic",
            "durable": queue.durable,
            "auto_delete": queue.auto_delete,
            "exclusive": queue.owner is not None,
            "arguments": _arguments(queue.arguments),
            "node": self._node,
            "state": "running",
            "policy": None,
            "messages": len(queue) + queue.unacknowledged,
            "messages_ready": len(queue),
            "messages_unacknowledged": queue.unacknowledged,
            "message_bytes_ready": queue.octets,
            "message_stats": {
                **_stat("publish", queue.next, self._meter.rate(f"publish {key}", queue.next)),
                **_stat("ack", gone, self._meter.rate(f"ack {key}", gone)),
            },
            "consumers": len(queue.consumers),
            "memory": queue.in_memory,
        }

    async def _exchanges(self, _: Request, rest: Sequence[str]) -> Any:
        rows = [_exchange(one) for one in exchanges_of(self._hosts)]
        if not rest:
            return rows
        host = self._host(rest[0])
        rows = [one for one in rows if one["vhost"] == host.name]
        if len(rest) == 1:
            return rows
        found = _only(rows, rest[1])
        if rest[2:] in (["bindings", "source"], ["bindings", "destination"]):
            every = [_binding(one) for one in bindings_of(self._hosts) if one.virtual_host == host.name]
            kind = {"destination_type": "exchange"} if rest[3] == "destination" else {}
            return [one for one in every if one[rest[3]] == rest[1] and kind.items() <= one.items()]
        return found

    async def _bindings(self, _: Request, rest: Sequence[str]) -> list[Fields]:
        hosts = [self._host(rest[0])] if rest else list(self._hosts.values())
        names = {host.name for host in hosts}
        rows = [_default_binding(host.name, queue) for host in hosts for queue in host.queues.values()]
        async for some in slices(bindings_of(self._hosts)):
            rows += [_binding(one) for one in some if one.virtual_host in names]
        return rows

    async def _connections(self, _: Request, rest: Sequence[str]) -> Any:
        rows: list[Fields] = []
        async for some in slices(list(self._clients())):
            rows += [self._connection(one) for one in some]
        return _only(rows, rest[0]) if rest else rows

    def _connection(self, one: Connected) -> Fields:
        host, _, port = one.address.rpartition(":")
        return {
            "name": one.address,
            "user": one.user,
            "user_provided_name": one.client,
            "vhost": one.virtual_host,
            "protocol": one.protocol,
            "state": "running",
            "type": "network",
            "node": self._node,
            "peer_host": host.strip("[]"),
            "peer_port": int(port) if port.isdigit() else 0,
            "channels": one.channels,
            "client_properties": {"connection_name": one.client},
        }

    async def _consumers(self, _: Request, rest: Sequence[str]) -> list[Fields]:
        hosts = [self._host(rest[0])] if rest else list(self._hosts.values())
        return [
            {"queue": {"name": queue.name, "vhost": host.name}}
            for host in hosts
            for queue in host.queues.values()
            for _ in queue.consumers
        ]

    async def _none(self, _: Request, __: Sequence[str]) -> list[Fields]:
        """What there is none of here, or what is not told."""
        return []

    async def _users(self, _: Request, rest: Sequence[str]) -> Any:
        rows = list(self._all_users())
        return _only(rows, rest[0]) if rest else rows

    def _all_users(self) -> Iterator[Fields]:
        roles = self._roles()
        for name, has in roles.users.items():
            yield {"name": name, "tags": TAGS[console_right(Principal(name, roles=has), roles.roles)]}

    async def _permissions(self, _: Request, __: Sequence[str]) -> list[Fields]:
        roles = self._roles()
        return [
            {
                "user": user,
                "vhost": host,
                **{word: getattr(given, word) or "" for word in ("configure", "write", "read")},
            }
            for user, has in roles.users.items()
            for name in has
            if name in roles.roles
            for host, given in roles.roles[name].amqp091.items()
        ]

    async def _definitions(self, request: Request, rest: Sequence[str]) -> Fields:
        hosts = [self._host(rest[0])] if rest else list(self._hosts.values())
        names = {host.name for host in hosts}
        queues = [
            {
                "name": queue.name,
                "vhost": host.name,
                "durable": True,
                "auto_delete": queue.auto_delete,
                "arguments": _arguments(queue.arguments),
            }
            for host in hosts
            for queue in host.queues.values()
            if queue.durable and queue.owner is None
        ]
        exchanges = [
            _exchange(one)
            for one in exchanges_of(self._hosts)
            if one.virtual_host in names and one.exchange.durable and not _built_in(one.name)
        ]
        kept = {(one["vhost"], "queue", one["name"]) for one in queues}
        kept |= {(one["vhost"], "exchange", one["name"]) for one in map(_exchange, exchanges_of(self._hosts))}
        bindings = [
            {word: value for word, value in one.items() if word != "properties_key"}
            async for some in slices(bindings_of(self._hosts))
            for one in map(_binding, some)
            if one["vhost"] in names and (one["vhost"], one["destination_type"], one["destination"]) in kept
        ]
        return {
            "rabbit_version": self._metrics.version,
            "rabbitmq_version": self._metrics.version,
            "product_name": "gateway",
            "product_version": self._metrics.version,
            "users": list(self._all_users()) if not rest else [],
            "vhosts": [{"name": name} for name in sorted(names)],
            "permissions": await self._permissions(request, ()) if not rest else [],
            "topic_permissions": [],
            "parameters": [],
            "global_parameters": [],
            "policies": [],
            "queues": queues,
            "exchanges": [
                {word: one[word] for word in one if word not in ("policy", "user_who_performed_action")}
                for one in exchanges
            ],
            "bindings": bindings,
        }

    async def _alive(self, _: Request, rest: Sequence[str]) -> Fields:
        self._host(rest[0] if rest else "/")
        if reasons := self._why_not():
            raise UnavailableError("; ".join(reasons))
        return {"status": "ok"}

    async def _healthy(self, _: Request, __: Sequence[str]) -> Fields:
        if reasons := self._why_not():
            return {"status": "failed", "reason": "; ".join(reasons)}
        return {"status": "ok"}

    # What is changed.

    async def _delete(self, word: str, rest: Sequence[str]) -> None:
        if word == "connections" and len(rest) == 1:
            chosen = [one for one in self._clients() if one.address == rest[0]]
            if not chosen:
                raise NotThereError
            for one in chosen:
                one.dismiss()
            self._flush()
            return
        if word != "queues" or len(rest) not in (2, 3):
            raise NotThereError
        host = self._host(rest[0])
        queue = host.queues.get(rest[1])
        if queue is None or (len(rest) == 3 and rest[2] != "contents"):
            raise NotThereError
        if len(rest) == 3:
            queue.purge()
        elif queue.owner is not None:
            raise ValueError(f"the queue {queue.name!r} is exclusive")
        else:
            host.delete_queue(queue)
            host.written = False  # we wait for the disk ourselves
        await Pace(self._flush).spend(1)
        await on_disk(self._store, self._flush)

    def _host(self, name: str) -> VirtualHost:
        host = self._hosts.get(name)
        if host is None:
            raise NotThereError
        return host


async def _listed(rows: list[Fields]) -> Response:
    """A list as JSON, some rows at a time: there may be very many."""
    parts = [orjson.dumps(some)[1:-1] async for some in slices(rows)]
    return Response(b"[" + b",".join(parts) + b"]", 200, NEVER_STORE, "application/json")


def _stat(word: str, count: int, rate: float) -> Fields:
    return {word: count, f"{word}_details": {"rate": round(rate, 3)}}


def _built_in(name: str) -> bool:
    return not name or name.startswith("amq.")


def _only(rows: Iterable[Fields], name: str) -> Fields:
    for row in rows:
        if row["name"] == name:
            return row
    raise NotThereError


def _arguments(headers: Headers) -> Any:
    return plain(plain_headers(headers))


def _exchange(one: ListedExchange) -> Fields:
    exchange = one.exchange
    arguments = {} if exchange.alternate is None else {"alternate-exchange": exchange.alternate}
    return {
        "name": exchange.name,
        "vhost": one.virtual_host,
        "type": exchange.kind,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": arguments,
    }


def _binding(one: ListedBinding) -> Fields:
    return {
        "source": one.source,
        "vhost": one.virtual_host,
        "destination": one.destination.name,
        "destination_type": one.kind,
        "routing_key": one.routing_key,
        "arguments": _arguments(one.arguments),
        "properties_key": one.routing_key or "~",
    }


def _default_binding(host: str, queue: AmqpQueue) -> Fields:
    """Every queue is bound to the default exchange, by its name."""
    return {
        "source": "",
        "vhost": host,
        "destination": queue.name,
        "destination_type": "queue",
        "routing_key": queue.name,
        "arguments": {},
        "properties_key": queue.name,
    }


def _chosen(request: Request, found: Any) -> Any:
    """Of a list the page, the names and the columns that are asked for."""
    query = request.query_params
    columns = [one for one in query.get("columns", "").split(",") if one]
    rows = found if isinstance(found, list) else [found]
    if isinstance(found, list) and (part := query.get("name")):
        rows = [row for row in rows if part in str(row.get("name", ""))]
    if isinstance(found, list) and "page" in query:
        page, size = int(query["page"]), int(query.get("page_size", PAGE_SIZE))
        if page < 1 or not 0 < size <= PAGE_SIZE_MAX:
            raise ValueError(f"page counts from 1, page_size is at most {PAGE_SIZE_MAX}")
        total, shown = len(rows), rows[(page - 1) * size : page * size]
        return {
            "total_count": len(found),
            "filtered_count": total,
            "item_count": len(shown),
            "page": page,
            "page_size": size,
            "page_count": max(-(-total // size), 1),
            "items": [_columns(row, columns) for row in shown],
        }
    if not columns:
        return rows if isinstance(found, list) else found
    return [_columns(row, columns) for row in rows] if isinstance(found, list) else _columns(found, columns)


def _columns(row: Fields, columns: Sequence[str]) -> Fields:
    """`a.b` is `b` in `a`."""
    if not columns:
        return row
    made: Fields = {}
    for column in columns:
        value: Any = row
        for step in column.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if value is None:
            continue
        place = made
        *above, last = column.split(".")
        for step in above:
            place = place.setdefault(step, {})
        place[last] = value
    return made
