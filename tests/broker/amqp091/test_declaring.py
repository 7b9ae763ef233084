"""What the configuration declares at the embedded broker: what is taken, refused, and told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import structlog

from gateway.app import Gateway
from gateway.broker.amqp091.declarations import gather, rehearse
from gateway.cli.checks import find_mapping_faults, rehearse_declarations
from gateway.errors import ConfigurationError
from gateway.mapping.linter import Severity
from gateway.settings import Settings, load_settings

TREE: Final = """declare:
  exchanges:
    - {name: orders, type: topic, arguments: {alternate-exchange: amq.fanout}}
    - {name: "amq.topic", type: topic}
  queues:
    - {name: "a: b / ü", arguments: {x-queue-type: quorum, note: ["of", 1.5, null, {deep: true}]}}
    - {name: brief, durable: false, arguments: {x-message-ttl: 1000}}
  bindings:
    - {source: orders, destination: "a: b / ü", routing_key: "#"}
    - {source: amq.topic, destination: orders, destination_type: exchange, routing_key: "plant.#"}
    - {source: amq.headers, destination: brief, arguments: {x-match: any, kind: 1}}
"""


def settings_of(folder: Path, text: str, more: str = "store: {enabled: false}\n") -> Settings:
    path = folder / "gateway.yaml"
    path.write_text(f"http: {{enabled: false}}\n{more}{text}")
    return load_settings(path, {})


def said(settings: Settings) -> list[tuple[Severity, str]]:
    declared, findings = gather(settings)
    return [(one.severity, one.text) for one in (*findings, *rehearse(settings, declared)[1])]


def exported(folder: Path, **given: Any) -> str:
    (folder / "definitions.json").write_text(json.dumps(given))
    return f"declare: {{definitions: {folder}/definitions.json}}\n"


def test_it_is_there_when_the_gateway_is_made(tmp_path: Path) -> None:
    host = Gateway(settings_of(tmp_path, TREE)).host
    assert host.exchanges["orders"].alternate == "amq.fanout"
    assert {"a: b / ü", "brief"} <= host.queues.keys()
    assert host.queues["a: b / ü"].options.quorum
    assert host.queues["brief"].options.ttl_ms == 1000
    assert host.bindings == 3
    assert [queue.name for queue in host.route_keys("amq.topic", ["plant.l1"], None)] == ["a: b / ü"]


def test_twice_is_once(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, TREE)
    declared, _ = gather(settings)
    hosts, _ = rehearse(settings, [*declared, *declared])
    assert (len(hosts["/"].queues), hosts["/"].bindings) == (2, 3)


WRONG: Final = [
    (
        "queues: [{name: amq.mine}]",
        "queues[0]: ACCESS_REFUSED - queue name 'amq.mine' contains",
    ),
    ("exchanges: [{name: amq.mine, type: topic}]", "exchanges[0]: ACCESS_REFUSED - exchange name 'amq.mine'"),
    ("exchanges: [{name: amq.topic, type: direct}]", "inequivalent arg 'type' for exchange 'amq.topic'"),
    ("queues: [{name: a, arguments: {x-max-length: -1}}]", "invalid arg 'x-max-length' for queue 'a'"),
    ("queues: [{name: a, arguments: {x-queue-type: stream}}]", "unsupported queue type 'stream'"),
    ("queues: [{name: a, durable: false, arguments: {x-queue-type: quorum}}]", "invalid property 'non-dur"),
    (
        "queues: [{name: a}, {name: a, auto_delete: true}]",
        "queues[1]: PRECONDITION_FAILED - inequivalent arg",
    ),
    ("bindings: [{source: amq.topic, destination: a}]", "NOT_FOUND - no queue 'a' in vhost '/'; declare it"),
    (
        "queues: [{name: a}]\n  bindings: [{source: x, destination: a}]",
        "NOT_FOUND - no exchange 'x'",
    ),
    (
        "queues: [{name: a}]\n  bindings: [{source: amq.headers, destination: a, arguments: {x-match: al}}]",
        "bindings[0]: PRECONDITION_FAILED - Invalid x-match field value",
    ),
    ("queues: [{name: a, vhost: plnt}]", "vhost: no listener serves 'plnt'"),
    ("queues: [{name: a}, {name: b}, {name: c}]", "RESOURCE_ERROR - limits.queues_max (2) is reached"),
]


@pytest.mark.parametrize("text, expected", WRONG)
def test_what_cannot_be_is_told_by_check_and_start_alike(tmp_path: Path, text: str, expected: str) -> None:
    settings = settings_of(tmp_path, f"declare:\n  {text}\n", "limits: {queues_max: 2}\n")
    told = [text for severity, text in said(settings) if severity is Severity.ERROR]
    assert len(told) == 1
    assert expected in told[0]
    with pytest.raises(ConfigurationError) as refused:
        Gateway(settings.model_copy(update={"store": settings.store.model_copy(update={"enabled": False})}))
    assert str(refused.value).startswith(f"{tmp_path}/gateway.yaml:")
    assert expected in str(refused.value)


REMARKS: Final = [
    (
        "queues: [{name: a, arguments: {x-max-lenght: 1}}]",
        "arguments.x-max-lenght: not supported, so it has no effect; did you mean 'x-max-length'?",
    ),
    (
        "exchanges: [{name: a, type: topic, arguments: {x-delay: 1}}]",
        "arguments.x-delay: not supported, so it has no effect",
    ),
    ("queues: [{name: a, arguments: {x-dead-letter-exchange: dlx}}]", "it refers to exchange 'dlx', which"),
    ("queues: [{name: a, auto_delete: true}]", "auto_delete: 'a' is deleted when its last"),
]


@pytest.mark.parametrize("text, expected", REMARKS)
def test_what_was_hardly_meant_is_a_warning(tmp_path: Path, text: str, expected: str) -> None:
    ((severity, told),) = said(settings_of(tmp_path, f"declare:\n  {text}\n"))
    assert severity is Severity.WARNING
    assert expected in told


def test_thousands_of_faults_are_not_thousands_of_lines(tmp_path: Path) -> None:
    text = exported(tmp_path, queues=[{"name": f"q{at}"} for at in range(2_000)])
    told = said(settings_of(tmp_path, text, "limits: {queues_max: 5}\n"))
    assert len(told) == 21
    assert told[-1] == (Severity.ERROR, "declare: 1975 more findings of this kind")


def test_without_a_listener_for_it_that_is_a_warning(tmp_path: Path) -> None:
    text = "listeners: {m: {protocol: mqtt}}\ndeclare: {queues: [{name: a}]}\n"
    assert said(settings_of(tmp_path, text)) == [
        (
            Severity.WARNING,
            (
                "declare: no listener uses AMQP 0-9-1, so no client can reach the declared"
                " queues. Add a listener, or remove declare"
            ),
        )
    ]


# The store.


def test_a_restart_finds_it_as_it_is(tmp_path: Path) -> None:
    limits = "limits: {queues_max: 2, exchanges_max: 6, bindings_max: 3}\n"  # not one more than there is
    lasting = TREE.replace("durable: false, ", "")
    settings = settings_of(tmp_path, lasting, f"{limits}store: {{path: {tmp_path}/data}}\n")
    for _ in range(2):
        gateway = Gateway(settings)
        assert gateway.store is not None
        assert (len(gateway.host.queues), gateway.host.bindings) == (2, 3)
        gateway.store.close()


def test_what_does_not_last_is_declared_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, TREE, f"store: {{path: {tmp_path}/data}}\n")
    for _ in range(2):
        gateway = Gateway(settings)
        assert gateway.store is not None
        assert (len(gateway.host.queues), gateway.host.bindings) == (2, 3)
        gateway.store.close()


def test_what_the_store_has_otherwise_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    store = f"store: {{path: {tmp_path}/data}}\n"
    before = "declare: {queues: [{name: a, arguments: {x-max-length: 10}}]}\n"
    first = Gateway(settings_of(tmp_path, before, store))
    assert first.store is not None
    first.store.close()
    after = "declare:\n  queues:\n    - {name: new}\n    - {name: a, arguments: {x-max-length: 20}}\n"
    with pytest.raises(ConfigurationError) as refused:
        Gateway(settings_of(tmp_path, after, store))
    assert str(refused.value) == (
        f"{tmp_path}/gateway.yaml:6:7: declare.queues[1]: PRECONDITION_FAILED - inequivalent arg"
        " 'x-max-length' for queue 'a' in vhost '/': received '20' but current is"
        " '10'; it exists with other properties, from an earlier start or another"
        " declaration. Declare it with the same properties, or delete the existing one"
    )
    last = Gateway(settings_of(tmp_path, before, store))
    assert last.store is not None
    assert last.host.queues.keys() == {"a"}
    last.store.close()


def test_a_queue_of_the_configuration_is_nobodys(tmp_path: Path) -> None:
    """Whoever connects without a name has a share of his own, and a restart knows whose the queues are."""
    more = f"limits: {{queues_max: 10}}\nstore: {{path: {tmp_path}/data}}\n"
    text = "declare: {queues: [" + ", ".join(f"{{name: q{at}}}" for at in range(10)) + "]}\n"
    for _ in range(2):
        gateway = Gateway(settings_of(tmp_path, text, more))
        assert gateway.store is not None
        assert {queue.user for queue in gateway.host.queues.values()} == {None}
        gateway.host.delete_queue(gateway.host.queues["q9"])
        gateway.host.declare_queue(
            "q9", self_, user="", durable=False, exclusive=False, auto_delete=False, arguments=()
        )
        gateway.store.close()


self_ = object()


@pytest.mark.needs("time")  # ten thousand of them
def test_ten_thousand_queues(tmp_path: Path) -> None:
    names = [f"q{at}" for at in range(10_000)]
    queues = [
        {"name": name, "vhost": "/", "durable": True, "auto_delete": False, "arguments": {}} for name in names
    ]
    bindings = [
        {
            "source": "amq.topic",
            "vhost": "/",
            "destination": name,
            "destination_type": "queue",
            "routing_key": name,
            "arguments": {},
        }
        for name in names
    ]
    text = exported(tmp_path, queues=queues, bindings=bindings)
    settings = settings_of(tmp_path, text, f"store: {{path: {tmp_path}/data}}\n")
    for _ in range(2):
        gateway = Gateway(settings)
        assert (len(gateway.host.queues), gateway.host.bindings) == (10_000, 10_000)
        assert gateway.store is not None
        gateway.store.close()


# Files of RabbitMQ.


def test_what_means_nothing_here_is_passed_over_and_counted(tmp_path: Path) -> None:
    text = exported(
        tmp_path,
        rabbit_version="3.10.8",
        users=[{"name": "guest"}],
        policies=[],
        global_parameters=[{"name": "cluster_name"}],
        vhosts=[{"name": "/"}, {"name": "other"}],
        queues=[
            {"name": "a", "vhost": "/", "type": "quorum", "arguments": []},
            {"name": "b", "vhost": "other"},
            {"name": "amq.gen-1", "vhost": "/"},
        ],
        exchanges=[],
        bindings=[
            {"source": "amq.topic", "vhost": "/", "destination": "amq.gen-1"},
            {"source": "amq.rabbitmq.trace", "vhost": "/", "destination": "a"},
            {"source": "amq.topic", "vhost": "/", "destination": "a"},
        ],
    )
    settings = settings_of(tmp_path, text)
    assert said(settings) == [
        (
            Severity.NOTE,
            (
                "ignored, because the gateway does not support it: users (1),"
                " global_parameters (1), objects in virtual host 'other', which no listener"
                " serves (1), queues with server-generated names (1)"
            ),
        ),
        (
            Severity.NOTE,
            "ignored: bindings whose exchange or queue is not in the export (2)",
        ),
    ]
    declared, _ = gather(settings)
    assert [(one.kind, one.thing.arguments) for one in declared] == [
        ("queues", {"x-queue-type": "quorum"}),
        ("bindings", {}),
    ]


BROKEN: Final = [
    ("{", "definitions.json:1:2: not JSON"),
    ("[]", "not a RabbitMQ definitions file"),
    ('{"users": []}', "not a RabbitMQ definitions file"),
    ('{"queues": {}}', "queues: must be a list"),
    ('{"queues": [7]}', "queues[0]: must be a table"),
    ('{"queues": [{"vhost": "/"}]}', "queues[0]: needs 'name'"),
    ('{"exchanges": [{"name": "d", "type": "x-recent-history"}]}', "exchanges[0] ('d'): type: input should"),
    ('{"queues": [{"name": "a", "type": "stream"}]}', "unsupported queue type 'stream'"),
    ('{"queues": [{"name": "\\ud800"}]}', "not JSON"),
    ('{"queues": [{"name": "' + "é" * 128 + '"}]}', "256 bytes; the maximum is 255"),
]


@pytest.mark.parametrize("data, expected", BROKEN)
def test_a_file_that_cannot_be_taken_is_told(tmp_path: Path, data: str, expected: str) -> None:
    text = exported(tmp_path)
    (tmp_path / "definitions.json").write_text(data)
    with pytest.raises(ConfigurationError) as refused:
        Gateway(settings_of(tmp_path, text))
    assert str(refused.value).startswith(f"{tmp_path}/definitions.json")
    assert expected in str(refused.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent.json: cannot be read"):
        Gateway(settings_of(tmp_path, "declare: {definitions: [absent.json]}\n"))


def test_a_file_and_the_configuration_agree_or_it_is_told(tmp_path: Path) -> None:
    text = exported(tmp_path, queues=[{"name": "a", "vhost": "/", "durable": False}])
    text = text.replace("{definitions:", "{queues: [{name: a}], definitions:")
    (told,) = said(settings_of(tmp_path, text))
    assert told[1].startswith("queues[0]: PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'a'")


def test_the_start_says_what_it_has_declared(tmp_path: Path) -> None:
    fast = (
        "listeners:\n  a: {protocol: amqp091}\n"
        "  f: {protocol: amqpfast, virtual_hosts: {x: {destinations: {queues: [q], topics: [t, u]}}}}\n"
    )
    with structlog.testing.capture_logs() as logs:
        Gateway(settings_of(tmp_path, TREE + fast))
    (line,) = [one for one in logs if one["event"] == "configured exchanges and queues declared"]
    assert {key: line[key] for key in ("exchanges", "queues", "bindings", "destinations", "new_count")} == {
        "exchanges": 2,
        "queues": 2,
        "bindings": 3,
        "destinations": 3,
        "new_count": 6,
    }


# Routes that lead where nothing is bound.

ROUTES: Final = """version: 1
routes:
  - name: brought
    from: {{endpoint: plant, topic: "a/#"}}
    to: {{endpoint: amqp091, {target}}}
  - name: published
    from: {{endpoint: mqtt, topic: "a/#"}}
    to: {{endpoint: amqp091, {target}}}
"""
NOTE, WARNING = Severity.NOTE, Severity.WARNING
ELSEWHERE: Final = "queues: [{name: other}]"
UNBOUND: Final = [
    ("exchange: amq.topic, routing_key: x", "", [("brought", NOTE)]),
    ("exchange: amq.topic, routing_key: x", ELSEWHERE, [("brought", WARNING), ("published", NOTE)]),
    ("exchange: absent, routing_key: x", ELSEWHERE, [("brought", WARNING), ("published", NOTE)]),
    ("queue: absent", ELSEWHERE, [("brought", WARNING), ("published", NOTE)]),
    ("queue: other", ELSEWHERE, []),
    ('queue: "{topic...}"', ELSEWHERE, []),
    ('exchange: "{client_id}", routing_key: x', ELSEWHERE, []),
    ("exchange: amq.topic, routing_key: x, mandatory: false", ELSEWHERE, []),
    (
        "exchange: amq.topic, routing_key: x",
        f"{ELSEWHERE}\n  bindings: [{{source: amq.topic, destination: other}}]",
        [],
    ),
    (  # a circle that leads nowhere
        "exchange: amq.topic, routing_key: x",
        "bindings: [{source: amq.topic, destination: amq.fanout, destination_type: exchange},"
        " {source: amq.fanout, destination: amq.topic, destination_type: exchange}]",
        [("brought", WARNING), ("published", NOTE)],
    ),
    (
        "exchange: e, routing_key: x",
        "exchanges: [{name: e, type: fanout, arguments: {alternate-exchange: amq.fanout}}]\n"
        "  queues: [{name: q}]\n  bindings: [{source: amq.fanout, destination: q}]",
        [],
    ),
]


@pytest.mark.parametrize("target, declared, expected", UNBOUND)
def test_a_route_that_leads_where_nothing_is_bound_is_told(
    tmp_path: Path, target: str, declared: str, expected: list[tuple[str, Severity]]
) -> None:
    (tmp_path / "mapping.yaml").write_text(ROUTES.format(target=target))
    more = f"links: {{plant: {{url: 'mqtt://h'}}}}\nmappings: ['{tmp_path}/mapping.yaml']\n"
    settings = settings_of(tmp_path, f"declare:\n  {declared}\n", more)
    found = [
        one for one in find_mapping_faults(settings, rehearse_declarations(settings)) if one.code == "unbound"
    ]
    assert [(one.text.split("'")[1], one.severity) for one in found] == expected
    assert all((one.file, bool(one.line)) == (f"{tmp_path}/mapping.yaml", True) for one in found)


def test_what_is_bound_is_not_known_while_the_declarations_are_wrong(tmp_path: Path) -> None:
    (tmp_path / "mapping.yaml").write_text(ROUTES.format(target="queue: absent"))
    more = f"links: {{plant: {{url: 'mqtt://h'}}}}\nmappings: ['{tmp_path}/mapping.yaml']\n"
    settings = settings_of(tmp_path, "declare: {queues: [{name: amq.x}]}\n", more)
    assert "unbound" not in [
        one.code for one in find_mapping_faults(settings, rehearse_declarations(settings))
    ]
