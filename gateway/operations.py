"""Table of the operations on a running gateway: one row for each, with its path below `/api/v1`.

A row has no code. The HTTP server's routes and the OpenAPI document (gateway/admin/operations.py) and
commands of the command line (gateway/cli/operations.py) are derived from it, so a path, a word or its meaning
is changed here, and nowhere else. Since `--help` reads this file, it imports nothing before it must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

PREFIX: Final = "/api/v1"

Kind = type | tuple[str, ...] | Callable[[], tuple[str, ...]]
"""str, int, float (not negative), bool, list (of texts), the texts that a word may be, or a function that
returns these."""


class Word(NamedTuple):
    """One word of a choice: a parameter of a query, a property of a body, or an option of a command.

    `metavar` is the name of its value on the command line.
    """

    kind: Kind
    meaning: str
    metavar: str | None = None

    @property
    def texts(self) -> tuple[str, ...] | None:
        """The texts that the word may be; None if it is of another kind."""
        if isinstance(self.kind, tuple):
            return self.kind
        return None if isinstance(self.kind, type) else self.kind()


Words = Mapping[str, Word]
NO_WORDS: Final[Words] = MappingProxyType({})


def protocols() -> tuple[str, ...]:
    """Return the names of all protocols."""
    from gateway.protocols import DIALECTS

    return tuple(DIALECTS)


def protocols_with_queues() -> tuple[str, ...]:
    """Return the names of the protocols with queues, which are in virtual hosts."""
    from gateway.protocols import DIALECTS

    return tuple(name for name, one in DIALECTS.items() if one.has_virtual_hosts)


class Operation(NamedTuple):
    """One operation. `path` is below the prefix; what is in braces is a part of it.

    `choice` are the words by which things are chosen, `flags` those that choose nothing by themselves. A GET
    reads them from its query, a POST from its body. `paged`: the response is one page of many rows.
    `removes`: the operation acts on what is chosen, or on everything with the word `all`. `is_open`: whoever
    gets in is decided elsewhere; else reading needs the right `read`, all else `write`.
    """

    method: str
    path: str
    summary: str
    choice: Words = NO_WORDS
    flags: Words = NO_WORDS
    paged: bool = False
    removes: bool = False
    absent: bool = False  # it may answer 404
    conflicts: bool = False  # and 409
    streams: bool = False  # the response is server-sent events
    is_open: bool = False
    by_host: bool = False  # callers with rights in some virtual hosts may ask, and see what is there

    @property
    def url(self) -> str:
        """The whole path."""
        return PREFIX + self.path

    @property
    def words(self) -> Words:
        """All words that the operation knows, but those of pages."""
        every = {"all": ALL} if self.removes else {}
        return {**self.choice, **self.flags, **every}


_read: Final = partial(Operation, "GET")
_page: Final = partial(Operation, "GET", paged=True)
_act: Final = partial(Operation, "POST")
_removal: Final = partial(Operation, "POST", removes=True)

ALL: Final = Word(bool, "All of them, in place of a choice.")
COUNT: Final = Word(int, "So many at most.")
AFTER: Final = Word(str, "Those behind this key, which `next` of the page before said.")
EXACT: Final = {"exact": Word(bool, "Names as they are: * is a *, and a topic no filter.")}
NAME: Final = Word(str, "By name; * is any text.")
ROUTE: Final = Word(str, "By the route's name.")
HOST: Final = Word(str, "Of this virtual host.", "NAME")
IDLE: Final = Word(float, "Unused for more than so many seconds.")

# The process.

NAMED: Final = {"name": NAME}
STATUS: Final = _read("/status", "The state of the gateway")
ENDPOINTS: Final = _page(
    "/endpoints", "Listeners and links", {"kind": Word(("listener", "link"), "By kind."), **NAMED}
)
ROUTES: Final = _page("/routes", "Routes with their counters", NAMED)
OUTBOXES: Final = _page("/outboxes", "What waits for links")
USERS: Final = _page("/users", "Users and their roles", NAMED)
ROLES: Final = _page("/roles", "Roles", NAMED)
LIMITS: Final = _page("/limits", "How much of limits is used")
JOURNAL: Final = _read(
    "/journal",
    "The newest rows of the journal, the newest first",
    {"route": ROUTE},
    {"count": COUNT, "after": AFTER},
    absent=True,
)
PUBLISH: Final = _act("/publish", "Publish a message")
PAUSE_ROUTE: Final = _act("/routes/pause", "Have a route wait; what comes meanwhile is held", absent=True)
RESUME_ROUTE: Final = _act("/routes/resume", "Have a route go on", absent=True)
PAUSE_LINK: Final = _act("/links/pause", "Have a link wait; what comes meanwhile is held", absent=True)
RESUME_LINK: Final = _act("/links/resume", "Have a link go on", absent=True)
DRAIN: Final = _act("/drain", "Stop when what is under way has settled")
RATES: Final = _page(
    "/rates",
    "Rates of the last hour",
    {
        "kind": Word(("process", "listener", "link", "route"), "By kind."),
        "name": NAME,
        "what": Word(("in", "out", "settled", "refused", "dead_letters"), "By what is counted."),
    },
)

# Mapping files.

MAPPINGS: Final = _page("/mappings", "The mapping files")
EXPLAIN: Final = _act(
    "/mappings/explain", "What would become of a message, by the mapping or by a draft of it"
)
RELOAD: Final = _act("/mappings/reload", "Read the mapping files again")
DRY_RUN: Final = _act("/mappings/dry-run", "What a reload would change")

# Clients.

CLIENT_WORDS: Final = {
    "client": Word(str, "By client id or connection name.", "ID"),
    "user": Word(str, "By user.", "NAME"),
    "address": Word(str, "By the client's address.", "HOST:PORT"),
    "endpoint": Word(str, "At this listener only.", "NAME"),
    "protocol": Word(protocols, "Of this protocol only."),
}
CONNECTIONS: Final = _page(
    "/connections",
    "Clients that are connected",
    CLIENT_WORDS,
    {"rates": Word(bool, "Bytes per second, too; they are counted while the response waits, for a second.")},
    by_host=True,
)
DISCONNECT: Final = _act("/connections/disconnect", "Send clients off", CLIENT_WORDS, by_host=True)

# MQTT sessions and retained messages.

SESSION_WORDS: Final = {
    "client": Word(str, "By client id; * is any text.", "PATTERN"),
    "user": Word(str, "By user; * is any text.", "PATTERN"),
    "idle_longer_than": IDLE,
}
SESSIONS: Final = _page(
    "/sessions",
    "MQTT sessions",
    {**SESSION_WORDS, "in_use": Word(bool, "Whose client is connected, or is not.")},
    EXACT,
)
REMOVE_SESSIONS: Final = _removal(
    "/sessions/remove",
    "End sessions, with all that they are owed",
    SESSION_WORDS,
    {"in_use": Word(bool, "Also of connected clients."), **EXACT},
)
SESSION: Final = _read("/sessions/{client:path}", "One session", absent=True)
RETAINED_WORDS: Final = {
    "topic": Word(str, "By topic, an MQTT filter with + and #.", "FILTER"),
    "client": Word(str, "By who published it; * is any text.", "PATTERN"),
    "user": Word(str, "By that client's user; * is any text.", "PATTERN"),
}
RETAINED: Final = _page("/retained", "Retained messages", RETAINED_WORDS, EXACT)
REMOVE_RETAINED: Final = _removal("/retained/remove", "Clear retained messages", RETAINED_WORDS, EXACT)

# Queues, and what else the embedded broker has.

QUEUE_WORDS: Final = {
    "protocol": Word(protocols_with_queues, "Of this protocol, which has queues."),
    "virtual_host": HOST,
    "kind": Word(
        ("queue", "subscription"), "Queues, or durable subscriptions (named CLIENT/IDENTIFIER), only."
    ),
    "queue": Word(str, "By name; * is any text.", "PATTERN"),
    "empty": Word(bool, "Without messages, or with some."),
    "idle_longer_than": IDLE,
}
QUEUES: Final = _page(
    "/queues",
    "Queues, and durable subscriptions",
    {**QUEUE_WORDS, "in_use": Word(bool, "With consumers or an owner, or without.")},
    {**EXACT, "sort": Word(("name", "messages"), "By name, or the longest first.")},
    by_host=True,
)
REMOVE_QUEUES: Final = _removal(
    "/queues/remove",
    "Delete queues",
    QUEUE_WORDS,
    {"in_use": Word(bool, "Also those with consumers."), **EXACT},
    by_host=True,
)
PURGE_QUEUES: Final = _removal(
    "/queues/purge", "Drop the ready messages of queues", QUEUE_WORDS, EXACT, by_host=True
)
PEEK: Final = _act(
    "/queues/peek", "Look at the first messages of a queue, and take none", absent=True, by_host=True
)
EXCHANGES: Final = _page("/exchanges", "Exchanges", {**NAMED, "virtual_host": HOST}, by_host=True)
BINDINGS: Final = _page(
    "/bindings",
    "Bindings",
    {
        "source": Word(str, "By the exchange that it is bound to."),
        "destination": Word(str, "By the name of what is bound."),
        "virtual_host": HOST,
    },
    by_host=True,
)
TRANSFERS: Final = _page(
    "/transfers", "Transfers of AMQP/Fast that can be gone on with", {"virtual_host": HOST}, by_host=True
)
DESTINATIONS: Final = _page(
    "/destinations", "Destinations of AMQP/Fast", {**NAMED, "virtual_host": HOST}, by_host=True
)

# Dead letters.

DEAD_LETTERS: Final = _page("/dead-letters", "The newest dead letters", {"route": ROUTE})
LETTER_WORDS: Final = {
    "ids": Word(list, "Dead letters by id.", "[ID]..."),
    "route": Word(str, "Those of a route."),
}
REDRIVE: Final = _act("/dead-letters/redrive", "Publish dead letters again", LETTER_WORDS, {"all": ALL})
PURGE_DEAD_LETTERS: Final = _act("/dead-letters/purge", "Forget dead letters", LETTER_WORDS, {"all": ALL})
DEAD_LETTER: Final = _read("/dead-letters/{id}", "A dead letter, whole", absent=True)

# Logins and tokens.

LOG_IN: Final = _act("/login", "Log in", is_open=True)
LOG_OUT: Final = _act("/logout", "End the session", is_open=True)
OWN_SESSION: Final = _read("/session", "Who one is, and what one may", by_host=True)
TOKENS: Final = _read("/tokens", "Tokens that were made")
MAKE_TOKEN: Final = _act("/tokens/make", "Make a token; its text is not shown again", conflicts=True)
REVOKE_TOKEN: Final = _act("/tokens/revoke", "Revoke a token")

# Streams of events.

EVENTS: Final = _read(
    "/events", "The state of the gateway, again and again, as server-sent events named `state`", streams=True
)
TAP: Final = _read(
    "/tap",
    "Messages that pass, some of each second, as server-sent events named `message`",
    {
        "route": ROUTE,
        "endpoint": Word(str, "By the endpoint's name."),
        "name": NAME,
        "per_second": Word(float, "So many at most."),
    },
    streams=True,
    absent=True,
)


def every_operation() -> list[Operation]:
    """Return all rows of the table."""
    return [one for one in globals().values() if isinstance(one, Operation)]
