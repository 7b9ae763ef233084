"""The part of HTTP/1.1 that a port of another protocol needs.

Such a port reads the head of one request, responds and closes. h11 parses the head once it is complete.
Request bodies are never read.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NamedTuple

import h11

HEAD_BYTES_MAX: Final = 8_192  # bytes of an unauthenticated request; browsers send some 800


class Request(NamedTuple):
    """Head of an HTTP request, and the bytes after it in `rest`.

    `path` is the target without its query. Header names are in lower case; repeated headers are joined by
    commas.
    """

    method: str
    path: str
    version: str
    headers: dict[str, str]
    rest: bytes

    def tokens(self, name: str) -> list[str]:
        """Return the elements of a comma-separated header in their order.

        Return an empty list if the header is missing.
        """
        return [piece.strip() for piece in self.headers.get(name, "").split(",") if piece.strip()]


class Refusal(Exception):
    """Error that refuses a request with the HTTP status code `status`; its text is the reason."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.headers = headers or {}

    @property
    def response(self) -> bytes:
        """Complete HTTP response for the client, in bytes."""
        return response(self.status, f"{self}\n", self.headers)


def parse_request(data: bytes) -> Request | None:
    """Return the request at the beginning of `data`, or None if its head is incomplete.

    Raises Refusal if the head is malformed or larger than HEAD_BYTES_MAX bytes.
    """
    if not b"A" <= data[:1] <= b"Z":
        raise Refusal(400, "not an HTTP response")
    if b"\n\r\n" not in data[: HEAD_BYTES_MAX + 1]:
        if len(data) > HEAD_BYTES_MAX:
            raise Refusal(431, f"the head of the request exceeds {HEAD_BYTES_MAX} bytes")
        return None
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
    connection.receive_data(data)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError as error:
        raise Refusal(400, f"not HTTP/1.1: {error}") from error
    if not isinstance(event, h11.Request):
        raise Refusal(400, "not HTTP/1.1")
    headers: dict[str, str] = {}
    for raw, value in event.headers:
        name, text = raw.decode("ascii"), value.decode("latin-1")
        headers[name] = f"{headers[name]}, {text}" if name in headers else text
    path = event.target.decode("ascii").partition("?")[0]
    version = event.http_version.decode("ascii")
    return Request(event.method.decode("ascii"), path, version, headers, connection.trailing_data[0])


def response(
    status: int,
    text: str,
    headers: Mapping[str, str] | None = None,
    *,
    with_body: bool = True,
    kind: str = "text/plain; charset=utf-8",
) -> bytes:
    """Return a complete HTTP response with this body text, after which the connection closes.

    `kind` is the content type. `with_body` False omits the body, for HEAD.
    """
    body = text.encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + (body if with_body else b"")
