"""The scripts by name, and how one is run.

A script is a function of a Wire whose channel 1 is open (`script`), or which has said nothing yet (`bare`).
Its name, in words, is the row in the table of `docs/conformance/amqp-0-9-1.md`. Queues and exchanges have
names that no other uses.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from tests.interop.oracle.wire import Heard, Log, Wire

Script = Callable[[Wire], object]
THREADS: Final = 12
SCRIPTS: Final[dict[str, tuple[Script, bool]]] = {}


def script(function: Script) -> Script:
    """Enter a script that begins with an open channel."""
    SCRIPTS[name_of(function)] = (function, True)
    return function


def bare(function: Script) -> Script:
    """Enter a script that begins with a connected socket."""
    SCRIPTS[name_of(function)] = (function, False)
    return function


def name_of(function: Script) -> str:
    return function.__name__.replace("_", " ")


def run(name: str, port: int) -> Log:
    """What a broker says to the script; ends with the exception, should there be one."""
    function, opened = SCRIPTS[name]
    log: Log = []
    wire = Wire(port, log)
    try:
        function(wire.open() if opened else wire)
    except (OSError, AssertionError) as error:
        log.append(Heard("a", 0, "exception", (repr(error),)))
    finally:
        wire.close()
    return log


def run_all(port: int) -> dict[str, Log]:
    """All scripts, several at a time: many of them wait for something that does not come."""
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip(SCRIPTS, pool.map(partial(run, port=port), SCRIPTS), strict=True))
