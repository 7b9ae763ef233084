"""The configuration: what it means, where a value comes from, and how an error says where to look."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from pydantic import ValidationError

from gateway.errors import ConfigurationError
from gateway.model_docs import attribute_docs
from gateway.settings import (
    AmqpLink,
    Limits,
    LinkUrl,
    MqttLink,
    Settings,
    json_schema,
    load_settings,
    masked_yaml,
    parse_url,
)
from gateway.settings.endpoints import MASK
from tests.docs.pages import PAGES

ERP = "links:\n  erp:\n    url: amqps://gateway@rabbit.internal/prod\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "gateway.yaml"
    path.write_text(text)
    return path


def test_without_a_file_everything_has_a_default() -> None:
    settings = load_settings(None, {})
    ports = {name: (one.protocol, one.port) for name, one in settings.listeners.items()}
    assert ports == {"mqtt": ("mqtt", 1883), "amqp091": ("amqp091", 5672), "amqpfast": ("amqpfast", 3018)}
    assert [path.name for path in settings.mapping_files()] == ["identity.yaml"]
    assert settings.links == {}


def test_an_empty_file_is_no_file(tmp_path: Path) -> None:
    assert load_settings(written(tmp_path, "# nothing\n"), {}) == load_settings(None, {})
    assert load_settings(written(tmp_path, "links:\nlisteners:\n"), {}) == load_settings(None, {})


PORTS = [
    ("protocol: mqtt", 1883),
    ("protocol: mqtt, tls: {cert_file: c, key_file: k}", 8883),
    ("protocol: mqtt, websocket_path: /mqtt", 8083),
    ("protocol: mqtt, websocket_path: /mqtt, tls: {cert_file: c, key_file: k}", 8084),
    ("protocol: amqp091", 5672),
    ("protocol: amqp091, tls: {cert_file: c, key_file: k}", 5671),
    ("protocol: amqpfast", 3018),
    ("protocol: mqtt, port: 0", 0),
]


@pytest.mark.parametrize("listener, port", PORTS)
def test_a_listener_has_the_port_of_its_protocol(tmp_path: Path, listener: str, port: int) -> None:
    settings = load_settings(written(tmp_path, f"listeners:\n  one: {{{listener}}}\n"), {})
    assert settings.listeners["one"].port == port


def test_the_environment_is_over_the_file(tmp_path: Path) -> None:
    text = "listeners:\n  Plant-A: {protocol: mqtt, port: 1}\n" + ERP + "limits: {hops_max: 3}\n"
    env = {
        "GATEWAY_CONFIG": str(written(tmp_path, text)),
        "GATEWAY_LISTENERS__PLANT_A__PORT": "1884",
        "GATEWAY_LISTENERS__AMQP__PROTOCOL": "amqp091",
        "GATEWAY_LINKS__ERP__PASSWORD": "1234",
        "GATEWAY_LINKS__ERP__REQUIRED": "true",
        "GATEWAY_LINKS__ERP__CONSUMER_PRIORITY": "2",
        "GATEWAY_LINKS__PLANT__URL": "mqtt://plant",
        "GATEWAY_LINKS__PLANT__QOS": "2",
        "GATEWAY_LINKS__PLANT__VERSION": "5.0",
        "GATEWAY_LINKS__ERP__TLS__CA_FILE": "/ca.pem",
        "GATEWAY_MAPPINGS": "[a.yaml, b.yaml]",
        "GATEWAY_LIMITS__CONNECT_TIMEOUT_SECS": "2.5",
        "GATEWAY_REPLICA": "7",
        "GATEWAY_PORT": "tcp://10.0.0.7:1883",
        "GATEWAY_SERVICE_PORT_MQTT": "1883",
        "GATEWAY_PORT_1883_TCP_ADDR": "10.0.0.7",
        "OTHER": "x",
    }
    settings = load_settings(None, env)
    assert settings.listeners["Plant-A"].port == 1884
    assert settings.listeners["amqp"].port == 5672
    link, plant = settings.links["erp"], settings.links["plant"]
    assert isinstance(link, AmqpLink)
    assert (link.required, link.consumer_priority, link.tls.ca_file) == (True, 2, Path("/ca.pem"))
    assert isinstance(plant, MqttLink)
    assert (plant.qos, plant.version) == (2, "5.0")
    assert link.target() == LinkUrl("amqp091", True, "rabbit.internal", 5671, "prod", "gateway", "1234")
    assert settings.mappings == ("a.yaml", "b.yaml")
    assert (settings.limits.hops_max, settings.limits.connect_timeout_secs) == (3, 2.5)
    assert settings.client_id_of("erp") == "gateway-7"


def test_a_variable_changes_a_default_listener_and_keeps_the_other() -> None:
    settings = load_settings(None, {"GATEWAY_LISTENERS__MQTT__PORT": "1884"})
    ports = {name: one.port for name, one in settings.listeners.items()}
    assert ports == {"mqtt": 1884, "amqp091": 5672, "amqpfast": 3018}


FAULTS = [
    ("listners: {}\n", ":1: listners: unknown key; did you mean 'listeners'?"),
    (
        "listeners:\n  a: {protocol: mqtt}\n  b:\n    protocol: mqtt\n    prot: 1\n",
        ":5: listeners.b.prot: unknown key",
    ),
    (ERP + "    prefech: 5\n", ":4:5: links.erp.prefech: unknown key; did you mean 'prefetch'?"),
    (ERP + "    tls: {ca: x}\n", ":4:11: links.erp.tls.ca: unknown key; did you mean 'ca_file'?"),
    ("limits: {hops: 1}\n", ":1:10: limits.hops: unknown key; did you mean 'hops_max'?"),
    ("limits:\n  hops_max: '8'\n", ":2:3: limits.hops_max: input should be a valid integer, not '8'"),
    (
        "limits:\n  hops_max: 0\n",
        ":2:3: limits.hops_max: input should be greater than or equal to 1, not 0",
    ),
    ("http: {port: 70000}\n", ":1:8: http.port: input should be less than or equal to 65535, not 70000"),
    ("listeners: {a: {protocol: mqt}}\n", ":1:17: listeners.a.protocol: input should be 'mqtt', 'amqp091'"),
    ("listeners: {a: {port: 1}}\n", ":1:13: listeners.a: needs 'protocol'"),
    (
        "listeners: {a: {protocol: amqp091, websocket_path: /x}}\n",
        ":1:36: listeners.a.websocket_path: for protocol mqtt only",
    ),
    ("links: {a: {url: 'amqp://x', share: g}}\n", ":1:30: links.a.share: for protocol mqtt only"),
    (
        "links: {a: {url: 'mqtt://x', share: g, version: 3.1}}\n",
        ":1:9: links.a: share needs MQTT 3.1.1 or later",
    ),
    ("links: {a: {url: 'amqp://x', bridge: true}}\n", ":1:30: links.a.bridge: for protocol mqtt only"),
    ("links: {a: {url: 'mqtt://x', share: g/h}}\n", ":1:30: links.a.share: "),
    (
        "links: {a: {url: 'http://x'}}\n",
        ":1:9: links.a: a broker's URL must begin with one of mqtt://, mqtts://",
    ),
    ("links: {a: {url: 'amqp:///x'}}\n", ":1:9: links.a: the URL has no host"),
    ("links: {a: {url: 'amqp://a b/x'}}\n", ":1:9: links.a: the host in the URL has a space"),
    ("links: {a: {url: 'mqtt://a%20b'}}\n", ":1:9: links.a: the host in the URL has a space"),
    ('links: {a: {url: "mqtt://a\\tb"}}\n', ":1:9: links.a: the host in the URL has a space"),
    ("links: {a: {urls: ['mqtts://a', 'mqtts://b,c']}}\n", ":1:9: links.a: the host in the URL has a space"),
    ("links: {a: {url: 'amqp://a/x?heartbeat=5'}}\n", ":1:9: links.a: the URL has a query"),
    ("links: {a: {url: 'mqtt://a?clean=1'}}\n", ":1:9: links.a: the URL has a query"),
    ("links: {a: {url: 'amqpfast://a/x?y'}}\n", ":1:9: links.a: the URL has a query"),
    (
        "links: {a: {url: 'MQTT://x', consumer_priority: 1}}\n",
        "links.a.consumer_priority: for protocol amqp091",
    ),
    ("links: {a: {url: 'mqtt://x/y'}}\n", ":1:9: links.a: the URL of an MQTT broker must not have a path"),
    ("links: {a: {url: 'amqp://u:p@x', password_file: f}}\n", ":1:9: links.a: set the password once"),
    (
        "links: {a: {url: 'amqp://x', reconnect_min_secs: 60}}\n",
        ":1:9: links.a: reconnect_min_secs must not be greater",
    ),
    (
        "links: {a: {url: 'amqp://x', tls: {cert_file: f}}}\n",
        "links.a.tls: set both cert_file and key_file, or neither",
    ),
    ("links: {mqtt: {url: 'mqtt://x'}}\n", "'mqtt' names a listener and a link"),
    ("links: {a: {required: true}}\n", ":1:9: links.a: set url or urls, the address of the broker"),
    (
        "links: {a: {urls: ['amqp://x', 'mqtt://x']}}\n",
        ":1:9: links.a: all urls of a link must have the same protocol",
    ),
    ("links: {a: {url: 'amqp://x', urls: ['amqp://x/v']}}\n", "name the same host and port twice"),
    ("links: {a: {urls: ['amqp://u:p@x', 'amqp://y'], password: f}}\n", "links.a: set the password once"),
    (
        "links: {a: {url: 'mqtt://x', consumer_priority: 1}}\n",
        ":1:30: links.a.consumer_priority: for protocol amqp091 only",
    ),
    ("links: {a: {url: 'amqp://x', qos: 1}}\n", ":1:30: links.a.qos: for protocol mqtt only"),
    (
        "listeners: {a: {protocol: amqp091, anonymous: never}}\n",
        ":1:36: listeners.a.anonymous: for protocol mqtt and amqpfast only",
    ),
    ("listeners: {a: {protocol: amqp091, anonymos: never}}\n", "listeners.a.anonymos: unknown key; known: "),
    ("links: {a: {url: 5, qos: 1}}\n", ":1:13: links.a.url: input should be a valid string"),
    ("links: {'a b': {url: 'mqtt://x'}}\n", "the endpoint name 'a b' must match"),
    (
        "listeners: {a: {protocol: mqtt}, b: {protocol: mqtt}}\n",
        "listeners.a and listeners.b both use port 1883",
    ),
    ("http: {port: 1883}\n", "listeners.mqtt and http both use port 1883"),
    ("dead_letters: {forward: {endpoint: mqtt}}\n", ":1:16: dead_letters.forward: set exactly one address"),
    (
        "dead_letters: {forward: {endpoint: mqtt, topic: a, queue: b}}\n",
        ":1:16: dead_letters.forward: set exactly one address",
    ),
    (
        "dead_letters: {forward: {endpoint: mqtt, topic: a, routing_key: b}}\n",
        ":1:16: dead_letters.forward: routing_key needs exchange",
    ),
    ("dead_letters: {forward: {endpoint: mqtt, topic: a/#}}\n", "topic must not have wildcards"),
    ("dead_letters: {forward: {endpoint: erp, queue: a}}\n", "dead_letters.forward: unknown endpoint 'erp'"),
    (
        "dead_letters: {forward: {endpoint: mqtt, queue: a}}\n",
        "'mqtt' uses mqtt, but the address is for amqp091",
    ),
    (ERP + "    outbox: {policy: block}\n", ":4:14: links.erp.outbox.policy: input should be 'reject'"),
    (ERP + "    outbox: {mesages_max: 1}\n", "did you mean 'messages_max'?"),
    ("users: {ann: {}}\n", ":1:9: users.ann: set one of password_hash and password_hash_file"),
    ("http: {}\nhttp: {}\n", ":2:1: http: duplicate key, first set in line 1"),
    ("http: [1\n", ":2:1: not YAML"),
    ("- a\n", ":1: a configuration must be a table of keys"),
    ("http: {\x00}\n", "not YAML"),
]


@pytest.mark.parametrize("text, expected", FAULTS, ids=[row[1][:50] for row in FAULTS])
def test_an_error_says_where_and_why(tmp_path: Path, text: str, expected: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path, {})
    assert str(caught.value).startswith(str(path))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_fault_is_told_on_a_line_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(written(tmp_path, "a: 1\nb: 2\nhttp: {prt: 1}\n"), {})
    assert len(str(caught.value).splitlines()) == 3


VARIABLES = [
    ("GATEWAY_LISTNERS__MQTT__PORT", "1", "unknown key listners; did you mean 'listeners'?"),
    ("GATEWAY_LISTENERS__MQTT__PROT", "1", "unknown key listeners.mqtt.prot; did you mean 'port'?"),
    (
        "GATEWAY_LISTENERS__MQTT__PORT",
        "x",
        "listeners.mqtt.port: input should be a valid integer, not 'x'",
    ),
    ("GATEWAY_LISTENERS__MQTT__PORT__X", "1", "unknown key listeners.mqtt.port.x"),
    ("GATEWAY_MAPPINGS", "[a", "expected ',' or ']'"),
    ("GATEWAY_MAPPINGS", "{a: 1, a: 2}", ":1:8: a: duplicate key, first set in line 1"),
    ("GATEWAY_MAPPINGS", "7", "mappings: must be a list, each item on its own line after `- `, not 7"),
    ("GATEWAY_LINKS__ERP__PASSWORD__X", "1", "unknown key links.erp.password.x"),
]


@pytest.mark.parametrize("variable, text, expected", VARIABLES)
def test_an_error_names_the_variable(variable: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None, {variable: text})
    assert str(caught.value).startswith(f"environment {variable}:")
    assert expected in str(caught.value)


def test_variables_that_contradict_each_other_are_named() -> None:
    whole = {"GATEWAY_LINKS__ERP__TLS": "null", "GATEWAY_LINKS__ERP__TLS__CA_FILE": "/ca.pem"}
    with pytest.raises(
        ConfigurationError, match=r"__CA_FILE: GATEWAY_LINKS__ERP__TLS sets links.erp.tls to a value, but"
    ):
        load_settings(None, whole)
    twice = {"GATEWAY_REPLICA": "a", "GATEWAY_replica": "b"}
    with pytest.raises(
        ConfigurationError, match="^environment GATEWAY_replica: GATEWAY_REPLICA sets the same key$"
    ):
        load_settings(None, twice)


def test_a_table_in_a_variable_is_joined_with_what_others_say_in_it() -> None:
    variables = {
        "GATEWAY_listeners__MQTT__PORT": "1",
        "GATEWAY_LISTENERS": "{mqtt: {protocol: mqtt, anonymous: never}}",
        "GATEWAY_LISTENERS__AMQP091__VIRTUAL_HOSTS": "[a, b]",
    }
    listeners = load_settings(None, variables).listeners
    assert (listeners["mqtt"].port, listeners["mqtt"].anonymous) == (1, "never")
    assert list(listeners["amqp091"].virtual_hosts) == ["a", "b"]
    assert "amqpfast" in listeners


def test_the_names_of_keys_have_one_spelling(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="1:1: Http: unknown key; did you mean 'http'"):
        load_settings(written(tmp_path, "Http: {port: 1}\n"), {})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent.yaml: cannot be read: No such file or directory$"):
        load_settings(tmp_path / "absent.yaml", {})


URLS = [
    ("mqtt://h", LinkUrl("mqtt", False, "h", 1883, "/", "", "")),
    ("mqtts://u%40x:p%3A@h:1", LinkUrl("mqtt", True, "h", 1, "/", "u@x", "p:")),
    ("amqp://h", LinkUrl("amqp091", False, "h", 5672, "/", "", "")),
    ("amqp://h/", LinkUrl("amqp091", False, "h", 5672, "/", "", "")),
    ("amqp://h/%2F", LinkUrl("amqp091", False, "h", 5672, "/", "", "")),
    ("amqps://[::1]:9/a%2Fb", LinkUrl("amqp091", True, "::1", 9, "a/b", "", "")),
    ("amqpfast://h", LinkUrl("amqpfast", False, "h", 3018, "/", "", "")),
    ("ws://h", LinkUrl("mqtt", False, "h", 80, "/", "", "", "/mqtt")),
    ("wss://u:p@h/", LinkUrl("mqtt", True, "h", 443, "/", "u", "p", "/")),
    ("wss://h:8084/a%20b?sign=x%3D", LinkUrl("mqtt", True, "h", 8084, "/", "", "", "/a%20b?sign=x%3D")),
]


@pytest.mark.parametrize("url, target", URLS)
def test_a_url_is_taken_apart(url: str, target: LinkUrl) -> None:
    assert parse_url(url) == target


def test_a_link_has_several_urls_with_names_of_their_own(tmp_path: Path) -> None:
    text = (
        "links:\n  erp:\n    url: amqps://first\n    urls: ['amqp://ann:one@[::1]:7/v', 'amqps://third']\n"
        "    username: bob\n"
    )
    link = load_settings(written(tmp_path, text), {}).links["erp"]
    assert link.addresses == ("first:5671", "[::1]:7", "third:5671")
    assert link.target() == LinkUrl("amqp091", True, "first", 5671, "/", "bob", "")
    assert link.target(1) == LinkUrl("amqp091", False, "::1", 7, "v", "bob", "one")
    assert link.model_dump(mode="json")["urls"] == [f"amqp://ann:{MASK}@[::1]:7/v", "amqps://third"]
    variables = {"GATEWAY_LINKS__ERP__URLS": "[amqp://a, amqp://b]"}
    assert load_settings(None, variables).links["erp"].addresses == ("a:5672", "b:5672")


def test_a_secret_is_read_from_its_file_each_time(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("one\n")
    text = f"{ERP}    password_file: {secret}\nusers: {{ann: {{password_hash_file: {secret}}}}}\n"
    settings = load_settings(written(tmp_path, text), {})
    assert settings.links["erp"].target().password == "one"
    secret.write_text("two")
    assert settings.links["erp"].target().password == "two"
    assert settings.users["ann"].hash() == "two"
    places = [("links", "erp", "password_file"), ("users", "ann", "password_hash_file")]
    assert settings.files() == [(place, secret) for place in places]
    secret.unlink()
    with pytest.raises(ConfigurationError, match="secret cannot be read: No such file or directory$"):
        settings.links["erp"].target()


def test_what_is_shown_hides_secrets_and_can_be_read_again(tmp_path: Path) -> None:
    text = (
        "listeners: {m: {protocol: mqtt, limits: {hops_max: 2}}}\n"
        "links: {a: {url: 'amqp://u:hush@h'}, b: {url: 'mqtt://h', password: hush}}\n"
        "users: {ann: {password_hash: hush}}\n"
    )
    settings = load_settings(written(tmp_path, text), {})
    shown = masked_yaml(settings)
    assert "hush" not in shown
    assert yaml.safe_load(shown)["listeners"]["m"]["limits"] == {"hops_max": 2}
    assert load_settings(written(tmp_path, shown), {}).limits_of("m").hops_max == 2


def test_a_fault_never_shows_a_secret(tmp_path: Path) -> None:
    text = "links: {a: {url: 'http://u:hush@h'}, b: {url: 'mqtt://h', password: [hush]}}\n"
    with pytest.raises(ConfigurationError) as caught:
        load_settings(written(tmp_path, text), {})
    assert "hush" not in str(caught.value)


def test_a_listener_overrides_only_the_limits_it_names() -> None:
    common = Limits(hops_max=3, queues_max=9)
    assert common.overridden_by(Limits(queues_max=2)) == Limits(hops_max=3, queues_max=2)
    assert common.overridden_by(None) is common


def test_every_limit_says_its_reason() -> None:
    assert Limits.model_fields.keys() - attribute_docs(Limits).keys() == set()


def test_mapping_files_are_found_by_globs(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yaml", "c.txt"):
        (tmp_path / name).touch()
    patterns = (f"{tmp_path}/*.yaml", f"{tmp_path}/missing.yaml")
    assert [path.name for path in Settings(mappings=patterns).mapping_files()] == [
        "a.yaml",
        "b.yaml",
        "missing.yaml",
    ]


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings(None, {}).http.port = 1


DECLARED_WRONG = [
    ("queues: [{name: a, durible: true}]", "declare.queues[0].durible: unknown key; did you mean 'durable'?"),
    ("queues: [{name: ''}]", "declare.queues[0].name: string should have at least 1 character"),
    ('queues: [{name: "a\\r"}]', "declare.queues[0].name: 'a\\r' contains a line end"),
    (f"queues: [{{name: {'é' * 128}}}]", "declare.queues[0].name: 256 bytes; the maximum is 255"),
    ("exchanges: [{name: a, type: tpic}]", "declare.exchanges[0].type: "),
    ("exchanges: [{name: a}]", "declare.exchanges[0]: needs 'type'"),
    ("bindings: [{source: a}]", "declare.bindings[0]: needs 'destination'"),
    ("queues: [{name: a, arguments: {x: 2020-01-01}}]", "is not a valid argument value"),
    ("queues: [{name: a, arguments: {x: 99999999999999999999}}]", "a number exceeds 64 bits"),
    (f"queues: [{{name: a, arguments: {{x: {'[' * 70}{']' * 70}}}}}]", "nested too deeply"),
    ("queues: [{name: a, arguments: {1: 1}}]", "declare.queues[0].arguments"),
]


@pytest.mark.parametrize("text, expected", DECLARED_WRONG)
def test_what_is_declared_is_checked_where_it_stands(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_settings(written(tmp_path, f"declare:\n  {text}\n"), {})
    assert f"{tmp_path}/gateway.yaml:2:" in str(refused.value)
    assert expected in str(refused.value)


def test_what_is_declared_knows_where_it_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, "declare:\n  definitions: a.json\n  queues:\n    - {name: a}\n    - {name: b}\n")
    settings = load_settings(path, {})
    assert settings.declare.definitions == (Path("a.json"),)
    assert settings.origin_of(("declare", "queues", 1)) == (str(path), 5, 7)
    said = load_settings(path, {"GATEWAY_DECLARE__QUEUES": "[{name: c}]"})
    assert said.origin_of(("declare", "queues", 0)).file == "environment GATEWAY_DECLARE__QUEUES"
    assert Settings().origin_of(("declare", "queues", 0)) == ("", 0, 0)


def test_more_destinations_than_the_limit_are_told(tmp_path: Path) -> None:
    text = "listeners: {f: {protocol: amqpfast, virtual_hosts: {a: {destinations: {topics: [x, y]}}}}}\n"
    with pytest.raises(
        ConfigurationError, match=r"a\.destinations\.topics: 2 names, but limits\.topics_max is 1"
    ):
        load_settings(written(tmp_path, f"{text}limits: {{topics_max: 1}}\n"), {})


@pytest.mark.needs("time")
def test_the_schema_takes_what_is_taken_and_nothing_that_is_not() -> None:
    validator = jsonschema_rs.Draft202012Validator(json_schema())
    jsonschema_rs.meta.validate(json_schema())
    blocks = [text for page in PAGES.values() for kind, text in page.blocks if kind == "yaml"]
    stated = [one for text in blocks if (one := yaml.safe_load(text)).keys() <= Settings.model_fields.keys()]
    assert len(stated) > 20
    for one in stated:
        validator.validate({key: value for key, value in one.items() if value is not None})
    fine = {"listeners": {"a": {"protocol": "amqp091", "virtual_hosts": ["/", "b"]}}}
    validator.validate(fine | {"links": {"b": {"url": "mqtt://b", "version": 5}}})
    wrongs: tuple[dict[str, Any], ...] = (
        {"htp": {}},
        {"http": {"port": "x"}},
        {"listeners": {"a": {"protocol": "smtp"}}},
    )
    for wrong in wrongs:
        assert not validator.is_valid(wrong), wrong


@pytest.mark.parametrize("url", ["AMQP://a/x", "Amqps://a", "MQTT://a", "WSS://a/p?q=1", "AmqpFast://a"])
def test_the_scheme_of_a_link_may_be_in_capitals(tmp_path: Path, url: str) -> None:
    lower = url.lower()
    links = [
        load_settings(written(tmp_path, f"links: {{a: {{url: '{one}'}}}}\n"), {}).links["a"]
        for one in (url, lower)
    ]
    assert type(links[0]) is type(links[1])
    assert parse_url(url) == parse_url(lower)
