"""Messages over HTTP, as people see them; and requests that are more than a choice."""

from __future__ import annotations

import base64
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from gateway.admin.answers import BadChoiceError
from gateway.admin.models import Row
from gateway.errors import RemoteProtocolError
from gateway.mapping.conditions import plain_headers
from gateway.model.message import Message
from gateway.protocols import show

BODY_SHOWN: Final = 1_024  # octets of a body in a list

Asked = TypeVar("Asked", bound=Row)


def asked_of(given: Any, model: type[Asked]) -> Asked:
    """The request. Raises BadChoiceError, which says what is wrong with it."""
    try:
        return model.model_validate(given, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise BadChoiceError(f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


def message_shown(message: Message) -> dict[str, Any]:
    """A message, its body cut."""
    try:
        content_type, headers = message.properties.content_type, message.properties.headers
        named = plain_headers(headers)
    except (RemoteProtocolError, ValueError):
        content_type, named = None, {}  # its sender has malformed them, and its receiver will say so
    body, encoding = text_of(message.body[:BODY_SHOWN], cut=len(message.body) > BODY_SHOWN)
    return {
        "address": show(message.address),
        "assurance": message.assurance,
        "durable": message.durable,
        "retain": message.retain,
        "content_type": content_type,
        "headers": {name: plain(value) for name, value in named.items()},
        "sender": message.sender._asdict(),
        "body_bytes": len(message.body),
        "body": body,
        "body_encoding": encoding,
    }


def text_of(body: bytes, *, cut: bool = False) -> tuple[str, str]:
    """A body as text, or else in base64, and which of the two. `cut`: it may end within a character."""
    for end in range(len(body), max(len(body) - (4 if cut else 1), -1), -1):
        try:
            return body[:end].decode(), "utf-8"
        except UnicodeDecodeError:
            continue
    return base64.b64encode(body).decode(), "base64"


def plain(value: Any) -> Any:
    """What JSON can say."""
    if isinstance(value, bytes):
        return text_of(value)[0]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
