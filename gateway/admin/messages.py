"""Messages as JSON for people, and parsing of JSON bodies that describe a message."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import orjson
from pydantic import ValidationError
from starlette.requests import Request

from gateway.admin.admission import Caller
from gateway.admin.models import Model, PublishRequest
from gateway.admin.responses import BadChoiceError
from gateway.errors import RemoteProtocolError
from gateway.mapping.conditions import plain_headers
from gateway.model.address import Address
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.properties import Properties, property_set, string
from gateway.model.spooled_bodies import WithheldBody
from gateway.protocols import DIALECT_OF_WORD, DIALECTS, dialect_of, show
from gateway.store.properties import encode_properties

ADDRESS_WORDS: Final = ("topic", "exchange", "routing_key", "queue", "service", "destination")
BODY_SHOWN: Final = 1_024  # Bytes of a body in a list.

SHOWN_APART: Final = frozenset(("content_type", "headers"))

Hide = Callable[[str, Message], Message]
"""Function that takes the name of a route ("": none) and a message, and removes private fields from it."""
Asked = TypeVar("Asked", bound=Model)


def parse_request(document: Any, model: type[Asked]) -> Asked:
    """Validate `document`, the parsed JSON body of a request, and return it as an instance of `model`.

    Raises BadChoiceError that names the first invalid field.
    """
    try:
        return model.model_validate(document, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise BadChoiceError(f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error


def message_of(choice: PublishRequest, protocols: Mapping[str, str], client: str, user: str) -> Message:
    """Return the message that `choice`, a request to publish, describes.

    `protocols` maps names of endpoints to their protocols; `client` and `user` become the message's sender.
    Raises BadChoiceError if the message is not valid for the endpoint's protocol.
    """
    protocol = protocols.get(choice.endpoint)
    if protocol is None:
        names = ", ".join(protocols)
        raise BadChoiceError(f"endpoint: unknown name {choice.endpoint!r}; known: {names}")
    words = {word: text for word in ADDRESS_WORDS if (text := getattr(choice, word)) is not None}
    other = {DIALECT_OF_WORD[word].name for word in words} - {protocol}
    if other or not words:
        raise BadChoiceError(
            f"endpoint {choice.endpoint!r} uses {protocol}, but the address is for another protocol"
        )
    try:
        address: Address = DIALECTS[protocol].published(words)[0]
        body = base64.b64decode(choice.body, validate=True) if choice.body_encoding == "base64" else None
    except NameRefused as error:
        raise BadChoiceError(str(error)) from error
    except ValueError as error:
        raise BadChoiceError(f"body: {error}") from error
    if not 0 <= choice.qos <= dialect_of(address).assurance_max:
        raise BadChoiceError(f"qos: {protocol} does not support QoS {choice.qos}")
    properties = Properties(
        content_type=choice.content_type,
        reply_to=choice.reply_to,
        headers=tuple((name, string(text)) for name, text in choice.headers.items()),
    )
    return Message(
        address,
        choice.body.encode() if body is None else body,
        property_set(properties),
        choice.qos,
        choice.qos > 0,
        choice.retain and "retain" in dialect_of(address).target_options,
        sender=Sender(choice.endpoint, client, user),
    )


def hide_nothing(_: str, message: Message) -> Message:
    """Return the message unchanged. This is the `Hide` function of a gateway without private fields."""
    return message


def hide_for_caller(request: Request, hide: Hide, host: str | None = None) -> Hide:
    """Return a function that reduces a message to what the caller of the request may see.

    It takes the name of a route and a message, and removes private fields. It also removes the body, unless
    the caller may see bodies in the virtual host `host`, or in all virtual hosts if `host` is None.
    """
    caller: Caller = request.state.caller
    if caller.rights.shows_bodies(host):
        return hide

    def without_body(route: str, message: Message) -> Message:
        return hide(route, message).with_body(WithheldBody(len(message.body)))

    return without_body


def message_shown(message: Message) -> dict[str, Any]:
    """Return a message as a JSON object of the API (MessageRow), with at most BODY_SHOWN bytes of body."""
    try:
        content_type, headers = message.properties.content_type, message.properties.headers
        header_values = plain_headers(headers)
    except (RemoteProtocolError, ValueError):
        content_type, header_values = None, {}  # Malformed by the sender; the receiver reports it.
    body, encoding = "", "withheld"
    if not isinstance(message.body, WithheldBody):
        body, encoding = text_of(message.body[:BODY_SHOWN], cut=len(message.body) > BODY_SHOWN)
    return {
        "address": show(message.address),
        "assurance": message.assurance,
        "durable": message.durable,
        "retain": message.retain,
        "content_type": content_type,
        "properties": {
            name: value for name, value in properties_shown(message).items() if name not in SHOWN_APART
        },
        "headers": {name: plain(value) for name, value in header_values.items()},
        "sender": message.sender.to_dict(),
        "body_bytes": len(message.body),
        "body": body,
        "body_encoding": encoding,
    }


def properties_shown(message: Message) -> dict[str, Any]:
    """Return the properties that a message has, as JSON values by name.

    If the properties from the sender are malformed, return the error under the name `unreadable`.
    """
    try:
        properties: dict[str, Any] = orjson.loads(encode_properties(message.properties) or b"{}")
    except RemoteProtocolError as error:
        return {"unreadable": str(error)}
    return properties


def text_of(body: bytes, *, cut: bool = False) -> tuple[str, str]:
    """Return a message body as text, and the encoding of this text: `utf-8`, or `base64` for other bodies.

    Set `cut` if `body` is only the beginning of a body: an incomplete character at its end is then omitted.
    """
    for end in range(len(body), max(len(body) - (4 if cut else 1), -1), -1):
        try:
            return body[:end].decode(), "utf-8"
        except UnicodeDecodeError:
            continue
    return base64.b64encode(body).decode(), "base64"


def moment(utc: float) -> str:
    """Return the time `utc`, in seconds since 1970, as text in ISO 8601."""
    return datetime.fromtimestamp(utc, UTC).isoformat(timespec="seconds")


def plain(value: Any) -> Any:
    """Convert a value of a message's headers to a value that JSON can express, such as bytes to text."""
    if isinstance(value, bytes):
        return text_of(value)[0]
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
