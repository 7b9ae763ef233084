"""STOMP as the other rooms know it."""

from __future__ import annotations

from typing import Final

from gateway.model.address import Address
from gateway.model.dialect import Dialect, FrameCount, NameRefused, Scheme, Word
from gateway.model.properties import PropertySet
from tests.stomp.protocol.codec import decode_properties


class StompDialect(Dialect):
    """STOMP 1.2. A destination is any text; here its levels are separated by `/`, as most servers have it."""

    name = "stomp"
    title = "STOMP"
    name_word = "stomp_destination"
    pattern_word = "stomp_destination"
    words = {"stomp_destination": Word("Destination with captures.", "Template of a destination.")}  # noqa: RUF012
    name_bytes_max = 1_024
    separator = "/"
    one = "*"
    forbidden = "/\0"
    guarded = "*"
    wild = "/*#\0"
    listener = "tests.stomp.ingress:StompIngress"
    schemes = (Scheme("stomp", "plain", 61_613), Scheme("stomps", "tls", 61_614))
    first_bytes = (b"CONNECT\n", b"CONNECT\r", b"STOMP\n", b"STOMP\r")
    frame_count = FrameCount(1, None, (0, 1, 1))

    def address(self, scope: str, name: str) -> Address:
        if not name or "\0" in name or len(name.encode()) > self.name_bytes_max:
            raise NameRefused(f"{name[:60]!r} is no destination")
        return Address(self.name, "", name, name.encode())

    def read_address(self, wire: bytes) -> Address:
        return Address(self.name, "", wire.decode(), wire)

    def property_set(self, data: bytes) -> PropertySet:
        return PropertySet(self.name, data, decode_properties)


STOMP: Final = StompDialect()
