"""What a client says of itself before anybody believes it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class Certificate(NamedTuple):
    """What a certificate that an authority of ours has signed says of its owner, by the names of the setting
    `name` of the back end, and `ou` and `o`.
    """

    names: Mapping[str, str] = NO_NAMES


class Credentials(NamedTuple):
    """A login. `user` "" says no name; `remote` is host:port; `client` is "" where it is not known. `backend`
    and `method`: only back ends of that kind are asked, or tokens that are shown in AUTH of that method.
    """

    user: str
    password: bytes
    remote: str
    certificate: Certificate | None = None
    client: str = ""
    backend: str = ""
    method: str = ""
