"""What connection.start says of us.

Programs choose their way by it: most look at the capabilities, but some at the product and its version, for
what RabbitMQ does otherwise than the specification (a prefetch without `global` is each consumer's) and this
listener does as it does. To them it is that product, in the version that its behaviour is compared with;
`information` and `platform`, which people read, say what it is in truth.
"""

from __future__ import annotations

from typing import Final, Literal

from gateway import __version__
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.settings.amqp091 import RABBITMQ_VERSION

Product = Literal["rabbitmq", "gateway"]
CAPABILITIES: Final = (
    "publisher_confirms",
    "exchange_exchange_bindings",
    "basic.nack",
    "consumer_cancel_notify",
    "connection.blocked",
    "consumer_priorities",
    "authentication_failure_close",
    "per_consumer_qos",
    "direct_reply_to",
)
PRODUCTS: Final[dict[Product, tuple[str, str]]] = {
    "rabbitmq": ("RabbitMQ", RABBITMQ_VERSION),
    "gateway": ("gateway", __version__),
}


def server_properties(announced: Product) -> Headers:
    """The server-properties of a listener (1.4.2.1), in RabbitMQ's order."""
    product, version = PRODUCTS[announced]
    yes = Value(ValueType.BOOL, True)
    return (
        ("capabilities", Value(ValueType.TABLE, tuple((name, yes) for name in CAPABILITIES))),
        ("cluster_name", string("gateway")),
        ("information", string(f"gateway {__version__}, which speaks as RabbitMQ 3.10 does")),
        ("platform", string("Python")),
        ("product", string(product)),
        ("version", string(version)),
    )
