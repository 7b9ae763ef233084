"""Requests to a running gateway over its HTTP interface, and the credentials that authenticate them."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import BaseHandler, HTTPSHandler, ProxyHandler, Request, build_opener

import orjson

from gateway.access.console_tokens import ADMINISTRATOR, left_tokens
from gateway.access.places import is_loopback
from gateway.cli.contexts import Context, read_context
from gateway.errors import ArgumentError, ConfigurationError, GatewayError
from gateway.settings import load_settings, secret_from

PATIENCE_SECS: Final = 120.0
UNAUTHORIZED: Final = 401
BAD_REQUEST: Final = 400  # the arguments of the request are invalid
LOOPBACK: Final = "127.0.0.1"
CONNECT_SECS: Final = 1.0


def request_json(url: str, token_file: Path | None, path: str, choice: dict[str, Any] | None = None) -> Any:
    """Send a request to the gateway at `url`, and return the JSON of the response.

    `choice` is the JSON body of a POST request; None sends a GET request. Raises GatewayError if the gateway
    does not respond or refuses, and ArgumentError if it reports that the request is invalid.
    """
    try:
        with open_response(url, token_file, path, choice) as answer:
            return orjson.loads(answer.read())
    except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
        raise GatewayError(f"{url}: not the response of a gateway: {error}") from error


def events(url: str, token_file: Path | None, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the server-sent events of a path as pairs of name and data, until the gateway closes the stream.

    Raises GatewayError and ArgumentError as `request_json` does.
    """
    name = ""
    try:
        with open_response(url, token_file, path) as answer:
            for line in answer:
                word, _, rest = line.decode().rstrip("\n").partition(": ")
                if word == "event":
                    name = rest
                elif word == "data":
                    yield name, orjson.loads(rest)
    except (OSError, http.client.HTTPException, orjson.JSONDecodeError) as error:
        raise GatewayError(f"{url}: not the response of a gateway: {error}") from error


def open_response(url: str, token_file: Path | None, path: str, choice: dict[str, Any] | None = None) -> Any:
    """Send a request to the gateway at `url`, and return the open response.

    Try the credentials in turn until one is accepted. Raises ArgumentError for status 400, and GatewayError
    for other errors.
    """
    body = None if choice is None else orjson.dumps(choice)
    at = _loopback_url(url)
    refused: HTTPError | None = None
    context = _context_for(url)
    for credentials in _credentials(url, token_file, context):
        headers = {"Content-Type": "application/json"}
        if credentials:
            headers["Authorization"] = credentials
        request = Request(at.rstrip("/") + path, body, headers)  # noqa: S310 - the option has checked its scheme
        try:
            return build_opener(ProxyHandler({}), *_tls(context)).open(request, timeout=PATIENCE_SECS)
        except HTTPError as error:
            if error.code != UNAUTHORIZED:
                kind = ArgumentError if error.code == BAD_REQUEST else GatewayError
                raise kind(f"{url}: {_reason(error)}") from error
            refused = refused or error
        except (URLError, OSError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            raise GatewayError(f"{url}: not the response of a gateway: {why}") from error
    assert refused is not None, "one attempt at least was made"
    raise GatewayError(f"{url}: {_reason(refused)}") from refused


def _loopback_url(url: str) -> str:
    """Return the URL with 127.0.0.1 instead of `localhost`, if that address accepts connections at the port.

    Otherwise return it unchanged. `localhost` resolves to IPv6 first, where another user of this machine
    could listen and receive the token while the gateway listens only on IPv4.
    """
    place = urlsplit(url)
    if place.scheme != "http" or place.hostname != "localhost":
        return url
    port = place.port or 80
    try:
        socket.create_connection((LOOPBACK, port), timeout=CONNECT_SECS).close()
    except OSError:
        return url
    return urlunsplit(place._replace(netloc=f"{LOOPBACK}:{port}"))


def _context_for(url: str) -> Context:
    """Return the URL and credentials from the environment, or an empty context if they are for another URL.

    Raises ConfigurationError.
    """
    context = read_context()
    return context if context.url in ("", url) else Context()


def _tls(context: Context) -> list[BaseHandler]:
    """Return the handler for https with the authority and client certificate of the context.

    Return an empty list if the context has neither. Raises ConfigurationError if a file cannot be used.
    """
    if not context.ca_file and not context.cert_file:
        return []
    try:
        tls = ssl.create_default_context(cafile=context.ca_file or None)
        if context.cert_file:
            tls.load_cert_chain(context.cert_file, context.key_file or None)
    except OSError as error:
        files = ", ".join(filter(None, (context.ca_file, context.cert_file, context.key_file)))
        raise ConfigurationError(f"{files}: {error.strerror or error}") from error
    return [HTTPSHandler(context=tls)]


def _credentials(url: str, token_file: Path | None, context: Context) -> Iterator[str]:
    """Yield values of the header Authorization, which are tried in turn; "" stands for no header.

    If `token_file` is given, yield only the token in it. Otherwise, if the context has credentials, yield
    only these. Otherwise yield the tokens that a gateway on this machine has stored for this user, and then
    "".
    """
    if token_file is not None or context.token or context.token_file:
        token = context.token if token_file is None else ""
        yield f"Bearer {token or secret_from(token_file or Path(context.token_file)).strip()}"
        return
    if context.user:
        password = secret_from(Path(context.password_file)) if context.password_file else ""
        yield f"Basic {b64encode(f'{context.user}:{password}'.encode()).decode()}"
        return
    for token in _stored_tokens(url):
        yield f"Bearer {token}"
    yield ""


def _stored_tokens(url: str) -> Iterator[str]:
    """Yield the tokens that the gateway at `url` has stored for this user, if it is on this machine.

    The token of the administrator, which the gateway's first start has written, is the last one.
    """
    place = urlsplit(url)
    host = place.hostname or ""
    if host == "localhost" or is_loopback(f"{host}:0"):
        port = place.port or (443 if place.scheme == "https" else 80)
        for path in left_tokens(port) + _administrator_token_files(port):
            try:
                yield secret_from(path).strip()
            except ConfigurationError:
                continue  # the file belongs to another user


def _administrator_token_files(port: int) -> list[Path]:
    """Return the path of the administrator's token file, which the gateway's first start has written.

    The folder is taken from the configuration in the environment. Return an empty list if the file does not
    exist, or if the configuration has another HTTP port than `port`.
    """
    try:
        settings = load_settings(None, os.environ)
    except ConfigurationError:
        return []
    folder = settings.tokens_path()
    path = None if folder is None or settings.http.port != port else folder / f"{ADMINISTRATOR}.token"
    return [] if path is None or not path.is_file() else [path]


def _reason(error: HTTPError) -> str:
    try:
        return f"{error.code}: {orjson.loads(error.read())['detail']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return f"{error.code} {error.reason}"
