"""A gateway for each test, in a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interop.gateway_fixture import Running, running


@pytest.fixture
def gateway() -> Iterator[Running]:
    """A gateway with the default mapping and the default limits."""
    with running() as one:
        yield one
