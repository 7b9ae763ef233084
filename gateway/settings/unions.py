"""A listener or a link of any protocol: of each the part of the configuration that its dialect names.

What another protocol's part knows does not exist there, and a complaint says whose it is.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Discriminator, Field, Tag

from gateway.protocols import DIALECTS
from gateway.settings.endpoints import SCHEMES, SHARED, Link, Listener, SharedListener

NONE = ""  # the tag of what names no protocol that there is


class UnknownListener(Listener):
    """A listener whose protocol is none, which is said of it and nothing else."""

    model_config = ConfigDict(extra="ignore")

    if not TYPE_CHECKING:
        protocol: Literal[*DIALECTS, SHARED] = Field(description="One that there is.")


class UnknownLink(Link):
    """A link whose protocol is not known: what is said of it is what is wrong with its URL."""

    model_config = ConfigDict(extra="ignore")


def _listener_tag(given: Any) -> str:
    name = given.get("protocol") if isinstance(given, dict) else getattr(given, "protocol", None)
    return name if isinstance(name, str) and (name in DIALECTS or name == SHARED) else NONE


def _link_tag(given: Any) -> str:
    if isinstance(given, Link):
        return given.protocol
    urls = [given.get("url"), *(given.get("urls") or ())] if isinstance(given, dict) else []
    first = next((url for url in urls if url is not None), None)
    known = SCHEMES.get(first.partition("://")[0].lower()) if isinstance(first, str) else None
    return NONE if known is None or not known[0].link else known[0].name


def _parts(settings: dict[str, str]) -> list[Any]:
    return [Annotated[resolve_name(place), Tag(name)] for name, place in settings.items()]


if TYPE_CHECKING:
    AnyListener: TypeAlias = Listener
    AnyLink: TypeAlias = Link
else:
    _listeners = _parts({name: one.listener_settings for name, one in DIALECTS.items()})
    _listeners += [Annotated[SharedListener, Tag(SHARED)], Annotated[UnknownListener, Tag(NONE)]]
    _links = _parts({name: one.link_settings for name, one in DIALECTS.items() if one.link})
    _links += [Annotated[UnknownLink, Tag(NONE)]]
    AnyListener = Annotated[reduce(or_, _listeners), Discriminator(_listener_tag)]
    AnyLink = Annotated[reduce(or_, _links), Discriminator(_link_tag)]
