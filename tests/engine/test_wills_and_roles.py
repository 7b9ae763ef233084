"""Wills over the cluster are published only as far as the rights of their client go at that moment."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from pydantic import SecretStr

from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.spec import Property
from gateway.settings import User
from gateway.settings.access import Role
from tests.chaos.proxy import Proxy
from tests.engine.replicas import Replica, replicas
from tests.files import replace_text
from tests.ingress.clients import connect
from tests.interop.servers import RabbitMQ
from tests.passwords import hashed

ASKING: Final = (
    "version: 1\nroutes:\n"
    "  - name: orders\n    role: erp\n"
    "    from: {endpoint: mqtt, topic: 'orders/{whose}'}\n"
    "    to: {endpoint: mqtt, topic: 'copied/{whose}'}\n"
)
OPEN: Final = ASKING.replace("    role: erp\n", "")


@pytest.mark.parametrize("delay_secs", [0, 1])
def test_a_will_does_not_cross(rabbitmq: RabbitMQ, tmp_path: Path, delay_secs: int) -> None:
    mapping = tmp_path / "routes.yaml"
    mapping.write_text(OPEN)
    everything = Role.model_validate({"mqtt": {"publish": "#", "subscribe": "#"}})
    secret = SecretStr(hashed("right"))
    given = {
        "mappings": (str(mapping),),
        "roles": {"all": everything, "erp": everything},
        "users": {
            "ann": User(password_hash=secret, roles=("all",)),
            "bob": User(password_hash=secret, roles=("erp",)),
        },
    }
    name = f"wills-{delay_secs}"
    one = Replica(name, rabbitmq.url, name, settings=given)
    with replicas(one):
        reader, _ = connect(one, "reader", user=("bob", b"right"))
        with reader:
            assert reader.subscribe("#", 1) == 1
            clients = []
            for user in ("ann", "bob"):
                will = Will(f"orders/{user}", b"x", 1, False, {Property.WILL_DELAY_INTERVAL: delay_secs})
                lasting = {Property.SESSION_EXPIRY_INTERVAL: 30}
                client, told = connect(one, user, user=(user, b"right"), will=will, properties=lasting)
                assert told.reason == 0
                clients.append(client)
            replace_text(mapping, ASKING)
            assert one.await_(one.gateway.reload_mappings)
            for client in clients:
                client.cut()
            heard = {reader.row()[1] for _ in range(2)}
            assert heard == {b"orders/bob", b"copied/bob"}
            assert reader.quiet()


def test_another_replica_checks_a_will_by_its_own_rules_and_users(rabbitmq: RabbitMQ) -> None:
    """It has the login of the lost client from the database: ann was removed, and bob has less rights."""
    secret = SecretStr(hashed("right"))
    both = {"publish": "#", "subscribe": "#"}

    def given(names: tuple[str, ...], **less: object) -> dict[str, object]:
        roles = {"dev": {"mqtt": both | less}, "all": {"mqtt": both}}
        users = {name: User(password_hash=secret, roles=("dev",)) for name in names}
        users |= {name: User(password_hash=secret, roles=("all",)) for name in ("eve", "root")}
        return {"roles": {name: Role.model_validate(role) for name, role in roles.items()}, "users": users}

    with Proxy(rabbitmq.port) as way:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(way.port))
        one = Replica("one", url, "willrules", settings=given(("ann", "bob")), reconnect_max_secs=0.5)
        other = Replica("other", rabbitmq.url, "willrules", settings=given(("bob",), retain=False))
        with replicas(one, other):
            reader, _ = connect(other, "reader", user=("root", b"right"))
            with reader:
                assert reader.subscribe("wills/#", 1) == 1
                clients = []
                for user in ("ann", "bob", "eve"):
                    will = Will(f"wills/{user}", b"x", 1, True, {Property.WILL_DELAY_INTERVAL: 1})
                    lasting = {Property.SESSION_EXPIRY_INTERVAL: 300}
                    client, told = connect(one, user, user=(user, b"right"), will=will, properties=lasting)
                    assert told.reason == 0
                    clients.append(client)
                way.shut()
                one.until(lambda: bool(one.gateway.readiness.reasons()))
                for client in clients:
                    client.cut()
                assert reader.row()[1] == b"wills/eve"
                other.until(lambda: not any(other.stored("will", user) for user in ("ann", "bob", "eve")))
                assert reader.quiet()
            way.open()
            one.until_ready()
