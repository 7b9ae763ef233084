"""`gateway import` of what is none, and how it says what it finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli.exits import Exit
from tests.cli.conftest import Run

RUBBISH = {
    "passwd": b"root:x:0:0:root:/root:/bin/bash\nbin:x:2:2:bin:/bin:/usr/sbin/nologin\n",
    "bytes": bytes(range(256)),
    "html": b"<html>\n<p>not found\n",
    "half": b"listener 1883\n<<<<<<< HEAD\n",
}
DEFINITIONS = {"text": b"{", "list": b"[]", "number": b"1", "other": b'{"a": 1}', "bytes": b"\xff"}


@pytest.mark.parametrize("given", RUBBISH.values(), ids=RUBBISH)
def test_what_is_no_configuration_of_mosquitto_writes_nothing(run: Run, tmp_path: Path, given: bytes) -> None:
    file, to = tmp_path / "mosquitto.conf", tmp_path / "made"
    file.write_bytes(given)
    ran = run("import", "mosquitto", str(file), "--to", str(to))
    assert (ran.code, to.exists()) == (Exit.FAILED, False)
    assert ": error: " in ran.out
    assert ran.out.endswith("no file was written\n")


@pytest.mark.parametrize("given", DEFINITIONS.values(), ids=DEFINITIONS)
def test_what_is_no_export_of_rabbitmq_writes_nothing(run: Run, tmp_path: Path, given: bytes) -> None:
    file, to = tmp_path / "definitions.json", tmp_path / "made"
    file.write_bytes(given)
    ran = run("import", "rabbitmq", str(file), "--to", str(to), "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["written"], to.exists()) == (Exit.FAILED, [], False)
    assert [one["severity"] for one in told["findings"]] == ["error"]


def test_findings_have_their_columns_and_are_json_for_programs(run: Run, tmp_path: Path) -> None:
    file, to = tmp_path / "mosquitto.conf", tmp_path / "made"
    file.write_text("listener 1884\n  bridge_alpn mqtt\n")
    ran = run("import", "mosquitto", str(file), "--to", str(to), "--json")
    told = json.loads(ran.out)
    assert (ran.code, told["written"]) == (0, [str(to / "gateway.yaml")])
    (found,) = told["findings"]
    assert (found["file"], found["line"], found["column"], found["code"]) == (str(file), 2, 3, "untaken")
    again = run("import", "mosquitto", str(file), "--to", str(to), "--force").out
    assert f"{file}:2:3: warning: bridge_alpn is not supported and was not imported (untaken)" in again


def test_what_is_there_twice_is_written_twice(run: Run, tmp_path: Path) -> None:
    """A topic both ways names its ends twice; anchors and aliases are no first mapping to learn from."""
    file, to = tmp_path / "mosquitto.conf", tmp_path / "made"
    file.write_text("connection far\naddress 192.0.2.1\ntopic plant/# both 1\n")
    assert run("import", "mosquitto", str(file), "--to", str(to)).code == 0
    text = (to / "mapping.yaml").read_text()
    assert ("&" in text, "*" in text) == (False, False)
    assert len(yaml.safe_load(text)["routes"]) == 2


def test_a_stream_is_left_out_with_its_bindings(run: Run, tmp_path: Path) -> None:
    """What is written is a configuration that `check` accepts; the export itself stays as it was."""
    file, to = tmp_path / "definitions.json", tmp_path / "made"
    queue = {"vhost": "/", "durable": True, "auto_delete": False, "arguments": {}}
    binding = {"source": "amq.topic", "vhost": "/", "destination_type": "queue", "arguments": {}}
    said = {
        "vhosts": [{"name": "/"}],
        "queues": [
            {**queue, "name": "kept"},
            {**queue, "name": "events", "arguments": {"x-queue-type": "stream", "x-max-age": "7D"}},
            {**queue, "name": "more", "type": "stream"},
        ],
        "exchanges": [],
        "bindings": [
            {**binding, "destination": name, "routing_key": name} for name in ("kept", "events", "more")
        ],
    }
    file.write_text(json.dumps(said))
    ran = run("import", "rabbitmq", str(file), "--to", str(to))
    assert ran.code == Exit.OK
    assert (
        "queue 'events' is a stream, which is not supported; the queue and its bindings were not imported"
        in ran.out
    )
    assert json.loads(file.read_text()) == said
    made = json.loads((to / "imported-definitions.json").read_text())
    assert [one["name"] for one in made["queues"]] == ["kept"]
    assert [one["destination"] for one in made["bindings"]] == ["kept"]
    ran = run("check", "--config", str(to / "gateway.yaml"))
    assert ran.code == Exit.OK, ran.out


def test_without_streams_the_export_itself_is_named(run: Run, tmp_path: Path) -> None:
    file, to = tmp_path / "definitions.json", tmp_path / "made"
    file.write_text(json.dumps({"vhosts": [{"name": "/"}], "queues": []}))
    assert run("import", "rabbitmq", str(file), "--to", str(to)).code == Exit.OK
    assert yaml.safe_load((to / "gateway.yaml").read_text())["declare"]["definitions"] == str(file)
    assert not (to / "imported-definitions.json").exists()


def imported(run: Run, tmp_path: Path, kind: str, name: str, text: str) -> tuple[int, dict[str, Any], Any]:
    """Return the exit code, the configuration and the routes of an import of this text."""
    file, to = tmp_path / name, tmp_path / "made"
    file.write_text(text)
    code = run("import", kind, str(file), "--to", str(to)).code
    mapping = to / "mapping.yaml"
    return (
        code,
        yaml.safe_load((to / "gateway.yaml").read_text()),
        yaml.safe_load(mapping.read_text())["routes"] if mapping.exists() else [],
    )


def test_listeners_on_one_port_of_two_addresses_are_both_imported(run: Run, tmp_path: Path) -> None:
    text = "listener 1883 127.0.0.1\nlistener 1883 192.0.2.7\n"
    _, configuration, _ = imported(run, tmp_path, "mosquitto", "mosquitto.conf", text)
    hosts = {name: one["host"] for name, one in configuration["listeners"].items()}
    assert hosts == {"mqtt-1883": "127.0.0.1", "mqtt-1883-2": "192.0.2.7"}


def test_a_topic_line_with_too_many_words_is_a_finding(run: Run, tmp_path: Path) -> None:
    text = "connection far\naddress 192.0.2.1\ntopic # both 1 a/ b/ c/\n"
    code, _, routes = imported(run, tmp_path, "mosquitto", "mosquitto.conf", text)
    assert (code, routes) == (Exit.FAILED, [])


def test_objects_of_two_virtual_hosts_stay_apart(run: Run, tmp_path: Path) -> None:
    """Two shovels of one name lead to two brokers; a policy federates exchanges of its own virtual host."""

    def shovel(host: str) -> dict[str, Any]:
        value = {"src-uri": "amqp://", "src-queue": "q", "dest-uri": f"amqp://{host}", "dest-queue": "q"}
        return {"component": "shovel", "vhost": host, "name": "move", "value": value}

    document = {
        "parameters": [
            shovel("a"),
            shovel("b"),
            {"component": "federation-upstream", "vhost": "a", "name": "up", "value": {"uri": "amqp://far"}},
        ],
        "policies": [
            {"vhost": "a", "name": "p", "pattern": "^news", "definition": {"federation-upstream": "up"}},
            {"vhost": "b", "name": "p", "pattern": "", "definition": {"federation-upstream": "up"}},
        ],
        "exchanges": [{"vhost": host, "name": name} for host in "ab" for name in ("news", f"own-{host}")],
    }
    _, configuration, routes = imported(run, tmp_path, "rabbitmq", "definitions.json", json.dumps(document))
    links = configuration["links"]
    leads = [links[one["to"]["endpoint"]]["urls"] for one in routes if one["from"]["endpoint"] == "amqp091"]
    assert leads == [["amqp://a"], ["amqp://b"]]
    assert [one["from"]["exchange"] for one in routes if one["from"]["endpoint"] == "up"] == ["news"]


def test_an_import_over_another_one_is_for_its_owner_alone(run: Run, tmp_path: Path) -> None:
    """The files may contain passwords of links."""
    file, to = tmp_path / "mosquitto.conf", tmp_path / "made"
    file.write_text("listener 1884\n")
    to.mkdir()
    (to / "gateway.yaml").touch(mode=0o644)
    assert run("import", "mosquitto", str(file), "--to", str(to), "--force").code == 0
    assert (to / "gateway.yaml").stat().st_mode & 0o777 == 0o600
