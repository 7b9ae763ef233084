"""Credentials of a client as received, before they are verified."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})


class Certificate(NamedTuple):
    """Names in a client certificate that a trusted authority has signed.

    The keys of `names` are `ou`, `o`, and the values that the setting `authentication[].name` permits, such
    as `common_name`.
    """

    names: Mapping[str, str] = NO_NAMES


class Credentials(NamedTuple):
    """Login of a client, as received and not yet verified.

    `user` is "" if the client sent no user name. `remote` is host:port. `client` is the client identifier, or
    "" if it is not known. `method` is "" for a password; for a token in MQTT 5 AUTH packets it is the
    authentication method. If `backend` is not "", only back ends of this kind that support `method` are
    queried.
    """

    user: str
    password: bytes
    remote: str
    certificate: Certificate | None = None
    client: str = ""
    backend: str = ""
    method: str = ""
