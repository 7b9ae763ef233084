"""Scopes of tokens as rights, as RabbitMQ understands them: `read:vhost/name` or `write:vhost/name/key`.

The parts are texts with `*` for any characters; what is percent-encoded is meant by itself. `configure`,
`write` and `read` are AMQP's permissions. Anything else is no right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import unquote

from gateway.regexes import Regex, RegexError, wildcard_regex

SCOPE: Final = re.compile(r"(configure|write|read):([^/]+)/([^/]+)(?:/(.+))?")


class Scope(NamedTuple):
    """One right: in these virtual hosts, on these names, and with these routing keys (None: any)."""

    text: str
    permission: str
    host: Regex
    name: Regex
    key: Regex | None


def parse_scope(text: str) -> Scope | None:
    """What a scope means; None: nothing here."""
    found = SCOPE.fullmatch(text)
    if found is None:
        return None
    permission, host, name, key = found.groups()
    try:
        return Scope(text, permission, _whole(host), _whole(name), None if key is None else _whole(key))
    except RegexError:
        return None


def parse_scopes(texts: Iterable[str]) -> list[Scope]:
    """Those that mean something here."""
    return [scope for text in texts if (scope := parse_scope(text)) is not None]


def _whole(text: str) -> Regex:
    return wildcard_regex([unquote(piece) for piece in text.split("*")])
