"""Who may do what: roles, in the words of each protocol, and who has which.

As long as there is no role, whoever may connect may do everything. With the first one everybody may only do
what his roles say: what several roles of one client allow is joined, and what one of them denies is denied.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict, field_serializer

from gateway.protocols.mqtt.octets import is_filter
from gateway.regexes import Regex, RegexError
from gateway.settings.endpoints import masked_url
from gateway.settings.limits import Section

PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
EVERY_HOST: Final = "*"


def _listed(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _a_filter(given: str) -> str:
    if given.startswith("$share/"):
        raise ValueError("say the filter alone; `shared` is about shared subscriptions")
    if not is_filter(PLACEHOLDER.sub("x", given)):
        raise ValueError("no topic filter: + fills a level, # the last one")
    return given


def _an_expression(given: str) -> str:
    try:
        Regex(PLACEHOLDER.sub("x", given))
    except RegexError as error:
        raise ValueError(f"no regular expression: {error}") from None
    return given


def _a_beginning(given: str) -> str:
    if "*" in given[:-1]:
        raise ValueError("a destination, or its beginning and a * at the end")
    return given


Names = Annotated[
    tuple[str, ...], Strict(False), BeforeValidator(_listed, json_schema_input_type=str | list[str])
]
Filters = Annotated[
    tuple[Annotated[str, AfterValidator(_a_filter)], ...],
    Strict(False),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
Expression = Annotated[str, AfterValidator(_an_expression)]
Beginnings = Annotated[
    tuple[Annotated[str, AfterValidator(_a_beginning)], ...],
    Strict(False),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]


class MqttRules(Section):
    """What a role may do in MQTT. Filters may have placeholders: `{user}`, `{client_id}`, `{cn}`."""

    publish: Filters = ()
    """Topic filters: topics that match one may be published to, also by a will. `$` topics are only meant by
    a filter that begins with their first level."""
    subscribe: Filters = ()
    """Topic filters: what may be subscribed to are these, and filters that match nothing else than one of
    them does. `$SYS` is read by a filter that says so."""
    deny_publish: Filters = ()
    """Topics that may not be published to, whatever else allows it."""
    deny_subscribe: Filters = ()
    """Filters that could match any of this are refused, whatever else allows them: also `#`."""
    qos_max: Literal[0, 1, 2] = 2
    """The highest QoS to publish with; subscriptions get at most that."""
    retain: bool = True
    """Whether messages may be retained, and a will."""
    will: bool = True
    """Whether a will may be left."""
    shared: bool = True
    """Whether subscriptions may be shared."""
    session_expiry_secs_max: int | None = Field(None, ge=0)
    """How long a session is kept for a client that is away; absent: `limits.session_expiry_secs_max`."""
    as_virtual_host: str | None = None
    """Also what RabbitMQ's MQTT plug-in would allow by the `amqp091` rules of this virtual host: topics are
    keys of its exchange `amq.topic`, a subscription is a queue `mqtt-subscription-CLIENTqosN`."""


class TopicPermission(Section):
    """Which routing keys, of one topic exchange; RabbitMQ's topic permissions."""

    write: Expression = ""
    """Keys to publish with."""
    read: Expression = ""
    """Keys to bind with."""


class AmqpPermissions(Section):
    """RabbitMQ's permissions of one virtual host: regular expressions that are looked for in the names of
    exchanges and queues. The default exchange is called `amq.default`. An empty one matches nothing.
    """

    configure: Expression = ""
    """What may be declared and deleted."""
    write: Expression = ""
    """Exchanges to publish to; queues (and exchanges) to bind to something."""
    read: Expression = ""
    """Queues to consume, get and purge; exchanges to bind something to."""
    topics: dict[str, TopicPermission] = Field({})
    """By topic exchange; of one that is not named here every key may be used. Placeholders: `{user}` (also
    `{username}`), `{vhost}`, `{client_id}` and what a certificate or token says."""


class Destinations(Section):
    """Of one service of AMQP/Fast: destinations by name, or by their beginning and a `*`; `{user}`."""

    read: Beginnings = ()
    """To consume."""
    browse: Beginnings = ()
    """To query and browse; what may be read may be browsed."""
    write: Beginnings = ()
    """To send to."""
    create: Beginnings = ()
    """To come to be by being named, and temporary ones: `*` has them all."""


class FastPermissions(Section):
    """What a role may do in one virtual host of AMQP/Fast."""

    queues: Destinations = Destinations()
    """Of the queue service."""
    topics: Destinations = Destinations()
    """Of the topic service."""
    peers: Beginnings = ()
    """Peers to talk to."""
    out_of_band: bool = False
    """Whether channels may use the shared folder."""


class Role(Section):
    """What some may do. What is not said is not allowed."""

    mqtt: MqttRules = MqttRules()
    amqp091: dict[str, AmqpPermissions] = Field({})
    """By virtual host; `*`: each. `{user}` may stand in it."""
    amqpfast: dict[str, FastPermissions] = Field({})
    """Likewise."""
    client_id: Names = ()
    """Which client identifiers (MQTT) and client-names (AMQP/Fast) may be used: a text with placeholders, and
    `*` for any characters. Absent: any. Identifiers that the gateway has made are always right."""
    console: Literal["none", "read", "write"] = "none"
    """What the console and the HTTP interface show, and whether they change anything."""
    console_bodies: bool = False
    """Whether they show the bodies of messages: of dead letters, of messages that are watched, and of the
    first ones of a queue. Administrators' tokens and links always do."""
    console_virtual_hosts: Names | None = None
    """The virtual hosts whose queues, exchanges, bindings, transfers and connections they show and change,
    and nothing else then; absent: everything."""
    hold: bool = False
    """Whether a full queue, subscription or session of a user with this role may make publishers wait, and
    whether its queue may refuse what comes by a binding (`x-overflow: reject-publish`). Without it a full
    recipient loses its own copy. Queues of the configuration always may, and so may everybody while there are
    no roles."""
    connections_max: int | None = Field(None, ge=0)
    """Connections of one user at once, over all listeners; absent: as `limits` say. Of several roles the
    largest counts, here and below; 0 for any number."""
    sessions_max: int | None = Field(None, ge=0)
    """MQTT sessions of one user, connected or not."""
    receive_bytes_per_sec_max: int | None = Field(None, ge=0)
    """Octets per second of each connection, from its login on; a user's own limit comes before it."""
    receive_messages_per_sec_max: int | None = Field(None, ge=0)
    """The same in messages that it publishes."""


class DefaultRoles(Section):
    """The roles of those to whom nothing else gives one."""

    anonymous: Names = ()
    """Of clients that have not said who they are."""
    guest: Names = ()
    """Of guest with the password guest, unless `users` has a guest."""
    authenticated: Names = ()
    """Of everybody else."""


class HttpAuthorizer(Section):
    """A server that is asked what no role allows or denies, as RabbitMQ's `rabbitmq_auth_backend_http` asks.
    A topic of MQTT is a key of exchange `amq.topic`; a queue of AMQP/Fast is a queue, a topic an exchange."""

    vhost_url: str = Field(pattern=r"^https?://[^/#]+[^#]*$")
    """Where it is asked about virtual hosts: `username`, `vhost`."""
    resource_url: str = Field(pattern=r"^https?://[^/#]+[^#]*$")
    """About queues and exchanges: also `resource`, `name`, `permission`."""
    topic_url: str = Field(pattern=r"^https?://[^/#]+[^#]*$")
    """About routing keys of topic exchanges: also `routing_key`; of MQTT `variable_map.client_id`."""
    method: Literal["get", "post"] = "post"
    """`get`: everything stands in the query; RabbitMQ's default."""
    ca_file: Annotated[Path, Strict(False)] | None = None
    """Authorities that its certificate is checked against; absent: those of the system."""
    mqtt_virtual_host: str = "/"
    """The virtual host that questions about MQTT name."""
    timeout_secs: float = Field(5.0, gt=0, le=60)
    """How long an answer may take; who asks is held meanwhile, and is refused without one."""
    connections_max: int = Field(16, ge=1, le=1_024)
    """Questions at a time."""
    waiting_max: int = Field(10_000, ge=1)
    """Questions that wait for their turn; beyond it the answer is no."""
    cache_secs: float = Field(60.0, ge=1, le=86_400)
    """How long an answer is remembered, `deny` for a tenth of it, but no less than a second."""
    cache_entries_max: int = Field(100_000, ge=1)
    """Answers that are remembered."""

    @field_serializer("vhost_url", "resource_url", "topic_url")
    def _hidden(self, url: str) -> str:
        return masked_url(url)
