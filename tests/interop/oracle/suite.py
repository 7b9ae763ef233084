"""All scripts, and where we answer otherwise than RabbitMQ on purpose.

The texts of DIFFERENT_TEXTS quote Erlang's terms, or what was in RabbitMQ's memory; codes and methods agree.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tests.interop.oracle import connecting, declaring, delivering, dying, publishing, quorum, unusual
from tests.interop.oracle.scripts import SCRIPTS
from tests.interop.oracle.wire import Heard, Log

FILES: Final = (connecting, declaring, delivering, dying, publishing, quorum, unusual)

DIFFERENT_TEXTS: Final = frozenset(
    {
        "a channel before the connection is open",
        "a method that does not exist",
        "a method cut short",
        "a frame that does not end",
        "a frame of an unknown type",
        "a heartbeat on a channel",
        "a frame larger than agreed",
    }
)


WITH_CLOCKS: Final = frozenset(  # of a tenth of a second, which go wrong in a crowd on a slow machine
    {
        "a circle without a rejection is cut",
        "a message behind another expires at the head",
        "a message expires by itself",
        "a message expires in its queue",
        "a message in a transaction lives from its commit on",
        "a message that expires by itself becomes a dead letter",
        "a queue expires when nobody uses it",
        "a quorum queue whose messages expire",
        "an expired message becomes a dead letter",
        "dying again and again",
    }
)


class Difference(NamedTuple):
    """What we say instead, and why."""

    said: Log
    why: str


DIFFERENT: Final = {
    "a class that does not exist": Difference(
        [
            Heard("a", 0, "connection.close", (501, "FRAME_ERROR - method 200.10 is not known", 200, 10)),
            Heard("a", 0, "end", ()),
        ],
        "RabbitMQ's reader fails, and closes the socket without a method",
    ),
    "a stream": Difference(
        [
            Heard(
                "a",
                1,
                "channel.close",
                (
                    406,
                    "PRECONDITION_FAILED - invalid arg 'x-queue-type' for queue 'ej' in vhost '/': "
                    "\"unsupported queue type 'stream'\": no queue here is read again from an offset",
                    50,
                    10,
                ),
            ),
            Heard("a", 1, "channel.open-ok", ()),
        ],
        "RabbitMQ has streams",
    ),
    "a large start ok": Difference(
        [
            Heard("a", 0, "connection.start", ()),
            Heard("a", 0, "connection.tune", (2047, 131_072, 60)),
        ],
        "an access token as a password may have more than 4 096 bytes; the limit is 65 536",
    ),
    "properties that cannot be read": Difference(
        [
            Heard(
                "a",
                0,
                "connection.close",
                (502, "the properties do not end at the end of their data", 60, 40),
            ),
            Heard("a", 0, "end", ()),
        ],
        "RabbitMQ's channel fails with 541, without the method's name",
    ),
}

assert {*DIFFERENT, *DIFFERENT_TEXTS} <= {*SCRIPTS}


def without_texts(log: Log) -> Log:
    """The log without the reply texts of closes."""
    return [
        heard._replace(said=(heard.said[0], *heard.said[2:])) if heard.name.endswith(".close") else heard
        for heard in log
    ]
