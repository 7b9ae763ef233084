"""Listeners and links of any protocol, as a configuration with these keys has them."""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter

from gateway.settings import LinkSettings, ListenerSettings
from gateway.settings.unions import AnyLink, AnyListener

LISTENERS: Final[TypeAdapter[ListenerSettings]] = TypeAdapter(AnyListener)
LINKS: Final[TypeAdapter[LinkSettings]] = TypeAdapter(AnyLink)


def make_listener(**given: Any) -> ListenerSettings:
    return LISTENERS.validate_python(given)


def make_link(**given: Any) -> LinkSettings:
    return LINKS.validate_python(given)
