"""Section `broker` of the configuration: the embedded broker, or a RabbitMQ cluster that replicas share.

`EmbeddedEngine` has no options of its own. `RabbitEngine` has the address of the cluster, the PostgreSQL
database of shared state (`StateDatabase`), and the names and bounds of the replicas' queues. The module holds
and checks the values only; `gateway/engine` and `gateway/state` use them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.protocols.amqp091.dialect import AMQP091
from gateway.settings.endpoints import FilePath, MaskedUrl, Remote, secret_from
from gateway.settings.limits import Section

EMBEDDED: Final = "embedded"
RABBITMQ: Final = "rabbitmq"
ENGINE: Final = "engine"
"""Name of the connection to the RabbitMQ cluster where endpoints are named, as in metrics."""


class EmbeddedEngine(Section):
    """Embedded broker: sessions, queues and retained messages belong to this process."""

    engine: Literal["embedded"] = "embedded"
    """Kind of engine."""


class StateDatabase(Section):
    """PostgreSQL database, version 15 or later, in which replicas store their state."""

    url: MaskedUrl
    """URL `postgresql://user@host:port/database`, with options of libpq after a `?`, such as
    `sslmode=verify-full&sslrootcert=/etc/ssl/ca.pem`. Several hosts, separated by commas, are tried in turn
    for one that is writable."""
    password_file: FilePath | None = None
    """File with the password, instead of the URL's; read for each connection, so that a changed password
    needs no restart."""

    @model_validator(mode="after")
    def _is_postgresql(self) -> Self:
        parts = urlsplit(self.url)
        if parts.scheme not in ("postgresql", "postgres"):
            raise ValueError("the url of a PostgreSQL database begins with postgresql://")
        if self.password_file is not None and parts.password is not None:
            raise ValueError("set the password once: in the url, or in password_file")
        return self

    def password(self) -> str:
        """Return the password in `password_file`. Raises ConfigurationError if it cannot be read."""
        assert self.password_file is not None
        return secret_from(self.password_file)


class RabbitEngine(Remote):
    """RabbitMQ cluster through which gateways with the same `namespace` serve the same clients."""

    engine: Literal["rabbitmq"]
    """Kind of engine."""
    postgresql: StateDatabase
    """Database of state that is not messages, in a schema with the name of `namespace`, which the replicas
    create. Two clusters with the same namespace need separate databases."""
    namespace: str = Field("gateway", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Prefix of the names of queues and exchanges. Replicas that serve the same clients use the same one."""
    topic_exchange: str = Field("amq.topic", min_length=1, max_length=127)
    """Topic exchange that every MQTT message passes. Programs that use AMQP bind their queues to it."""
    queue_type: Literal["classic", "quorum"] = "quorum"
    """Type of the queues: `quorum` survives the loss of a node; `classic` needs fewer resources and stays on
    one node."""
    queue_bytes_max: int = Field(1024 * 1024 * 1024, ge=1_048_576)
    """Bytes that may wait on the cluster for one replica; beyond it the oldest messages are dropped and
    counted."""
    engine_timeout_secs: float = Field(60.0, gt=0)
    """Time in seconds that clients stay connected while the cluster is unreachable. The other replicas
    declare a replica dead after 20 s more without a sign of life."""

    @model_validator(mode="after")
    def _speaks_amqp(self) -> Self:
        if self.protocol != AMQP091.name:
            raise ValueError("the urls of a RabbitMQ cluster begin with amqp:// or amqps://")
        return self


def _tag(value: Any) -> str:
    name = value.get("engine", EMBEDDED) if isinstance(value, dict) else getattr(value, "engine", EMBEDDED)
    return RABBITMQ if name == RABBITMQ else EMBEDDED


AnyEngine = Annotated[
    Annotated[EmbeddedEngine, Tag(EMBEDDED)] | Annotated[RabbitEngine, Tag(RABBITMQ)], Discriminator(_tag)
]
