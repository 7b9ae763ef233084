"""The same as test_as_embedded.py, of gateways that are configured otherwise."""

from __future__ import annotations

from typing import Final

from tests.engine.amqpfast.embedded import taken_from, unknown
from tests.ingress.amqpfast import test_out_of_band

TAKEN: Final = (test_out_of_band,)
EXCEPTIONS: Final[dict[str, str]] = {}

globals().update(taken_from(test_out_of_band))


def test_exceptions_are_tests() -> None:
    assert not unknown(EXCEPTIONS, globals())
