"""AMQP 0-9-1 options of listeners and links.

`AmqpListener` and `AmqpLink` extend the common `ListenerSettings` and `LinkSettings` of
`gateway/settings/endpoints.py` with options that only AMQP 0-9-1 has. The module holds and checks the values
only; `gateway/ingress` and `gateway/egress` use them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, Strict

from gateway.settings.endpoints import LinkSettings, ListenerSettings


def _names(value: Any) -> Any:
    """Convert a table of virtual hosts to a tuple of their names; return other values unchanged.

    AMQP/Fast configures virtual hosts as a table, and so may AMQP 0-9-1. Raises ValueError if a virtual host
    in the table has options, because AMQP 0-9-1 has none.
    """
    if not isinstance(value, dict):
        return value
    if any(value.values()):
        raise ValueError("virtual hosts of AMQP 0-9-1 have no options: write a list of names")
    return tuple(value)


RABBITMQ_VERSION: Final = "3.10.8"
"""RabbitMQ version that a listener announces to its clients."""


class AmqpListener(ListenerSettings):
    """Listener for AMQP 0-9-1 clients, with the options for this protocol."""

    virtual_hosts: Annotated[
        tuple[str, ...], Strict(False), BeforeValidator(_names, json_schema_input_type=list[str])
    ] = Field(("/",), min_length=1)
    """Names of the virtual hosts. Routes of the mapping files belong to the first one; the others are
    isolated from routes. With `engine: rabbitmq` the first one is the virtual host of the cluster's URLs, and
    the others are the cluster's virtual hosts of the same names."""
    announce: Literal["rabbitmq", "gateway"] = "rabbitmq"
    """Product name sent to clients. Programs that recognise RabbitMQ use its extensions only if they see its
    name; with `gateway` they follow the specification alone."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the listener's virtual hosts. Routes of mapping files apply only to the first one."""
        return self.virtual_hosts


class AmqpLink(LinkSettings):
    """Link to an AMQP 0-9-1 broker, with the options for this protocol."""

    declare: Literal["create", "check", "none"] = "create"
    """Treatment of exchanges and queues that routes name: `create` declares them, `check` only verifies that
    they exist, `none` does neither."""
    single_active_consumer: bool = False
    """True if queues that the link declares get `x-single-active-consumer`, so that one replica at a time
    consumes."""
    trust_user_id: bool = False
    """True if the property `user-id` of consumed messages is kept. Otherwise it becomes the header
    `x-user-id`, because users of that broker are not users of the gateway."""
    consumer_priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    """`x-priority` of the link's consumers. While consumers of a higher priority have credit, the link
    receives nothing."""

    survey_secs: float = Field(30.0, ge=0)
    """Interval in seconds at which the link verifies that exchanges, queues, bindings and consumers of its
    routes exist, and restores them; 0 disables this."""

    def divides(self, queue: str | None) -> bool:
        """Return True if each message reaches only one of the replicas that consume over this link.

        This is true for an elected link, and if all replicas consume from the queue `queue`. If `queue` is
        None, they consume from an exchange, each one through a queue of its own.
        """
        return queue is not None or self.elected
