"""Names that nobody has: when they are nobody's, and when they are refused."""

from __future__ import annotations

from typing import Any, Final

import pytest
from pydantic import SecretStr

from gateway.protocols.mqtt.spec import ReasonCode, Version
from gateway.settings import User
from tests.configured import make_listener
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import LOOPBACK, running, settings_of
from tests.passwords import hashed

WRONG: Final = ReasonCode.BAD_USER_NAME_OR_PASSWORD
NOT_AUTHORIZED: Final = ReasonCode.NOT_AUTHORIZED
ANN: Final = {"ann": User(password_hash=SecretStr(hashed("right")))}
ROWS: Final = [
    # anonymous, users, name, password, refused with, user of the session
    ("always", {}, "", b"", 0, ""),
    ("always", {}, "", b"\xff\x00", 0, ""),
    ("loopback", {}, "", b"", 0, ""),
    ("never", {}, "", b"", NOT_AUTHORIZED, ""),
    ("always", ANN, "", b"right", 0, ""),
    ("never", ANN, "", b"right", NOT_AUTHORIZED, ""),
    ("always", {}, "anybody", b"what", 0, ""),
    ("loopback", {}, "anybody", b"what", 0, ""),
    ("never", {}, "anybody", b"what", WRONG, ""),
    ("always", ANN, "anybody", b"what", WRONG, ""),
    ("always", ANN, "ann", b"wrong", WRONG, ""),
    ("always", ANN, "ann", b"right", 0, "ann"),
    ("always", {}, "guest", b"guest", 0, "guest"),
    ("always", {}, "guest", b"wrong", WRONG, ""),
]


@pytest.mark.parametrize("version", [Version.V5, Version.V311, Version.V31])
@pytest.mark.parametrize("anonymous, users, name, password, reason, user", ROWS)
def test_whose_name_it_is(
    anonymous: Any,
    users: dict[str, User],
    name: str,
    password: bytes,
    reason: int,
    user: str,
    version: Version,
) -> None:
    listener = make_listener(protocol="mqtt", host=LOOPBACK, port=0, anonymous=anonymous)
    with running(settings_of(listeners={"mqtt": listener}, users=users)) as gateway:
        client, connack = connect(gateway, version=version, user=(name, password))
        with client:
            assert connack.reason == reason
            if not reason:
                assert gateway.ask(lambda: gateway.gateway.mqtt.sessions["c"].user) == user
