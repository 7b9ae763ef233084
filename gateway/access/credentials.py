"""Credentials of a client as received, before they are verified."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class Certificate(NamedTuple):
    """Names in a client certificate that a trusted authority has signed.

    The keys of `names` are `ou`, `o` and whatever the setting `authentication[].name` permits, such as
    `common_name`.
    """

    names: Mapping[str, str] = NO_NAMES


class Credentials(NamedTuple):
    """Login of a client, as it was received.

    `user` is "" without a user name, `remote` is host:port, and `client` the client identifier, or "" if it
    is not known. If `backend` is not empty, only back ends of that kind that can verify `method` are queried.
    `method` is the authentication method of MQTT 5 AUTH packets that carry a token, "" for a password.
    """

    user: str
    password: bytes
    remote: str
    certificate: Certificate | None = None
    client: str = ""
    backend: str = ""
    method: str = ""
