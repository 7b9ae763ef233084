"""Server properties that an AMQP 0-9-1 listener sends in connection.start.

Some client programs select their behaviour by these properties. Most check the capabilities; some check
product and version, to handle points where RabbitMQ deviates from the specification (for example, a prefetch
without `global` applies to each consumer). This listener deviates in the same way. It therefore reports by
default the product "RabbitMQ" and the version that its behaviour is compared with. `information` and
`platform`, which are read by people, name the real program.
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
    """Return the server-properties of a listener (AMQP 0-9-1, 1.4.2.1), in RabbitMQ's order.

    `announced` selects whether they name RabbitMQ or the gateway as the product.
    """
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
