"""`gateway check`, `passwd` and `version`: what they print, and how they exit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from argon2 import PasswordHasher
from pydantic import SecretStr

from gateway import __version__, is_compiled
from gateway.access.scram import SALT_OCTETS, make_keys, parse_keys
from gateway.cli.exits import Exit
from gateway.settings import User
from tests.cli.conftest import Run

ROUTE = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "a/#"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: x}
"""


def configuration(folder: Path, mapping: str, more: str = "") -> str:
    (folder / "mapping.yaml").write_text(mapping)
    path = folder / "gateway.yaml"
    path.write_text(f"mappings: ['{folder}/mapping.yaml']\n{more}")
    return str(path)


def test_a_right_configuration_is_printed_whole(tmp_path: Path, run: Run) -> None:
    ran = run("check", "--config", configuration(tmp_path, ROUTE))
    note = "note: listener 'amqpfast': no route names it, so nothing crosses from it or to it"
    assert (ran.code, ran.err.split()) == (Exit.OK, note.split())
    assert yaml.safe_load(ran.out)["limits"]["hops_max"] == 8


LISTENERS = (
    "listeners: {mqtt: {protocol: mqtt}, web: {protocol: mqtt, port: 1}, amqp091: {protocol: amqp091}}\n"
)


def test_a_listener_that_no_route_names_is_a_warning(tmp_path: Path, run: Run) -> None:
    ran = run("check", "--config", configuration(tmp_path, ROUTE, LISTENERS))
    assert "warning: listener 'web': no route names it, so what its clients publish does not cross" in ran.err
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text(f"mappings: [identity.yaml]\n{LISTENERS}")
    assert "listener" not in run("check", "--config", str(shipped)).err


def test_the_default_configuration_is_right(run: Run) -> None:
    assert run("check").code == Exit.OK


WRONG = [
    (ROUTE, "htp: {}\n", "gateway.yaml:2:1: htp: unknown key; did you mean 'http'?"),
    (ROUTE.replace("mqtt", "nobody"), "", "mapping.yaml:"),
    (ROUTE.replace("topic:", "tpic:"), "", "mapping.yaml:4:28: error: routes[0].from.tpic"),
    (ROUTE, "http: {token_file: /absent}\n", "http.token_file: this file cannot"),
    (f"{ROUTE}    settle: stored\n", "", "mapping.yaml:3: route 'up': settle: stored is for links"),
    (
        f"{ROUTE}    settle: stored\n".replace("amqp091", "erp"),
        "links: {erp: {url: 'amqp://h'}}\nstore: {enabled: false}\n",
        "mapping.yaml:3: route 'up': settle: stored needs the store",
    ),
    (
        ROUTE,
        "links: {erp: {url: 'amqp://h', password_file: /absent}}\n",
        "links.erp.password_file: this file cannot",
    ),
    (ROUTE, "users: {ann: {password_hash: hush}}\n", "users.ann.password_hash: this is no argon2 hash"),
    (ROUTE, "users: {ann: {scram: hush}}\n", "users.ann.scram: "),
]


@pytest.mark.parametrize("mapping, more, expected", WRONG)
def test_what_is_wrong_is_told_with_its_place(
    tmp_path: Path, run: Run, mapping: str, more: str, expected: str
) -> None:
    path = configuration(tmp_path, mapping, more)
    ran = run("check", "-c", path)
    assert ran.code == Exit.CONFIGURATION
    assert expected in ran.err
    document = json.loads(run("check", "-c", path, "--json").out)
    assert document["ok"] is False
    assert document["findings"][0]["severity"] == "error"


def test_a_glob_that_finds_nothing_is_a_warning(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"mappings: ['{tmp_path}/*.yml']\n")
    ran = run("check", "-c", str(path))
    assert ran.code == Exit.OK
    assert "warning: mappings: no file is found" in ran.err


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_bytes(b"")
    more = f"store: {{path: {tmp_path}/file}}\njournal: {{enabled: true, path: {tmp_path}/file/journal}}\n"
    ran = run("check", "-c", configuration(tmp_path, ROUTE, more))
    assert ran.code == Exit.OK
    assert f"warning: store.path: {tmp_path}/file is a file, not a folder" in ran.err
    assert f"warning: journal.path: {tmp_path}/file is a file, not a folder" in ran.err


def test_json_holds_the_masked_configuration(tmp_path: Path, run: Run) -> None:
    path = configuration(tmp_path, ROUTE, "links: {erp: {url: 'amqp://u:hush@h'}}\n")
    ran = run("check", "-c", path, "--json")
    assert "hush" not in ran.out
    assert json.loads(ran.out)["configuration"]["links"]["erp"]["url"] == "amqp://u:**********@h"


def test_passwd_hashes_what_it_reads(run: Run) -> None:
    ran = run("passwd", stdin="secret\n")
    assert ran.code == Exit.OK
    assert PasswordHasher().verify(ran.out.strip(), "secret")
    assert run("passwd", stdin="\n").code == Exit.USAGE


def test_passwd_makes_scram_keys_of_what_it_reads(run: Run) -> None:
    ran = run("passwd", "--scram", "--iterations", "5000", stdin="pencil\n")
    assert ran.code == Exit.OK
    keys = parse_keys(ran.out.strip())
    assert keys.iterations == 5_000
    assert keys == make_keys("pencil", keys.salt, 5_000)
    assert len(keys.salt) == SALT_OCTETS
    assert parse_keys(run("passwd", "--scram", stdin="pencil\n").out.strip()).salt != keys.salt
    assert User(scram=SecretStr(ran.out.strip())).scram_keys() == str(keys)


@pytest.mark.parametrize(
    "arguments, password",
    [
        (["--scram"], ""),
        (["--scram"], "bell\x07"),  # SASLprep forbids control characters
        (["--scram", "--iterations", "4095"], "pencil"),  # fewer than RFC 7677 allows
    ],
)
def test_passwd_makes_no_keys_of(arguments: list[str], password: str, run: Run) -> None:
    ran = run("passwd", *arguments, stdin=f"{password}\n")
    assert (ran.code, ran.out) == (Exit.USAGE, "")


def test_version_is_told(run: Run) -> None:
    form = "compiled" if is_compiled() else "interpreted"
    assert run("version").out.startswith(f"gateway {__version__}, {form} ")
    assert run("--version") == run("version")
    assert run("--version", "nothing") == run("version")
    told = json.loads(run("version", "--json").out)
    assert (told["gateway"], told["compiled"]) == (__version__, is_compiled())


def test_the_package_is_the_program() -> None:
    """`python -m gateway`, with its arguments and its exit codes."""
    for arguments, code, said in [
        (["--version"], Exit.OK, f"gateway {__version__}, "),
        (["nothing"], Exit.USAGE, ""),
    ]:
        command = [sys.executable, "-m", "gateway", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout[: len(said)]) == (code, said)


def test_an_unknown_command_is_a_usage_error(run: Run) -> None:
    assert run("nothing").code == Exit.USAGE


def test_a_shared_folder_that_is_not_there_is_a_warning(tmp_path: Path, run: Run) -> None:
    fast = "{protocol: amqpfast, out_of_band: {folder: /absent}}"
    mapping = ROUTE.replace("amqp091, exchange: amq.topic, routing_key: x", "fast, destination: x")
    listeners = f"listeners: {{mqtt: {{protocol: mqtt}}, fast: {fast}}}\n"
    ran = run("check", "--config", configuration(tmp_path, mapping, listeners))
    assert "/absent: warning: listeners.fast.out_of_band.folder: no such folder" in ran.err
    assert ran.code == Exit.OK


def test_what_is_declared_is_tried(tmp_path: Path, run: Run) -> None:
    (tmp_path / "definitions.json").write_text('{"users": [{}], "queues": [{"name": "a", "vhost": "/"}]}')
    right = f"declare:\n  definitions: {tmp_path}/definitions.json\n  queues: [{{name: a}}]\n"
    ran = run("check", "-c", configuration(tmp_path, ROUTE, right))
    assert ran.code == Exit.OK
    assert f"{tmp_path}/definitions.json: note: passed over, for it means nothing here: users (1)" in ran.err
    assert yaml.safe_load(ran.out)["declare"]["queues"][0]["name"] == "a"
    wrong = f"{right}  bindings:\n    - {{source: x, destination: a}}\n"
    ran = run("check", "-c", configuration(tmp_path, ROUTE, wrong))
    assert ran.code == Exit.CONFIGURATION
    assert "gateway.yaml:6:7: error: declare.bindings[0]: NOT_FOUND - no exchange 'x' in vhost '/'" in ran.err
    (tmp_path / "definitions.json").unlink()
    ran = run("check", "-c", configuration(tmp_path, ROUTE, right))
    assert ran.code == Exit.CONFIGURATION
    assert f"{tmp_path}/definitions.json: error: cannot be read: No such file" in ran.err
