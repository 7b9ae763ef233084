"""The exception hierarchy: every error that the gateway raises on purpose descends from GatewayError.

A protocol error names the guilty side. `RemoteProtocolError` is the peer's fault and carries what the wire
has to answer; `LocalProtocolError` is ours and is a bug.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

MASK: Final = "**********"
USER_PART: Final = re.compile(r"(?<=://)[^\s'\"<>]*@")  # to the last @: a password may hold any character


def without_users(text: str) -> str:
    """The text with the user part of each URL masked."""
    return USER_PART.sub(f"{MASK}@", text) if "://" in text else text


class GatewayError(Exception):
    """The base of all deliberate errors. The user part of a URL never stands in the text of one."""

    def __init__(self, text: str = "") -> None:
        super().__init__(without_users(text))


class ConfigurationError(GatewayError):
    """A configuration that cannot be used; the text says where, why and what to do.

    `file`, `line` and `column` (both from 1; 0 when unknown) say where. `others` are what else is wrong; the
    text has a line for each.
    """

    def __init__(
        self,
        reason: str,
        *,
        file: str = "",
        line: int = 0,
        column: int = 0,
        others: Iterable[ConfigurationError] = (),
    ) -> None:
        self.others = tuple(others)
        reason = without_users(reason)
        place = ":".join([file, *(str(number) for number in (line, column) if number)])
        super().__init__("\n".join([f"{place}: {reason}" if place else reason, *map(str, self.others)]))
        self.reason = reason
        self.file = file
        self.line = line
        self.column = column


class MappingError(ConfigurationError):
    """A mapping file that cannot be used, or a pattern, template or expression as one holds them."""


class ArgumentError(GatewayError):
    """Arguments of a command mean nothing; the text says which."""


class StoreError(GatewayError):
    """The store cannot be opened, read or written; the text says what is wrong and what to do."""


class ProtocolError(GatewayError):
    """A rule of a protocol was broken."""


class LocalProtocolError(ProtocolError):
    """We tried to say what the protocol does not allow in this state: a bug of ours."""


class RemoteProtocolError(ProtocolError):
    """The peer broke a rule.

    `reason` is the code of the peer's protocol that answers it (an MQTT 5 reason code, an AMQP reply code).
    `class_id` and `method_id` name the AMQP method at fault (0: none).
    """

    def __init__(self, text: str, *, reason: int, class_id: int = 0, method_id: int = 0) -> None:
        super().__init__(text)
        self.reason = reason
        self.class_id = class_id
        self.method_id = method_id


class LinkError(GatewayError):
    """A remote broker could not be reached, refused us, or went away."""


class PipelineError(GatewayError):
    """A job on Spark cannot run or go on; the text says what to install, to give or to change."""
