"""Sections `roles`, `default_roles` and `authorizer`: access rules in the words of each protocol.

Without a role and an authorizer, every client that may connect may do everything. Otherwise clients may do
only what their roles or the authorizer allow: allowing rules of several roles of one client are joined, and a
denying rule of one role overrides all of them. This module only describes and checks the rules;
`gateway/access` compiles and applies them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict

from gateway.protocols.mqtt.data_types import is_filter
from gateway.regexes import Regex, RegexError
from gateway.settings.endpoints import MaskedUrl
from gateway.settings.limits import Section

PLACEHOLDER: Final = re.compile(r"\{([A-Za-z_][A-Za-z0-9_.-]*)\}")
EVERY_HOST: Final = "*"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _a_filter(text: str) -> str:
    if text.startswith("$share/"):
        raise ValueError(
            "write the filter without $share/GROUP/; the key `shared` permits shared subscriptions"
        )
    if not is_filter(PLACEHOLDER.sub("x", text)):
        raise ValueError("not a topic filter: + must fill a whole level, # must be the last level")
    return text


def _an_expression(text: str) -> str:
    try:
        Regex(PLACEHOLDER.sub("x", text))
    except RegexError as error:
        raise ValueError(f"not a regular expression: {error}") from None
    return text


def _a_beginning(text: str) -> str:
    if "*" in text[:-1]:
        raise ValueError("write a destination, or its beginning with a * at the end")
    return text


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
    """MQTT rules of a role. Topic filters may contain placeholders: `{user}`, `{client_id}`, `{cn}`."""

    publish: Filters = ()
    """Topic filters: topics that match one of them may be published to, also by a will. A topic that begins
    with `$` matches only a filter that begins with the topic's first level."""
    subscribe: Filters = ()
    """Topic filters that may be subscribed to, and every filter that matches nothing beyond one of them.
    `$SYS` topics need a filter that begins with `$SYS`."""
    deny_publish: Filters = ()
    """Topic filters: topics that match one of them may not be published to, whatever other rules allow."""
    deny_subscribe: Filters = ()
    """Topic filters: subscriptions that could match a topic of one of them are refused, whatever other rules
    allow; that includes `#`."""
    qos_max: Literal[0, 1, 2] = 2
    """Highest QoS to publish with; subscriptions are granted at most this QoS."""
    retain: bool = True
    """True if clients may publish retained messages and retained wills."""
    will: bool = True
    """True if clients may register a will."""
    shared: bool = True
    """True if clients may use shared subscriptions."""
    session_expiry_secs_max: int | None = Field(None, ge=0)
    """Longest time in seconds that the session of a disconnected client is stored. Absent:
    `limits.session_expiry_secs_max`."""
    as_virtual_host: str | None = None
    """Virtual host whose `amqp091` rules apply to MQTT as well, as in RabbitMQ's MQTT plug-in: topics are
    routing keys of its exchange `amq.topic`, a subscription is a queue `mqtt-subscription-CLIENTqosN`."""


class TopicPermission(Section):
    """Regular expressions for the routing keys of one topic exchange, as in RabbitMQ's topic permissions."""

    write: Expression = ""
    """Regular expression for routing keys to publish with."""
    read: Expression = ""
    """Regular expression for routing keys to bind with."""


class AmqpPermissions(Section):
    """RabbitMQ's permissions of one virtual host, as regular expressions.

    The expressions are searched for in the names of exchanges and queues. The default exchange is named
    `amq.default`. An empty expression matches nothing.
    """

    configure: Expression = ""
    """Exchanges and queues that may be declared and deleted."""
    write: Expression = ""
    """Exchanges that may be published to; queues and exchanges that may be bound to an exchange."""
    read: Expression = ""
    """Queues that may be consumed, fetched from and purged; exchanges that something may be bound to."""
    topics: dict[str, TopicPermission] = Field({})
    """Permitted routing keys by topic exchange; an exchange that is not listed permits every key.
    Placeholders: `{user}` (also `{username}`), `{vhost}`, `{client_id}`, and fields of a certificate or
    token."""


class Destinations(Section):
    """Rules of a role for the queues, or for the topics, of AMQP/Fast.

    Each rule is a name, or the beginning of a name followed by `*`. It may contain the placeholder `{user}`.
    """

    read: Beginnings = ()
    """Destinations that may be consumed."""
    browse: Beginnings = ()
    """Destinations that may be queried and browsed. Destinations in `read` may be browsed as well."""
    write: Beginnings = ()
    """Destinations that may be sent to."""
    create: Beginnings = ()
    """Destinations that a client may create by naming them, and temporary ones. `*` permits all."""


class FastPermissions(Section):
    """Rules of a role for one virtual host of AMQP/Fast."""

    queues: Destinations = Destinations()
    """Rules for the queue service."""
    topics: Destinations = Destinations()
    """Rules for the topic service."""
    peers: Beginnings = ()
    """Peer services that may be used: names, or the beginning of a name and a `*`."""
    out_of_band: bool | Beginnings = False
    """Folders directly in the shared folder that channels may use: names, or the beginning of a name and a
    `*`; `{user}` is a placeholder. `true` permits the folder that is called like the user, `false` none. The
    shared folder itself may be used only while no roles are configured."""


class Role(Section):
    """Named set of rules that users can be given. A client may do only what the rules of its roles permit."""

    mqtt: MqttRules = MqttRules()
    amqp091: dict[str, AmqpPermissions] = Field({})
    """Rules by virtual host; `*` is every virtual host. The name may contain `{user}`."""
    amqpfast: dict[str, FastPermissions] = Field({})
    """Rules by virtual host; `*` is every virtual host. The name may contain `{user}`."""
    client_id: Names = ()
    """Permitted client identifiers (MQTT) and client-names (AMQP/Fast): text with placeholders, where `*`
    stands for any characters. Absent: any. Identifiers that the gateway has assigned are always permitted."""
    console: Literal["none", "read", "write"] = "none"
    """Access to the console and the HTTP interface: none, reading, or reading and changing."""
    console_bodies: bool = False
    """True if the console and the HTTP interface show message bodies: of dead letters, of watched messages,
    and of the first messages of a queue. Administrator tokens and links always show them."""
    console_virtual_hosts: Names | None = None
    """Virtual hosts whose queues, exchanges, bindings, transfers and connections the console and the HTTP
    interface show and change; nothing else is then visible. Absent: everything."""
    hold: bool = False
    """True if a full queue, subscription or session of a user with this role may make publishers wait, and if
    its queue may refuse messages of bindings (`x-overflow: reject-publish`). Otherwise a full recipient loses
    its own copy. Queues of the configuration always may, and so may every user while no roles are configured.
    """
    connections_max: int | None = Field(None, ge=0)
    """Connections of one user over all listeners. Absent: no limit of the role, only `limits` apply. Of
    several roles the largest value counts, here and in the options below; 0 is no limit."""
    sessions_max: int | None = Field(None, ge=0)
    """MQTT sessions of one user, connected or not."""
    receive_bytes_per_sec_max: int | None = Field(None, ge=0)
    """Bytes per second of each connection, from its login on. A limit of the user itself takes precedence."""
    receive_messages_per_sec_max: int | None = Field(None, ge=0)
    """Messages per second that each connection may publish. A limit of the user itself takes precedence."""


class DefaultRoles(Section):
    """Roles of clients to whom neither `users` nor an authentication back end gives a role."""

    anonymous: Names = ()
    """Roles of clients without a user name."""
    guest: Names = ()
    """Roles of the user guest with the password guest, unless `users` has a guest."""
    authenticated: Names = ()
    """Roles of all other authenticated clients."""


class HttpAuthorizer(Section):
    """HTTP server that decides on actions of clients if no role allows or denies them.

    The protocol is that of RabbitMQ's `rabbitmq_auth_backend_http`. The server receives an MQTT topic as a
    routing key of the exchange `amq.topic`, an AMQP/Fast queue as a queue, and an AMQP/Fast topic as an
    exchange.
    """

    vhost_url: MaskedUrl = Field(pattern=r"^https?://[^/#]+[^#]*$")
    """URL for checks of virtual hosts; receives `username` and `vhost`."""
    resource_url: MaskedUrl = Field(pattern=r"^https?://[^/#]+[^#]*$")
    """URL for checks of queues and exchanges; also receives `resource`, `name` and `permission`."""
    topic_url: MaskedUrl = Field(pattern=r"^https?://[^/#]+[^#]*$")
    """URL for checks of routing keys of topic exchanges; also receives `routing_key`, for MQTT
    `variable_map.client_id`."""
    method: Literal["get", "post"] = "post"
    """HTTP method. `get` puts all parameters into the query and is RabbitMQ's default."""
    ca_file: Annotated[Path, Strict(False)] | None = None
    """File of certificate authorities that the server's certificate is checked against. Absent: those of the
    system."""
    mqtt_virtual_host: str = "/"
    """Virtual host that is sent in checks of MQTT clients."""
    timeout_secs: float = Field(5.0, gt=0, le=60)
    """Longest time for one response in seconds. The client waits meanwhile, and is refused without a
    response."""
    connections_max: int = Field(16, ge=1, le=1_024)
    """Concurrent requests to the server."""
    waiting_max: int = Field(10_000, ge=1)
    """Requests that wait for a free connection; further requests are refused."""
    cache_secs: float = Field(60.0, ge=1, le=86_400)
    """Time in seconds that a response is cached; `deny` is cached for 10 % of it, but at least one second."""
    cache_entries_max: int = Field(100_000, ge=16)
    """Cached responses, of 1 KiB each on average. With more, the user who has most loses the oldest. One
    action needs up to six."""
