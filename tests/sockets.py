"""Where each open socket was created, to say it of a socket that is collected unclosed.

Python reports such a socket in whatever test its memory is collected in, which may be another than its own.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from types import FrameType
from typing import Any, Final

FRAMES_MAX: Final = 16
UNCLOSED: Final = re.compile(r"unclosed <\S*socket\S* fd=(\d+)")
# By file descriptor: the test that ran, and the calls, innermost first.
_created: dict[int, list[str]] = {}


def record_sockets() -> None:
    """From now on, record where each socket of this process is created."""
    create = socket.socket.__init__

    def recording(self: socket.socket, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        calls, frame = [os.environ.get("PYTEST_CURRENT_TEST", "no test")], sys._getframe(1)
        following: FrameType | None = frame
        while following is not None and len(calls) <= FRAMES_MAX:
            calls.append(f"{following.f_code.co_filename}:{following.f_lineno} {following.f_code.co_name}")
            following = following.f_back
        _created[self.fileno()] = calls

    socket.socket.__init__ = recording  # type: ignore[method-assign]


def created_sockets(report: str) -> str:
    """For each unclosed socket that a failure's text names: where it was created."""
    found = {int(descriptor) for descriptor in UNCLOSED.findall(report)}
    return "\n\n".join(
        "\n".join((f"descriptor {one}, created in {_created[one][0]}", *_created[one][1:]))
        for one in sorted(found & _created.keys())
    )
