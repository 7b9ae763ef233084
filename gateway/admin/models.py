"""What the answers of the HTTP interface are made of, for its OpenAPI document.

Answers are made by hand, of dictionaries; a test holds them to these.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from gateway.documented import Documented


class Row(Documented):
    """A part of an answer or of a request. Nothing else is in it."""

    model_config = ConfigDict(extra="forbid")


class RateRow(Row):
    """What one counter has counted in the last hour, per second."""

    kind: Literal["process", "listener", "link", "route"]
    name: str
    """Of the listener, link or route."""
    what: str
    """`in`, `out`, `settled`, `refused` or `dead_letters`; of a route `in` is what matched it, `out` what it
    has delivered, and `refused` what failed or was dropped."""
    now: float
    """Over the last five seconds."""
    step_secs: int
    until: str
    """When the last of the steps ended."""
    values: list[float]
    """Of each step, the oldest first; as many as there have been, at most an hour of them."""


class Whatever(Row):
    """Something that is described elsewhere."""

    model_config = ConfigDict(extra="allow")


class ConnectionRow(Row):
    """A client that is connected."""

    endpoint: str
    protocol: str
    client: str
    """Client id, connection name or client-name; empty until it has said it."""
    user: str
    address: str
    virtual_host: str
    """Of AMQP 0-9-1 and AMQP/Fast."""
    channels: int
    idle: bool
    """Nothing that it has published waits to be settled."""
    unsettled: int
    """Messages that it has published and waits to be told of."""
    unacknowledged: int
    """Messages that it has been sent and has not acknowledged."""
    version: str
    """Of the protocol; empty until it is known."""
    since: str | None
    """When it was let in; null: it has not said who it is."""
    bytes_in_per_sec: float | None
    """Read from it, with `rates`, as `bytes_out_per_sec` written to it."""
    bytes_out_per_sec: float | None


class SessionRow(Row):
    """An MQTT session."""

    client: str
    user: str
    in_use: bool
    """Its client is connected."""
    idle_secs: float | None
    expires_secs: float | None
    subscriptions: int
    waiting: int
    """Messages that it is owed and that were not sent yet."""
    in_flight: int


class SubscriptionRow(Row):
    """A subscription of an MQTT session."""

    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int


class SessionDetail(SessionRow):
    """An MQTT session with its subscriptions."""

    filters: list[SubscriptionRow]


class RetainedRow(Row):
    """A topic with a retained message."""

    topic: str
    body_bytes: int
    qos: int
    client: str
    user: str
    expires: str | None


class QueueRow(Row):
    """A queue, or a durable subscription of AMQP/Fast, whose name is CLIENT/IDENTIFIER."""

    protocol: str
    virtual_host: str
    kind: Literal["queue", "subscription"]
    queue: str
    messages: int
    messages_bytes: int
    unacknowledged: int
    in_per_sec: float
    """Messages that came, over the time since this was asked for last; 0 the first time."""
    out_per_sec: float
    """Messages that left, whichever way."""
    consumers: int
    durable: bool
    in_use: bool
    idle_secs: float | None
    temporary: bool
    arguments: dict[str, Any]
    """With which it was declared, of AMQP 0-9-1."""


class ExchangeRow(Row):
    """An exchange of AMQP 0-9-1."""

    virtual_host: str
    name: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    alternate: str | None
    bindings: int
    """So many queues and exchanges are bound to it."""


class BindingRow(Row):
    """A binding of AMQP 0-9-1."""

    virtual_host: str
    source: str
    destination: str
    destination_kind: Literal["queue", "exchange"]
    key: str
    arguments: dict[str, Any]


class DestinationRow(Row):
    """A destination of AMQP/Fast."""

    virtual_host: str
    service: Literal["queue", "topic"]
    name: str
    temporary: bool


class Sender(Row):
    """Who has published a message."""

    endpoint: str
    client: str
    user: str
    address: str


class LetterRow(Row):
    """A message that nothing would take, its body cut."""

    id: str
    time: str
    route: str
    reason: str
    text: str
    protocol: str
    address: str
    crossed: bool
    sender: Sender
    body_bytes: int
    body: str


class LetterDetail(LetterRow):
    """A message that nothing would take, whole."""

    assurance: int
    durable: bool
    retain: bool
    expires: float | None
    hops: int
    properties: dict[str, Any]
    body_encoding: Literal["utf-8", "base64", "withheld"]


class EndpointRow(Row):
    """A listener or a link."""

    name: str
    kind: Literal["listener", "link"]
    protocol: str
    place: str
    """Where it listens, or the broker's address that is tried or in use."""
    up: bool
    why: str
    """Of a link that is down: what went wrong last."""
    last_error: str
    """What went wrong last, be it well since or not; of a listener the reason, as metrics have it."""
    last_error_at: str | None
    connections: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    errors: dict[str, int]
    """What its peers did wrong, or how it failed, by reason."""
    in_flight: int
    paused: bool
    """An operator has paused this link."""
    in_per_sec: float
    """Messages over the last five seconds, as `out_per_sec`."""
    out_per_sec: float
    p50_secs: float | None
    """From reading a message to answering its source, for half of all; null: there was none."""
    p99_secs: float | None


class RouteRow(Row):
    """A route of the mapping files."""

    name: str
    file: str
    line: int
    source: str
    target: str
    when: str | None
    settle: str
    matched: int
    delivered: int
    failed: int
    retried: int
    dropped: int
    unparsable: int
    undecided: int
    duplicates: int
    in_flight: int
    paused: bool
    """An operator has paused this route."""
    held: int
    """Messages that wait for it to go on, not in an outbox."""
    in_per_sec: float
    """Messages over the last five seconds, as `out_per_sec`."""
    out_per_sec: float
    refused_per_sec: float
    """What failed or was dropped."""
    p50_secs: float | None
    """From reading a message to its acceptance at the end, or in the outbox, for half of all."""
    p99_secs: float | None


class Named(Row):
    """One of them, by its name."""

    name: str


class Paused(Row):
    """Whether it waits."""

    name: str
    paused: bool


class OutboxRow(Row):
    """Messages that wait for a link."""

    link: str
    route: str
    messages: int | None
    """null, here and below: it is shared, and the cluster does not say, or not now."""
    octets: int | None
    in_flight: int
    """Of a shared one, what this replica has been handed."""
    oldest_secs: float | None
    dropped: int | None
    problem: str
    waiting: int | None
    """Those that have not been handed to the link, which its limits count."""
    waiting_octets: int | None
    messages_max: int
    octets_max: int
    age_secs_max: float | None
    policy: str
    """What happens beyond them."""
    shared: bool
    """It is on the cluster, and any replica's to empty."""


class UserRow(Row):
    """A user, as the gateway knows it; secrets are not shown."""

    name: str
    roles: list[str]


class RoleRow(Row):
    """A role, as the configuration says it."""

    name: str
    console: Literal["none", "read", "write"]
    says: dict[str, Any]


class LimitRow(Row):
    """How much of a limit is used."""

    name: str
    of: str
    """The listener or virtual host whose limit it is; empty: the gateway's."""
    limit: int
    """0: there is none."""
    used: int


class JournalRow(Whatever):
    """A row of the journal; its columns stand in the reference of the journal."""


class JournalRows(Row):
    """The newest rows."""

    items: list[JournalRow]
    next: str | None
    """What to say as `after` to get those before them; null: there are none."""


class TransferRow(Row):
    """A transfer of AMQP/Fast: a message that comes in parts, and can be gone on with."""

    virtual_host: str
    client: str
    body_bytes: int
    """So much will come."""
    received_bytes: int
    under_way: bool
    """Somebody sends it now."""
    heard: str
    """When something of it came last."""


class Status(Whatever):
    """The state of the gateway, as the console shows it."""


class SessionOfCaller(Row):
    """Who asks."""

    user: str
    right: Literal["read", "write"]
    csrf: str | None
    virtual_hosts: list[str] | None
    """Names of the virtual hosts that the caller sees; null means everything."""


class TokenRow(Row):
    """A token that was made; its text is not kept."""

    name: str
    console: Literal["read", "write"]
    by: str
    made: float
    expires: float | None
    bodies: bool
    """It shows bodies of messages; one that may `write` always does."""
    user: str | None
    """Who made it: it ends with that user, or when its password changes. null: an administrator."""


class Tokens(Row):
    """The tokens that were made."""

    tokens: list[TokenRow]


class TokenAsked(Row):
    """A token that is to be made."""

    name: str
    console: Literal["read", "write"] = "read"
    days: float | None = None
    bodies: bool = False


class TokenMade(Row):
    """A new token; its text is shown this once."""

    token: str
    name: str


class TokenNamed(Row):
    """A token by its name."""

    name: str


class Revoked(Row):
    """How many tokens open nothing any more."""

    revoked: int


class LoginAsked(Row):
    """One of: `user` and `password`; `token`; `code`."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    code: str | None = None


class LoggedOut(Row):
    """The session has ended."""

    logged_out: bool


class Disconnected(Row):
    """How many were sent off."""

    disconnected: int


class SessionsRemoved(Row):
    """What became of sessions. `leaving`: they end when their clients have gone."""

    removed: int
    in_use: int
    leaving: int


class QueuesRemoved(Row):
    """What became of queues. `in_use` were left alone."""

    removed: int
    messages: int
    in_use: int


class QueuesPurged(Row):
    """What became of the ready messages of queues."""

    purged: int
    messages: int


class Removed(Row):
    """How many are gone."""

    removed: int


class Refused(Row):
    """A dead letter that was refused again."""

    id: str
    reason: str
    text: str


class Redriven(Row):
    """Result of redriving dead letters. `redriven` counts those that the target accepted, which are
    deleted."""

    redriven: int
    left: list[Refused]
    waiting: list[str]
    untried: int
    unknown: list[str]


class LettersPurged(Row):
    """What became of dead letters that were to be forgotten."""

    purged: int
    unknown: list[str]


class PeekAsked(Row):
    """A queue that is looked into."""

    protocol: str
    virtual_host: str = "/"
    queue: str
    count: int = 10


class MessageRow(Row):
    """A message, its body cut."""

    address: str
    assurance: int
    durable: bool
    retain: bool
    content_type: str | None
    headers: dict[str, Any]
    sender: Sender
    body_bytes: int
    body: str
    body_encoding: Literal["utf-8", "base64", "withheld"]


class PassedRow(Row):
    """A message that has passed, as it was delivered."""

    route: str
    """Empty: it stayed in the namespace in which it was published."""
    endpoint: str
    """By which it came."""
    outcome: str
    reason: str
    text: str
    message: MessageRow


class Peeked(Row):
    """The first messages of a queue. They stay where they are."""

    messages: int
    """So many wait in all."""
    shown: list[MessageRow]


class PublishAsked(Row):
    """A message as a client of an endpoint would publish it; its address in the words of the protocol."""

    endpoint: str
    topic: str | None = None
    exchange: str | None = None
    routing_key: str | None = None
    queue: str | None = None
    service: str | None = None
    destination: str | None = None
    body: str = ""
    body_encoding: Literal["utf-8", "base64"] = "utf-8"
    qos: int = 0
    retain: bool = False
    content_type: str | None = None
    reply_to: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)


class Published(Row):
    """What became of it."""

    outcome: str
    """`accepted`, `released` or `rejected`; `waiting`: nobody has said yet."""
    reason: str
    text: str


class Reloaded(Row):
    """The mapping that is in force."""

    taken: bool
    why: str
    """Why the files were not taken; the mapping before stays in force."""
    routes: int


class Fault(Row):
    """Something that is wrong with a file."""

    file: str
    line: int
    column: int
    message: str


class MappingRow(Row):
    """A mapping file, as it is on disk now."""

    file: str
    text: str | None
    """Null: it cannot be read, or is too large to be shown."""
    why: str
    """Why there is no text."""


class ExplainAsked(PublishAsked):
    """A message that nobody publishes: what would become of it?"""

    client: str = ""
    """Of its sender, for templates that name it."""
    user: str = ""
    files: dict[str, str] | None = None
    """Texts in place of those of these mapping files; a name that there is none of is another file."""


class Explained(Row):
    """What the routes say of a message. With `faults` there is no more than these."""

    faults: list[Fault]
    address: str
    matches: list[Whatever]
    """Routes that take it, in the order of the files: where it goes, what it becomes, or why it does not."""
    misses: list[Whatever]
    """Routes that do not, and why."""


class DryRun(Row):
    """What a reload would change."""

    good: bool
    faults: list[Fault]
    added: list[str]
    removed: list[str]
    changed: list[str]


class Draining(Row):
    """The process ends when what is under way has settled."""

    draining: bool
