"""Table of the operations on a running gateway: one row for each, with its path below `/api/v1`.

A row has no code. The HTTP server's routes, the OpenAPI document (gateway/admin/operations.py) and the
commands of the command line (gateway/cli/operations.py) are derived from the table. So paths, parameters and
their descriptions are changed only here. Since `--help` reads this file, it imports nothing at its start that
takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

PREFIX: Final = "/api/v1"

Kind = type | tuple[str, ...] | Callable[[], tuple[str, ...]]
"""Type of a parameter's value: str, int, float (not negative), bool, list (of texts), the permitted texts, or
a function that returns the permitted texts.
"""


class OperationWord(NamedTuple):
    """Parameter of an operation: in a query, in a request's body, or as an option of a command.

    `kind` is the type of its value, `meaning` its description, and `metavar` the name of its value in the
    help of the command line.
    """

    kind: Kind
    meaning: str
    metavar: str | None = None

    @property
    def texts(self) -> tuple[str, ...] | None:
        """Permitted values, or None if the value is a number, a flag or free text."""
        if isinstance(self.kind, tuple):
            return self.kind
        return None if isinstance(self.kind, type) else self.kind()


Words = Mapping[str, OperationWord]
NO_WORDS: Final[Words] = MappingProxyType({})


def protocols() -> tuple[str, ...]:
    """Return the names of all protocols."""
    from gateway.protocols import DIALECTS

    return tuple(DIALECTS)


def protocols_with_queues() -> tuple[str, ...]:
    """Return the names of the protocols that have queues and virtual hosts."""
    from gateway.protocols import DIALECTS

    return tuple(name for name, one in DIALECTS.items() if one.has_virtual_hosts)


class ApiOperation(NamedTuple):
    """Operation of the HTTP API.

    `path` is below `/api/v1` and may contain parameters in braces. `choice` has the parameters that select
    objects, `flags` the other parameters. A GET reads parameters from its query, a POST from its body.
    `paged` is True if the response is one page of a list. `removes` is True if the operation acts on the
    selected objects or, with the parameter `all`, on all objects. If `is_open` is True, the function behind
    the operation decides who may call it; otherwise a GET needs the right `read`, everything else the right
    `write`.
    """

    method: str
    path: str
    summary: str
    choice: Words = NO_WORDS
    flags: Words = NO_WORDS
    paged: bool = False
    removes: bool = False
    absent: bool = False  # the response may be 404
    conflicts: bool = False  # the response may be 409
    streams: bool = False  # the response is server-sent events
    is_open: bool = False
    by_host: bool = False  # a caller with rights in some virtual hosts only may call it, for these

    @property
    def url(self) -> str:
        """Path of the operation, including `/api/v1`."""
        return PREFIX + self.path

    @property
    def words(self) -> Words:
        """All parameters that the operation accepts, except those that select one page of a list."""
        every = {"all": ALL} if self.removes else {}
        return {**self.choice, **self.flags, **every}


_read: Final = partial(ApiOperation, "GET")
_page: Final = partial(ApiOperation, "GET", paged=True)
_act: Final = partial(ApiOperation, "POST")
_removal: Final = partial(ApiOperation, "POST", removes=True)

ALL: Final = OperationWord(bool, "Select all objects instead of giving conditions.")
COUNT: Final = OperationWord(int, "Maximum number of rows.")
AFTER: Final = OperationWord(str, "Key after which the list begins, from `next` of the previous page.")
EXACT: Final = {"exact": OperationWord(bool, "Compare names literally: * is a *, and a topic is no filter.")}
NAME: Final = OperationWord(str, "Name; * is any text.")
ROUTE: Final = OperationWord(str, "Name of the route.")
HOST: Final = OperationWord(str, "Name of the virtual host.", "NAME")
IDLE: Final = OperationWord(float, "Minimum time without use, in seconds.")
HISTORY: Final = {"history": OperationWord(bool, "Add the counters of the last hour, if they are stored.")}

# The process.

NAMED: Final = {"name": NAME}
STATUS: Final = _read("/status", "Return the state of the gateway")
ENDPOINTS: Final = _page(
    "/endpoints",
    "List listeners and links",
    {"kind": OperationWord(("listener", "link"), "Kind of endpoint."), **NAMED},
)
ROUTES: Final = _page("/routes", "List routes with their counters", NAMED)
OUTBOXES: Final = _page("/outboxes", "List outboxes of links")
USERS: Final = _page("/users", "List users and their roles", NAMED)
ROLES: Final = _page("/roles", "List roles", NAMED)
LIMITS: Final = _page("/limits", "List limits and their use")
JOURNAL: Final = _read(
    "/journal",
    "List the newest rows of the journal, newest first",
    {"route": ROUTE},
    {"count": COUNT, "after": AFTER},
    absent=True,
)
PUBLISH: Final = _act("/publish", "Publish a message")
PAUSE_ROUTE: Final = _act("/routes/pause", "Pause a route; messages are held meanwhile", absent=True)
RESUME_ROUTE: Final = _act("/routes/resume", "Resume a route", absent=True)
PAUSE_LINK: Final = _act("/links/pause", "Pause a link; messages are held meanwhile", absent=True)
RESUME_LINK: Final = _act("/links/resume", "Resume a link", absent=True)
DRAIN: Final = _act("/drain", "Stop the gateway when messages in flight have settled")
RATES: Final = _page(
    "/rates",
    "List rates of the last hour",
    {
        "kind": OperationWord(("process", "protocol", "listener", "link", "route"), "Kind of counter."),
        "name": NAME,
        "what": OperationWord(
            ("in", "out", "settled", "refused", "dead_letters", "frames_in", "frames_out"),
            "Counted quantity.",
        ),
    },
)

# Mapping files.

MAPPINGS: Final = _page("/mappings", "List the mapping files")
EXPLAIN: Final = _act("/mappings/explain", "Explain how the mapping, or a draft of it, routes a message")
RELOAD: Final = _act("/mappings/reload", "Reload the mapping files")
DRY_RUN: Final = _act("/mappings/dry-run", "Return the changes that a reload would make")

# Clients.

CLIENT_WORDS: Final = {
    "client": OperationWord(str, "Client id or connection name.", "ID"),
    "user": OperationWord(str, "User name.", "NAME"),
    "address": OperationWord(str, "Address of the client.", "HOST:PORT"),
    "endpoint": OperationWord(str, "Name of the listener.", "NAME"),
    "protocol": OperationWord(protocols, "Name of the protocol."),
}
CLIENT_ORDERS: Final = ("address", "endpoint", "protocol", "client", "user", "since", "bytes_in", "bytes_out")
CONNECTIONS: Final = _page(
    "/connections",
    "List connected clients",
    CLIENT_WORDS,
    {
        "rates": OperationWord(bool, "Add bytes per second, which are measured for one second."),
        "sort": OperationWord(
            CLIENT_ORDERS, "Column to sort by; bytes_in and bytes_out: the highest rates first."
        ),
        **HISTORY,
    },
    by_host=True,
)
DISCONNECT: Final = _act("/connections/disconnect", "Disconnect clients", CLIENT_WORDS, by_host=True)

# MQTT sessions and retained messages.

SESSION_WORDS: Final = {
    "client": OperationWord(str, "Client id; * is any text.", "PATTERN"),
    "user": OperationWord(str, "User name; * is any text.", "PATTERN"),
    "idle_longer_than": IDLE,
}
SESSIONS: Final = _page(
    "/sessions",
    "List MQTT sessions",
    {
        **SESSION_WORDS,
        "in_use": OperationWord(bool, "Only sessions of connected clients, or only of disconnected ones."),
    },
    EXACT,
)
REMOVE_SESSIONS: Final = _removal(
    "/sessions/remove",
    "End sessions and discard their messages",
    SESSION_WORDS,
    {"in_use": OperationWord(bool, "Include sessions of connected clients."), **EXACT},
)
SESSION: Final = _read("/sessions/{client:path}", "Return one session", absent=True)
RETAINED_WORDS: Final = {
    "topic": OperationWord(str, "MQTT topic filter with + and #.", "FILTER"),
    "client": OperationWord(str, "Client that published the retained message; * is any text.", "PATTERN"),
    "user": OperationWord(str, "User that published the retained message; * is any text.", "PATTERN"),
}
RETAINED: Final = _page("/retained", "List retained messages", RETAINED_WORDS, EXACT)
REMOVE_RETAINED: Final = _removal("/retained/remove", "Clear retained messages", RETAINED_WORDS, EXACT)

# Queues and other objects of the embedded broker.

QUEUE_WORDS: Final = {
    "protocol": OperationWord(protocols_with_queues, "Name of a protocol with queues."),
    "virtual_host": HOST,
    "kind": OperationWord(
        ("queue", "subscription"), "Kind: queues, or durable subscriptions (named CLIENT/IDENTIFIER)."
    ),
    "queue": OperationWord(str, "Name; * is any text.", "PATTERN"),
    "empty": OperationWord(bool, "Only queues without messages, or only with messages."),
    "idle_longer_than": IDLE,
}
QUEUES: Final = _page(
    "/queues",
    "List queues and durable subscriptions",
    {
        **QUEUE_WORDS,
        "in_use": OperationWord(bool, "Only queues with consumers or an owner, or only without."),
    },
    {
        **EXACT,
        **HISTORY,
        "sort": OperationWord(("name", "messages"), "Order: by name, or the longest first."),
    },
    by_host=True,
)
REMOVE_QUEUES: Final = _removal(
    "/queues/remove",
    "Delete queues",
    QUEUE_WORDS,
    {"in_use": OperationWord(bool, "Include queues with consumers."), **EXACT},
    by_host=True,
)
PURGE_QUEUES: Final = _removal(
    "/queues/purge", "Purge the ready messages of queues", QUEUE_WORDS, EXACT, by_host=True
)
PEEK: Final = _act(
    "/queues/peek", "Return the first messages of a queue without consuming them", absent=True, by_host=True
)
CONSUMERS: Final = _page(
    "/consumers",
    "List consumers of queues and durable subscriptions",
    {
        "protocol": OperationWord(protocols_with_queues, "Name of a protocol with queues."),
        "virtual_host": HOST,
        "queue": OperationWord(str, "Name of the queue or subscription."),
        "address": OperationWord(str, "Address of the client.", "HOST:PORT"),
    },
    by_host=True,
)
EXCHANGES: Final = _page("/exchanges", "List exchanges", {**NAMED, "virtual_host": HOST}, EXACT, by_host=True)
BINDINGS: Final = _page(
    "/bindings",
    "List bindings",
    {
        "source": OperationWord(str, "Name of the source exchange."),
        "destination": OperationWord(str, "Name of the bound queue or exchange."),
        "virtual_host": HOST,
    },
    by_host=True,
)
TRANSFERS: Final = _page(
    "/transfers", "List resumable AMQP/Fast transfers", {"virtual_host": HOST}, by_host=True
)
DESTINATIONS: Final = _page(
    "/destinations", "List AMQP/Fast destinations", {**NAMED, "virtual_host": HOST}, by_host=True
)

# Dead letters.

DEAD_LETTERS: Final = _page("/dead-letters", "List the newest dead letters", {"route": ROUTE})
LETTER_WORDS: Final = {
    "ids": OperationWord(list, "Ids of dead letters.", "[ID]..."),
    "route": OperationWord(str, "Name of the route."),
}
REDRIVE: Final = _act("/dead-letters/redrive", "Publish dead letters again", LETTER_WORDS, {"all": ALL})
PURGE_DEAD_LETTERS: Final = _act("/dead-letters/purge", "Delete dead letters", LETTER_WORDS, {"all": ALL})
DEAD_LETTER: Final = _read("/dead-letters/{id}", "Return a dead letter with its whole body", absent=True)

# Logins and tokens.

LOG_IN: Final = _act("/login", "Log in", is_open=True)
LOG_OUT: Final = _act("/logout", "End the session", is_open=True)
OWN_SESSION: Final = _read("/session", "Return the caller's user and rights", by_host=True)
TOKENS: Final = _read("/tokens", "List tokens")
MAKE_TOKEN: Final = _act("/tokens/make", "Create a token; its text is shown only once", conflicts=True)
REVOKE_TOKEN: Final = _act("/tokens/revoke", "Revoke a token")

# Streams of events.

EVENTS: Final = _read(
    "/events", "Send the state of the gateway repeatedly, as server-sent events named `state`", streams=True
)
TAP: Final = _read(
    "/tap",
    "Send passing messages, up to a rate, as server-sent events named `message`",
    {
        "route": ROUTE,
        "endpoint": OperationWord(str, "Name of the endpoint."),
        "name": NAME,
        "per_second": OperationWord(float, "Maximum messages per second."),
    },
    streams=True,
    absent=True,
)


def every_operation() -> list[ApiOperation]:
    """Return all operations of the HTTP API."""
    return [one for one in globals().values() if isinstance(one, ApiOperation)]
