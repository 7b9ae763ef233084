"""What is AMQP 0-9-1's own in a listener and in a link."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, Strict

from gateway.settings.endpoints import Link, Listener


def _names(given: Any) -> Any:
    """Virtual hosts about which nothing is said may stand as those of AMQP/Fast do."""
    if not isinstance(given, dict):
        return given
    if any(given.values()):
        raise ValueError("virtual hosts of AMQP 0-9-1 are a list of names")
    return tuple(given)


RABBITMQ_VERSION: Final = "3.10.8"
"""The version of RabbitMQ as which a listener announces itself."""


class AmqpListener(Listener):
    """A listener for AMQP 0-9-1 clients."""

    virtual_hosts: Annotated[
        tuple[str, ...], Strict(False), BeforeValidator(_names, json_schema_input_type=list[str])
    ] = Field(("/",), min_length=1)
    """Their names. Routes of the mapping files join the first one; the others keep to themselves. With
    `engine: rabbitmq` the first one is that of the cluster's urls, and the others are the cluster's own of
    the same names."""
    announce: Literal["rabbitmq", "gateway"] = "rabbitmq"
    """The product that clients are told they are connected to: programs that know RabbitMQ's ways take them
    when they see its name. `gateway` has them believe in the letter of the specification."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.virtual_hosts


class AmqpLink(Link):
    """A link to an AMQP 0-9-1 broker."""

    declare: Literal["create", "check", "none"] = "create"
    """Exchanges and queues that routes name: declare them, only look whether they exist, or trust."""
    single_active_consumer: bool = False
    """Queues that the link declares have `x-single-active-consumer`: one replica at a time."""
    trust_user_id: bool = False
    """Whether the `user-id` of what the link consumes stays what it is. Else it becomes the header
    `x-user-id`, for users of that broker are none of ours."""
    consumer_priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    """`x-priority` of our consumers; while those of a higher one have credit, we get nothing."""

    survey_secs: float = Field(30.0, ge=0)
    """How often to look whether exchanges, queues, bindings and consumers of routes are still there, and to
    restore them; 0 is never."""

    def divides(self, queue: str | None) -> bool:
        """A queue does. From an exchange each client identifier has a queue of its own."""
        return queue is not None or self.elected
