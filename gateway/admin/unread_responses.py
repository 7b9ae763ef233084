"""Responses that their clients have not read yet: how much memory each user may occupy with them.

A response is complete in memory before its first byte is sent. A client that requests large responses on many
connections and reads none of them would fill the memory, and then publishers of all protocols are held. A
user with more unsent bytes than a limit receives 429 until they are read or time out. Large responses for one
user are built one at a time, so that each is counted before the next one is begun.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.admin.responses import PROBLEMS, ShareFullError, problem_response
from gateway.model.shares import UserShares


class UnsentResponses:
    """Counter of the bytes of each user's unsent responses, with a limit per user."""

    def __init__(self, shares: UserShares | None = None) -> None:
        """Create the counter.

        `shares` stores the counts and defines the limit of one user; with None there is no limit.
        """
        self.shares = shares or UserShares("unsent responses")
        self._builders: dict[str, trio.Lock] = {}

    def check(self, owner: str) -> None:
        """Raise ShareFullError if the unsent responses of the user `owner` exceed the limit of one user."""
        if limit := self.shares.exceeded_user_limit(owner, 0):
            self.shares.refuse(owner, limit, 1)
            raise ShareFullError(
                f"too many unread responses: {self.shares.of(owner)} bytes are unsent. Read them first"
            )

    @asynccontextmanager
    async def building(self, owner: str) -> AsyncIterator[None]:
        """Let only one large response for the user `owner` be built at a time: on entry wait for the others.

        This is a context manager around the building of a response. Raises ShareFullError if the unsent
        responses of this user exceed the user's limit.
        """
        lock = self._builders.setdefault(owner, trio.Lock())
        try:
            async with lock:
                self.check(owner)
                yield
        finally:
            if not lock.locked():
                self._builders.pop(owner, None)

    async def serve_counted(self, owner: str, serve: Callable[[], Awaitable[Response]]) -> Response:
        """Call `serve` and return its response, whose bytes count for the user `owner` until they are sent.

        Return a problem document if `serve` raises an error of the API. Large responses for one user are
        built one after another.
        """
        try:
            async with self.building(owner):
                response = await serve()
        except tuple(PROBLEMS) as error:
            response = problem_response(PROBLEMS[type(error)], str(error))
        return self.count_until_sent(owner, response)

    def count_until_sent(self, owner: str, response: Response) -> Response:
        """Return a response whose body is counted for the user `owner` while it is being sent."""
        return UnsentResponse(self.shares, owner, response) if response.body else response


class UnsentResponse(Response):
    """Response whose body is counted for a user from the beginning of sending until it has been sent."""

    def __init__(self, shares: UserShares, owner: str, response: Response) -> None:
        super().__init__(None, response.status_code)
        self.body = response.body
        self.raw_headers = response.raw_headers
        self._shares = shares
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, and count its bytes for the user meanwhile."""
        size = len(self.body)
        self._shares.add(self._owner, size)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._shares.remove(self._owner, size)
