"""Who may change something over HTTP: callers on this machine, and whoever shows the secret of
`http.token_file`.

A web page that is open on this machine calls from it, too: so a call without the secret is refused when it
says that a page of another place made it, when it was meant for another host's name (which a page can have
point here), or when a proxy passed it on.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from gateway.access.places import is_loopback
from gateway.admin.answers import BadChoiceError, answer
from gateway.errors import ConfigurationError
from gateway.settings import secret_from

FORWARDED: Final = ("forwarded", "x-forwarded-for", "via")
SCHEME: Final = "bearer "

Serve = Callable[[Request], Awaitable[Response]]


class Admission:
    """Decides about requests. The file is read each time, so that a changed secret is taken."""

    def __init__(self, token_file: Path | None = None) -> None:
        self._token_file = token_file

    def admitted(self, serve: Serve) -> Serve:
        """`serve`, for those who may: others are answered 403, and a choice that cannot be 400."""

        async def serve_or_refuse(request: Request) -> Response:
            if refusal := self.refusal(request):
                return answer({"error": refusal}, 403)
            try:
                return await serve(request)
            except BadChoiceError as error:
                return answer({"error": str(error)}, 400)

        return serve_or_refuse

    def refusal(self, request: Request) -> str:
        """Why this request may change nothing; "" when it may."""
        shown = request.headers.get("authorization", "")
        if shown.lower().startswith(SCHEME):
            return "" if self._is_secret(shown[len(SCHEME) :].strip()) else "the token is not the right one"
        if request.client is None or not _is_here(request.client.host):
            return "from elsewhere it needs `Authorization: Bearer` with the secret of http.token_file"
        if any(name in request.headers for name in FORWARDED):
            return "a proxy passed it on; it needs the secret of http.token_file"
        places = [f"//{request.headers.get('host', '')}", request.headers.get("origin", "//localhost")]
        if not all(_is_here(_host_of(place)) for place in places):
            return "it was meant for, or made by, another place; it needs the secret of http.token_file"
        return ""

    def _is_secret(self, shown: str) -> bool:
        if self._token_file is None:
            return False
        try:
            secret = secret_from(self._token_file).strip()
        except ConfigurationError:
            return False
        return bool(secret) and hmac.compare_digest(secret.encode(), shown.encode())


def _host_of(place: str) -> str:
    """The host in an address; "" for what is none."""
    try:
        return urlsplit(place).hostname or ""
    except ValueError:
        return ""


def _is_here(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    return host == "localhost" or is_loopback(f"{host}:0")
