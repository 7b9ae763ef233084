"""What stands behind the listeners: the embedded broker, or a RabbitMQ cluster that many gateways share."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, Tag, field_serializer, model_validator

from gateway.protocols.amqp091.dialect import AMQP091
from gateway.settings.endpoints import FilePath, Remote, masked_url, secret_from
from gateway.settings.limits import Section

EMBEDDED: Final = "embedded"
RABBITMQ: Final = "rabbitmq"
ENGINE: Final = "engine"
"""What the connection to the cluster is called where endpoints are listed."""


class EmbeddedEngine(Section):
    """The gateway is its own broker: sessions, queues and retained messages belong to this process."""

    engine: Literal["embedded"] = "embedded"
    """Which engine this is."""


class StateDatabase(Section):
    """The PostgreSQL database, version 15 or later, in which replicas keep their state."""

    url: str
    """`postgresql://user@host:port/database`; behind a `?` options of libpq, such as
    `sslmode=verify-full&sslrootcert=/etc/ssl/ca.pem`. Several hosts, divided by commas, are tried in turn for
    the one that can be written."""
    password_file: FilePath | None = None
    """Instead of the URL's; read for each connection, so that a changed password needs no restart."""

    @model_validator(mode="after")
    def _is_postgresql(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("the url of a PostgreSQL database begins with postgresql://")
        if self.password_file is not None and parts.password is not None:
            raise ValueError("say the password once: in the url, or in password_file")
        return self

    @field_serializer("url")
    def _hidden(self, url: str) -> str:
        return masked_url(url)

    def password(self) -> str:
        """Read `password_file`. Raises ConfigurationError."""
        assert self.password_file is not None
        return secret_from(self.password_file)


class RabbitEngine(Remote):
    """A RabbitMQ cluster, through which gateways with the same `namespace` serve the same clients."""

    engine: Literal["rabbitmq"]
    """Which engine this is."""
    postgresql: StateDatabase
    """Where replicas keep what is not a message, in a schema with the name of `namespace`, which they create.
    Two clusters with the same namespace need a database each."""
    namespace: str = Field("gateway", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """With what the names of queues and exchanges begin; replicas of one world say the same."""
    topic_exchange: str = Field("amq.topic", min_length=1, max_length=127)
    """The topic exchange that every MQTT message passes; programs that speak AMQP bind their queues to it."""
    queue_type: Literal["classic", "quorum"] = "quorum"
    """Of the queues: `quorum` survives the loss of a node; `classic` costs less and stays on one."""
    queue_bytes_max: int = Field(1024 * 1024 * 1024, ge=1_048_576)
    """Octets that may wait on the cluster for one replica; beyond it the oldest are dropped, and counted."""
    engine_timeout_secs: float = Field(60.0, gt=0)
    """How long clients stay connected while the cluster is away; a replica that is silent for 20 s longer is
    held dead by the others."""

    @model_validator(mode="after")
    def _speaks_amqp(self) -> Self:
        if self.protocol != AMQP091.name:
            raise ValueError("the urls of a RabbitMQ cluster begin with amqp:// or amqps://")
        return self


def _tag(given: Any) -> str:
    name = given.get("engine", EMBEDDED) if isinstance(given, dict) else getattr(given, "engine", EMBEDDED)
    return RABBITMQ if name == RABBITMQ else EMBEDDED


AnyEngine = Annotated[
    Annotated[EmbeddedEngine, Tag(EMBEDDED)] | Annotated[RabbitEngine, Tag(RABBITMQ)], Discriminator(_tag)
]
