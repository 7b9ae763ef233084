"""Listeners and links of any protocol, as a configuration with these keys has them."""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter

from gateway.settings import Link, Listener
from gateway.settings.unions import AnyLink, AnyListener

LISTENERS: Final[TypeAdapter[Listener]] = TypeAdapter(AnyListener)
LINKS: Final[TypeAdapter[Link]] = TypeAdapter(AnyLink)


def make_listener(**given: Any) -> Listener:
    return LISTENERS.validate_python(given)


def make_link(**given: Any) -> Link:
    return LINKS.validate_python(given)
