"""Who is not known yet: guesses over HTTP, salts of names, pages of elsewhere, and names in the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from gateway.access.authentication import Access
from gateway.access.credentials import Credentials
from gateway.access.places import LOOPBACK, place_of
from gateway.access.scram import Keys, make_keys
from gateway.access.users import Users
from gateway.admin.admission import remote_address_of
from gateway.settings import LoginSettings, User
from tests.access.logins import PROTOCOLS, log_in
from tests.configured import make_listener
from tests.ingress.clients import Raw
from tests.ingress.front.test_web import CONNECT, WELCOME, opened
from tests.interop.gateway_fixture import LOOPBACK as HERE
from tests.interop.gateway_fixture import running, settings_of
from tests.passwords import hashed
from tests.transport.test_websocket import masked

KEYS: Final = {"ann": make_keys("pencil", b"salt of sixteen."), "bob": make_keys("b", b"salt of sixteen,")}


def asked_from(host: str) -> Any:
    return SimpleNamespace(client=SimpleNamespace(host=host, port=5))


def test_guesses_over_http_are_counted_by_network() -> None:
    places = {place_of(remote_address_of(asked_from(f"2001:db8:0:1::{number:x}"))) for number in range(50)}
    assert len(places) == 1
    assert place_of(remote_address_of(asked_from("2001:db8:0:2::1"))) not in places
    assert place_of(remote_address_of(asked_from("::ffff:192.0.2.1"))) == place_of(
        remote_address_of(asked_from("192.0.2.1"))
    )
    for host in ("127.0.0.1", "::1"):  # a proxy may stand there
        assert place_of(remote_address_of(asked_from(host))) != LOOPBACK


async def test_one_network_cannot_go_on_guessing_over_http() -> None:
    access = Access({"ann": hashed("right")}, logins=LoginSettings(delay_secs=0.0, failures_max=5))
    for number in range(8):
        remote = remote_address_of(asked_from(f"2001:db8:0:1::{number:x}"))
        await access.verify(Credentials("ann", b"wrong %d" % number, remote))
    assert access.failures.is_refused(remote_address_of(asked_from("2001:db8:0:1:ffff::1")), "ann")
    assert not access.failures.is_refused(remote_address_of(asked_from("2001:db8:0:2::1")), "ann")


# Salts.


def salt(users: Users, name: str) -> bytes:
    return users._keys_of(name).salt


def users_with(keys: dict[str, Keys]) -> Users:
    return Access(dict.fromkeys(keys, ""), scram=keys).users


def test_salts_of_unknown_users_outlive_the_process() -> None:
    first, second = users_with(KEYS), users_with(dict(reversed(KEYS.items())))
    names = ["eve", "mallory", ""]
    assert [salt(first, name) for name in names] == [salt(second, name) for name in names]
    assert len({salt(first, name) for name in names}) == 3
    other = users_with({**KEYS, "ann": make_keys("other", b"salt of sixteen.")})
    assert salt(other, "eve") != salt(first, "eve"), "nobody without the secrets can make it"


def test_salts_of_unknown_users_outlive_a_reload() -> None:
    users = users_with(KEYS)
    before = salt(users, "eve")
    users.replace({"ann": ""}, {"ann": KEYS["ann"]})
    assert salt(users, "eve") == before
    late = users_with({})
    late.replace({"ann": ""}, {"ann": KEYS["ann"]})
    assert salt(late, "eve") == salt(users_with({"ann": KEYS["ann"]}), "eve")


# Names that are not proved.


TYPED: Final = "pa55word of ann"


def told_of(lines: Any, word: str) -> bool:
    return any(word in str(line) for line in lines)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_password_in_place_of_a_name_is_not_logged(protocol: str) -> None:
    users = {"ann": User(password_hash=SecretStr(hashed("right")))}
    with running(settings_of(users=users)) as gateway, capture_logs() as lines:
        for _ in range(2):
            log_in(protocol, gateway.port(protocol), TYPED, "x")
        log_in(protocol, gateway.port(protocol), "ann", "wrong")
        gateway.until(lambda: sum(line.get("audit") == "refused" for line in list(lines)) == 3)
    assert not told_of(lines, TYPED)
    names = [line["user"] for line in lines if line.get("audit") == "refused"]
    assert names[0] == names[1] != names[2] == "ann", "one is known again"
    assert names[0].startswith("unknown ")


def test_names_of_other_processes_cannot_be_compared() -> None:
    one, other = Access({}), Access({})
    assert one.loggable(TYPED) != other.loggable(TYPED)
    assert one.loggable("") == ""


# Pages.


PAGES: Final = [
    ("https://evil.example", False),
    ("null", False),
    ("http://127.0.0.1.evil.example", False),
    ("http://localhost:3000", True),
    ("http://127.0.0.1", True),
    ("http://[::1]:8080", True),
    (None, True),
]


@pytest.mark.parametrize("origin, enters", PAGES)
def test_a_page_of_elsewhere_is_not_this_machine(origin: str | None, enters: bool) -> None:
    one = make_listener(protocol="mqtt", host=HERE, port=0, websocket_path="/mqtt")
    with running(settings_of(listeners={"mqtt": one})) as gateway, Raw(gateway.mqtt) as client:
        assert opened(client, origin).startswith(b"HTTP/1.1 101 ")
        client.send(masked(0x82, CONNECT))
        assert (client.sock.recv(len(WELCOME)) == WELCOME) is enters


@pytest.mark.parametrize("origins, anonymous", [(("https://evil.example",), "loopback"), (None, "always")])
def test_a_page_enters_that_the_operator_lets_in(origins: Any, anonymous: str) -> None:
    one = make_listener(
        protocol="mqtt",
        host=HERE,
        port=0,
        websocket_path="/mqtt",
        websocket_origins=origins,
        anonymous=anonymous,
    )
    with running(settings_of(listeners={"mqtt": one})) as gateway, Raw(gateway.mqtt) as client:
        assert opened(client, "https://evil.example").startswith(b"HTTP/1.1 101 ")
        assert client.send(masked(0x82, CONNECT)).sock.recv(len(WELCOME)) == WELCOME
