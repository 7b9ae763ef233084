"""A will is checked when it is published as in a CONNECT, by the rules and users of that moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.access.principal import Principal
from gateway.app.access import DefinedUsers
from gateway.model.message import Sender
from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.spec import Property
from gateway.settings import Settings, StoreSettings
from gateway.settings.access import DefaultRoles
from gateway.settings.identity import CertificatesBackend, UsersBackend
from tests.access.received import received
from tests.access.test_doors import HASH, PASSWORD, change, settings
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, running

ALL: Final = {"publish": "#", "subscribe": "#"}
LASTING: Final = {Property.SESSION_EXPIRY_INTERVAL: 600}
LATER: Final = {Property.WILL_DELAY_INTERVAL: 500}
LESS: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    "will": {"will": False},
    "retain": {"retain": False},
    "qos_max": {"qos_max": 1},
    "publish": {"publish": "open/#"},
    "deny_publish": {"deny_publish": "+/door"},
}

heard = partial(received, user="root", root="plant")


def given(less: dict[str, Any], users: tuple[str, ...] = ("ann",), **more: Any) -> Settings:
    """Settings in which the role `dev`, of ann and of clients without a name, has less."""
    roles = {"dev": {"mqtt": ALL | less}, "all": {"mqtt": ALL}}
    names = dict.fromkeys(users, ("dev",)) | {"root": ("all",)}
    found = settings(roles, names, **more)
    return found.model_copy(update={"default_roles": DefaultRoles(anonymous=("dev",))})


def leave(gateway: Running, user: str, properties: dict[Property, Any]) -> None:
    """A client connects with a will of QoS 2 to be retained, and is lost."""
    with lost(gateway, user, properties):
        pass


@contextmanager
def lost(gateway: Running, user: str, properties: dict[Property, Any]) -> Iterator[None]:
    """Within it the client is connected."""
    login = (user, PASSWORD.encode()) if user else None
    will = Will("plant/door", user.encode() or b"nobody", 2, True, properties)
    client, told = connect(gateway, f"{user}-c", user=login, will=will, properties=LASTING)
    assert told.reason == 0
    yield
    client.cut()
    gateway.until(lambda: gateway.gateway.mqtt.sessions[f"{user}-c"].outlet is None)


def publish_all(gateway: Running) -> None:
    """Publish the delayed wills now."""
    mqtt = gateway.gateway.mqtt
    gateway.until(lambda: not mqtt._left_wills)
    gateway.ask(lambda: [mqtt._publish_will(one) for one in list(mqtt._wills)])


@pytest.mark.parametrize("delay", [{}, LATER])
@pytest.mark.parametrize("less", LESS)
def test_of_a_connected_client_that_has_less_rights_now(less: str, delay: dict[Property, Any]) -> None:
    with running(given({})) as gateway, heard(gateway) as told:
        with lost(gateway, "ann", delay):
            change(gateway, given(LESS[less]))
        publish_all(gateway)
    assert told == ([b"ann"] if less == "nothing" else [])


@pytest.mark.parametrize("user", ["ann", ""])
@pytest.mark.parametrize("less", LESS)
def test_that_an_earlier_process_has_left(tmp_path: Path, user: str, less: str) -> None:
    store = StoreSettings(path=tmp_path / "store")
    with running(given({}, store=store)) as gateway:
        leave(gateway, user, LATER)
    with running(given(LESS[less], store=store)) as gateway, heard(gateway) as told:
        publish_all(gateway)
    assert told == ([user.encode() or b"nobody"] if less == "nothing" else [])


@pytest.mark.parametrize("how", ["restart", "reload"])
def test_of_a_user_who_was_removed_meanwhile(tmp_path: Path, how: str) -> None:
    store = StoreSettings(path=tmp_path / "store")
    before, after = given({}, ("ann", "bob"), store=store), given({}, ("bob",), store=store)
    with running(before) as gateway:
        leave(gateway, "ann", LATER)
        leave(gateway, "bob", LATER)
        if how == "reload":
            hashes = dict.fromkeys(after.users, HASH)
            gateway.ask(
                lambda: gateway.gateway.identities.use(DefinedUsers(dict(after.users), hashes, {}, ""))
            )
            with heard(gateway) as told:
                publish_all(gateway)
    if how == "restart":
        with running(after) as gateway, heard(gateway) as told:
            publish_all(gateway)
    assert told == [b"bob"]


def test_of_a_user_who_is_removed_while_its_client_is_connected() -> None:
    after = given({}, ())
    with running(given({})) as gateway, heard(gateway) as told:
        with lost(gateway, "ann", {}):
            hashes = dict.fromkeys(after.users, HASH)
            gateway.ask(
                lambda: gateway.gateway.identities.use(DefinedUsers(dict(after.users), hashes, {}, ""))
            )
        publish_all(gateway)
    assert told == []


@pytest.mark.parametrize(
    "roles, scopes, less, published",
    [
        (("dev",), (), {}, True),
        (("dev",), (), {"qos_max": 1}, False),
        ((), ("write:%2F/amq.topic/plant.door",), {}, True),
        ((), ("write:%2F/amq.topic/plant.window",), {}, False),
        ((), (), {}, False),
    ],
)
def test_of_a_user_whose_roles_came_with_its_login(
    tmp_path: Path, roles: tuple[str, ...], scopes: tuple[str, ...], less: dict[str, Any], published: bool
) -> None:
    """The configuration does not know the user; what the back end gave it counts, under the roles of now."""
    store = StoreSettings(path=tmp_path / "store")
    eve = Principal("eve", roles=roles, scopes=scopes, backend="jwt")
    sender = Sender("mqtt", "eve-c", "eve", "127.0.0.1:1")
    with running(given({}, store=store)) as gateway:
        keep = gateway.gateway.mqtt.store_will
        gateway.ask(lambda: keep("eve-c", Will("plant/door", b"eve", 2, True, {}), sender, eve))
    with running(given(less, store=store)) as gateway:
        publish_all(gateway)
        assert gateway.ask(lambda: "plant/door" in gateway.gateway.mqtt.retained) == published


@pytest.mark.parametrize("known_only, published", [(True, [b"ann"]), (False, [b"ann", b"bob"])])
def test_of_a_removed_user_who_logged_in_with_a_certificate(
    tmp_path: Path, known_only: bool, published: list[bytes]
) -> None:
    backends = (
        UsersBackend(backend="users"),
        CertificatesBackend(backend="certificates", known_only=known_only),
    )
    more: dict[str, Any] = {"store": StoreSettings(path=tmp_path / "store"), "authentication": backends}
    default = {"default_roles": DefaultRoles(authenticated=("dev",))}

    def leave_will(gateway: Running, user: str) -> None:
        will = Will("plant/door", user.encode(), 2, True, {})
        sender = Sender("mqtt", f"{user}-c", user, "127.0.0.1:1")
        who = Principal(user, backend="certificates")
        gateway.ask(lambda: gateway.gateway.mqtt.store_will(f"{user}-c", will, sender, who))

    with running(given({}, ("ann", "bob"), **more)) as gateway:
        leave_will(gateway, "ann")
        leave_will(gateway, "bob")
    with (
        running(given({}, ("ann",), **more).model_copy(update=default)) as gateway,
        heard(gateway) as told,
    ):
        publish_all(gateway)
    assert told == published


@pytest.mark.parametrize("user, published", [("ann", True), ("eve", False)])
def test_that_an_earlier_version_has_stored_without_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, published: bool
) -> None:
    """Only the roles of the configuration are known, or the default ones."""
    store = StoreSettings(path=tmp_path / "store")
    will, sender = Will("plant/door", user.encode(), 2, True, {}), Sender("mqtt", "c", user, "127.0.0.1:1")
    with running(given({}, store=store)) as gateway, monkeypatch.context() as patch:
        patch.setattr(Principal, "to_dict", lambda _: None)
        keep: Callable[..., None] = gateway.gateway.mqtt.store_will
        gateway.ask(lambda: keep("c", will, sender, Principal(user)))
    with running(given({}, store=store)) as gateway:
        publish_all(gateway)
        assert gateway.ask(lambda: "plant/door" in gateway.gateway.mqtt.retained) == published
