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
from gateway.access.scram import SALT_BYTES, make_keys, parse_keys
from gateway.cli.exits import Exit
from gateway.settings import User
from tests.cli.conftest import Run
from tests.transport.test_tls import self_signed

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
    note = "note: listeners.amqpfast: no route names it, so no message is routed from it or to it (unnamed)"
    summary = "checked 3 listeners, 0 links, 1 mapping file: 0 errors, 0 warnings, 1 note"
    assert (ran.code, ran.out, ran.err) == (Exit.OK, f"{note}\n{summary}\n", "")


def test_a_listener_that_the_engine_does_not_serve_is_refused(tmp_path: Path, run: Run) -> None:
    engine = (
        "broker: {engine: rabbitmq, urls: ['amqp://gateway@one'],"
        " postgresql: {url: 'postgresql://gateway@localhost/gateway'}}\n"
    )
    listeners = "listeners: {mqtt: {protocol: mqtt}, amqp091: {protocol: amqp091, port: 5673}}\n"
    ran = run("check", "--config", configuration(tmp_path, ROUTE, engine + listeners))
    assert ran.code == Exit.CONFIGURATION
    assert "listeners.amqp091: protocol amqp091 needs the embedded broker" in ran.out


def test_what_takes_effect_is_printed_and_nothing_else(tmp_path: Path, run: Run) -> None:
    more = "journal: {enabled: false, body_bytes_max: 5}\nlinks: {erp: {url: 'amqp://u:hush@h'}}\n"
    path = configuration(tmp_path, ROUTE, more)
    ran = run("check", "--config", path, "--print")
    shown = yaml.safe_load(ran.out)
    assert ran.code == Exit.OK
    assert "checked 3 listeners, 1 link, 1 mapping file" in ran.err
    assert shown["limits"]["hops_max"] == 8
    assert shown["journal"] == {"enabled": False}
    assert shown["links"]["erp"].keys() & {"declare", "qos", "durable_subscriptions"} == {"declare"}
    assert {name for name, one in shown["listeners"].items() if "qos_max" in one} == {"mqtt"}
    assert {name for name, one in shown["listeners"].items() if "virtual_hosts" in one} == {
        "amqp091",
        "amqpfast",
    }
    (tmp_path / "again.yaml").write_text(ran.out.replace("**********", "hush"))
    again = run("check", "--config", str(tmp_path / "again.yaml"), "--print")
    assert (again.code, again.out) == (Exit.OK, ran.out)


LISTENERS = (
    "listeners: {mqtt: {protocol: mqtt}, web: {protocol: mqtt, port: 1}, amqp091: {protocol: amqp091}}\n"
)


def test_a_listener_that_no_route_names_is_a_warning(tmp_path: Path, run: Run) -> None:
    ran = run("check", "--config", configuration(tmp_path, ROUTE, LISTENERS))
    said = "gateway.yaml:2:37: warning: listeners.web: no route names it, so its clients' messages are"
    assert said in ran.out
    assert ran.code == Exit.OK
    strict = run("check", "--strict", "--config", configuration(tmp_path, ROUTE, LISTENERS))
    assert (strict.code, strict.out) == (Exit.CONFIGURATION, ran.out)
    shipped = tmp_path / "shipped.yaml"
    shipped.write_text(f"mappings: [identity.yaml]\n{LISTENERS}")
    assert "listeners." not in run("check", "--config", str(shipped)).out


def test_the_default_configuration_is_right(run: Run) -> None:
    assert run("check").code == Exit.OK


WRONG = [
    (ROUTE, "htp: {}\n", "gateway.yaml:2:1: error: htp: unknown key; did you mean 'http'? (invalid)"),
    (ROUTE.replace("mqtt", "nobody"), "", "mapping.yaml:"),
    (ROUTE.replace("topic:", "tpic:"), "", "mapping.yaml:4:28: error: routes[0].from.tpic"),
    (
        ROUTE,
        "http: {token_file: /absent}\n",
        "gateway.yaml:2:8: error: http.token_file: /absent cannot be read: no such file",
    ),
    (
        f"{ROUTE}    settle: stored\n",
        "",
        "mapping.yaml:3:5: error: route 'up': settle: stored is only for links",
    ),
    (
        f"{ROUTE}    settle: stored\n".replace("amqp091", "erp"),
        "links: {erp: {url: 'amqp://h'}}\nstore: {enabled: false}\n",
        "mapping.yaml:3:5: error: route 'up': settle: stored needs the store",
    ),
    (
        ROUTE,
        "links: {erp: {url: 'amqp://h', password_file: /absent}}\n",
        "gateway.yaml:2:32: error: links.erp.password_file: /absent cannot be read: no such file",
    ),
    (ROUTE, "users: {ann: {password_hash: hush}}\n", "users.ann.password_hash: not an Argon2 hash"),
    (ROUTE, "users: {ann: {scram: hush}}\n", "users.ann.scram: "),
]


@pytest.mark.parametrize("mapping, more, expected", WRONG)
def test_what_is_wrong_is_told_with_its_place(
    tmp_path: Path, run: Run, mapping: str, more: str, expected: str
) -> None:
    path = configuration(tmp_path, mapping, more)
    ran = run("check", "-c", path)
    assert ran.code == Exit.CONFIGURATION
    assert expected in ran.out
    document = json.loads(run("check", "-c", path, "--json").out)
    assert document["ok"] is False
    assert document["findings"][0]["severity"] == "error"


def test_a_glob_that_finds_nothing_is_a_warning(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(f"mappings: ['{tmp_path}/*.yml']\n")
    ran = run("check", "-c", str(path))
    assert ran.code == Exit.OK
    assert f"{path}:1:12: warning: mappings[0]: no file matches {tmp_path}/*.yml (empty)" in ran.out


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_bytes(b"")
    more = f"store: {{path: {tmp_path}/file}}\njournal: {{enabled: true, path: {tmp_path}/file/journal}}\n"
    ran = run("check", "-c", configuration(tmp_path, ROUTE, more))
    assert ran.code == Exit.OK
    assert f"gateway.yaml:2:9: warning: store.path: {tmp_path}/file is a file, not a folder" in ran.out
    assert f"gateway.yaml:3:26: warning: journal.path: {tmp_path}/file is a file, not a folder" in ran.out


def test_json_holds_the_masked_configuration(tmp_path: Path, run: Run) -> None:
    path = configuration(tmp_path, ROUTE, "links: {erp: {url: 'amqp://u:hush@h'}}\n")
    ran = run("check", "-c", path, "--json", "--print")
    assert "hush" not in ran.out
    assert "configuration" not in json.loads(run("check", "-c", path, "--json").out)
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
    assert len(keys.salt) == SALT_BYTES
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
    said = (
        "listeners.fast.out_of_band.folder: no folder /absent. Create it; until"
        " then, channels that name it are closed (absent)"
    )
    assert f"gateway.yaml:2:78: warning: {said}" in ran.out
    assert ran.code == Exit.OK


def test_what_is_declared_is_tried(tmp_path: Path, run: Run) -> None:
    (tmp_path / "definitions.json").write_text('{"users": [{}], "queues": [{"name": "a", "vhost": "/"}]}')
    right = f"declare:\n  definitions: {tmp_path}/definitions.json\n  queues: [{{name: a}}]\n"
    ran = run("check", "-c", configuration(tmp_path, ROUTE, right))
    assert ran.code == Exit.OK
    assert (
        f"{tmp_path}/definitions.json: note: ignored, because the gateway does not support it: users (1)"
        in ran.out
    )
    wrong = f"{right}  bindings:\n    - {{source: x, destination: a}}\n"
    ran = run("check", "-c", configuration(tmp_path, ROUTE, wrong))
    assert ran.code == Exit.CONFIGURATION
    assert "gateway.yaml:6:7: error: declare.bindings[0]: NOT_FOUND - no exchange 'x' in vhost '/'" in ran.out
    (tmp_path / "definitions.json").unlink()
    ran = run("check", "-c", configuration(tmp_path, ROUTE, right))
    assert ran.code == Exit.CONFIGURATION
    assert f"{tmp_path}/definitions.json: error: cannot be read: No such file" in ran.out


def test_each_fault_is_a_finding_of_its_own(tmp_path: Path, run: Run) -> None:
    path = configuration(tmp_path, ROUTE.replace("name: up", "nam: up, x: 1"), "htp: {}\nlgo: {}\n")
    found = json.loads(run("check", "-c", path, "--json").out)["findings"]
    assert [(one["line"], one["column"], one["severity"], one["code"]) for one in found] == [
        (2, 1, "error", "invalid"),
        (3, 1, "error", "invalid"),
    ]
    assert [one["message"].partition(":")[0] for one in found] == ["htp", "lgo"]
    assert {one["file"] for one in found} == {path}
    assert run("run", "-c", path).err.splitlines() == run("check", "-c", path).out.splitlines()[:-1]
    mapping = ROUTE.replace("name: up", "nam: up").replace("exchange:", "exchnge:")
    found = json.loads(run("check", "-c", configuration(tmp_path, mapping), "--json").out)["findings"]
    wrong = [one for one in found if one["severity"] == "error"]
    assert [one["line"] for one in wrong] == [3, 3, 5]
    assert {one["file"] for one in wrong} == {str(tmp_path / "mapping.yaml")}


CEL = """version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: "a/#"}
    to: {endpoint: amqp091, queue: x}
    when: WHEN
"""


@pytest.mark.parametrize(
    "said, line, column",
    [
        ("qos ==", 6, 17),
        ("'qos == 1 1'", 6, 21),
        ('"qos == 1 1"', 6, 21),
        ("|\n      qos == 1 &&\n      qos == 2 2", 8, 16),
        (">\n      qos == 1 &&\n      qos == 2 2", 6, 5),
        ('"qos == \\x31 1"', 6, 5),
        ("body.x == 'a", 6, 21),
    ],
)
def test_an_expression_that_is_none_is_one_finding_where_it_breaks(
    tmp_path: Path, run: Run, said: str, line: int, column: int
) -> None:
    path = configuration(tmp_path, CEL.replace("WHEN", said))
    wrong = [one for one in run("check", "-c", path).out.splitlines() if ": error: " in one]
    assert len(wrong) == 1, wrong
    assert wrong[0].startswith(f"{tmp_path}/mapping.yaml:{line}:{column}: error: "), wrong
    assert "not a CEL expression: " in wrong[0]


def test_every_finding_about_a_route_has_its_column(tmp_path: Path, run: Run) -> None:
    """Of the linter, of what is not bound, and of tests that fail: editors go to the place."""
    more = """declare: {queues: [{name: other}]}
"""
    mapping = (
        ROUTE
        + """tests:
  - name: wrong on purpose
    publish: {endpoint: mqtt, topic: b}
    expect: [{endpoint: amqp091, routing_key: other}]
"""
    )
    path = configuration(tmp_path, mapping, more)
    found = json.loads(run("check", "-c", path, "--json").out)["findings"]
    placed = [one for one in found if one["file"] == str(tmp_path / "mapping.yaml")]
    assert placed
    assert [one for one in placed if not one["column"]] == []
    told = run("test", str(tmp_path / "mapping.yaml"))
    line = ROUTE.count("\n") + 2
    assert f"{tmp_path}/mapping.yaml:{line}:5: error: test 'wrong on purpose'" in told.out


def test_a_brace_without_quotes_is_explained(tmp_path: Path, run: Run) -> None:
    for name in ("{rest...}", "{a}/{b}"):
        path = configuration(tmp_path, ROUTE.replace('"a/#"', name))
        ran = run("check", "-c", path)
        assert ran.code == Exit.CONFIGURATION
        assert 'YAML reads a text that begins with { as a table: put it in quotes, as "{name}"' in ran.out, (
            name
        )
    path = configuration(tmp_path, ROUTE.replace("to: {", "to: {{"))
    assert "in quotes" not in run("check", "-c", path).out


def test_relative_paths_are_not_those_of_the_files_folder(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for folder in (here, there):
        configuration(folder, ROUTE)
    (there / "gateway.yaml").write_text("mappings: [mapping.yaml]\nstore: {path: data}\n")
    monkeypatch.chdir(here)
    said = run("check", "-c", str(there / "gateway.yaml")).out
    assert (
        f"{there}/gateway.yaml:2:9: warning: store.path: data is relative to the"
        f" working directory {here}, not to {there}, the folder of this file (relative)"
    ) in said
    assert "mappings[0]" not in said, "which are taken from there"
    monkeypatch.chdir(there)
    assert "(relative)" not in run("check", "-c", "gateway.yaml").out
    (there / "gateway.yaml").write_text("mappings: [identity.yaml]\n")
    monkeypatch.chdir(here)
    assert "(relative)" not in run("check", "-c", str(there / "gateway.yaml")).out, "that one comes with us"


def test_a_message_is_explained(tmp_path: Path, run: Run) -> None:
    mapping = ROUTE.replace("to:", "when: body.t > 1\n    to:")
    path = configuration(tmp_path, mapping)
    asked = ("explain", "mqtt", "--topic", "a/b", "-c", path)
    assert "when body.t > 1\n" in run(*asked).out
    (tmp_path / "body").write_text('{"t": 2}')
    said = run(*asked, "--body", f"@{tmp_path}/body", "--header", "a=b", "--qos", "2").out
    assert "when body.t > 1  (true)\n" in said
    assert 'as qos 2, headers {"a":"b"}, body {"t": 2}\n' in said
    false = run(*asked, "--body", '{"t": 0}').out
    assert "when body.t > 1  (the condition is false for this message)\n" in false
    assert json.loads(run(*asked, "--qos", "1", "--json").out)["matches"][0]["why"].startswith("cannot be")
    for wrong in (("--body", f"@{tmp_path}/none"), ("--header", "a"), ("--qos", "3")):
        assert run(*asked, *wrong).code == Exit.USAGE, wrong


def test_a_listener_that_believes_no_balancer_is_a_warning(tmp_path: Path, run: Run) -> None:
    listeners = (
        "listeners:\n  mqtt: {protocol: mqtt, proxy_protocol: required}\n  amqp091: {protocol: amqp091}\n"
    )
    ran = run("check", "--config", configuration(tmp_path, ROUTE, listeners))
    assert ran.code == Exit.OK
    assert "gateway.yaml:3:26: warning: listeners.mqtt.proxy_protocol: no client can connect." in ran.out


URLS = [
    "amqp://u:topsecret#1@h/",
    "amqp://u:topsecret?1@h/",
    "amqp://u:topsecret/1@h/",
    "amqp://u:topsecret@h:port/",
    "amqp://u:topsecret@[h/",
    "amqp://u:topsecret\u2100@h/",
    "ampq://u:topsecret@h/",
    "u:topsecret@h",
    "mqtt://u:topsecret@h/path",
    "amqp://u:topsecret@/",
    "http://u:topsecret@h/",
    "http://u:topsecret/1@h/",
]


@pytest.mark.parametrize("url", URLS)
def test_no_password_of_an_address_is_repeated(tmp_path: Path, run: Run, url: str) -> None:
    for more in (
        {"links": {"erp": {"url": url}}},
        {"links": {"erp": {"urls": [url, "amqp://other"]}}},
        {"links": {"erp": {"address": url}}},
        {"authentication": [{"backend": "http", "user_url": url}]},
        {"authentication": [{"backend": "jwt", "keys_url": url}]},
        {"tracing": {"url": url, "enabled": True}},
        {"authorizer": {"vhost_url": url, "resource_url": url, "topic_url": url}},
    ):
        path = tmp_path / "gateway.yaml"
        path.write_text(yaml.safe_dump(more, allow_unicode=True))
        for arguments in (("check",), ("check", "--json"), ("check", "--print")):
            ran = run(*arguments, "--config", str(path))
            assert "topsecret" not in ran.out + ran.err, (more, arguments)
    publish = ("publish", url, "x", "--body", "y")
    commands = ("status",), ("tap",), ("tokens", "list"), ("routes", "list")
    for arguments in (publish, *((*command, "--url", url) for command in commands)):
        ran = run(*arguments)
        assert ran.code == Exit.USAGE
        assert "topsecret" not in ran.out + ran.err


def test_certificates_and_keys_that_do_not_fit(tmp_path: Path, run: Run) -> None:
    files = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        files[name] = self_signed(tmp_path / name)
    (one, one_key), (_, two_key) = files.values()
    empty = tmp_path / "empty.pem"
    empty.touch()
    for certificate, key, reason in (
        (one, one_key, ""),
        (one, two_key, f"the key in {two_key} is not that of the certificate in {one}"),
        (one_key, one, f"cert_file and key_file are swapped: {one_key} holds a key, {one} a certificate"),
        (empty, one_key, f"{empty} holds no certificate in PEM"),
        (one, empty, f"{empty} holds no private key in PEM"),
    ):
        pair = {"cert_file": str(certificate), "key_file": str(key)}
        for more, place in (
            ({"listeners": {"mqtt": {"protocol": "mqtt", "tls": pair}}}, "listeners.mqtt.tls.cert_file"),
            ({"http": {"tls": pair}}, "http.tls.cert_file"),
            ({"links": {"erp": {"url": "amqps://h", "tls": pair}}}, "links.erp.tls.cert_file"),
        ):
            ran = run("check", "--config", configuration(tmp_path, ROUTE, yaml.safe_dump(more)))
            if reason:
                assert ran.code == Exit.CONFIGURATION
                assert f"error: {place}: {reason} (certificate)" in ran.out
            else:
                assert "(certificate)" not in ran.out


def test_a_key_with_a_password_is_told_and_nobody_is_asked_for_it(tmp_path: Path, run: Run) -> None:
    certificate, key = self_signed(tmp_path)
    hidden = tmp_path / "hidden.pem"
    command = ["openssl", "rsa", "-aes128", "-passout", "pass:x", "-in", str(key), "-out", str(hidden)]
    subprocess.run(command, check=True, capture_output=True)
    pair = {"cert_file": str(certificate), "key_file": str(hidden)}
    more = yaml.safe_dump({"listeners": {"mqtt": {"protocol": "mqtt", "tls": pair}}})
    ran = run("check", "--config", configuration(tmp_path, ROUTE, more))
    assert f"the key in {hidden} is encrypted" in ran.out
