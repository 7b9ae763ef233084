"""Wills over the cluster take no route that asks for a role which their client does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from pydantic import SecretStr

from gateway.protocols.mqtt.packets import Will
from gateway.protocols.mqtt.spec import Property
from gateway.settings import User
from gateway.settings.access import Role
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
