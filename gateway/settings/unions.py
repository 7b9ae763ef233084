"""Union types of listeners and links: each protocol has a class with its own options.

The name of the protocol, or the scheme of a URL, selects the class. An option of another protocol is
therefore an unknown key, and the error message names the protocol that the option belongs to.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from gateway.protocols import DIALECTS
from gateway.settings.endpoints import SCHEMES, SHARED, LinkSettings, ListenerSettings, SharedListener

NONE = ""  # Tag of a section without a known protocol.


class UnknownListener(ListenerSettings):
    """Listener whose protocol is unknown.

    This class accepts all options, so that an error is reported only for the protocol.
    """

    model_config = ConfigDict(extra="ignore")

    if not TYPE_CHECKING:
        protocol: Literal[*DIALECTS, SHARED] = Field(description="One that there is.")


class UnknownLink(LinkSettings):
    """Link whose protocol is unknown.

    This class accepts all options, so that an error is reported only for the URL.
    """

    model_config = ConfigDict(extra="ignore")


def _listener_tag(value: Any) -> str:
    name = value.get("protocol") if isinstance(value, dict) else getattr(value, "protocol", None)
    return name if isinstance(name, str) and (name in DIALECTS or name == SHARED) else NONE


def _link_tag(value: Any) -> str:
    if isinstance(value, LinkSettings):
        return value.protocol
    urls = [value.get("url"), *(value.get("urls") or ())] if isinstance(value, dict) else []
    first = next((url for url in urls if url is not None), None)
    protocol = SCHEMES.get(first.partition("://")[0].lower()) if isinstance(first, str) else None
    return NONE if protocol is None or not protocol[0].link else protocol[0].name


def _parts(settings: dict[str, str]) -> list[Any]:
    return [Annotated[resolve_name(place), Tag(name)] for name, place in settings.items()]


if TYPE_CHECKING:
    AnyListener: TypeAlias = ListenerSettings
    AnyLink: TypeAlias = LinkSettings
else:
    _listeners = _parts({name: one.listener_settings for name, one in DIALECTS.items()})
    _listeners += [Annotated[SharedListener, Tag(SHARED)], Annotated[UnknownListener, Tag(NONE)]]
    _links = _parts({name: one.link_settings for name, one in DIALECTS.items() if one.link})
    _links += [Annotated[UnknownLink, Tag(NONE)]]
    AnyListener = Annotated[reduce(or_, _listeners), Discriminator(_listener_tag)]
    AnyLink = Annotated[reduce(or_, _links), Discriminator(_link_tag)]
