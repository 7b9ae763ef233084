"""Rights of one client: a decision on each action, with the rule that decides.

As long as no role and no authorizer is configured everything is allowed (`UNLIMITED`). Otherwise an action
that no rule allows is denied. Callers store decisions by address (or by connection) until
`Authorization.generation` changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal, NamedTuple

from gateway.access.http_authorization import Authorizer, AuthorizerRequest, AuthorizerResponse
from gateway.access.principal import Principal
from gateway.access.rules import AmqpGrant, FastGrant, MqttGrant, NamedRoles, amqp_grants, fast_grants
from gateway.access.scopes import PermissionScope, parse_scopes
from gateway.access.templates import wildcard
from gateway.model.address import Address
from gateway.model.pending import Pending
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.amqpfast.dialect import AMQPFAST
from gateway.protocols.mqtt.dialect import MQTT

DEFAULT_EXCHANGE: Final = "amq.default"  # name of the default exchange in RabbitMQ's permissions
MQTT_EXCHANGE: Final = "amq.topic"
SHARED: Final = "$share/"
EVERYTHING: Final = "#"
QUEUE, EXCHANGE = "queue", "exchange"  # kinds of resources, in RabbitMQ's terms
KINDS: Final = {"queue": QUEUE, "topic": EXCHANGE}
PERMISSIONS: Final = {"read": "read", "browse": "read", "write": "write", "create": "configure"}
TO_KEY: Final = str.maketrans({"/": ".", "+": "*"})


class Decision(NamedTuple):
    """Result of a check.

    `rule` is the rule that allows the action, or the reason why the action is denied.
    """

    allowed: bool
    rule: str


UNLIMITED: Final = Decision(
    True, "everything is permitted: no roles are configured, or the user is an administrator"
)
NOTHING: Final = "no rule permits it"


class Rights:
    """Rights of one client, by its roles and scopes.

    `key` is equal for clients that have the same rights.
    """

    unlimited = False

    def __init__(
        self,
        principal: Principal,
        roles: NamedRoles,
        *,
        client_id: str = "",
        key: object = None,
        host: str = "/",
        authorizer: Authorizer | None = None,
        shared: dict[tuple[str, ...], MqttGrant] | None = None,
    ) -> None:
        """Set up the rights that the roles and the principal's scopes give.

        `roles` are pairs of name and role. `key` must be equal for clients with the same rights. `host` is
        the virtual host in which the scopes of a token apply to MQTT. `authorizer` decides on actions that no
        rule allows or denies; with an authorizer, each check may raise Pending. `shared` caches the compiled
        MQTT rules by role names, for all clients with the same roles.
        """
        self._user = principal.name
        self._authorizer = authorizer
        self._shared = {} if shared is None else shared
        self.key = key
        self.roles = tuple(name for name, _ in roles)
        self._roles = roles
        self._scopes: Sequence[PermissionScope] = parse_scopes(principal.scopes)
        self._scope_host = host
        self._variables = {
            **principal.fields,
            "user": principal.name,
            "username": principal.name,
            "client_id": client_id,
        }
        self._client_id = client_id
        self._mqtt: MqttGrant | None = None
        self._amqp: dict[str, list[AmqpGrant]] = {}
        self._fast: dict[str, list[FastGrant]] = {}
        self.connections_max = self._largest("connections_max")
        self.sessions_max = self._largest("sessions_max")
        self.receive_bytes_per_sec_max = self._largest("receive_bytes_per_sec_max")
        self.receive_messages_per_sec_max = self._largest("receive_messages_per_sec_max")

    def _largest(self, word: str) -> int | None:
        """Return the largest value that the client's roles set for the limit named `word`.

        Return 0 (no limit) if a role sets 0. Return None if no role sets the limit.
        """
        stated = [most for _, role in self._roles if (most := getattr(role, word)) is not None]
        return None if not stated else 0 if 0 in stated else max(stated)

    def _external_decision(self, kind: Literal["vhost", "resource", "topic"], **fields: str) -> Decision:
        """Return the authorizer's decision on an action that no rule allows or denies.

        `kind` and `fields` are those of the request. Return a denial if there is no authorizer. Raises
        Pending if the authorizer's response has not arrived yet.
        """
        authorizer = self._authorizer
        if authorizer is None:
            return Decision(False, NOTHING)
        request = AuthorizerRequest(kind, (("username", self._user), *fields.items()))
        allowed = authorizer.cached_decision(request)
        if allowed is None:
            raise Pending(AuthorizerResponse(request, authorizer))
        values = ", ".join(f"{name} {text}" for name, text in fields.items())
        return Decision(allowed, f"decided by the authorizer: {kind} ({values})")

    # All protocols.

    def has_client_id(self, client_id: str) -> Decision:
        """Decide if the client may use this client identifier of MQTT, or client-name of AMQP/Fast."""
        stated = [(name, text) for name, role in self._roles for text in role.client_id]
        for name, text in stated:
            compiled = wildcard(text, {**self._variables, "client_id": ""})
            if compiled is not None and compiled.search(client_id):
                return Decision(True, f"roles.{name}.client_id: {text}")
        return Decision(False, NOTHING) if stated else Decision(True, "no role binds client identifiers")

    def publish(self, address: Address, host: str = "/") -> Decision:
        """Decide if the client may publish to an address of any protocol.

        `host` is the virtual host, for protocols with virtual hosts.
        """
        publishes = PUBLISHES.get(address.protocol)
        return Decision(False, NOTHING) if publishes is None else publishes(self, address, host)

    def _publish_topic(self, address: Address, host: str) -> Decision:
        return self.mqtt_publish(address.name)

    def _publish_by_exchange(self, address: Address, host: str) -> Decision:
        found = self.amqp(host, "write", address.scope or DEFAULT_EXCHANGE, EXCHANGE)
        if not found.allowed or not address.scope:
            return found
        return self.amqp_key(host, "write", address.scope, address.name)

    def _publish_to_destination(self, address: Address, host: str) -> Decision:
        return self.fast(host, "write", address.scope, address.name)

    # MQTT.

    @property
    def mqtt(self) -> MqttGrant:
        """MQTT rules of the client's roles, compiled at the first use."""
        if self._mqtt is None:
            shared = self._shared
            self._mqtt = shared.get(self.roles) or shared.setdefault(self.roles, MqttGrant(self._roles))
        return self._mqtt

    def enters_mqtt(self) -> Decision:
        """Decide if the client may connect by MQTT."""
        rule = self.mqtt.rule
        if rule is not None:
            return Decision(True, rule)
        if self._scopes or any(self.amqp_grants(host) for _, host in self.mqtt.hosts):
            return Decision(True, "permissions in AMQP, which also apply to MQTT")
        return self._external_decision("vhost", vhost=self._mqtt_host)

    def mqtt_publish(self, topic: str) -> Decision:
        """Decide if the client may publish to an MQTT topic."""
        return self._topic("publish", topic)

    def mqtt_subscribe(self, topic_filter: str, qos: int = 0) -> Decision:
        """Decide if the client may subscribe to an MQTT topic filter, also to one with `$share/GROUP/`."""
        if topic_filter.startswith(SHARED):
            if not self.mqtt.shared:
                return Decision(False, "mqtt.shared: shared subscriptions are not permitted")
            topic_filter = topic_filter.split("/", 2)[-1]
        return self._topic("subscribe", topic_filter, qos)

    def _topic(self, action: str, name: str, qos: int = 0) -> Decision:
        """Decide if the client may `publish` to a topic or `subscribe` to a topic filter (`action`).

        `name` is the topic or filter. A rule that denies the action has precedence over a rule that allows
        it. Without a rule, AMQP permissions that also apply to MQTT decide.
        """
        grant = self.mqtt
        denied = grant.denying_rule(action, name, self._variables)
        if denied is not None:
            return Decision(False, denied)
        rule = grant.allowed(action, name, self._variables)
        if rule is not None:
            return Decision(True, rule)
        hosts = [host for _, host in grant.hosts] + [self._scope_host] * bool(self._scopes)
        hosts += [self._mqtt_host] * (self._authorizer is not None)
        decision = Decision(False, NOTHING)
        for host in dict.fromkeys(hosts):
            decision = self._topic_as_key(host, action, name, qos)
            if decision.allowed:
                break
        return decision

    @property
    def _mqtt_host(self) -> str:
        return self._scope_host if self._authorizer is None else self._authorizer.mqtt_host

    def _topic_as_key(self, host: str, action: str, name: str, qos: int) -> Decision:
        """Decide on an MQTT action by AMQP permissions in a virtual host, as RabbitMQ's MQTT plug-in does.

        `action` is `publish` or `subscribe`, `name` is the topic or filter.
        """
        key = name.translate(TO_KEY)
        permission = "write" if action == "publish" else "read"
        exchange = self.amqp(host, permission, MQTT_EXCHANGE, EXCHANGE)
        if not exchange.allowed or action == "publish":
            return exchange if not exchange.allowed else self.amqp_key(host, "write", MQTT_EXCHANGE, key)
        queue = f"mqtt-subscription-{self._client_id}qos{min(qos, 1)}"
        for permission in ("configure", "write", "read"):
            decision = self.amqp(host, permission, queue)
            if not decision.allowed:
                return decision
        return self.amqp_key(host, "read", MQTT_EXCHANGE, key)

    # AMQP 0-9-1.

    def amqp_grants(self, host: str) -> list[AmqpGrant]:
        """Return the client's AMQP 0-9-1 permissions in a virtual host, one entry for each role or scope.

        An empty list means that the client may not use the virtual host by any rule.
        """
        found = self._amqp.get(host)
        if found is None:
            found = self._amqp[host] = amqp_grants(self._roles, self._scopes, host, self._variables)
        return found

    def enters_amqp(self, host: str) -> Decision:
        """Decide if the client may use an AMQP 0-9-1 virtual host."""
        found = self.amqp_grants(host)
        return Decision(True, found[0].rule) if found else self._external_decision("vhost", vhost=host)

    def amqp(self, host: str, permission: str, name: str, kind: str = QUEUE) -> Decision:
        """Decide if the client has a permission for an exchange or a queue of AMQP 0-9-1.

        `name` is its name. `permission` is `configure`, `write` or `read`. `kind` is `queue` or `exchange`.
        """
        for grant in self.amqp_grants(host):
            if grant.allows(permission, name):
                return Decision(True, f"{grant.rule}.{permission}")
        return self._external_decision(
            "resource", vhost=host, resource=kind, name=name, permission=permission
        )

    def amqp_key(self, host: str, permission: str, exchange: str, key: str | None) -> Decision:
        """Decide if the client has a permission for a routing key of a topic exchange.

        The key None stands for every key; an authorizer then receives the key `#`.
        """
        for grant in self.amqp_grants(host):
            if grant.allows_key(permission, exchange or DEFAULT_EXCHANGE, key):
                return Decision(True, f"{grant.rule}.{permission}")
        own = {"variable_map.client_id": self._client_id} if self._client_id else {}
        return self._external_decision(
            "topic",
            vhost=host,
            resource="topic",
            name=exchange or DEFAULT_EXCHANGE,
            permission=permission,
            routing_key=EVERYTHING if key is None else key,
            **own,
        )

    # AMQP/Fast.

    def fast_grants(self, host: str) -> list[FastGrant]:
        """Return the client's AMQP/Fast rights in a virtual host, one entry for each role or scope.

        An empty list means that the client may not use the virtual host by any rule.
        """
        found = self._fast.get(host)
        if found is None:
            found = self._fast[host] = fast_grants(self._roles, self._scopes, host, self._variables)
        return found

    def enters_fast(self, host: str) -> Decision:
        """Decide if the client may use an AMQP/Fast virtual host."""
        found = self.fast_grants(host)
        return Decision(True, found[0].rule) if found else self._external_decision("vhost", vhost=host)

    def fast(self, host: str, right: str, service: str, name: str, *, whole: bool = False) -> Decision:
        """Decide if the client has a right to the AMQP/Fast destination `name` of a service.

        `right` is `read`, `browse`, `write` or `create`, or `talk` for a peer service. With `whole`, decide
        on all destinations whose names begin with `name`.
        """
        for grant in self.fast_grants(host):
            if grant.allows(right, service, name, whole=whole):
                return Decision(True, f"{grant.rule}.{service}.{right}")
        kind = KINDS.get(service)
        if kind is None or whole:  # an authorizer cannot be queried for all names with a prefix
            return Decision(False, NOTHING)
        return self._external_decision(
            "resource", vhost=host, resource=kind, name=name, permission=PERMISSIONS[right]
        )

    def fast_concerns(self, host: str, service: str, name: str) -> Decision:
        """Decide if the client may have any right to a destination whose name is, or begins with, `name`."""
        for grant in self.fast_grants(host):
            if grant.concerns(service, name):
                return Decision(True, grant.rule)
        if self._authorizer is not None and service in KINDS:
            return Decision(True, "decided by the authorizer for each operation")
        return Decision(False, NOTHING)

    def fast_out_of_band(self, host: str, folder: str) -> Decision:
        """Decide if a channel of the client may use a folder for bodies that are transferred as files.

        `folder` is a name in the shared folder, or "" for the shared folder itself, which no rule allows.
        """
        for grant in self.fast_grants(host) if folder else ():
            if grant.allows_folder(folder):
                return Decision(True, f"{grant.rule}.out_of_band")
        return Decision(False, NOTHING)


class AllRights(Rights):
    """Rights without limits: every check returns UNLIMITED.

    All clients have these rights while neither a role nor an authorizer is configured, and so do
    administrators who change the broker over HTTP.
    """

    unlimited = True

    def __init__(self, key: object = None) -> None:
        super().__init__(Principal(""), (), key=key)

    def _permit(self, *_: object, **__: object) -> Decision:
        return UNLIMITED

    has_client_id = publish = _permit
    enters_mqtt = mqtt_publish = mqtt_subscribe = _permit
    enters_amqp = amqp = amqp_key = _permit
    enters_fast = fast = fast_concerns = fast_out_of_band = _permit


PUBLISHES: Final[dict[str, Callable[[Rights, Address, str], Decision]]] = {
    MQTT.name: Rights._publish_topic,
    AMQP091.name: Rights._publish_by_exchange,
    AMQPFAST.name: Rights._publish_to_destination,
}
"""Functions that `Rights.publish` calls, by the protocol of the address."""
