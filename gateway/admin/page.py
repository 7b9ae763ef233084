"""Static files of the console, which are the same for all browsers, logged in or not.

They are read once, at the start, and contain nothing confidential: the data that they show is requested below
/api/v1. The permitted values of list filters come from the table of operations.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.admin.responses import with_etag
from gateway.operations import every_operation

# All content comes from this server, and the browser enforces that; no page has inline scripts or styles.
POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "txt": "text/plain; charset=utf-8",
}


class ConsoleFiles:
    """Static files of the console, in memory, and their HTTP routes."""

    def __init__(self) -> None:
        root = files("gateway.admin") / "console"
        self._files = {
            place + one.name: one.read_bytes()
            for place, folder in (("", root), ("vendor/", root / "vendor"))
            for one in folder.iterdir()
            if one.is_file()
        }
        self._files["words.js"] = _words()

    def file(self, request: Request, name: str) -> Response:
        """Return the response with the file `name`, or 304 if the browser already has this version.

        Raises HTTPException 404 for an unknown file.
        """
        data = self._files.get(name)
        if data is None:
            raise HTTPException(404, "Not Found")
        kind = TYPES[name.rpartition(".")[2]]
        return with_etag(request, Response(data, headers={**HEADERS, "Content-Type": kind}))

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the login page and of all files, but not of the console page at `/`."""
        return [Route("/login", self._login), Route("/console/{name:path}", self._one)]

    async def _login(self, request: Request) -> Response:
        return self.file(request, "login.html")

    async def _one(self, request: Request) -> Response:
        return self.file(request, request.path_params["name"])


def _words() -> bytes:
    """Return a JavaScript module that exports `TEXTS`: the permitted values of filters of lists.

    `TEXTS` maps the path of each list to an object, which maps each filter to its permitted values.
    """
    texts = {
        one.path[1:]: {
            name: ("true", "false") if word.kind is bool else word.texts
            for name, word in one.words.items()
            if word.kind is bool or word.texts is not None
        }
        for one in every_operation()
        if one.paged
    }
    return b"export const TEXTS = " + orjson.dumps(texts) + b";\n"
