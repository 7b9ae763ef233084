"""Exception hierarchy: every error that the gateway raises on purpose descends from GatewayError.

A protocol error names the side at fault. `RemoteProtocolError` is the peer's fault and has the code to send
as a response; `LocalProtocolError` is the gateway's own fault and a bug.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

MASK: Final = "**********"
USER_PART: Final = re.compile(r"(?<=://)[^\s'\"<>]*@")  # to the last @: a password may hold any character


def without_users(text: str) -> str:
    """Return the text with the user name and password in each URL masked."""
    return USER_PART.sub(f"{MASK}@", text) if "://" in text else text


class GatewayError(Exception):
    """Base class of all errors that the gateway raises on purpose.

    The error's text never contains the user name and password of a URL.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(without_users(text))


class ConfigurationError(GatewayError):
    """Error of a configuration that cannot be used; the text states where, why and what to do.

    `file`, `line` and `column` (both from 1; 0 when unknown) are the position. `others` are further errors of
    the same configuration; the text has a line for each.
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
    """Error of a mapping file that cannot be used, or of a pattern, template or expression in one."""


class ArgumentError(GatewayError):
    """Error of meaningless arguments of a command; the text names them."""


class StoreError(GatewayError):
    """Error of a store that cannot be opened, read or written; the text states the fault and what to do."""


class ProtocolError(GatewayError):
    """Violation of a rule of a protocol."""


class LocalProtocolError(ProtocolError):
    """Error in the gateway itself: it tried to send what the protocol does not allow in this state."""


class RemoteProtocolError(ProtocolError):
    """Violation of a protocol's rule by the peer.

    `reason` is the code of the peer's protocol to respond with (an MQTT 5 reason code, an AMQP reply code).
    `class_id` and `method_id` are those of the faulty AMQP method (0: none).
    """

    def __init__(self, text: str, *, reason: int, class_id: int = 0, method_id: int = 0) -> None:
        super().__init__(text)
        self.reason = reason
        self.class_id = class_id
        self.method_id = method_id


class LinkError(GatewayError):
    """Error of a remote broker: it could not be reached, or it denied or closed the connection."""


class PipelineError(GatewayError):
    """Error of a Spark job that cannot start or continue; the text states what to install, set or change."""
