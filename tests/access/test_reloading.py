"""Users, secrets and roles that change while the gateway runs, and files that have lost a part."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pika
import pytest
import structlog
import yaml

from gateway.errors import ConfigurationError
from gateway.protocols.amqpfast.events import Closed as FastClosed
from gateway.protocols.mqtt.packets import Connack, Connect, Disconnect
from gateway.protocols.mqtt.spec import PacketType, ReasonCode, Version
from gateway.settings import load_settings
from gateway.settings.users_file import read_users
from tests.access.logins import PROTOCOLS, log_in, pika_parameters
from tests.files import replace_text
from tests.ingress.amqpfast.client import Fast
from tests.ingress.clients import Mqtt, connect
from tests.interop.gateway_fixture import LOOPBACK, Running, running
from tests.passwords import hashed

REFUSED: Final = "users and roles not reloaded, previous ones in force"
RIGHT, OTHER = hashed("right"), hashed("other")
WRONG: Final = {"mqtt": 0x86, "amqp091": 403, "amqpfast": 403}
EVERYTHING: Final = {
    "mqtt": {"publish": "#", "subscribe": "#", "deny_publish": "cmd/#"},
    "amqp091": {"*": {"configure": ".*", "write": ".*", "read": ".*"}},
    "amqpfast": {"*": {"queues": {"read": "*", "write": "*", "create": "*"}}},
}


def document(**more: Any) -> dict[str, Any]:
    """A configuration with a listener of each protocol, two users and a role, in this order."""
    own: dict[str, dict[str, Any]] = {
        "mqtt": {"anonymous": "never"},
        "amqp091": {},
        "amqpfast": {"anonymous": "never", "negotiation_pause_secs": 0.0},
    }
    return {
        "listeners": {
            name: {"protocol": name, "host": LOOPBACK, "port": 0, **given} for name, given in own.items()
        },
        "http": {"enabled": False},
        "store": {"enabled": False},
        "drain_timeout_secs": 2.0,
        "guest": "never",
        "users": {name: {"password_hash": RIGHT, "roles": ["every"]} for name in ("ann", "bob")},
        "roles": {"every": EVERYTHING},
        **more,
    }


def written(path: Path, content: dict[str, Any]) -> str:
    text = yaml.safe_dump(content, sort_keys=False)
    replace_text(path, text)
    return text


def reloaded(gateway: Running, outcome: str, change: Callable[[], object]) -> None:
    """Change something, and wait until the gateway has noticed it."""
    counts = gateway.gateway.metrics.rule_reloads
    before = gateway.ask(lambda: counts[outcome])
    change()
    gateway.until(lambda: counts[outcome] > before)


def refused_publish(gateway: Running, packet_id: int = 1) -> bool:
    """Whether ann may not publish what the role denies."""
    client, told = connect(gateway, "probe", user=("ann", b"right"))
    with client:
        assert told.reason == 0
        client.publish("cmd/stop", qos=1, packet_id=packet_id)
        return client.acked(PacketType.PUBACK) == (packet_id, ReasonCode.NOT_AUTHORIZED)


def before_section(name: str) -> Callable[[str], str]:
    return lambda text: text[: text.index(f"\n{name}:") + 1]


CUTS: Final[dict[str, Callable[[str], str]]] = {
    "empty": lambda _: "",
    "comments alone": lambda _: "# nothing\n",
    "before the roles": before_section("roles"),
    "before the users": before_section("users"),
    "behind the key of the roles": lambda text: text[: text.index("\nroles:") + 7] + "\n",
    "no roles": lambda text: before_section("roles")(text) + "roles: {}\n",
    "without a section": lambda text: text.replace("guest: never\n", ""),
    "in the middle of a line": lambda text: text[: text.index("deny_publish") + 4],
    "in the middle of a role": lambda text: text[: text.index("    deny_publish")],
    "not UTF-8": lambda text: text + "# \udcff\n",
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("order", ["default roles first", "default roles last"])
def test_a_file_that_has_lost_a_part_leaves_the_old_rules(
    tmp_path: Path, cut: Callable[[str], str], order: str
) -> None:
    path = tmp_path / "gateway.yaml"
    # Nothing in `users` names a role, so that what is left of the file is well-formed.
    given = document()
    for user in given["users"].values():
        del user["roles"]
    default = {"default_roles": {"authenticated": "every"}}
    given = {**given, **default} if order == "default roles last" else {**default, **given}
    content = written(path, given)
    left = cut(content)
    with running(load_settings(path, {}), but=REFUSED) as gateway:
        assert refused_publish(gateway)
        new = path.with_suffix(".new")
        new.write_bytes(left.encode(errors="surrogateescape"))
        reloaded(gateway, "refused", lambda: new.rename(path))
        assert refused_publish(gateway), "the old rules stay"
        assert log_in("mqtt", gateway.mqtt, "nobody", "") == WRONG["mqtt"]
        reloaded(gateway, "taken", lambda: written(path, given))
        assert refused_publish(gateway)


def test_sighup_refuses_half_a_file_as_well(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    content = written(path, document())
    with running(load_settings(path, {}), but=REFUSED) as gateway:
        for left in ("", content[: content.index("\nroles:") + 1], content[:-3]):
            path.write_text(left)
            assert not gateway.await_(gateway.gateway.rules.reload)
            assert refused_publish(gateway)
        path.unlink()
        assert not gateway.await_(gateway.gateway.rules.reload)
        assert refused_publish(gateway)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_users_of_the_configuration_change(tmp_path: Path, protocol: str) -> None:
    path = tmp_path / "gateway.yaml"
    given = document()
    written(path, given)
    with running(load_settings(path, {})) as gateway:
        port = gateway.port(protocol)
        assert [log_in(protocol, port, name, "right") for name in ("ann", "bob")] == [0, 0]
        given["users"]["ann"]["password_hash"] = OTHER
        del given["users"]["bob"]
        given["users"]["eve"] = {"password_hash": RIGHT, "roles": ["every"]}
        reloaded(gateway, "taken", lambda: written(path, given))
        wrong = WRONG[protocol]
        rows = [("ann", "right", wrong), ("ann", "other", 0), ("bob", "right", wrong), ("eve", "right", 0)]
        for user, password, expected in rows:
            assert log_in(protocol, port, user, password) == expected, (user, password)


def test_the_last_user_of_the_file_may_go(tmp_path: Path) -> None:
    """Whole items at the end of a file are not a lost end."""
    path = tmp_path / "gateway.yaml"
    given = document()
    given["users"] = given.pop("users")
    content = written(path, given)
    with running(load_settings(path, {})) as gateway:
        reloaded(gateway, "taken", lambda: replace_text(path, content[: content.index("  bob:")]))
        assert log_in("mqtt", gateway.mqtt, "bob", "right") == WRONG["mqtt"]
        assert log_in("mqtt", gateway.mqtt, "ann", "right") == 0


def user_of(name: str, hash: str) -> dict[str, Any]:
    """A user as a users file says it."""
    return {name: {"password_hash": hash, "roles": ["every"]}}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_users_file_that_is_cut_leaves_the_old_users(tmp_path: Path, protocol: str) -> None:
    """Whatever is left of it, at a gateway that runs; a whole one is taken, with a user who comes or goes."""
    path, users = tmp_path / "gateway.yaml", tmp_path / "users.yaml"
    given = document(authentication=[{"backend": "users", "file": str(users)}])
    del given["users"]
    whole = written(users, user_of("ann", RIGHT) | user_of("bob", RIGHT))
    written(path, given)
    with running(load_settings(path, {}), but=REFUSED) as gateway:
        port, wrong = gateway.port(protocol), WRONG[protocol]

        def answers() -> list[int]:
            return [
                log_in(protocol, port, *who) for who in (("ann", "right"), ("bob", "right"), ("bob", "other"))
            ]

        assert answers() == [0, 0, wrong]
        for left in ("", "# nothing\n", "{}\n", whole[:-3], whole[: whole.index("bob:") + 5]):
            reloaded(gateway, "refused", lambda: replace_text(users, left))  # noqa: B023
            assert answers() == [0, 0, wrong], left
        reloaded(gateway, "refused", users.unlink)
        assert answers() == [0, 0, wrong]
        reloaded(gateway, "taken", lambda: written(users, user_of("ann", RIGHT) | user_of("bob", OTHER)))
        assert answers() == [0, wrong, 0]
        reloaded(gateway, "taken", lambda: written(users, user_of("ann", RIGHT)))
        assert answers() == [0, wrong, wrong]


def export(*users: str, write: str = ".*", password: str = "right") -> str:
    """What RabbitMQ exports of these users."""
    salt = b"salt"
    secret = base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
    rights = {"vhost": "/", "configure": ".*", "write": write, "read": ".*"}
    content: dict[str, Any] = {
        "users": [{"name": name, "password_hash": secret, "tags": []} for name in users],
        "vhosts": [{"name": "/"}],
        "permissions": [{"user": name, **rights} for name in users],
        "queues": [],
        "exchanges": [],
        "bindings": [],
    }
    return json.dumps(content, indent=1)


def may_publish(gateway: Running, user: str, password: str = "right") -> bool:
    with closing(pika.BlockingConnection(pika_parameters(gateway.amqp, user, password))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        try:
            channel.basic_publish("amq.fanout", "", b"x")
        except pika.exceptions.ChannelClosedByBroker:
            return False
        return True


def test_an_export_of_rabbitmq_is_read_again_while_the_gateway_runs(tmp_path: Path) -> None:
    """Its users, passwords and permissions; one that is cut short, or has no users, is refused."""
    path, file = tmp_path / "gateway.yaml", tmp_path / "definitions.json"
    whole = export("ann", "bob")
    file.write_text(whole)
    given = document(declare={"definitions": [str(file)], "users": True})
    del given["users"]
    written(path, given)
    with running(load_settings(path, {}), but=REFUSED) as gateway:
        assert may_publish(gateway, "ann")
        kept = pika.BlockingConnection(pika_parameters(gateway.amqp, "bob", "right"))
        for left in (
            "",
            "{}",
            whole[:-1],
            whole[: len(whole) // 2],
            export(),
            '{"users": [], "permissions": []}',
        ):
            reloaded(gateway, "refused", lambda: replace_text(file, left))  # noqa: B023
            assert may_publish(gateway, "ann"), left
            assert log_in("amqp091", gateway.amqp, "bob", "right") == 0, left
        reloaded(gateway, "refused", file.unlink)
        assert may_publish(gateway, "ann")
        reloaded(gateway, "taken", lambda: replace_text(file, export("ann", "bob", write="^$")))
        assert not may_publish(gateway, "ann")
        reloaded(gateway, "taken", lambda: replace_text(file, export("ann", password="other")))
        assert log_in("amqp091", gateway.amqp, "ann", "right") == WRONG["amqp091"]
        assert may_publish(gateway, "ann", "other")
        assert log_in("amqp091", gateway.amqp, "bob", "right") == WRONG["amqp091"]
        with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
            kept.process_data_events(10)


def test_who_is_connected_as_a_removed_user_is_disconnected(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    given = document()
    written(path, given)
    with running(load_settings(path, {})) as gateway, Mqtt(gateway.mqtt) as ann, Mqtt(gateway.mqtt) as bob:
        for client, name in ((ann, "ann"), (bob, "bob")):
            client.say(Connect(name, Version.V5, True, 0, None, name, b"right", {}))
            assert client.next(Connack).reason == 0
        with Fast(gateway, user="bob", password="right").open() as fast:
            amqp = pika.BlockingConnection(pika_parameters(gateway.amqp, "bob", "right"))
            del given["users"]["bob"]
            written(path, given)
            assert bob.next(Disconnect).reason == ReasonCode.NOT_AUTHORIZED
            assert fast.next(FastClosed).reply_code == 403
            with pytest.raises(pika.exceptions.ConnectionClosedByBroker):
                amqp.process_data_events(10)
        ann.ping()


def test_a_changed_password_file_is_taken(tmp_path: Path) -> None:
    path, secret = tmp_path / "gateway.yaml", tmp_path / "ann"
    secret.write_text(RIGHT)
    given = document()
    given["users"]["ann"] = {"password_hash_file": str(secret), "roles": ["every"]}
    written(path, given)
    with running(load_settings(path, {}), but=REFUSED) as gateway:
        assert log_in("mqtt", gateway.mqtt, "ann", "right") == 0
        client, _ = connect(gateway, "stays", user=("ann", b"right"))
        with client:
            reloaded(gateway, "taken", lambda: replace_text(secret, OTHER + "\n"))
            assert log_in("mqtt", gateway.mqtt, "ann", "other") == 0
            assert log_in("mqtt", gateway.mqtt, "ann", "right") == WRONG["mqtt"]
            client.ping()  # who is connected already stays
        for bad in ("", OTHER[:20], "other"):
            reloaded(gateway, "refused", lambda: replace_text(secret, bad))  # noqa: B023
            assert log_in("mqtt", gateway.mqtt, "ann", "other") == 0
        reloaded(gateway, "refused", secret.unlink)
        assert log_in("mqtt", gateway.mqtt, "ann", "other") == 0
        secret.write_text(RIGHT)
        assert gateway.await_(gateway.gateway.rules.reload)
        assert log_in("mqtt", gateway.mqtt, "ann", "right") == 0


def test_sections_that_need_a_restart_are_named_once(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    given = document()
    written(path, given)
    with running(load_settings(path, {})) as gateway:
        given["limits"] = {"queues_max": 7}
        given["drain_timeout_secs"] = 3.0
        given["roles"]["every"]["mqtt"]["deny_publish"] = "other/#"
        with structlog.testing.capture_logs() as lines:
            reloaded(gateway, "taken", lambda: written(path, given))
            gateway.await_(gateway.gateway.rules.reload)
        told = [line for line in lines if line["event"] == "configuration sections changed, restart needed"]
        assert [line["sections"] for line in told] == [["drain_timeout_secs", "limits"]]
        assert [line["log_level"] for line in told] == ["warning"]
        assert not refused_publish(gateway), "what can be reloaded is in force all the same"


@pytest.mark.parametrize(
    "left, reason",
    [
        ("", "is empty"),
        ("ann: {password_hash: x}\nbob:\n  password_h", "a truncated copy"),
        ("ann: {password_hash: x}\nbob:\n  password_hash: y\n", "last item of the file looks truncated"),
    ],
)
def test_a_users_file_that_has_lost_its_end(tmp_path: Path, left: str, reason: str) -> None:
    path = tmp_path / "users.yaml"
    before = "ann: {password_hash: x}\nbob:\n  password_hash: y\n  receive_bytes_per_sec_max: 7\n"
    path.write_text(left)
    with pytest.raises(ConfigurationError, match=reason):
        read_users(path, before)
    path.write_text("ann: {password_hash: x}\n")
    assert list(read_users(path, before).users) == ["ann"]
