"""`gateway store check | repair` on the store of a gateway that was killed, and the gateway afterwards."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gateway.cli.exits import Exit
from gateway.protocols.mqtt.spec import PacketType, Property
from tests.cli.conftest import Run
from tests.ingress.clients import connect
from tests.interop.gateway_process import GatewayProcess

STAYS = {Property.SESSION_EXPIRY_INTERVAL: 600}


def owed(gateway: GatewayProcess, client: str, count: int) -> None:
    """A session of a client that is away, with `count` messages, each in a row of its own."""
    with connect(gateway, client, properties=STAYS)[0] as reader:
        reader.subscribe(f"{client}/#", qos=1)
    with connect(gateway, "writer")[0] as writer:
        for number in range(1, count + 1):
            writer.publish(f"{client}/t", b"%d" % number, 1, number)
            writer.acked(PacketType.PUBACK)


def read(gateway: GatewayProcess, client: str, count: int) -> list[bytes]:
    reader, connack = connect(gateway, client, clean=False, properties=STAYS)
    with reader:
        assert connack.session_present
        return [reader.body() for _ in range(count)]


def test_a_gateway_goes_on_with_what_could_be_read(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    chosen = ("--store", str(folder))
    with GatewayProcess(tmp_path) as gateway:
        owed(gateway, "ann", 5)
        owed(gateway, "bob", 5)
        assert "used by another gateway" in run("store", "check", *chosen).err
        gateway.kill()
        path = folder / "gateway.db"
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            query = "SELECT rows.id FROM rows JOIN logs ON logs.id = rows.log WHERE name = 'bob' ORDER BY 1"
            ids = [id for (id,) in connection.execute(query)]
            connection.execute("UPDATE rows SET messages = x'00' WHERE id = ?", (ids[1],))
            (root,) = connection.execute(
                "SELECT rootpage FROM sqlite_master WHERE name = 'dead_letters'"
            ).fetchone()
        with path.open("r+b") as file:
            file.seek((root - 1) * 4_096)
            file.write(b"spoilt" * 100)
        with pytest.raises(AssertionError, match="gateway store repair"):
            gateway.start()
        ran = run("store", "check", *chosen)
        assert ran.code == Exit.FAILED
        assert "session bob: 1 messages are lost\n" in ran.out
        assert "table dead_letters: 1 ranges of rows are unreadable\n" in ran.out
        assert "readable: 9 messages" in ran.out
        found = json.loads(run("store", "check", *chosen, "--json").out)
        assert found["logs"] == [{"kind": "session", "name": "bob", "messages": 1, "perhaps": 0}]
        ran = run("store", "repair", *chosen)
        assert ran.code == Exit.OK
        assert f"repaired; the damaged files are in {folder}/damaged-" in ran.out
        assert run("store", "check", *chosen).code == Exit.OK
        gateway.start()
        assert read(gateway, "ann", 5) == [b"1", b"2", b"3", b"4", b"5"]
        assert read(gateway, "bob", 4) == [b"1", b"3", b"4", b"5"]


def test_where_there_is_no_store(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"store: {{path: {tmp_path / 'data'}}}\n")
    for verb in ("check", "repair"):
        ran = run("store", verb, "--config", str(config))
        assert (ran.code, ran.out) == (Exit.FAILED, "")
        assert "no store in" in ran.err
    assert not (tmp_path / "data").exists()
