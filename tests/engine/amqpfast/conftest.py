"""Fixtures for modules that say which tests they take (`TAKEN`), and which not (`EXCEPTIONS`, with why)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.amqpfast.embedded import Embedded
from tests.interop.gateway_fixture import Running
from tests.interop.servers import RabbitMQ


@pytest.fixture(scope="module", autouse=True)
def embedded(request: pytest.FixtureRequest) -> Iterator[Embedded | None]:
    """What the tests of such a module start gateways with."""
    taken = getattr(request.module, "TAKEN", ())
    if not taken:
        yield None
        return
    rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
    with pytest.MonkeyPatch.context() as patched:
        run = Embedded(rabbitmq)
        for module in taken:
            if hasattr(module, "running"):
                patched.setattr(module, "running", run)
        yield run


@pytest.fixture(autouse=True)
def excepted(request: pytest.FixtureRequest) -> None:
    """What is otherwise on the engine is not run."""
    exceptions: dict[str, str] = getattr(request.module, "EXCEPTIONS", {})
    whole = request.node.name.removeprefix("test_")
    if (why := exceptions.get(whole) or exceptions.get(whole.partition("[")[0])) is not None:
        pytest.skip(why)


@pytest.fixture
def gateway(embedded: Embedded) -> Iterator[Running]:
    """A replica of a namespace of its own."""
    with embedded() as one:
        yield one
