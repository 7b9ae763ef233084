"""Faults that are thrown into the gateway, and what has to come of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from gateway import containment
from gateway.errors import LocalProtocolError, RemoteProtocolError
from tests.interop.gateway_fixture import Running, running, settings_of

TOLD: Final = "internal error, contained"
POISON: Final = b"poison"

UNFORESEEN: Final[list[Exception]] = [
    KeyError("odd"),
    RecursionError("too deep"),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
]
FORESEEN: Final[list[Exception]] = [
    LocalProtocolError("cannot be said"),
    RemoteProtocolError("malformed", reason=502),
]


def by_type(error: Exception) -> str:
    return type(error).__name__


def poisoned(real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """`real`, which gets a message first, but for the message that raises."""

    def function(message: Any, *others: Any, **more: Any) -> Any:
        if message.body == POISON:
            raise error
        return real(message, *others, **more)

    return function


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """What guards have contained since; everything is told anew."""
    fresh: Counter[str] = Counter()
    containment.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containment, "counted", fresh)
        yield fresh


@contextmanager
def faulty(**more: Any) -> Iterator[Running]:
    """A gateway that may log contained errors, and no others."""
    with running(settings_of(**more), but=TOLD) as gateway:
        yield gateway
