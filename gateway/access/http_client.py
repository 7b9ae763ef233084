"""HTTP requests to back ends: one client for each, with limits of time and size, and no redirects.

Every failure, from an unknown host name to a response that is too long, raises one error:
`BackendResponseError`.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import trio

from gateway.errors import ConfigurationError

ANSWER_BYTES_MAX: Final = 1_048_576
NO_FIELDS: Final[Mapping[str, str]] = MappingProxyType({})


class BackendResponseError(Exception):
    """Error for a request to which the server gave no usable response; the text states the reason."""


class BackendHttpClient:
    """HTTP client of one back end.

    `timeout_secs` limits the time in seconds from the request to the end of its response.
    """

    def __init__(
        self,
        timeout_secs: float,
        *,
        ca_file: Path | None = None,
        connections_max: int = 4,
        keepalive_max: int = 0,
    ) -> None:
        """Create the client; `keepalive_max` is the number of idle connections that stay open.

        Raises ConfigurationError if `ca_file` cannot be used.
        """
        import httpx  # imported late: the import is slow, and most gateways send no requests

        try:
            trusted = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except OSError as error:
            raise ConfigurationError(
                f"{ca_file}: the certificate authorities cannot be read: {error}"
            ) from error
        self._timeout_secs = timeout_secs
        self._client = httpx.AsyncClient(
            verify=trusted,
            timeout=timeout_secs,
            limits=httpx.Limits(max_connections=connections_max, max_keepalive_connections=keepalive_max),
            headers={"Accept-Encoding": "identity", "User-Agent": "gateway"},
            follow_redirects=False,
            trust_env=False,  # no proxy from the environment may see passwords
        )

    async def request(
        self, url: str, fields: Mapping[str, str] = NO_FIELDS, *, method: Literal["get", "post"] = "get"
    ) -> bytes:
        """Send a request and return the body of the response.

        `fields` are added to the query of a GET, and are the form of a POST. Raises BackendResponseError if
        the response does not arrive in time, is too long, or has a status other than 200.
        """
        import httpx

        where = httpx.URL(url)
        if method == "get" and fields:
            where = where.copy_merge_params(fields)
        form = None if method == "get" else fields
        body = b""
        try:
            with trio.fail_after(self._timeout_secs) as scope:
                async with self._client.stream(method.upper(), where, data=form) as answer:
                    # The body is not decompressed: it could become any size. Leaving the loop would leave the
                    # generators within it to the garbage collector, so the scope is cancelled instead.
                    async for piece in answer.aiter_raw():
                        body += piece
                        if len(body) > ANSWER_BYTES_MAX:
                            scope.cancel()
        except trio.TooSlowError:
            if len(body) <= ANSWER_BYTES_MAX:
                raise BackendResponseError(f"no response within {self._timeout_secs:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise BackendResponseError(f"{type(error).__name__}: {error}") from error
        if len(body) > ANSWER_BYTES_MAX:
            raise BackendResponseError(f"the response is longer than {ANSWER_BYTES_MAX} bytes")
        if answer.status_code != 200:
            raise BackendResponseError(f"the response has status {answer.status_code}")
        return body

    async def close(self) -> None:
        """Close the client's connections."""
        await self._client.aclose()
