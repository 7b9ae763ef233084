"""HTTP API of RabbitMQ's management plug-in for the embedded AMQP 0-9-1 broker, as far as programs need it.

The paths and fields are those that monitoring, `rabbitmqadmin` and the test suites of clients use most; PATHS
lists all paths that are served, CHANGES those that change something. Responses use RabbitMQ's terms
(https://www.rabbitmq.com/docs/http-api-reference). Fields whose values the gateway does not know are left
out: a test compares the fields with those of a RabbitMQ, and the reference explains the missing ones. Rates
of queues are averages since the previous request for them.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import orjson
import trio
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway import clock
from gateway.access.authorization import Roles
from gateway.access.console import ConsoleRights, console_rights
from gateway.access.principal import Principal
from gateway.admin.admission import READING, Admission, Caller
from gateway.admin.clients import ConnectedClient
from gateway.admin.messages import plain
from gateway.admin.namespaces import ListedBinding, ListedExchange, bindings_of, exchanges_of
from gateway.admin.queues import ConsumerDetails, count_removed
from gateway.admin.rabbitmq_changes import Actor, BrokerAccess, RabbitChanges
from gateway.admin.rabbitmq_lists import Fields, listed
from gateway.admin.rates import Meter
from gateway.admin.responses import NEVER_STORE, UnavailableError, json_response
from gateway.admin.selection import RemovalPace, slices, wait_until_durable
from gateway.admin.unread_responses import UnsentResponses
from gateway.broker.amqp091.arguments import EXCHANGE_TYPES as KINDS
from gateway.broker.amqp091.checks import check_binding
from gateway.broker.amqp091.exchange import Exchange
from gateway.broker.amqp091.policies import applicable_policy, policy_of_exchange
from gateway.broker.amqp091.queue import AmqpQueue
from gateway.broker.amqp091.refusals import ACCESS_REFUSED, NOT_FOUND, AmqpRefused
from gateway.broker.amqp091.virtual_host import VirtualHost
from gateway.broker.queue import Consumer
from gateway.mapping.conditions import plain_headers
from gateway.model.properties import Headers
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.store.store import Store
from gateway.telemetry.history import CounterKey, History
from gateway.telemetry.metrics import Metrics

TAGS: Final = {"write": ["administrator"], "read": ["monitoring"], "none": []}
METHODS: Final = ("GET", "DELETE", "PUT", "POST")
UNSAID: Final = (
    "not supported over HTTP: the gateway only declares, binds, publishes, gets, deletes and"
    " purges. Change everything else in its configuration"
)
PROTOCOLS: Final = {AMQP091.name: "amqp"}  # of listeners, where RabbitMQ has another name
VERSIONS: Final = {"v5": "MQTT 5-0", "v311": "MQTT 3-1-1", "v31": "MQTT 3-1"}
Asked = Callable[..., Any]
DEFAULT: Final = "amq.default"  # in a path: the exchange whose name is empty
EXCHANGE_TYPES: Final = [{"name": kind, "enabled": True, "description": ""} for kind in KINDS]
FREE: Final = "*"  # in PATHS and CHANGES: any part of a path, which is an argument


class NotThereError(Exception):
    """Error for an object that does not exist. The response is 404, as RabbitMQ's is."""


class _RabbitPath(PathConvertor):
    """Path parameter for Starlette's routes that matches everything below `/api` except `/api/v1`."""

    regex = r"(?!v1(?:/|$)).*"


class RabbitListener(NamedTuple):
    """Listener of the gateway, as RabbitMQ's API shows it: name, protocol, address and TLS."""

    name: str
    protocol: str
    host: str
    port: int
    tls: bool


class RabbitApi:
    """RabbitMQ's management API for one caller, limited to the virtual hosts that the caller may see.

    `hosts` are the virtual hosts. `clients` returns the connections, `listeners` the listeners, and `why_not`
    the reasons why the gateway is not ready. `version` is the version of RabbitMQ that the API reports.
    `consuming` returns tag, prefetch and client of a consumer, or None if the consumer is a route. `flush`
    passes changes to the store and writes to sockets.
    """

    def __init__(
        self,
        hosts: Mapping[str, VirtualHost],
        clients: Callable[[], Iterable[ConnectedClient]],
        metrics: Metrics,
        history: History,
        roles: Callable[[], Roles],
        *,
        why_not: Callable[[], list[str]] = list,
        store: Store | None = None,
        flush: Callable[[], None] = lambda: None,
        node: str = "gateway",
        version: str = "",
        listeners: Callable[[], Iterable[RabbitListener]] = tuple,
        consuming: Callable[[Consumer], ConsumerDetails | None] = lambda _: None,
        broker: BrokerAccess,
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
        self._version = version
        self._began = clock.monotonic()
        self._listeners = listeners
        self._consuming = consuming
        self._changes = RabbitChanges(broker, flush)
        self._unsent = UnsentResponses()
        self._is_part = False  # True if limited to some virtual hosts: data of the whole gateway is left out

    def routes(self, admission: Admission) -> list[BaseRoute]:
        """Return the HTTP routes of this API, with admission control before them.

        They match all paths below `/api` except those below `/api/v1`.
        """
        register_url_convertor("rabbitmq", _RabbitPath())
        self._unsent = admission.unsent
        return [
            Route(
                "/api/{rest:rabbitmq}",
                admission.with_admission_control(self._serve, by_host=True),
                methods=list(METHODS),
            )
        ]

    async def _serve(self, request: Request) -> Response:
        # An escaped slash, such as that of the virtual host `/`, is no separator.
        """Return the response to a request, or an error in the form of RabbitMQ's API."""
        raw = bytes(request.scope["raw_path"]).decode("ascii")
        word, *rest = [unquote(one) for one in raw.removeprefix("/api/").rstrip("/").split("/")]
        caller: Caller = request.state.caller
        is_read = request.method in READING
        hosts = caller.rights.hosts(reading=is_read)
        api = self if hosts is None else self.restricted_to(hosts)
        try:
            if not is_read:
                return await api.change(request, (word, *rest))
            serve, words = _match_path(PATHS, (word, *rest))
            if hosts is not None and serve in OF_ALL_HOSTS:
                return json_response({"error": "not_authorised", "reason": "Not management user"}, 403)
            async with self._unsent.building(caller.principal.name):
                found = await listed(request.query_params, await serve(api, request, *words))
                return await _as_json(found) if isinstance(found, list) else json_response(found)
        except NotThereError:
            return json_response({"error": "Object Not Found", "reason": "Not Found"}, 404)
        except AmqpRefused as error:
            if error.code == NOT_FOUND:
                return json_response({"error": "Object Not Found", "reason": str(error)}, 404)
            if error.code == ACCESS_REFUSED:
                return json_response({"error": "not_authorised", "reason": str(error)}, 401)
            return json_response({"error": "bad_request", "reason": str(error).partition(" - ")[2]}, 400)
        except ValueError as error:
            return json_response({"error": "bad_request", "reason": str(error)}, 400)

    def restricted_to(self, hosts: frozenset[str]) -> RabbitApi:
        """Return a copy of this API that is limited to these virtual hosts and the connections to them."""
        clients, found = self._clients, copy(self)
        found._hosts = {name: host for name, host in self._hosts.items() if name in hosts}
        found._clients = lambda: (one for one in clients() if one.virtual_host in hosts)
        found._is_part = True
        return found

    # Objects and their state.

    async def overview(self, _: Request) -> Fields:
        """Return the versions, listeners, and total numbers of objects and messages."""
        queues = [queue for host in self._hosts.values() for queue in host.queues.values()]
        ready, unacknowledged = sum(map(len, queues)), sum(one.unacknowledged for one in queues)
        exchanges = sum(
            len(host.exchanges) + 1 for host in self._hosts.values()
        )  # the default one is not stored
        return {
            "management_version": self._version,
            "rates_mode": "basic",
            "product_name": "gateway",
            "product_version": self._metrics.version,
            "rabbitmq_version": self._version,
            "cluster_name": self._node,
            "node": self._node,
            "exchange_types": EXCHANGE_TYPES,
            "object_totals": {
                "channels": sum(one.channels for one in self._clients()),
                "connections": sum(1 for _ in self._clients()),
                "consumers": sum(len(one.consumers) for one in queues),
                "exchanges": exchanges,
                "queues": len(queues),
            },
            "queue_totals": {
                "messages": ready + unacknowledged,
                "messages_ready": ready,
                "messages_unacknowledged": unacknowledged,
            },
            "message_stats": {} if self._is_part else self._all_stats(),
            "listeners": [
                {
                    "node": self._node,
                    "protocol": PROTOCOLS.get(one.protocol, one.protocol) + "/ssl" * one.tls,
                    "ip_address": one.host,
                    "port": one.port,
                    "socket_opts": {},
                    "name": one.name,
                }
                for one in (() if self._is_part else self._listeners())
            ],
            "contexts": [],
        }

    def _all_stats(self) -> Fields:
        """Return counts and rates of the messages of all AMQP 0-9-1 listeners."""
        found: Fields = {}
        for word, direction in (("publish", "in"), ("deliver_get", "out")):
            count, rate = 0, 0.0
            for name, stats in self._metrics.listeners.items():
                if stats.protocol == AMQP091.name:
                    count += stats.messages_in if direction == "in" else stats.messages_out
                    rate += self._history.current_rate(CounterKey("listener", name, direction))
            found |= _stat(word, count, rate)
        return found

    async def whoami(self, request: Request) -> Fields:
        """Return the caller's user name and the RabbitMQ tags that correspond to its rights."""
        caller: Caller = request.state.caller
        return {"name": caller.principal.name, "tags": _tags_of(caller.rights)}

    async def cluster_name(self, _: Request) -> Fields:
        """Return the name of the cluster, which is the name of its only node."""
        return {"name": self._node}

    async def nodes(self, _: Request) -> list[Fields]:
        """Return the only node of the cluster: its resources, alarms and uptime."""
        gauges = self._metrics.broker()
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        node = {
            "name": self._node,
            "type": "disc",
            "running": True,
            "uptime": int((clock.monotonic() - self._began) * 1_000),
            "processors": os.cpu_count(),
            "os_pid": str(os.getpid()),
            "mem_used": int(gauges.get("gateway_memory_bytes", 0)),
            "mem_limit": int(gauges.get("gateway_memory_limit_bytes", 0)),
            "mem_alarm": any("memory" in one for one in self._why_not()),
            "mem_calculation_strategy": "rss",
            "disk_free_alarm": any("store" in one for one in self._why_not()),
            "fd_total": files,
            "fd_used": await trio.to_thread.run_sync(_descriptors),  # slow with many connections
            "sockets_total": files,
            "sockets_used": sum(1 for _ in self._clients()),
            "exchange_types": EXCHANGE_TYPES,
            "partitions": [],
            "cluster_links": [],
            "contexts": [],
            "rates_mode": "basic",
        }
        if self._store is not None:
            usage = await trio.to_thread.run_sync(shutil.disk_usage, self._store.folder)
            node["disk_free"] = usage.free
        return [node]

    async def node(self, request: Request, name: str) -> Fields:
        """Return the node `name`. Raises NotThereError for any other name than that of the only node."""
        return _only(await self.nodes(request), name)

    async def vhosts(self, _: Request) -> list[Fields]:
        """Return the virtual hosts."""
        return [self._vhost(host) for host in self._hosts.values()]

    async def vhost(self, _: Request, name: str) -> Fields:
        """Return the virtual host `name`. Raises NotThereError if it does not exist."""
        return self._vhost(self._host(name))

    def _vhost(self, host: VirtualHost) -> Fields:
        ready = sum(len(one) for one in host.queues.values())
        unacknowledged = sum(one.unacknowledged for one in host.queues.values())
        return {
            "name": host.name,
            "description": "",
            "tags": [],
            "metadata": {"description": "", "tags": []},
            "default_queue_type": "classic",
            "tracing": False,
            "messages": ready + unacknowledged,
            "messages_ready": ready,
            "messages_unacknowledged": unacknowledged,
            "cluster_state": {self._node: "running"},
        }

    async def queues(self, _: Request, *of: str) -> list[Fields]:
        """Return the queues of the virtual host `of`, or of all virtual hosts if none is given."""
        rows: list[Fields] = []
        for host in self._hosts_of(of):
            async for some in slices(list(host.queues.values())):
                rows += [self._queue(host, queue) for queue in some]
        return rows

    async def queue(self, _: Request, of: str, name: str) -> Fields:
        """Return the queue `name` of the virtual host `of`, with its consumers."""
        host = self._host(of)
        queue = _queue_of(host, name)
        consumers = [self._consumer(host, queue, one) for one in queue.consumers]
        return {**self._queue(host, queue), "consumer_details": consumers}

    async def queue_bindings(self, _: Request, of: str, name: str) -> list[Fields]:
        """Return the bindings of the queue `name` in the virtual host `of`.

        The binding to the default exchange is first.
        """
        host = self._host(of)
        queue = _queue_of(host, name)
        every = [one for one in bindings_of(self._hosts) if one.destination is queue]
        return [_default_binding(host.name, queue), *map(_binding, every)]

    def _queue(self, host: VirtualHost, queue: AmqpQueue) -> Fields:
        """Return a queue of the virtual host `host`, with the field names of RabbitMQ's API."""
        quorum, removed_count, key = (
            queue.deliveries is not None,
            count_removed(queue),
            f"{host.name} {queue.name}",
        )
        published = self._meter.rate(f"publish {key}", queue.next)
        settled = self._meter.rate(f"ack {key}", removed_count)
        policy = applicable_policy(host.policies, queue.name, queue.arguments)
        idle = None if queue.consumers else clock.unix_time() - (clock.monotonic() - queue.used)
        exclusive, first = queue.exclusive_consumer, next(iter(queue.consumers), None)
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
            "policy": None if policy is None else policy.document.get("name"),
            "effective_policy_definition": {} if policy is None else policy.document["definition"],
            "operator_policy": None,
            "messages": len(queue) + queue.unacknowledged,
            "messages_details": {"rate": round(published - settled, 3)},
            "messages_ready": len(queue),
            "messages_unacknowledged": queue.unacknowledged,
            "message_bytes": queue.byte_count,
            "message_bytes_ready": queue.byte_count,
            "message_bytes_ram": queue.in_memory,
            "message_stats": {
                **_stat("publish", queue.next, published),
                **_stat("ack", removed_count, settled),
            },
            "consumers": len(queue.consumers),
            "exclusive_consumer_tag": self._tag(exclusive),
            "single_active_consumer_tag": self._tag(first if queue.options.single_active else None),
            "memory": queue.in_memory,
            **({} if idle is None else {"idle_since": _moment(round(idle))}),
        }

    async def exchanges(self, _: Request, *of: str) -> list[Fields]:
        """Return the exchanges of the virtual host `of`, or of all virtual hosts if none is given.

        Default exchanges are first.
        """
        names = {host.name for host in self._hosts_of(of)}
        rows = [_default_exchange(name) for name in sorted(names)]
        every = [one for one in exchanges_of(self._hosts) if one.virtual_host in names]
        return rows + [_exchange(one) | self._governed(one) for one in every]

    def _governed(self, one: ListedExchange) -> Fields:
        """Return `{"policy": NAME}` if a policy applies to an exchange, else an empty object."""
        policy = policy_of_exchange(self._hosts[one.virtual_host].policies, one.name)
        return {} if policy is None else {"policy": policy.document.get("name")}

    async def exchange(self, request: Request, of: str, name: str) -> Fields:
        """Return the exchange `name` of the virtual host `of`."""
        return _only(await self.exchanges(request, of), _exchange_name(name))

    async def bindings_from(self, request: Request, of: str, name: str) -> list[Fields]:
        """Return the bindings in the virtual host `of` whose source is the exchange `name`."""
        await self.exchange(request, of, name)
        return [one for one in await self.bindings(request, of) if one["source"] == _exchange_name(name)]

    async def bindings_to(self, request: Request, of: str, name: str) -> list[Fields]:
        """Return the bindings in the virtual host `of` whose destination is the exchange `name`."""
        await self.exchange(request, of, name)
        leads = ("exchange", _exchange_name(name))
        every = await self.bindings(request, of)
        return [one for one in every if (one["destination_type"], one["destination"]) == leads]

    async def bindings(self, _: Request, *of: str) -> list[Fields]:
        """Return the bindings in the virtual host `of`, or in all virtual hosts if none is given.

        Bindings of queues to the default exchange are first.
        """
        hosts = list(self._hosts_of(of))
        names = {host.name for host in hosts}
        rows = [_default_binding(host.name, queue) for host in hosts for queue in host.queues.values()]
        async for some in slices(bindings_of(self._hosts)):
            rows += [_binding(one) for one in some if one.virtual_host in names]
        return rows

    async def bindings_between(
        self, request: Request, of: str, source: str, letter: str, name: str
    ) -> list[Fields]:
        """Return the bindings between the exchange `source` and one destination, in the virtual host `of`.

        The destination is the queue `name` if `letter` is "q", and the exchange `name` if it is "e". Raises
        NotThereError for any other letter.
        """
        leads = _destination_of(letter, name)
        if leads[0] == "queue":
            _queue_of(self._host(of), name)
        else:
            await self.exchange(request, of, name)
        rows = await self.bindings_from(request, of, source)
        return [one for one in rows if (one["destination_type"], one["destination"]) == leads]

    async def binding(
        self, request: Request, of: str, source: str, letter: str, name: str, key: str
    ) -> Fields:
        """Return one binding between the exchange `source` and a destination, in the virtual host `of`.

        The destination is the queue `name` if `letter` is "q", and the exchange `name` if it is "e". `key` is
        the binding's properties key, percent-encoded or not. Raises NotThereError if there is no such
        binding.
        """
        for row in await self.bindings_between(request, of, source, letter, name):
            if _has_key(row, key):
                return row
        raise NotThereError

    async def connections(self, _: Request) -> list[Fields]:
        """Return the connections of clients that the caller may see."""
        rows: list[Fields] = []
        async for some in slices(list(self._clients())):
            rows += [self._connection(one) for one in some]
        return rows

    async def connection(self, request: Request, name: str) -> Fields:
        """Return the connection of this name, which is the client's address."""
        return _only(await self.connections(request), name)

    async def vhost_connections(self, request: Request, of: str) -> list[Fields]:
        """Return the connections to the virtual host `of`."""
        host = self._host(of)
        return [one for one in await self.connections(request) if one["vhost"] == host.name]

    def _connection(self, one: ConnectedClient) -> Fields:
        """Return a connection, with the field names of RabbitMQ's API."""
        host, _, port = one.address.rpartition(":")
        details = one.details
        connected_at = None if one.opened_at is None else clock.unix_time() - (clock.now() - one.opened_at)
        amqp = one.protocol == AMQP091.name
        return {
            "name": one.address,
            "user": one.user,
            "user_who_performed_action": one.user,
            "user_provided_name": one.client,
            "vhost": one.virtual_host,
            "protocol": "AMQP 0-9-1" if amqp else VERSIONS.get(one.version, one.protocol),
            "state": "running",
            "type": "network",
            "node": self._node,
            "host": details.host,
            "port": details.port,
            "peer_host": host.strip("[]"),
            "peer_port": int(port) if port.isdigit() else 0,
            "ssl": details.tls,
            "channels": one.channels,
            "client_properties": {**plain(dict(details.client_properties)), "connection_name": one.client},
            **({} if connected_at is None else {"connected_at": round(connected_at) * 1_000}),
            **(
                {
                    "frame_max": details.frame_max,
                    "channel_max": details.channel_max,
                    "timeout": details.timeout,
                }
                if amqp
                else {}
            ),
        }

    async def consumers(self, _: Request, *of: str) -> list[Fields]:
        """Return the consumers in the virtual host `of`, or in all virtual hosts if none is given."""
        queues = ((host, queue) for host in self._hosts_of(of) for queue in list(host.queues.values()))
        return [
            self._consumer(host, queue, one)
            async for some in slices(queues)
            for host, queue in some
            for one in queue.consumers
        ]

    def _consumer(self, host: VirtualHost, queue: AmqpQueue, consumer: Consumer) -> Fields:
        """Return a consumer of a queue in the virtual host `host`, with the field names of RabbitMQ's API."""
        active = not queue.options.single_active or consumer is queue.consumers[0]
        found: Fields = {
            "queue": {"name": queue.name, "vhost": host.name},
            "arguments": {},
            "exclusive": consumer is queue.exclusive_consumer,
            "active": active,
            "activity_status": "single_active" if active and queue.options.single_active else "up",
        }
        if not active:
            found["activity_status"] = "waiting"
        details = self._consuming(consumer)
        if details is None:
            return found
        remote, _, port = details.address.rpartition(":")
        return found | {
            "consumer_tag": details.tag,
            "ack_required": details.acknowledges,
            "prefetch_count": details.prefetch,
            "channel_details": {
                "name": f"{details.address} ({details.channel})",
                "number": details.channel,
                "connection_name": details.address,
                "peer_host": remote.strip("[]"),
                "peer_port": int(port) if port.isdigit() else 0,
                "node": self._node,
                "user": details.sender.user,
            },
        }

    def _tag(self, consumer: Consumer | None) -> str | None:
        details = None if consumer is None else self._consuming(consumer)
        return None if details is None else details.tag

    async def empty_list(self, _: Request) -> list[Fields]:
        """Return an empty list, for objects that the gateway does not have or does not report."""
        return []

    async def empty_list_of_host(self, _: Request, of: str) -> list[Fields]:
        """Return an empty list for the virtual host `of`.

        Raises NotThereError if the virtual host does not exist.
        """
        self._host(of)
        return []

    async def empty_list_of_user(self, request: Request, name: str) -> list[Fields]:
        """Return an empty list for the user `name`. Raises NotThereError if the user does not exist."""
        await self.user(request, name)
        return []

    async def users(self, _: Request) -> list[Fields]:
        """Return the users of the configuration and of imported definitions, with their RabbitMQ tags."""
        roles = self._roles()
        return [
            {
                "name": name,
                "tags": _tags_of(console_rights(Principal(name, roles=has), roles.roles)),
                "limits": {},
            }
            for name, has in roles.users.items()
        ]

    async def user(self, request: Request, name: str) -> Fields:
        """Return the user `name`. Raises NotThereError if the user does not exist."""
        return _only(await self.users(request), name)

    async def permissions(self, _: Request) -> list[Fields]:
        """Return the AMQP 0-9-1 permissions of users: one row for each user, role and virtual host."""
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

    async def vhost_permissions(self, request: Request, of: str) -> list[Fields]:
        """Return the AMQP 0-9-1 permissions of all users in the virtual host `of`."""
        host = self._host(of)
        return [one for one in await self.permissions(request) if one["vhost"] == host.name]

    async def user_permissions(self, request: Request, name: str) -> list[Fields]:
        """Return the AMQP 0-9-1 permissions of the user `name` in all virtual hosts."""
        await self.user(request, name)
        return [one for one in await self.permissions(request) if one["user"] == name]

    async def permission(self, request: Request, of: str, user: str) -> Fields:
        """Return the permissions of a user in the virtual host `of`.

        The regular expressions of several roles are combined into one that matches if any of them does.
        Raises NotThereError if the user has no permissions in the virtual host.
        """
        found = [one for one in await self.vhost_permissions(request, of) if one["user"] == user]
        if not found:
            raise NotThereError
        if len(found) == 1:
            return found[0]
        words = ("configure", "write", "read")
        return found[0] | {word: "|".join(f"({one[word]})" for one in found if one[word]) for word in words}

    async def policies(self, _: Request, *of: str) -> list[Fields]:
        """Return the policies of the virtual host `of`, or of all virtual hosts if none is given."""
        return [
            {"vhost": host.name, "apply-to": "all", "priority": 0, **one.document}
            for host in self._hosts_of(of)
            for one in host.policies
        ]

    async def policy(self, request: Request, of: str, name: str) -> Fields:
        """Return the policy `name` of the virtual host `of`."""
        return _only(await self.policies(request, of), name)

    async def definitions(self, request: Request, *of: str) -> Fields:
        """Return the durable objects and the policies in the form of RabbitMQ's definitions file.

        With a virtual host `of`, return only its objects and policies. Without it, return those of all
        virtual hosts, and also users and permissions.
        """
        hosts = list(self._hosts_of(of))
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
        durable = {(one["vhost"], "queue", one["name"]) for one in queues}
        durable |= {
            (one.virtual_host, "exchange", one.name)
            for one in exchanges_of(self._hosts)
            if one.exchange.durable or _built_in(one.name)
        }
        bindings = [
            {word: value for word, value in one.items() if word != "properties_key"}
            async for some in slices(bindings_of(self._hosts))
            for one in map(_binding, some)
            if one["vhost"] in names
            and (one["vhost"], "exchange", one["source"]) in durable
            and (one["vhost"], one["destination_type"], one["destination"]) in durable
        ]
        return {
            "rabbit_version": self._version,
            "rabbitmq_version": self._version,
            "product_name": "gateway",
            "product_version": self._metrics.version,
            "users": [] if of or self._is_part else await self.users(request),
            "vhosts": [{"name": name} for name in sorted(names)],
            "permissions": [] if of or self._is_part else await self.permissions(request),
            "topic_permissions": [],
            "parameters": [],
            "global_parameters": [],
            "policies": await self.policies(request, *of),
            "queues": queues,
            "exchanges": exchanges,
            "bindings": bindings,
        }

    async def aliveness_test(self, request: Request, of: str) -> Fields:
        """Return status `ok` if the virtual host `of` exists and the gateway is ready.

        Raises NotThereError if the virtual host does not exist, UnavailableError if the gateway is not ready.
        """
        self._host(of)
        return await self.checked(request)

    async def healthy(self, _: Request, *of: str) -> Fields:
        """Return status `ok`, or status `failed` with the reason if the gateway is not ready.

        `of` may be the name of the node. Raises NotThereError for any other name.
        """
        if of and of[0] != self._node:
            raise NotThereError
        if reasons := self._why_not():
            return {"status": "failed", "reason": "; ".join(reasons)}
        return {"status": "ok"}

    async def checked(self, _: Request) -> Fields:
        """Return status `ok` if the gateway is ready. This method serves all paths below `health/checks`.

        Raises UnavailableError if the gateway is not ready.
        """
        if reasons := self._why_not():
            raise UnavailableError("; ".join(reasons))
        return {"status": "ok"}

    async def port_open(self, _: Request, port: str) -> Fields:
        """Return status `ok` if a listener of the gateway has this port.

        Raises UnavailableError if none has.
        """
        if port not in {str(one.port) for one in self._listeners()}:
            raise UnavailableError(f"nothing listens on port {port}")
        return {"status": "ok", "port": int(port)}

    # Changes.

    async def close_connection(self, _: Request, name: str) -> Response:
        """Disconnect the client whose connection has this name, which is its address.

        Raises NotThereError if there is no such connection.
        """
        chosen = [one for one in self._clients() if one.address == name]
        if not chosen:
            raise NotThereError
        for one in chosen:
            one.dismiss()
        self._flush()
        return Response(status_code=204)

    async def change(self, request: Request, path: Sequence[str]) -> Response:
        """Execute a DELETE, PUT or POST request.

        `path` has the parts of the URL's path after `/api/`. Raises NotThereError if the object does not
        exist or nothing can be deleted at this path, and ValueError if the API has no PUT or POST at this
        path.
        """
        try:
            act, words = _match_path(CHANGES[request.method], path)
        except NotThereError:
            if request.method == "DELETE":
                raise
            raise ValueError(UNSAID) from None
        found: Response = await act(self, request, *words)
        return found

    async def declare_queue(self, request: Request, of: str, name: str) -> Response:
        """Declare the queue `name` in the virtual host `of`, with the properties in the request's body.

        Return 201 for a new queue, else 204.
        """
        host = self._host(of)
        new = await self._changes.declare_queue(request, host, name)
        return await self._respond_declared(host, new)

    async def declare_exchange(self, request: Request, of: str, name: str) -> Response:
        """Declare the exchange `name` in the virtual host `of`, with the properties in the request's body.

        Return 201 for a new exchange, else 204.
        """
        host = self._host(of)
        new = await self._changes.declare_exchange(request, host, _exchange_name(name))
        return await self._respond_declared(host, new)

    async def bind(self, request: Request, of: str, source: str, letter: str, name: str) -> Response:
        """Bind a queue or exchange to the exchange `source`, in the virtual host `of`.

        The queue `name` is bound if `letter` is "q", and the exchange `name` if it is "e". The request's body
        has the routing key and the arguments.
        """
        host, (kind, name) = self._host(of), _destination_of(letter, name)
        key = await self._changes.bind(request, host, kind, _exchange_name(source), name)
        response = await self._respond_declared(host, True)
        response.headers["location"] = f"{quote(name, safe='')}/{quote(key, safe='') or '~'}"
        return response

    async def _respond_declared(self, host: VirtualHost, new: bool) -> Response:
        host.has_durable_changes = False  # the response waits for the disk instead
        await self._wait_until_durable()
        return Response(status_code=201 if new else 204)

    async def publish(self, request: Request, of: str, name: str) -> Response:
        """Publish the message in the request's body to the exchange `name` of the virtual host `of`.

        The field `routed` of the response is False if no queue or route accepts the message. Raises
        ValueError if the message is refused.
        """
        host = self._host(of)
        try:
            routed = await self._changes.publish(request, host, _exchange_name(name))
        except AmqpRefused as error:  # for a publish RabbitMQ's response has the code and text only
            raise ValueError(f"{error.code} {error}") from error
        return json_response({"routed": routed})

    async def get(self, request: Request, of: str, name: str) -> Response:
        """Take messages from the head of the queue `name` in the virtual host `of`, and return them.

        The fields of the request's body are RabbitMQ's: `ackmode` determines if the messages are removed,
        rejected or requeued, and `count` is the largest number of messages to return.
        """
        caller: Caller = request.state.caller
        await request.body()  # The client is waited for before other responses of the user wait.
        async with self._unsent.building(caller.principal.name):
            rows = await self._changes.get(request, self._host(of), name)
            await self._wait_until_durable()
            return await _as_json(rows)

    async def delete_queue(self, request: Request, of: str, name: str) -> Response:
        """Delete the queue `name` of the virtual host `of`, unless `if-unused` or `if-empty` forbids it.

        These parameters of the request's query are as in queue.delete. Raises NotThereError if the queue does
        not exist.
        """
        host = self._host(of)
        if name not in host.queues:
            raise NotThereError
        unused, empty = (_flag_of(request, word) for word in ("if-unused", "if-empty"))

        def act(actor: Actor) -> None:
            actor.check("configure", "queue", name)
            host.delete_queue(host.queue(name, self), if_unused=unused, if_empty=empty)

        return await self._apply_change(request, host, act)

    async def delete_exchange(self, request: Request, of: str, name: str) -> Response:
        """Delete the exchange `name` of the virtual host `of`, unless `if-unused` forbids it.

        This parameter of the request's query is as in exchange.delete. Raises NotThereError if the exchange
        does not exist.
        """
        host = self._host(of)
        name = _exchange_name(name)
        if name and name not in host.exchanges:
            raise NotThereError

        def act(actor: Actor) -> None:
            actor.check("configure", "exchange", name)
            host.delete_exchange(name, if_unused=_flag_of(request, "if-unused"))

        return await self._apply_change(request, host, act)

    async def unbind(
        self, request: Request, of: str, source: str, letter: str, name: str, key: str
    ) -> Response:
        """Remove one binding between the exchange `source` and a destination, in the virtual host `of`.

        The destination is the queue `name` if `letter` is "q", and the exchange `name` if it is "e". `key` is
        the binding's properties key, percent-encoded or not. Raises NotThereError if there is no such
        binding.
        """
        host, leads = self._host(of), _destination_of(letter, name)
        for one in bindings_of(self._hosts):
            same = one.virtual_host == host.name and one.source == _exchange_name(source)
            if same and (one.kind, one.destination.name) == leads and _has_key(_binding(one), key):
                return await self._apply_change(request, host, partial(_remove_binding, host, one))
        raise NotThereError

    async def purge_queue(self, request: Request, of: str, name: str) -> Response:
        """Remove all ready messages of the queue `name` in the virtual host `of`.

        Raises NotThereError if the queue does not exist.
        """
        host = self._host(of)
        if name not in host.queues:
            raise NotThereError

        def act(actor: Actor) -> None:
            actor.check("read", "queue", name)
            host.queue(name, self).purge()

        return await self._apply_change(request, host, act)

    async def _apply_change(
        self, request: Request, host: VirtualHost, act: Callable[[Actor], None]
    ) -> Response:
        """Change a virtual host: call `act` with the caller's rights. Return 204 once this is on disk."""
        await self._changes.permit(request, host, act)
        host.has_durable_changes = False  # the response waits for the disk instead
        await self._wait_until_durable()
        return Response(status_code=204)

    async def _wait_until_durable(self) -> None:
        """Wait until all changes are on disk."""
        await RemovalPace(self._flush).spend(1)
        await wait_until_durable(self._store, self._flush)

    def _hosts_of(self, of: Sequence[str]) -> Iterable[VirtualHost]:
        """Return the virtual hosts with the names in `of`, or all virtual hosts if `of` is empty.

        Raises NotThereError if one of them does not exist.
        """
        return [self._host(name) for name in of] if of else list(self._hosts.values())

    def _host(self, name: str) -> VirtualHost:
        host = self._hosts.get(name)
        if host is None:
            raise NotThereError
        return host


def _tags_of(rights: ConsoleRights) -> list[str]:
    """Return RabbitMQ's user tags that correspond to rights of the gateway."""
    return ["management"] if rights.right == "read" and rights.read_hosts is not None else TAGS[rights.right]


def _match_path(table: Mapping[str, Asked], words: Sequence[str]) -> tuple[Asked, list[str]]:
    """Find the first path in `table` that matches a request's path, and return its value.

    `words` are the parts of the request's path. A part `*` of a path in the table matches any word; these
    words are returned as a list, after the value. Raises NotThereError if no path matches.
    """
    for path, one in table.items():
        parts = path.split("/")
        if len(parts) == len(words) and all(
            word in (FREE, given) for word, given in zip(parts, words, strict=True)
        ):
            return one, [given for word, given in zip(parts, words, strict=True) if word == FREE]
    raise NotThereError


async def _as_json(rows: list[Fields]) -> Response:
    """Return a JSON response with the list `rows`.

    The list may be very long. It is encoded in slices, and the event loop runs other tasks between them.
    """
    parts = [orjson.dumps(some)[1:-1] async for some in slices(rows)]
    return Response(b"[" + b",".join(parts) + b"]", 200, NEVER_STORE, "application/json")


def _stat(word: str, count: int, rate: float) -> Fields:
    """Return two fields of RabbitMQ's `message_stats`: `word` has a count, `word_details` its rate."""
    return {word: count, f"{word}_details": {"rate": round(rate, 3)}}


def _descriptors() -> int:
    """Return the number of open file descriptors, or 0 where the system does not report it."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def _moment(utc: float) -> str:
    return datetime.fromtimestamp(utc, UTC).isoformat(timespec="milliseconds")


def _queue_of(host: VirtualHost, name: str) -> AmqpQueue:
    queue = host.queues.get(name)
    if queue is None:
        raise NotThereError
    return queue


def _remove_binding(host: VirtualHost, one: ListedBinding, actor: Actor) -> None:
    to = one.destination
    assert isinstance(to, AmqpQueue | Exchange)
    check_binding(actor, one.kind, to.name, one.source, one.routing_key)
    host.unbind(one.source, to, one.routing_key, one.arguments)


def _flag_of(request: Request, word: str) -> bool:
    return request.query_params.get(word) == "true"


def _exchange_name(word: str) -> str:
    return "" if word == DEFAULT else word


def _destination_of(letter: str, name: str) -> tuple[str, str]:
    """Return the kind and name of the destination that a path names as `q/NAME` or `e/NAME`.

    `letter` is `q` for a queue or `e` for an exchange. Raises NotThereError for any other letter.
    """
    if letter == "q":
        return "queue", name
    if letter == "e":
        return "exchange", _exchange_name(name)
    raise NotThereError


def _has_key(binding: Fields, key: str) -> bool:
    return key in (binding["properties_key"], unquote(binding["properties_key"]))


def _built_in(name: str) -> bool:
    return not name or name.startswith("amq.")


def _only(rows: Iterable[Fields], name: str) -> Fields:
    """Return the first row whose field `name` has this value. Raises NotThereError if there is none."""
    for row in rows:
        if row["name"] == name:
            return row
    raise NotThereError


def _arguments(headers: Headers) -> Any:
    return plain(plain_headers(headers))


def _exchange(one: ListedExchange) -> Fields:
    exchange = one.exchange
    return {
        "name": exchange.name,
        "vhost": one.virtual_host,
        "type": exchange.kind,
        "durable": exchange.durable,
        "auto_delete": exchange.auto_delete,
        "internal": exchange.internal,
        "arguments": _arguments(exchange.arguments),
        **({} if exchange.delayed is None else {"messages_delayed": len(exchange.delayed)}),
    }


def _default_exchange(host: str) -> Fields:
    return {
        "name": "",
        "vhost": host,
        "type": "direct",
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": {},
    }


def _binding(one: ListedBinding) -> Fields:
    return {
        "source": one.source,
        "vhost": one.virtual_host,
        "destination": one.destination.name,
        "destination_type": one.kind,
        "routing_key": one.routing_key,
        "arguments": _arguments(one.arguments),
        "properties_key": quote(one.routing_key, safe="") or "~",
    }


def _default_binding(host: str, queue: AmqpQueue) -> Fields:
    """Return the binding of a queue to the default exchange, which has the queue's name as its key.

    `host` is the name of the virtual host.
    """
    return _binding(ListedBinding(host, "", queue, queue.name, ()))


PATHS: Final[Mapping[str, Asked]] = {
    "overview": RabbitApi.overview,
    "whoami": RabbitApi.whoami,
    "cluster-name": RabbitApi.cluster_name,
    "nodes": RabbitApi.nodes,
    "nodes/*": RabbitApi.node,
    "vhosts": RabbitApi.vhosts,
    "vhosts/*": RabbitApi.vhost,
    "vhosts/*/connections": RabbitApi.vhost_connections,
    "vhosts/*/permissions": RabbitApi.vhost_permissions,
    "vhosts/*/topic-permissions": RabbitApi.empty_list_of_host,
    "vhosts/*/channels": RabbitApi.empty_list_of_host,
    "queues": RabbitApi.queues,
    "queues/*": RabbitApi.queues,
    "queues/*/*": RabbitApi.queue,
    "queues/*/*/bindings": RabbitApi.queue_bindings,
    "exchanges": RabbitApi.exchanges,
    "exchanges/*": RabbitApi.exchanges,
    "exchanges/*/*": RabbitApi.exchange,
    "exchanges/*/*/bindings/source": RabbitApi.bindings_from,
    "exchanges/*/*/bindings/destination": RabbitApi.bindings_to,
    "bindings": RabbitApi.bindings,
    "bindings/*": RabbitApi.bindings,
    "bindings/*/e/*/*/*": RabbitApi.bindings_between,
    "bindings/*/e/*/*/*/*": RabbitApi.binding,
    "connections": RabbitApi.connections,
    "connections/*": RabbitApi.connection,
    "channels": RabbitApi.empty_list,
    "consumers": RabbitApi.consumers,
    "consumers/*": RabbitApi.consumers,
    "users": RabbitApi.users,
    "users/*": RabbitApi.user,
    "users/*/permissions": RabbitApi.user_permissions,
    "users/*/topic-permissions": RabbitApi.empty_list_of_user,
    "permissions": RabbitApi.permissions,
    "permissions/*/*": RabbitApi.permission,
    "topic-permissions": RabbitApi.empty_list,
    "policies": RabbitApi.policies,
    "policies/*": RabbitApi.policies,
    "policies/*/*": RabbitApi.policy,
    "operator-policies": RabbitApi.empty_list,
    "parameters": RabbitApi.empty_list,
    "global-parameters": RabbitApi.empty_list,
    "vhost-limits": RabbitApi.empty_list,
    "user-limits": RabbitApi.empty_list,
    "definitions": RabbitApi.definitions,
    "definitions/*": RabbitApi.definitions,
    "aliveness-test/*": RabbitApi.aliveness_test,
    "healthchecks/node": RabbitApi.healthy,
    "healthchecks/node/*": RabbitApi.healthy,
    "health/checks/alarms": RabbitApi.checked,
    "health/checks/local-alarms": RabbitApi.checked,
    "health/checks/virtual-hosts": RabbitApi.checked,
    "health/checks/port-listener/*": RabbitApi.port_open,
}
"""Methods that return the response to GET, by path; a part `*` of a path is an argument of the method."""
OF_ALL_HOSTS: Final = frozenset(
    {
        RabbitApi.nodes,
        RabbitApi.node,
        RabbitApi.users,
        RabbitApi.user,
        RabbitApi.user_permissions,
        RabbitApi.empty_list_of_user,
        RabbitApi.permissions,
        RabbitApi.permission,
        RabbitApi.vhost_permissions,
        RabbitApi.port_open,
    }
)
"""Methods denied to callers who may see some virtual hosts only: nodes, ports, users and permissions."""
CHANGES: Final[Mapping[str, Mapping[str, Asked]]] = {
    "DELETE": {
        "connections/*": RabbitApi.close_connection,
        "queues/*/*": RabbitApi.delete_queue,
        "queues/*/*/contents": RabbitApi.purge_queue,
        "exchanges/*/*": RabbitApi.delete_exchange,
        "bindings/*/e/*/*/*/*": RabbitApi.unbind,
    },
    "PUT": {
        "queues/*/*": RabbitApi.declare_queue,
        "exchanges/*/*": RabbitApi.declare_exchange,
    },
    "POST": {
        "bindings/*/e/*/*/*": RabbitApi.bind,
        "exchanges/*/*/publish": RabbitApi.publish,
        "queues/*/*/get": RabbitApi.get,
    },
}
"""Methods that perform a DELETE, PUT or POST, by HTTP method and path."""
