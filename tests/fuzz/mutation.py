"""Valid bytes of AMQP and AMQP/Fast, changed a little; and decoders that may refuse, but not fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from gateway.errors import RemoteProtocolError

# Frame types, ends, classes and bounds of lengths: bytes that lead further in than others.
TELLING: Final = (0, 1, 2, 3, 8, 0x1F, 0x29, 0x7F, 0xCE, 0xFF)


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with a few of them changed, cut, repeated or put in."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) or 1)
        match chance.randrange(4):
            case 0 if changed:
                changed[at] = chance.choice((*TELLING, chance.randrange(256)))
            case 1:
                del changed[at : at + chance.randint(1, 9)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randint(1, 9))
            case _:
                changed[at:at] = changed[chance.randrange(len(changed) or 1) :][:40]
    return bytes(changed)


def read(decode: Callable[[bytes], object], data: bytes) -> None:
    """Decode, or be refused."""
    try:
        decode(data)
    except RemoteProtocolError:
        return
