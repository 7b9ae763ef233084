"""Whole heads of messages (3.5.12): the body-size, and what the codec makes of the rest."""

from __future__ import annotations

from gateway.protocols.amqpfast.codec import (
    BODY_SIZE,
    Head,
    decode_head_properties,
    encode_head_properties,
    find_head_end,
)


def encode_head(body_size: int, head: Head) -> bytes:
    return BODY_SIZE.pack(body_size) + encode_head_properties(head)


def decode_head(data: bytes, at: int = 0) -> tuple[int, Head, int]:
    """(body size, head, position behind it)."""
    end = find_head_end(data, at, len(data))
    return BODY_SIZE.unpack_from(data, at)[0], decode_head_properties(data[at + BODY_SIZE.size : end]), end
