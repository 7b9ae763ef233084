"""Models of requests and responses of the HTTP API, for its OpenAPI document.

Responses are built by hand as dictionaries; a test compares them with these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from gateway.model_docs import Documented


class Model(Documented):
    """Base class of the API's models of requests and responses. Unknown fields are not permitted."""

    model_config = ConfigDict(extra="forbid")


class RateRow(Model):
    """Rates of one counter, per second, during the last hour."""

    kind: Literal["process", "protocol", "listener", "link", "route"]
    name: str
    """Name of the protocol, listener, link or route."""
    what: str
    """`in`, `out`, `settled`, `refused` or `dead_letters`; for a protocol `frames_in` or `frames_out`. For a
    route, `in` counts matched messages, `out` delivered ones, and `refused` failed and dropped ones."""
    now: float
    """Rate over the last five seconds."""
    step_secs: int
    until: str
    """End of the last step."""
    values: list[float]
    """Rate of each step, the oldest first, for an hour at most."""


class HistoryRow(Model):
    """Numbers of one queue or client at the end of each step of the last hour, the oldest first."""

    step_secs: int
    until: str
    """End of the last step."""
    values: dict[str, list[float]]
    """By name. Of a queue: `ready` and `unacknowledged` messages, `in` and `out` per second. Of a client:
    `unsettled` and `unacknowledged` messages, `bytes_in` and `bytes_out` per second."""


class JsonObject(Model):
    """JSON object whose fields this model does not restrict."""

    model_config = ConfigDict(extra="allow")


class ConnectionRow(Model):
    """Connection of a client."""

    endpoint: str
    protocol: str
    client: str
    """Client id, connection name or client-name; empty before the login."""
    user: str
    address: str
    virtual_host: str
    """Virtual host, of AMQP 0-9-1 and AMQP/Fast."""
    channels: int
    idle: bool
    """True if no published message waits to be settled."""
    unsettled: int
    """Published messages that are not settled yet."""
    unacknowledged: int
    """Messages sent to the client that it has not acknowledged."""
    version: str
    """Version of the protocol; empty until it is known."""
    since: str | None
    """Time of the login; null before it."""
    bytes_in_per_sec: float | None
    """Bytes per second read from the client, only with `rates`; `bytes_out_per_sec` are written to it."""
    bytes_out_per_sec: float | None
    tls: bool
    """True if the listener uses TLS."""
    frame_max: int
    """Largest frame in bytes, as negotiated in AMQP 0-9-1; 0 without it, here and below."""
    channel_max: int
    heartbeat_secs: int
    client_properties: dict[str, Any]
    """Properties that an AMQP 0-9-1 client has sent about itself."""
    history: HistoryRow | None
    """Only with `history`, and only of the clients that have one."""


class SessionRow(Model):
    """MQTT session with its numbers of subscriptions and messages."""

    client: str
    user: str
    in_use: bool
    """True if its client is connected."""
    idle_secs: float | None
    expires_secs: float | None
    subscriptions: int
    waiting: int
    """Messages that have not been sent yet."""
    in_flight: int


class SubscriptionRow(Model):
    """Subscription of an MQTT session."""

    filter: str
    qos: int
    no_local: bool
    retain_as_published: bool
    retain_handling: int
    identifier: int


class SessionDetail(SessionRow):
    """MQTT session with its subscriptions."""

    filters: list[SubscriptionRow]


class RetainedRow(Model):
    """Retained message of an MQTT topic, without its body."""

    topic: str
    body_bytes: int
    qos: int
    client: str
    user: str
    expires: str | None


class QueueRow(Model):
    """Queue, or durable subscription of AMQP/Fast, whose name is CLIENT/IDENTIFIER."""

    protocol: str
    virtual_host: str
    kind: Literal["queue", "subscription"]
    queue: str
    messages: int
    messages_bytes: int
    unacknowledged: int
    in_per_sec: float
    """Messages received per second since the previous request; 0 the first time."""
    out_per_sec: float
    """Messages removed per second, in whichever way."""
    messages_max: int
    """Largest number of messages, by the configuration, its arguments or a policy."""
    messages_bytes_max: int
    consumers: int
    durable: bool
    in_use: bool
    idle_secs: float | None
    temporary: bool
    arguments: dict[str, Any]
    """Arguments of its declaration, of AMQP 0-9-1."""
    history: HistoryRow | None
    """Only with `history`, and only of the queues that have one."""


class ConsumerRow(Model):
    """Consumer of a queue or durable subscription, with the client to which it belongs."""

    protocol: str
    virtual_host: str
    kind: Literal["queue", "subscription"]
    queue: str
    tag: str
    """Consumer tag of AMQP 0-9-1, or number of the handle of AMQP/Fast."""
    channel: int
    acknowledges: bool
    """False if messages count as consumed when they are sent."""
    prefetch: int
    """Largest number of unacknowledged messages."""
    unacknowledged: int
    endpoint: str
    client: str
    user: str
    address: str


class ExchangeRow(Model):
    """Exchange of AMQP 0-9-1 with its properties."""

    virtual_host: str
    name: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    alternate: str | None
    bindings: int
    """Number of queues and exchanges bound to it."""


class BindingRow(Model):
    """Binding of a queue or exchange to an AMQP 0-9-1 exchange."""

    virtual_host: str
    source: str
    destination: str
    destination_kind: Literal["queue", "exchange"]
    key: str
    arguments: dict[str, Any]


class DestinationRow(Model):
    """AMQP/Fast destination: a queue or topic."""

    virtual_host: str
    service: Literal["queue", "topic"]
    name: str
    temporary: bool


class MessageSender(Model):
    """Client that published a message: listener, client identifier, user and address."""

    endpoint: str
    client: str
    user: str
    address: str


class LetterRow(Model):
    """Dead letter with the beginning of its body."""

    id: str
    time: str
    route: str
    reason: str
    text: str
    protocol: str
    address: str
    crossed: bool
    sender: MessageSender
    body_bytes: int
    body: str


class LetterDetail(LetterRow):
    """Dead letter with its properties and its whole body."""

    assurance: int
    durable: bool
    retain: bool
    expires: float | None
    hops: int
    properties: dict[str, Any]
    body_encoding: Literal["utf-8", "base64", "withheld"]


class EndpointRow(Model):
    """Listener or link with its state and counters."""

    name: str
    kind: Literal["listener", "link"]
    protocol: str
    place: str
    """Address of the listener, or the broker's address that the link uses or tries."""
    up: bool
    why: str
    """Last failure of a link that is down."""
    last_error: str
    """Last failure, even if it is over; for a listener the reason as in metrics."""
    last_error_at: str | None
    connections: int
    messages_in: int
    messages_out: int
    bytes_in: int
    bytes_out: int
    errors: dict[str, int]
    """Number of protocol errors of clients, and of failures of the link, by reason."""
    in_flight: int
    paused: bool
    """True if an operator has paused this link."""
    in_per_sec: float
    """Messages per second over the last five seconds, as `out_per_sec`."""
    out_per_sec: float
    p50_secs: float | None
    """Median time from reading a message to acknowledging it; null without messages."""
    p99_secs: float | None


class RouteRow(Model):
    """Route of the mapping files with its counters."""

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
    """True if an operator has paused this route."""
    held: int
    """Messages that wait for the route to be resumed, without those in an outbox."""
    in_per_sec: float
    """Messages per second over the last five seconds, as `out_per_sec`."""
    out_per_sec: float
    refused_per_sec: float
    """Failed and dropped messages per second."""
    p50_secs: float | None
    """Median time from reading a message to its acceptance by the target, or in the outbox."""
    p99_secs: float | None


class NamedObject(Model):
    """Name of the route or link that a request concerns."""

    name: str


class PauseResult(Model):
    """Name of a route or link, and True if it is paused now."""

    name: str
    paused: bool


class OutboxRow(Model):
    """Outbox of a route: the durable queue of messages that wait for a link."""

    link: str
    route: str
    messages: int | None
    """Number of messages; null, here and below, for a shared outbox of which the cluster does not report it,
    or not now."""
    byte_count: int | None
    in_flight: int
    """Messages in flight; of a shared outbox those of this replica."""
    oldest_secs: float | None
    dropped: int | None
    problem: str
    waiting: int | None
    """Messages that have not been passed to the link, to which its limits apply."""
    waiting_bytes: int | None
    messages_max: int
    bytes_max: int
    age_secs_max: float | None
    policy: str
    """Policy at a limit."""
    shared: bool
    """True if the outbox is on the cluster, where any replica drains it."""


class UserRow(Model):
    """User of the gateway with the roles, without secrets."""

    name: str
    roles: list[str]


class RoleRow(Model):
    """Role as the configuration defines it."""

    name: str
    console: Literal["none", "read", "write"]
    says: dict[str, Any]


class LimitRow(Model):
    """Limit of the gateway: its value, and how much of it is used."""

    name: str
    of: str
    """Listener or virtual host of the limit; empty for the whole gateway."""
    limit: int
    """The limit; 0 is no limit."""
    used: int


class JournalRow(JsonObject):
    """Row of the journal, whose columns the reference of the journal describes."""


class JournalRows(Model):
    """Newest rows of the journal."""

    items: list[JournalRow]
    next: str | None
    """Value of `after` for the rows before these; null if there are none."""


class TransferRow(Model):
    """AMQP/Fast transfer: a large message in parts, which the sender can continue after a disconnection."""

    virtual_host: str
    client: str
    body_bytes: int
    """Total size."""
    received_bytes: int
    under_way: bool
    """True if a client is sending it now."""
    heard: str
    """Time of the last received part."""


class AlarmRow(Model):
    """Problem that exists now and that an operator should solve."""

    name: str
    """Name of the alert, and of the runbook's section."""
    of: str
    """Object that it is about; "" is the gateway."""
    text: str
    act: str
    """Advice: how to end the alarm."""
    since: str
    page: str
    """Section of the runbook."""


class Status(JsonObject):
    """State of the gateway, as the console shows it."""

    alarms: list[AlarmRow]


class SessionOfCaller(Model):
    """Caller of the API: user, right, CSRF token of its session, and virtual hosts."""

    user: str
    right: Literal["read", "write"]
    csrf: str | None
    virtual_hosts: list[str] | None
    """Names of the virtual hosts that the caller sees; null means all."""


class TokenRow(Model):
    """Token for programs, without its secret text, which is not stored."""

    name: str
    console: Literal["read", "write"]
    by: str
    made: float
    expires: float | None
    bodies: bool
    """True if it shows bodies of messages; tokens with `write` always do."""
    user: str | None
    """User who made it, with whom it ends, also when the user's password changes; null for an
    administrator."""


class TokenList(Model):
    """All existing tokens for programs."""

    tokens: list[TokenRow]


class TokenRequest(Model):
    """Request for a new token."""

    name: str
    console: Literal["read", "write"] = "read"
    days: float | None = Field(default=None, gt=0, le=36_500)
    bodies: bool = False


class NewToken(Model):
    """New token with its secret text, which is shown only once."""

    token: str
    name: str


class TokenName(Model):
    """Name of the token to revoke."""

    name: str


class RevocationResult(Model):
    """Number of revoked tokens."""

    revoked: int


class LoginRequest(Model):
    """Request to log in with one of: `user` and `password`; `token`; `code`."""

    user: str | None = None
    password: str | None = None
    token: str | None = None
    code: str | None = None


class LogoutResult(Model):
    """Confirmation that the session has ended."""

    logged_out: bool


class DisconnectResult(Model):
    """Number of clients that were disconnected."""

    disconnected: int


class SessionRemovalResult(Model):
    """Result of ending MQTT sessions.

    `removed` sessions have ended. `in_use` sessions were not ended, because their clients are connected.
    `leaving` counts the sessions that will end when their clients have disconnected.
    """

    removed: int
    in_use: int
    leaving: int


class QueueRemovalResult(Model):
    """Result of deleting queues: numbers of deleted queues, and of the messages in them.

    `in_use` counts the selected queues that were not deleted, because they are in use.
    """

    removed: int
    messages: int
    in_use: int


class QueuePurgeResult(Model):
    """Result of purging queues: number of queues, and of messages removed from them."""

    purged: int
    messages: int


class RemovalResult(Model):
    """Number of removed objects."""

    removed: int


class RefusedLetter(Model):
    """Redriven dead letter that was refused again, with the reason."""

    id: str
    reason: str
    text: str


class RedriveResult(Model):
    """Result of redriving dead letters.

    `redriven` is the number of dead letters that the target accepted, which are deleted. `left` lists those
    that were refused again. `waiting` has the ids of those that were not settled in time, `unknown` the ids
    that do not exist. `untried` is the number of those that were not redriven, because earlier ones still
    wait.
    """

    redriven: int
    left: list[RefusedLetter]
    waiting: list[str]
    untried: int
    unknown: list[str]


class LetterPurgeResult(Model):
    """Result of deleting dead letters.

    `purged` is the number of deleted ones. `waiting` has the ids of dead letters that were not deleted
    because they are being redriven. `unknown` has the ids that do not exist.
    """

    purged: int
    waiting: list[str]
    unknown: list[str]


class PeekRequest(Model):
    """Request to show the first messages of a queue without consuming them."""

    protocol: str
    virtual_host: str = "/"
    queue: str
    count: int = 10


class MessageRow(Model):
    """Message with the beginning of its body."""

    address: str
    assurance: int
    durable: bool
    retain: bool
    content_type: str | None
    properties: dict[str, Any]
    """Further properties that are set, by name."""
    headers: dict[str, Any]
    sender: MessageSender
    body_bytes: int
    body: str
    body_encoding: Literal["utf-8", "base64", "withheld"]


class TappedRow(Model):
    """Message that has passed through the gateway, with the outcome of its delivery."""

    route: str
    """Name of the route; empty if the message stayed in the namespace where it was published."""
    endpoint: str
    """Endpoint that received it."""
    outcome: str
    reason: str
    text: str
    message: MessageRow


class PeekResult(Model):
    """First messages of a queue, which were not consumed."""

    messages: int
    """Number of all messages in the queue."""
    shown: list[MessageRow]


class PublishRequest(Model):
    """Message to publish as a client of an endpoint would.

    Its address is in the fields of the endpoint's protocol: `topic` for MQTT, `exchange`, `routing_key` or
    `queue` for AMQP 0-9-1, `service` and `destination` for AMQP/Fast.
    """

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


class PublishResult(Model):
    """Outcome of publishing a message."""

    outcome: str
    """`accepted`, `released` or `rejected`; `waiting` if it is not settled yet."""
    reason: str
    text: str


class ReloadResult(Model):
    """Result of reloading the mapping files."""

    taken: bool
    why: str
    """Reason why the files were refused; the previous mapping stays in force."""
    routes: int


class Fault(Model):
    """Error in a mapping file, with its position."""

    file: str
    line: int
    column: int
    message: str


class MappingRow(Model):
    """Mapping file with its text, as it is on disk now."""

    file: str
    text: str | None
    """Text; null if it cannot be read, or is too large to be shown."""
    why: str
    """Reason why there is no text."""


class ExplainRequest(PublishRequest):
    """Message whose routing is to be explained, without publishing it."""

    client: str = ""
    """Client identifier of the sender, for templates that use it."""
    user: str = ""
    files: dict[str, str] | None = None
    """Texts in place of those of these mapping files; an unknown name adds a file."""


class ExplainResult(Model):
    """Routes that match a message and those that do not.

    If the mapping files of the request have `faults`, the other fields are empty.
    """

    faults: list[Fault]
    address: str
    matches: list[JsonObject]
    """Routes that match, in the order of the files, with the target and the message there, or the refusal."""
    misses: list[JsonObject]
    """Routes that do not match, with the reason."""


class DryRun(Model):
    """Routes that a reload of the mapping files would add, remove or change, or the faults of the files."""

    good: bool
    faults: list[Fault]
    added: list[str]
    removed: list[str]
    changed: list[str]


class DrainResult(Model):
    """Confirmation that the gateway drains.

    The gateway stops when all messages in flight are settled, or after `drain_timeout_secs` seconds.
    """

    draining: bool
