"""What tests of replicas leave behind is closed after each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.local_state import LocalDatabase


@pytest.fixture(autouse=True)
def local_databases_are_closed() -> Iterator[None]:
    """Each has three files open, and is in cycles of objects that are collected late."""
    yield
    while LocalDatabase.opened:
        LocalDatabase.opened.pop().database.close()
