"""Root of the configuration, `Settings`, with the sections that have no module of their own.

Every key has a default. Validators check rules that concern several sections, such as ports, endpoint names
and roles. `Settings` also knows at which position each key was set, and returns paths, client identifiers and
virtual hosts that follow from several keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, PrivateAttr, SecretStr, Strict, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.documents import Document, Place, dotted, suggestion
from gateway.model.address import Address
from gateway.model.dialect import Dialect, NameRefused
from gateway.model_docs import Documented
from gateway.protocols import DIALECT_OF_WORD, DIALECTS
from gateway.settings.access import DefaultRoles, HttpAuthorizer, Names, Role
from gateway.settings.amqp091 import AmqpListener
from gateway.settings.amqpfast import FastListener, FastVirtualHost
from gateway.settings.audit import Audit
from gateway.settings.declare import Declare, Origin
from gateway.settings.endpoints import (
    Admission,
    FilePath,
    Host,
    LinkSettings,
    ListenerSettings,
    Port,
    SharedListener,
    check_shares,
    secret_from,
)
from gateway.settings.engine import ENGINE, AnyEngine, EmbeddedEngine, RabbitEngine
from gateway.settings.identity import USERS_ALONE, Backend, UsersBackend, check_backends
from gateway.settings.journal import Journal
from gateway.settings.limits import Limits, Section
from gateway.settings.logins import LoginSettings
from gateway.settings.tracing import TracingSettings
from gateway.settings.unions import AnyLink, AnyListener
from gateway.settings.worker_checks import single_broker_options

ENDPOINT_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,62}")
PORT_MAX: Final = 65_535
EVERYWHERE: Final = frozenset(("", "::", "0.0.0.0"))  # Addresses that occupy a port for IPv4.
GUEST: Final = "guest"
ANONYMOUS: Final = "anonymous"
REPLICA: Final = "{replica}"
PACKAGE: Final = Path(__file__).resolve().parent.parent


def shipped_mappings() -> Path:
    """Return the folder of the mapping files that come with the gateway, in its wheel or a checkout."""
    installed = PACKAGE / "shipped_mappings"
    return installed if installed.is_dir() else PACKAGE.parent / "mappings"


class StoreSettings(Section):
    """Storage of durable queues, persistent sessions and retained messages on disk."""

    enabled: bool = True
    """True if the store is used. Otherwise everything is in memory and is lost when the process ends."""
    path: FilePath = Path("data")
    """Folder of the database, created if it is missing. Each gateway needs one of its own."""
    probe_secs: float = Field(1.0, gt=0)
    """Interval in seconds at which a store that could not be written is tried again."""


class HttpTls(Section):
    """TLS of an HTTP port. Files are PEM and are read again when they change."""

    cert_file: FilePath
    """Certificate with its chain."""
    key_file: FilePath
    """Private key of the certificate."""


class HealthSettings(Section):
    """Separate port for health probes and metrics, which the console's port then does not serve."""

    host: Host = "0.0.0.0"
    """Address to bind."""
    port: Port = 8081
    """Port to bind; 0: any free port."""
    tls: HttpTls | None = None
    """TLS of this port. Absent: no TLS."""


class Http(Section):
    """HTTP server for health probes, metrics, the console and the API."""

    enabled: bool = True
    """True if the HTTP server runs."""
    host: Host = "0.0.0.0"
    """Address to bind."""
    port: Port = 8080
    """Port to bind; 0: any free port."""
    tls: HttpTls | None = None
    """TLS of this port. Absent: no TLS; passwords and tokens should then not leave this machine."""
    health: HealthSettings | None = None
    """Separate port for health and metrics. Absent: they are served on the same port."""
    scrape_token_file: FilePath | None = None
    """File with a token. Metrics then need this token (`Authorization: Bearer`) or a login."""
    token_file: FilePath | None = None
    """File with a token that grants all rights, like an administrator's token."""
    tokens_path: FilePath | None = None
    """Folder of the console's tokens, where the first start writes the administrator's token. Absent:
    `console` in the store's folder, or, without a store, in memory only."""
    sessions_max: int = Field(1_000, ge=1)
    """Concurrent sessions of the console; beyond it the least recently used one ends."""
    session_idle_secs: float = Field(43_200.0, gt=0)
    """Time in seconds after which a session without requests ends."""
    session_secs_max: float = Field(604_800.0, gt=0)
    """Longest duration of a session in seconds."""
    connections_max: int = Field(100, ge=1)
    """Concurrent connections, for browsers, Prometheus and probes. Beyond it an idle connection is closed for
    the new one; if there is none, the new one receives 503."""
    head_timeout_secs: float = Field(10.0, gt=0)
    """Longest time in seconds from accepting a connection, or from the first byte of a further request, to
    the end of the request's head."""
    body_timeout_secs: float = Field(30.0, gt=0)
    """Longest time in seconds from the end of the head to the end of the body."""
    keep_alive_secs: float = Field(60.0, gt=0)
    """Longest time in seconds between two requests of a connection; Prometheus scrapes every 15 or 30 s."""
    send_timeout_secs: float = Field(30.0, gt=0)
    """Longest time in seconds for a client to read a response."""
    head_bytes_max: int = Field(16_384, ge=1_024, le=1_048_576)
    """Bytes of a request's head; browsers behind a login send some kilobytes of cookies. Beyond it: 431."""
    body_bytes_max: int = Field(1_048_576, ge=0)
    """Bytes of a request's body; the default holds forty thousand ids of dead letters. Beyond it: 413."""


class Forward(Section):
    """Address to which copies of dead letters are published.

    The fields of the address are those of the endpoint's protocol, such as `topic`.
    """

    endpoint: str
    """Name of a listener or link."""
    topic: str | None = Field(None, min_length=1)
    """MQTT topic, without wildcards."""
    exchange: str | None = None
    """AMQP 0-9-1 exchange."""
    routing_key: str | None = None
    """Routing key, with `exchange`."""
    queue: str | None = Field(None, min_length=1)
    """AMQP 0-9-1 queue."""
    qos: Literal[0, 1, 2] = 1
    """QoS of the copies; for AMQP, above 0 is persistent."""

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        if sum(word is not None for word in (self.topic, self.exchange, self.queue)) != 1:
            raise ValueError("set exactly one address: topic, exchange (with routing_key) or queue")
        if self.routing_key is not None and self.exchange is None:
            raise ValueError("routing_key needs exchange")
        if self.topic is not None and set(self.topic) & set("+#\0"):
            raise ValueError("topic must not have wildcards")
        return self

    def _stated_words(self) -> dict[str, str]:
        return {word: text for word in DIALECT_OF_WORD if (text := getattr(self, word, None)) is not None}

    @property
    def dialect(self) -> Dialect:
        """Description of the protocol to which the fields of the address belong."""
        return DIALECT_OF_WORD[next(iter(self._stated_words()))]

    def address(self) -> Address:
        """Return the address to which copies are published. Raises ValueError if it is too long."""
        try:
            return self.dialect.published(self._stated_words())[0]
        except NameRefused as error:
            raise ValueError(str(error)) from error


class DeadLetterSettings(Section):
    """Options for dead letters: messages that could not be routed or delivered."""

    forward: Forward | None = None
    """Address that receives a copy of each dead letter."""


ONE_OF_EACH: Final = "set one of password_hash and password_hash_file, or one of scram and scram_file"


class User(Section):
    """User who may log in with a password.

    `gateway passwd` computes the password hash, `gateway passwd --scram` the SCRAM keys.
    """

    password_hash: SecretStr | None = None
    """Password hash (argon2id), as `gateway passwd` prints it."""
    password_hash_file: FilePath | None = None
    """File with the password hash, instead of `password_hash`."""
    scram: SecretStr | None = None
    """Keys for MQTT 5 clients that authenticate by SCRAM-SHA-256, in addition to the hash or instead of it.
    """
    scram_file: FilePath | None = None
    """File with the SCRAM keys, instead of `scram`."""
    roles: Names = ()
    """Names of the user's `roles`."""
    receive_bytes_per_sec_max: int | None = Field(None, ge=0)
    """Bytes per second of each of the user's connections, in all protocols, from its login on, instead of the
    listener's limit; 0: no limit."""
    receive_messages_per_sec_max: int | None = Field(None, ge=0)
    """Messages per second that each of the user's connections may publish, instead of the listener's limit;
    0: no limit."""

    @model_validator(mode="after")
    def _one_of_each(self) -> Self:
        stated = [
            (self.password_hash is not None) + (self.password_hash_file is not None),
            (self.scram is not None) + (self.scram_file is not None),
        ]
        if max(stated) > 1 or not self.model_fields_set:
            raise ValueError(ONE_OF_EACH)
        return self

    @property
    def has_credentials(self) -> bool:
        """True if the user has a password hash or SCRAM keys, and can thus log in with a password."""
        secrets = (self.password_hash, self.password_hash_file, self.scram, self.scram_file)
        return any(one is not None for one in secrets)

    def hash(self) -> str:
        """Return the user's password hash, or "" if the user has none.

        The hash is read from `password_hash_file` if that is set. Raises ConfigurationError if the file
        cannot be read.
        """
        return _secret(self.password_hash, self.password_hash_file)

    def scram_keys(self) -> str:
        """Return the user's SCRAM keys, or "" if the user has none.

        The keys are read from `scram_file` if that is set. Raises ConfigurationError if the file cannot be
        read.
        """
        return _secret(self.scram, self.scram_file)


def _secret(value: SecretStr | None, file: Path | None) -> str:
    if value is not None:
        return value.get_secret_value()
    return "" if file is None else secret_from(file).strip()


def check_users(users: Mapping[str, User], *, elsewhere: bool) -> None:
    """Check that every user in `users` can authenticate. Raises ValueError for a user who cannot.

    `elsewhere` is True if users can also authenticate by other means than a password hash or SCRAM keys in
    `users`.
    """
    for name, user in users.items():
        if name == ANONYMOUS and user.has_credentials:
            raise ValueError(f"users.{name}: clients without a name cannot have a password; remove it")
        if not user.has_credentials and name not in (ANONYMOUS, GUEST) and not elsewhere:
            raise ValueError(f"users.{name}: {ONE_OF_EACH}")


class LogSettings(Section):
    """Level and format of the log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written."""
    format: Literal["auto", "console", "json"] = "auto"
    """Format of log lines. `auto` is `console` on a terminal and `json` elsewhere. With `json` nothing else
    is written, unless standard output is a terminal."""
    slow_turn_secs: float = Field(0.1, ge=0)
    """Time in seconds after which work that delays all connections is logged, with the task and, when known,
    the connection that caused it; 0 disables this."""


class ReadFrom:
    """File from which settings were read: its path, its content, and the position of each key.

    All objects of this class are equal, so that settings with equal values are equal, whatever file they come
    from.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.path: Path | None = None
        self.text = ""
        self.sections: dict[str, object] = {}
        self.empty: list[str] = []
        self.origins: dict[Place, Origin] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ReadFrom)


class Settings(Documented, BaseSettings):
    """Configuration of one gateway process.

    The class reads neither file nor environment; `load_settings` passes it their values.
    """

    model_config = SettingsConfigDict(strict=True, frozen=True, extra="forbid", case_sensitive=True)

    replica: str = Field("gateway", min_length=1, max_length=64, json_schema_extra={"default": None})
    """Name of this process among its replicas. Absent: the host name. Replaces `{replica}` in client
    identifiers."""
    workers: int = Field(1, ge=1, le=64)
    """Processes on this machine that share the listeners' ports, each a replica with its number appended to
    the name. More than one needs `engine: rabbitmq`, or MQTT clients that only publish to links."""
    listeners: dict[str, AnyListener] = {}
    """Ports where clients connect, by name. Absent: `mqtt`, `amqp091` and `amqpfast` with their defaults."""
    links: dict[str, AnyLink] = {}
    """Connections to remote brokers, by name."""
    mappings: Annotated[tuple[str, ...], Strict(False)] = ()
    """Paths or globs of mapping files, relative to the configuration file, or in a variable to the working
    directory. Absent: the shipped identity.yaml, which is also found by that name."""
    broker: AnyEngine = EmbeddedEngine()
    """Broker behind the listeners: the embedded one, or a RabbitMQ cluster that replicas share."""
    limits: Limits = Limits()
    """Bounds on memory, connections, sessions, queues and messages."""
    store: StoreSettings = StoreSettings()
    journal: Journal = Journal()
    """Record of messages that crossed the gateway."""
    http: Http = Http()
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    declare: Declare = Declare()
    users: dict[str, User] = {}
    """Users who may log in with a password, by name; `anonymous` stands for clients without a name."""
    authentication: Annotated[tuple[Backend, ...], Strict(False), Field(min_length=1)] = USERS_ALONE
    """Back ends that establish who a client is, in the order in which they are tried. The first that accepts
    decides. Absent: `users` alone."""
    roles: dict[str, Role] = {}
    """Permissions by role name. Without roles and without `authorizer`, every client that may connect may do
    everything."""
    default_roles: DefaultRoles = DefaultRoles()
    authorizer: HttpAuthorizer | None = None
    """Server that decides on requests which no role allows or denies. Absent: such requests are refused."""
    guest: Admission = "loopback"
    """Admission of the user guest with the password guest: from this machine, always, or never."""
    logins: LoginSettings = LoginSettings()
    """Limits on failed logins, and on logins that wait."""
    drain_timeout_secs: float = Field(20.0, ge=0)
    """Time in seconds after SIGTERM for messages in flight. Kubernetes kills the process after 30 s by
    default."""
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
    audit: Audit = Audit()
    _read_from: ReadFrom = PrivateAttr(default_factory=ReadFrom)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return only the arguments of the class as sources of values, for pydantic."""
        return (init_settings,)

    @model_validator(mode="after")
    def _names(self) -> Self:
        """Check that the names of listeners and links are valid. Raises ValueError."""
        for name in (*self.listeners, *self.links):
            if not ENDPOINT_NAME.fullmatch(name):
                raise ValueError(f"the endpoint name {name!r} must match {ENDPOINT_NAME.pattern}")
        if both := sorted(self.listeners.keys() & self.links.keys()):
            raise ValueError(f"{both[0]!r} names a listener and a link; rename one of them")
        return self

    @model_validator(mode="after")
    def _engine(self) -> Self:
        """Check that a RabbitMQ cluster, if configured, supports the listeners and declarations.

        Raises ValueError.
        """
        if not isinstance(self.broker, RabbitEngine):
            return self
        if ENGINE in self.listeners or ENGINE in self.links:
            raise ValueError(
                f"the endpoint name {ENGINE!r} is reserved with broker.engine: rabbitmq; choose another name"
            )
        for name, one in self.listeners.items():
            dialect = DIALECTS.get(one.protocol)
            if dialect is not None and not dialect.on_engine:
                spoken = ", ".join(known.title for known in DIALECTS.values() if known.on_engine)
                raise ValueError(
                    f"listeners.{name}: protocol {one.protocol} needs the embedded broker; with"
                    f" engine: rabbitmq use {spoken}"
                )
        if self.declare != Declare():
            raise ValueError("declare needs the embedded broker; declare queues in the cluster itself")
        return self

    @model_validator(mode="after")
    def _elected(self) -> Self:
        """Check that the configuration permits the links that are elected or share an outbox.

        Raises ValueError.
        """
        for name, link in self.links.items():
            if link.elected and not isinstance(self.broker, RabbitEngine):
                raise ValueError(f"links.{name}.elected: needs broker.engine: rabbitmq")
            if link.outbox.shared and not isinstance(self.broker, RabbitEngine):
                raise ValueError(f"links.{name}.outbox.shared: needs broker.engine: rabbitmq")
            if link.elected and REPLICA not in link.client_id:
                raise ValueError(
                    f"links.{name}.client_id: must contain {REPLICA} with elected, because each"
                    " replica connects to publish"
                )
        return self

    @model_validator(mode="after")
    def _workers(self) -> Self:
        """Check that the other options permit several workers, if these are configured. Raises ValueError."""
        if self.workers == 1:
            return self
        if not isinstance(self.broker, RabbitEngine):
            needs = single_broker_options(self.listeners, self.roles, self.authentication, self.authorizer)
            for need in needs:
                raise ValueError(
                    f"workers: {self.workers} needs broker.engine: rabbitmq. With the embedded broker,"
                    f" workers are separate, so clients may only publish to links: {need}"
                )
        for name, link in self.links.items():
            if REPLICA not in link.client_id:
                raise ValueError(
                    f"links.{name}.client_id: must contain {REPLICA} with several workers,"
                    " otherwise each takes over the others' session at the broker"
                )
        return self

    @model_validator(mode="after")
    def _roles(self) -> Self:
        """Check that each role exists that is given to a user or by default. Raises ValueError."""
        role_lists = [(f"users.{name}.roles", user.roles) for name, user in self.users.items()]
        default = self.default_roles
        role_lists += [
            (f"default_roles.{word}", getattr(default, word)) for word in type(default).model_fields
        ]
        for place, names in role_lists:
            for name in names:
                if name not in self.roles:
                    hint = suggestion(name, list(self.roles))
                    raise ValueError(f"{place}: unknown role {name!r}{hint}")
        return self

    @model_validator(mode="after")
    def _identities(self) -> Self:
        check_backends(self.authentication)
        check_users(self.users, elsewhere=self.has_external_users)
        return self

    @property
    def has_external_users(self) -> bool:
        """True if users may authenticate by other means than a secret in the section `users`.

        These means are a client certificate, or another authentication back end.
        """
        return len(self.authentication) > 1 or any(
            one.tls is not None and one.tls.client_ca_file is not None for one in self.listeners.values()
        )

    def users_file(self) -> Path | None:
        """Return the path of the separate file of users, or None if there is none."""
        return next((one.file for one in self.authentication if isinstance(one, UsersBackend)), None)

    @model_validator(mode="after")
    def _shares(self) -> Self:
        check_shares(self.listeners)
        return self

    @model_validator(mode="after")
    def _forward(self) -> Self:
        """Check the endpoint and the address for copies of dead letters. Raises ValueError."""
        forward = self.dead_letters.forward
        if forward is not None:
            endpoints = self.endpoints()
            at = "dead_letters.forward"
            if forward.endpoint not in endpoints:
                raise ValueError(
                    f"{at}: unknown endpoint {forward.endpoint!r}; known: {', '.join(endpoints)}"
                )
            if endpoints[forward.endpoint] != forward.dialect.name:
                raise ValueError(
                    f"{at}: {forward.endpoint!r} uses {endpoints[forward.endpoint]}, but the"
                    f" address is for {forward.dialect.name}"
                )
            forward.address()
        return self

    @model_validator(mode="after")
    def _virtual_hosts(self) -> Self:
        """Check that listeners configure the same AMQP/Fast virtual host alike, and within the limits.

        Raises ValueError.
        """
        stated: dict[str, tuple[str, FastVirtualHost]] = {}
        for name, one in self.listeners.items():
            for host, options in one.virtual_hosts.items() if isinstance(one, FastListener) else ():
                other, same = stated.setdefault(host, (name, options))
                if same != options:
                    raise ValueError(f"{other} and {name} configure virtual host {host!r} differently")
                for words, most in (("queues", self.limits.queues_max), ("topics", self.limits.topics_max)):
                    if (count := len(set(getattr(options.destinations, words)))) > most:
                        at = f"listeners.{name}.virtual_hosts.{host}.destinations.{words}"
                        raise ValueError(f"{at}: {count} names, but limits.{words}_max is {most}")
        return self

    def amqp_hosts(self) -> list[str]:
        """Return the names of the virtual hosts of all AMQP 0-9-1 listeners, or `["/"]` if there are none."""
        amqp = [one for one in self.listeners.values() if isinstance(one, AmqpListener)]
        return list(dict.fromkeys(host for one in amqp for host in one.virtual_hosts)) or ["/"]

    def virtual_hosts(self) -> dict[str, FastVirtualHost]:
        """Return the virtual hosts of all AMQP/Fast listeners by name."""
        return {
            host: given
            for one in self.listeners.values()
            if isinstance(one, FastListener)
            for host, given in one.virtual_hosts.items()
        }

    @model_validator(mode="after")
    def _ports(self) -> Self:
        """Check that no two servers bind the same port. Raises ValueError."""
        by_port: dict[tuple[str, int], str] = {}
        places = [(f"listeners.{name}", one.host, one.port) for name, one in self.listeners.items()]
        if self.http.enabled:
            places.append(("http", self.http.host, self.http.port))
            if (health := self.http.health) is not None:
                places.append(("http.health", health.host, health.port))
            for number in range(1, self.workers + 1 if self.workers > 1 and self.http.port else 1):
                if (port := self.http.port + number) > PORT_MAX:
                    raise ValueError(
                        f"http.port: too high, since {self.workers} workers use the ports above it"
                    )
                places.append((f"the console of worker {number}, behind http.port,", self.http.host, port))
        for name, host, port in places:
            place = "" if host in EVERYWHERE else host
            if port and (other := by_port.setdefault((place, port), name)) != name:
                raise ValueError(f"{other} and {name} both use port {port} of {host}; change one")
        return self

    def note_origins(self, origins: Mapping[Place, Origin]) -> None:
        """Store where each key was set, for error messages after loading.

        `origins` has the file and position, or the environment variable, by the path of the key.
        """
        self._read_from.origins.update(origins)

    def note_file(self, path: Path | None, document: Document) -> None:
        """Store the path and content of the file from which the settings were read."""
        read_from, content = self._read_from, document.content
        read_from.path = path
        read_from.text = document.text
        stated = content if isinstance(content, dict) else {}
        read_from.sections = {str(key): value for key, value in stated.items() if value is not None}
        read_from.empty = [str(key) for key, value in stated.items() if value is None]

    def empty_sections(self) -> list[str]:
        """Return the top-level keys of the configuration file that have no value."""
        return self._read_from.empty

    @property
    def file(self) -> Path | None:
        """Path of the file that the settings were read from, or None if there is none."""
        return self._read_from.path

    @property
    def text(self) -> str:
        """Text of the configuration file, or "" if there is none."""
        return self._read_from.text

    @property
    def sections(self) -> Mapping[str, object]:
        """Top-level keys of the configuration file with their values. Keys without a value are omitted."""
        return self._read_from.sections

    def origin_of(self, place: Place) -> Origin:
        """Return the position at which the key at `place`, or else its nearest parent key, is set.

        `place` is a path of keys and list indexes. Return an empty Origin if the position is unknown.
        """
        while place and place not in self._read_from.origins:
            place = place[:-1]
        return self._read_from.origins.get(place, Origin()) if place else Origin()

    def origin_of_key(self, key: str) -> Origin:
        """Return the position at which a key, or else its nearest parent key, is set.

        `key` is in dotted notation, such as `roles.device.mqtt`. Return an empty Origin if the position is
        unknown.
        """
        found = {dotted(place): place for place in self._read_from.origins}
        while key and key not in found:
            key = key[: max(key.rfind("."), key.rfind("["), 0)]
        return self.origin_of(found.get(key, ()))

    def is_set(self, place: Place) -> bool:
        """Return True if the file or the environment sets the key at `place`, a path of keys."""
        return place in self._read_from.origins

    def limits_of(self, listener: str) -> Limits:
        """Return the limits for one listener: those that it sets, and otherwise the general ones."""
        return self.limits.overridden_by(self.listeners[listener].limits)

    def client_id_of(self, link: str) -> str:
        """Return the client identifier of a link, in which the name of this process replaces `{replica}`."""
        return self.links[link].client_id.replace(REPLICA, self.replica)

    def consumer_id_of(self, link: str) -> str:
        """Return the client identifier of the connection over which a link consumes.

        If the link is elected, all replicas use the same client identifier, in which the namespace replaces
        `{replica}`. The replica that is elected next can thus continue the session at the broker. A broker
        that permits one connection for each client identifier then closes the previous connection.
        """
        options = self.links[link]
        if not options.elected:
            return self.client_id_of(link)
        assert isinstance(self.broker, RabbitEngine)
        return options.client_id.replace(REPLICA, self.broker.namespace)

    def shared_outboxes(self) -> list[str]:
        """Return the names of the links whose outboxes are queues of the RabbitMQ cluster."""
        return [name for name, one in self.links.items() if one.outbox.shared]

    @property
    def one_way(self) -> bool:
        """True if there are several workers, each with an embedded broker of its own.

        Clients can then only publish, and all messages leave by links.
        """
        return self.workers > 1 and not isinstance(self.broker, RabbitEngine)

    def divides(self, endpoint: str, queue: str | None) -> bool:
        """Return True if each message at an endpoint reaches only one of the replicas that consume there.

        `queue` is the queue from which the replicas consume; None stands for another source, such as a topic.
        The result is always True for a listener.
        """
        return endpoint not in self.links or self.links[endpoint].divides(queue)

    def journal_path(self) -> Path:
        """Return the folder of the journal; the default is the subfolder `journal` of the store."""
        return self.store.path / "journal" if self.journal.path is None else self.journal.path

    def tokens_path(self) -> Path | None:
        """Return the folder that stores the console's tokens, or None if they are only in memory."""
        if self.http.tokens_path is not None or not self.store.enabled:
            return self.http.tokens_path
        return self.store.path / "console"

    def endpoints(self) -> dict[str, str]:
        """Return the protocol of each listener and link, by the name of the listener or link.

        Shared ports are omitted, because their connections belong to other listeners.
        """
        both: dict[str, ListenerSettings | LinkSettings] = {**self.listeners, **self.links}
        return {name: one.protocol for name, one in both.items() if not isinstance(one, SharedListener)}

    def listener_namespaces(self) -> dict[str, str]:
        """Return the name of each listener's namespace, by the name of the listener.

        Clients of listeners with the same namespace can exchange messages. Shared ports are omitted.
        """
        found = {}
        endpoints = self.endpoints()
        for name, one in self.listeners.items():
            if name in endpoints:
                dialect = DIALECTS[one.protocol]
                place = {"gateway": "", "virtual_host": one.hosts[0], "listener": name}
                found[name] = f"{dialect.name} {place[dialect.meeting]}"
        return found

    def mapping_files(self) -> list[Path]:
        """Return the paths of the mapping files, sorted.

        A path without wildcards is included even if the file does not exist. A path with wildcards stands for
        the files that match it now. Without the key `mappings`, return the shipped file `identity.yaml`.
        """
        if not self.mappings:
            return [shipped_mappings() / "identity.yaml"]
        found: set[Path] = set()
        for pattern in self.mappings:
            found.update(self.expand_pattern(pattern))
        return sorted(found)

    def expand_pattern(self, pattern: str) -> list[Path]:
        """Return the paths of the mapping files for which `pattern`, an entry of `mappings`, stands.

        The bare name of a shipped mapping file stands for the shipped file, unless the folder has a file of
        this name.
        """
        path = str(self.mappings_folder / pattern)
        if set(pattern) & set("*?["):
            return _glob(path)
        if Path(pattern).name == pattern and not Path(path).exists():
            shipped = shipped_mappings() / pattern
            return [shipped if shipped.is_file() else Path(path)]
        return [Path(path)]

    @property
    def mappings_folder(self) -> Path:
        """Folder to which the paths in `mappings` are relative.

        It is the folder of the configuration file if the file sets `mappings`, otherwise the working
        directory.
        """
        path = self._read_from.path
        said_there = path is not None and self.origin_of(("mappings",)).file == str(path)
        return path.parent if path is not None and said_there else Path()

    def files(self) -> list[tuple[Place, Path]]:
        """Return each file that the configuration names and the gateway reads, with the path of its key."""
        paths: list[tuple[Place, Path | None]] = []
        for name, listener in self.listeners.items():
            if (tls := listener.tls) is not None:
                at: Place = ("listeners", name, "tls")
                paths += [((*at, "cert_file"), tls.cert_file), ((*at, "key_file"), tls.key_file)]
                paths += [((*at, "client_ca_file"), tls.client_ca_file), ((*at, "crl_file"), tls.crl_file)]
        for name, link in self.links.items():
            own, at = link.tls, ("links", name, "tls")
            paths += [(("links", name, "password_file"), link.password_file)]
            paths += [((*at, "ca_file"), own.ca_file), ((*at, "cert_file"), own.cert_file)]
            paths += [((*at, "key_file"), own.key_file)]
        if isinstance(broker := self.broker, RabbitEngine):
            paths += [(("broker", "password_file"), broker.password_file)]
            paths += [(("broker", "postgresql", "password_file"), broker.postgresql.password_file)]
            paths += [
                (("broker", "tls", key), getattr(broker.tls, key))
                for key in ("ca_file", "cert_file", "key_file")
            ]
        paths += [(("http", "token_file"), self.http.token_file)]
        paths += [(("http", "scrape_token_file"), self.http.scrape_token_file)]
        health = self.http.health
        secured: dict[Place, HttpTls | None] = {
            ("http", "tls"): self.http.tls,
            ("http", "health", "tls"): None if health is None else health.tls,
        }
        for at, own_tls in secured.items():
            if own_tls is not None:
                paths += [((*at, "cert_file"), own_tls.cert_file), ((*at, "key_file"), own_tls.key_file)]
        paths += [
            (("authentication", number, key), getattr(one, key))
            for number, one in enumerate(self.authentication)
            for key in ("file", "keys_file", "keys_ca_file", "ca_file")
            if hasattr(one, key)
        ]
        if self.authorizer is not None:
            paths += [(("authorizer", "ca_file"), self.authorizer.ca_file)]
        for name, user in self.users.items():
            paths += [(("users", name, "password_hash_file"), user.password_hash_file)]
            paths += [(("users", name, "scram_file"), user.scram_file)]
        return [(place, path) for place, path in paths if path is not None]


def _glob(pattern: str) -> list[Path]:
    path = Path(pattern)
    return list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
