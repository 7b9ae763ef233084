"""Scopes of tokens as rights, as RabbitMQ interprets them: `read:vhost/name` or `write:vhost/name/key`.

In each part `*` matches any characters, and percent-encoded characters stand for themselves. `configure`,
`write` and `read` are AMQP's permissions. Any other scope gives no right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import unquote

from gateway.regexes import Regex, RegexError, wildcard_regex

SCOPE: Final = re.compile(r"(configure|write|read):([^/]+)/([^/]+)(?:/(.+))?")


class PermissionScope(NamedTuple):
    """Parsed scope of a token, such as `read:vhost/name/key`.

    `text` is the scope itself. `permission` is `configure`, `write` or `read`. The permission is given in
    virtual hosts that match `host`, for names that match `name`, and for routing keys that match `key`; if
    `key` is None, for every routing key.
    """

    text: str
    permission: str
    host: Regex
    name: Regex
    key: Regex | None


def parse_scope(text: str) -> PermissionScope | None:
    """Parse a scope of a token. Return None if the scope gives no right in the gateway."""
    found = SCOPE.fullmatch(text)
    if found is None:
        return None
    permission, host, name, key = found.groups()
    try:
        return PermissionScope(
            text,
            permission,
            _wildcard_pattern(host),
            _wildcard_pattern(name),
            None if key is None else _wildcard_pattern(key),
        )
    except RegexError:
        return None


def parse_scopes(texts: Iterable[str]) -> list[PermissionScope]:
    """Parse the scopes of a token. Scopes that give no right in the gateway are omitted."""
    return [scope for text in texts if (scope := parse_scope(text)) is not None]


def _wildcard_pattern(text: str) -> Regex:
    return wildcard_regex([unquote(piece) for piece in text.split("*")])
