"""The PostgreSQL in which gateways of the tests with `engine: rabbitmq` keep their state.

One server for the process, started when the first gateway needs it. Each namespace has a schema of its own.
"""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any, Final

from gateway.settings.engine import StateDatabase
from tests.interop.servers import PostgreSQL

NOWHERE: Final = StateDatabase(url="postgresql://gateway@localhost/gateway")
"""For settings that nothing connects with."""
NO_CLUSTER: Final = {
    "engine": "rabbitmq",
    "urls": ["amqp://cluster"],
    "postgresql": {"url": "postgresql://gateway@localhost/gateway"},
}
"""Keys of `broker`, for the same."""


@cache
def state_server() -> PostgreSQL:
    """Start the server, which ends with the process."""
    server = PostgreSQL()
    atexit.register(server.close)
    server.start()
    return server


def state_database() -> StateDatabase:
    """Return where the server is."""
    return StateDatabase(url=state_server().url)


def with_state(broker: dict[str, Any]) -> dict[str, Any]:
    """Return keys of `broker` with a database, if its engine needs one and has none."""
    if broker.get("engine") != "rabbitmq" or "postgresql" in broker:
        return broker
    return broker | {"postgresql": {"url": state_server().url}}
