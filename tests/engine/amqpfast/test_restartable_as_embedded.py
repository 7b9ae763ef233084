"""The same as test_as_embedded.py, of gateways that are configured otherwise."""

from __future__ import annotations

from typing import Final

from tests.engine.amqpfast.embedded import taken_from, unknown
from tests.ingress.amqpfast import test_restartable

TAKEN: Final = (test_restartable,)
EXCEPTIONS: Final[dict[str, str]] = {
    "restartable_the_gateway_prepares_with_the_content_hash_that_it_has_checked": "the hash stays with the "
    "replica that has checked it, and is not said of what comes from the cluster",
}

globals().update(taken_from(test_restartable))


def test_exceptions_are_tests() -> None:
    assert not unknown(EXCEPTIONS, globals())
