"""Operations on connected clients: listing and disconnecting them.

A disconnection needs at least one of the parameters client, user and address. The protocol decides which
packet a client receives, and what happens to its session and will.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import structlog
import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway import clock
from gateway.admin.admission import hosts_of
from gateway.admin.messages import moment, plain
from gateway.admin.models import ConnectionRow, DisconnectResult
from gateway.admin.object_history import ObjectHistory
from gateway.admin.operations import ServedOperation
from gateway.admin.responses import BadChoiceError, json_body, json_response
from gateway.admin.selection import SLICE, ListPage, checked_choice, page_of, query_of, slices
from gateway.operations import CONNECTIONS, DISCONNECT
from gateway.transport.stream import Stream, StreamCounters

WORDS: Final = ("client", "user", "address")
WATCHED_SECS: Final = 1.0
RATES: Final = {"bytes_in": 0, "bytes_out": 1}

log = structlog.get_logger()


class ConnectionDetails(NamedTuple):
    """Details of a client's connection, for the rows of the API and for RabbitMQ's API.

    `host` and `port` are the address of the listener. `client_properties`, `frame_max` and `channel_max` are
    those of AMQP 0-9-1. `timeout` is the heartbeat interval in seconds.
    """

    host: str = ""
    port: int = 0
    tls: bool = False
    client_properties: Mapping[str, Any] = MappingProxyType({})
    frame_max: int = 0
    channel_max: int = 0
    timeout: int = 0


class ConnectedClient(NamedTuple):
    """Connection of a client, as the API shows it.

    `client` (the client identifier) and `user` are "" before the login. `address` is the client's address, as
    `host:port`. `dismiss` disconnects the client. `virtual_host` is "" in protocols without virtual hosts.
    `opened_at` is the time of the login in loop-clock seconds, or None before the login.
    """

    endpoint: str
    protocol: str
    client: str
    user: str
    address: str
    dismiss: Callable[[], None]
    virtual_host: str = ""
    channels: int = 0
    idle: bool = True
    unsettled: int = 0
    unacknowledged: int = 0
    version: str = ""
    opened_at: float | None = None
    stream: Stream | None = None
    details: ConnectionDetails = ConnectionDetails()

    @property
    def key(self) -> str:
        """Sort key of the connection in paged lists."""
        return f"{self.address}\n{self.endpoint}"

    def to_row(self) -> dict[str, Any]:
        """Return the connection as a JSON object of the API (ConnectionRow), without rates and history."""
        facts = self._asdict()
        del facts["dismiss"], facts["stream"], facts["details"]
        opened_at = facts.pop("opened_at")
        began = None if opened_at is None else clock.wall() - (clock.now() - opened_at)
        facts["since"] = None if began is None else moment(began)
        facts["bytes_in_per_sec"] = facts["bytes_out_per_sec"] = None
        details = self.details
        facts["tls"] = details.tls
        facts["frame_max"], facts["channel_max"] = details.frame_max, details.channel_max
        facts["heartbeat_secs"] = details.timeout
        facts["client_properties"] = plain(dict(details.client_properties))
        return facts


KEYS: Final[Mapping[str, Callable[[ConnectedClient], str]]] = {
    "address": lambda one: one.key,
    "endpoint": lambda one: f"{one.endpoint}\n{one.key}",
    "protocol": lambda one: f"{one.protocol}\n{one.key}",
    "client": lambda one: f"{one.client}\n{one.key}",
    "user": lambda one: f"{one.user}\n{one.key}",
    "since": lambda one: f"{one.opened_at or 0.0:020.6f}\n{one.key}",
}
"""Functions that return the sort key of a connection, by the value of the parameter `sort`."""


class ClientsApi:
    """API operations on connected clients.

    `connected` returns the connections; `flush` writes pending packets to sockets. While `history` runs, it
    records the message and byte counts of each client.
    """

    def __init__(
        self,
        connected: Callable[[], Iterable[ConnectedClient]],
        flush: Callable[[], None],
    ) -> None:
        self._connected = connected
        self._flush = flush
        self._watched: dict[str, tuple[Stream, StreamCounters]] = {}  # by the key of the history
        self.history = ObjectHistory(
            connected,
            _history_key,
            self._numbers,
            levels=("unsettled", "unacknowledged"),
            counts=("bytes_in", "bytes_out"),
            dropped=self._unwatch,
        )

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on clients, each with the function that serves it."""
        return [
            ServedOperation(CONNECTIONS, self._list, ConnectionRow),
            ServedOperation(DISCONNECT, self._disconnect, DisconnectResult),
        ]

    async def _list(self, request: Request) -> Response:
        choice, count, after = await query_of(request, CONNECTIONS.words)
        rates, order = choice.pop("rates", False), choice.pop("sort", "address")
        with_history = choice.pop("history", False)
        streams: list[Stream | None] = []

        def row_of(one: ConnectedClient) -> dict[str, Any]:
            return {**one.to_row(), "history": self.history.shown(one) if with_history else None}

        def show(one: ConnectedClient) -> dict[str, Any]:
            streams.append(one.stream)
            return row_of(one)

        mine, fits = hosts_of(request), chooser(choice)

        def is_selected(one: ConnectedClient) -> bool:
            return mine(one.virtual_host) and fits(one)

        if order in RATES:
            return (await self._fastest(is_selected, order, count, row_of)).to_response()
        page = await page_of(self._connected(), is_selected, KEYS[order], show, count, after)
        if rates:
            for row, (read, written) in zip(page.rows, await measure_rates(streams), strict=True):
                row["bytes_in_per_sec"], row["bytes_out_per_sec"] = read, written
        return page.to_response()

    def _numbers(self, one: ConnectedClient) -> tuple[int, int, int, int]:
        """Return the numbers of a connection that are recorded in the history of the last hour.

        They are unsettled messages, unacknowledged messages, bytes read and bytes written. Bytes are counted
        from the first call of this method for this connection.
        """
        read = written = 0
        if one.stream is not None:
            key = _history_key(one)
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = (one.stream, one.stream.watch())
            read, written = watched[1].read, watched[1].written
        return one.unsettled, one.unacknowledged, read, written

    def _unwatch(self, key: str) -> None:
        """Stop counting the bytes of a connection that has closed; `key` is its key in the history."""
        if (watched := self._watched.pop(key, None)) is not None:
            watched[0].unwatch(watched[1])

    async def _fastest(
        self,
        chosen: Callable[[ConnectedClient], bool],
        order: str,
        count: int,
        row_of: Callable[[ConnectedClient], dict[str, Any]],
    ) -> ListPage:
        """Return the `count` connections with the highest rates, as the only page of a list.

        Only connections for which `chosen` returns True are considered. `order` is `bytes_in` or `bytes_out`,
        the rate to compare; rates are measured for WATCHED_SECS. `row_of` returns the JSON object of a
        connection.
        """
        found: list[ConnectedClient] = []
        async for some in slices(self._connected()):
            found += [one for one in some if chosen(one)]
        rows = list(zip(found, await measure_rates([one.stream for one in found]), strict=True))
        at = RATES[order]
        first = heapq.nlargest(count, rows, key=lambda row: row[1][at] or 0.0)
        fastest = [
            {**row_of(one), "bytes_in_per_sec": read, "bytes_out_per_sec": written}
            for one, (read, written) in first
        ]
        return ListPage(len(found), fastest, None)

    async def _disconnect(self, request: Request) -> Response:
        """Disconnect the clients that the body of the request selects, and return their number."""
        choice = await _choice(request)
        mine, fits = hosts_of(request), chooser(choice)
        chosen = [one for one in self._connected() if mine(one.virtual_host) and fits(one)]
        for one in chosen:
            one.dismiss()
        self._flush()
        if chosen:
            log.info("operator disconnected clients", count=len(chosen), **choice)
        return json_response({"disconnected": len(chosen)})


def _history_key(one: ConnectedClient) -> str:
    """Return the key of a connection in the history.

    Later connections from the same address have other keys.
    """
    return f"{one.key}\n{one.opened_at}"


async def measure_rates(streams: Sequence[Stream | None]) -> list[tuple[float, float] | tuple[None, None]]:
    """Measure for WATCHED_SECS seconds how many bytes per second each stream reads and writes.

    Return a pair for each stream: bytes read and bytes written per second, or two Nones if the stream is
    None.
    """
    began = clock.now()
    watched: list[StreamCounters | None] = []
    try:
        for at, stream in enumerate(streams):
            watched.append(None if stream is None else stream.watch())
            if at % SLICE == SLICE - 1:
                await trio.lowlevel.checkpoint()
        before = [(0, 0) if one is None else (one.read, one.written) for one in watched]
        await trio.sleep(WATCHED_SECS)
    finally:
        for stream, one in zip(streams, watched, strict=False):
            if stream is not None and one is not None:
                stream.unwatch(one)
    secs = clock.now() - began
    return [
        (None, None)
        if one is None
        else (round((one.read - read) / secs, 1), round((one.written - written) / secs, 1))
        for one, (read, written) in zip(watched, before, strict=True)
    ]


def chooser(choice: Mapping[str, str]) -> Callable[[ConnectedClient], bool]:
    """Return a predicate that selects connections by the values of their fields.

    `choice` maps names of fields of ConnectedClient, such as `user`, to the values that they must have.
    """
    return lambda one: all(getattr(one, word) == value for word, value in choice.items())


async def _choice(request: Request) -> dict[str, str]:
    choice: Any = await json_body(request)
    if not isinstance(choice, dict) or not all(choice.values()) or choice.keys().isdisjoint(WORDS):
        raise BadChoiceError('give one of {"client": ID}, {"user": NAME}, {"address": "HOST:PORT"}')
    return checked_choice(choice, DISCONNECT.words)
