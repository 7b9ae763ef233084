"""Mapping files that are read, and those that are refused: each complaint names file, line and what to do."""

from __future__ import annotations

from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from gateway.errors import MappingError
from gateway.mapping import load, parse
from gateway.mapping.schema import json_schema

SHIPPED = sorted(Path(__file__).parents[2].joinpath("mappings").glob("*.yaml"))
GOOD = """\
version: 1
routes:
  - name: up
    from: {endpoint: mqtt, topic: a/#}
    to:
      endpoint: erp
      exchange: e
"""
ROUTE = (
    "version: 1\nroutes:\n  - name: up\n    from: {endpoint: m, topic: a}\n    to: {endpoint: n, topic: b}\n"
)


@pytest.mark.parametrize(
    "text, line, reason",
    [
        (GOOD.replace("topic:", "topc:"), 4, "routes[0].from.topc: unknown key; did you mean 'topic'?"),
        (
            GOOD.replace("      exchange: e", "      exchang: e"),
            7,
            "routes[0].to.exchang: unknown key; did you mean",
        ),
        (GOOD + "    escape: precent\n", 8, "not 'precent'; did you mean 'percent'?"),
        (GOOD + "    headers: {a: [1]}\n", 8, "routes[0].headers.a: "),
        (GOOD + "    retries: 3\n", 8, "routes[0].retries: unknown key; known: "),
        (GOOD + "    deduplicate: true\n", 8, "routes[0].deduplicate: "),
        (GOOD + "    deduplicate: {by: body}\n", 8, "routes[0].deduplicate.by: input should be 'message_id'"),
        (GOOD + "    deduplicate: {}\n", 8, "routes[0].deduplicate: needs 'window'"),
        (
            GOOD + "    deduplicate: {window: 10}\n",
            8,
            "routes[0].deduplicate.window: a number and s, m, h or d, as 10m, not 10",
        ),
        (GOOD + "    deduplicate: {window: 0s}\n", 8, "as 10m, not '0s'"),
        (GOOD + "    deduplicate: {window: 1m, ids_mx: 1}\n", 8, "did you mean 'ids_max'?"),
        (
            GOOD + "    outbox: {messages_max: 1}\n",
            3,
            "routes[0]: outbox needs settle: stored, because only such a route has an outbox",
        ),
        (GOOD + "    attempts_max: 2\n", 3, "attempts_max needs settle: stored"),
        (GOOD + "    settle: stored\n    outbox: {polcy: reject}\n", 9, "did you mean 'policy'?"),
        (GOOD + "    settle: stored\n    outbox: {policy: block}\n", 9, "not 'block'"),
        (GOOD + "    settle: stored\n    outbox: {messages_max: 0}\n", 9, "routes[0].outbox.messages_max"),
        (GOOD + "    optional: 'yes'\n", 8, "routes[0].optional: "),
        (GOOD + "    delivery: {qos1: durable}\n", 8, "not 'durable'"),
        (GOOD + "      qos: 1\n", 5, "routes[0].to: qos is only for topic"),
        (GOOD + "      topic: x\n", 5, "routes[0].to: words of different protocols: topic, exchange"),
        (GOOD + "      queue: x\n", 5, "routes[0].to: queue cannot be combined with exchange"),
        (GOOD.replace("exchange: e", "routing_key: e"), 5, "routes[0].to: give exchange or queue"),
        (GOOD.replace("exchange: e", "service: topic"), 5, "routes[0].to: service needs destination"),
        (GOOD.replace("exchange: e", "service: peer"), 5, "routes[0].to: routes cannot use a peer"),
        (
            GOOD.replace("exchange: e", "service: peer\n      destination: rpc"),
            5,
            "routes[0].to: routes cannot use a peer service, because it replies on the handle of its caller",
        ),
        (
            GOOD.replace("topic: a/#", "service: peer, destination: rpc"),
            4,
            "routes[0].from: routes cannot use a peer service",
        ),
        (GOOD.replace("\n      exchange: e", ""), 5, "routes[0].to: no address"),
        (GOOD.replace("endpoint: erp", "qos: 1"), 5, "routes[0].to: needs 'endpoint'"),
        (GOOD.replace("name: up", "name: 'an up'"), 3, "routes[0].name: "),
        (GOOD.replace("version: 1", "version: 2"), 1, "version: "),
        (
            GOOD + "tests:\n  - name: t\n    publish: {endpoint: m, topic: x, qos: 3}\n",
            10,
            "tests[0].publish.qos: ",
        ),
        (
            GOOD + "tests:\n  - name: t\n    publish: {endpoint: m}\n    expct: []\n",
            11,
            "did you mean 'expect'?",
        ),
        (GOOD + "version: 1\n", 8, "version: duplicate key, first set in line 1"),
        (ROUTE.replace("topic: b", "topic: b, qos: true"), 5, "routes[0].to.qos: "),
        (
            ROUTE.replace("topic: b", "topic: b, qos: 1") + "    delivery: {persistent: 2}\n",
            3,
            "both set the QoS",
        ),
        ("version: 1\nroutes: []\n", 2, "routes: "),
        ("version: 1\nroutes: [\n", 3, ""),
        ("version: 1\n\troutes: 1\n", 2, "not YAML: found"),
        ("just text", 1, "a YAML mapping"),
        ("", 1, "a YAML mapping"),
        ("version: !!python/object:os.system 1\n", 1, "constructor"),
    ],
)
def test_refused(text: str, line: int, reason: str) -> None:
    with pytest.raises(MappingError) as caught:
        parse(text, "plant.yaml")
    assert caught.value.file == "plant.yaml"
    assert (caught.value.line, reason in str(caught.value)) == (line, True), caught.value
    assert caught.value.column >= 1
    assert str(caught.value).startswith(f"plant.yaml:{line}:{caught.value.column}: ")


def test_all_complaints_are_told_by_line() -> None:
    text = GOOD.replace("topic:", "topc:").replace("exchange:", "exchang:")
    with pytest.raises(MappingError) as caught:
        parse(text, "plant.yaml")
    places = [line.split(": ")[0] for line in str(caught.value).splitlines()]
    assert places == ["plant.yaml:4:28", "plant.yaml:7:7"]


def test_lines_of_places() -> None:
    mapping = parse(GOOD, "plant.yaml")
    assert mapping.position(("routes", 0, "to", "exchange")).line == 7
    assert mapping.position(("routes", 0, "to", "routing_key")).line == 5
    assert str(mapping.error(("routes", 0), "no")) == "plant.yaml:3:5: routes[0]: no"


def test_files(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yaml"):
        tmp_path.joinpath(name).write_text(GOOD)
    first = tmp_path / "a.yaml"
    loaded = load([first, tmp_path / "*.yaml"])
    assert [Path(mapping.file).name for mapping in loaded] == ["a.yaml", "b.yaml"]


@pytest.mark.parametrize(
    "content, name, reason",
    [
        (None, "none.yaml", "cannot be read: No such file"),
        (None, "*.none", "no file matches it"),
        (b"\xff\xfe\xff", "x.yaml", "the file is UTF-16: save it as UTF-8"),
        (b"#" * 4_194_305, "x.yaml", "more than 4194304 bytes"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, content: bytes | None, name: str, reason: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MappingError, match=reason) as caught:
        load([path])
    assert caught.value.file == str(path)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_schema_for_editors_takes_the_shipped_files(file: Path) -> None:
    jsonschema_rs.Draft202012Validator(json_schema()).validate(yaml.safe_load(file.read_text()))


def test_the_schema_for_editors_refuses_unknown_keys() -> None:
    validator = jsonschema_rs.Draft202012Validator(json_schema())
    jsonschema_rs.meta.validate(json_schema())
    assert validator.is_valid(yaml.safe_load(GOOD))
    assert not validator.is_valid(yaml.safe_load(GOOD.replace("topic:", "topc:")))
