"""What is AMQP 0-9-1's own in a listener."""

from __future__ import annotations

from typing import Literal

from gateway.settings.limits import Section


class AmqpOptions(Section):
    """The part of a listener that is about what AMQP 0-9-1 clients are told."""

    announce: Literal["rabbitmq", "gateway"] = "rabbitmq"
    """The product that clients are told they are connected to: programs that know RabbitMQ's ways take them
    when they see its name. `gateway` has them believe in the letter of the specification."""
