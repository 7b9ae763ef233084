"""What people and clients write in a language of ours is refused in its own words, or means something: JMS
selectors, CEL conditions, mapping files and the configuration.

One text of each for twenty inputs that FUZZ_COUNT asks of the codecs (default 50 000); FUZZ_SEED says where
the random numbers begin.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

import pytest

from gateway.broker.amqpfast.selection import selection
from gateway.broker.amqpfast.selector import SelectorRefused
from gateway.errors import ConfigurationError, MappingError, RemoteProtocolError
from gateway.mapping import parse
from gateway.mapping.conditions import Condition
from gateway.mapping.router import Router
from gateway.model.message import Message
from gateway.model.properties import Properties, property_set
from gateway.protocols.amqp091.dialect import amqp_address
from gateway.protocols.amqpfast.dialect import fast_address
from gateway.protocols.mqtt.dialect import topic_address
from gateway.settings import load_settings
from tests.fuzz.grammars import table, value

COUNT: Final = int(os.environ.get("FUZZ_COUNT", "50000")) // 20
pytestmark = pytest.mark.needs("time")  # as many inputs as FUZZ_COUNT says
SEED: Final = int(os.environ.get("FUZZ_SEED", "31"))
ROOT: Final = Path(__file__).resolve().parents[2]
WORDS: Final = (
    *(
        "a",
        "b",
        "h",
        "JMSPriority",
        "NULL",
        "TRUE",
        "1",
        "-1",
        "0",
        "1.5e3",
        "9" * 40,
        "'x'",
        "'%_'",
        "''",
        "'",
    ),
    *(
        "=",
        "<>",
        "<",
        ">=",
        "+",
        "-",
        "*",
        "/",
        "(",
        ")",
        "AND",
        "OR",
        "NOT",
        "IN",
        "LIKE",
        "ESCAPE",
        "BETWEEN",
    ),
    *("IS", ",", ".", "\0", "é", "\U0001f600", "#", "LIKE '%a%a%a%b'", "IN ('a','b')", "BETWEEN 1 AND 2"),
)
CEL_WORDS: Final = (
    *(
        "body",
        "headers",
        "headers.h",
        "headers['a']",
        "qos",
        "size",
        "content_type",
        "client_id",
        "1",
        "2u",
        "0.5",
    ),
    *(
        "'x'",
        'b"x"',
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        ",",
        ".",
        "?",
        ":",
        "==",
        "!=",
        "<",
        "&&",
        "||",
        "!",
        "-",
        "+",
    ),
    *(
        "*",
        "/",
        "%",
        "in",
        "null",
        "true",
        "[1,2]",
        ".all(x, x > 1)",
        ".exists(y, y == 'a')",
        ".map(z, z + z)",
    ),
    *(
        ".size()",
        "size(",
        "int(",
        "string(",
        "timestamp('x')",
        ".matches('(a*)*b')",
        "duration('1s')",
        ".filter(",
    ),
)


def message(chance: random.Random) -> Message:
    """With any headers and a body that may be JSON."""
    headers = (*table(chance), ("a", value(chance)), ("h", value(chance)))
    body = chance.choice((b"", b"{}", b'{"a":[1,{"b":null}]}', b"\xff", b"[" * 2_000, b"1e999", b'"\\ud800"'))
    address = chance.choice(
        (fast_address("topic", "a.b"), topic_address("a/b"), amqp_address("amq.topic", "a.b"))
    )
    return Message(address, body, property_set(Properties(headers=headers, content_type="a/b")))


def sentence(chance: random.Random, words: tuple[str, ...]) -> str:
    return " ".join(chance.choice(words) for _ in range(chance.randint(1, 9)))


@pytest.mark.parametrize("mime_type, words", [("", WORDS), ("application/cel", CEL_WORDS)])
def test_a_selector_is_refused_or_selects(mime_type: str, words: tuple[str, ...]) -> None:
    chance = random.Random(SEED)
    for _ in range(COUNT):
        text = sentence(chance, words)
        try:
            selects = selection(mime_type, text.encode())
        except SelectorRefused:
            continue
        if selects is not None:
            assert selects(message(chance)) in (True, False), text


class Counts:
    unparsable = 0
    undecided = 0


def test_a_condition_is_refused_or_decides() -> None:
    chance = random.Random(SEED)
    for _ in range(COUNT):
        text = sentence(chance, CEL_WORDS)
        try:
            condition = Condition(text, ())
        except MappingError:
            continue
        assert condition.holds(message(chance), {}, Counts()) in (True, False), text


def pieces(text: str, chance: random.Random) -> str:
    """`text` with lines and words exchanged, repeated, cut out, or replaced by others."""
    lines = text.splitlines()
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(lines) or 1)
        match chance.randrange(5):
            case 0 if lines:
                del lines[at]
            case 1 if lines:
                lines.insert(chance.randrange(len(lines)), lines[at])
            case 2 if lines:
                words = lines[at].split(" ")
                words[chance.randrange(len(words))] = chance.choice(MAPPING_WORDS)
                lines[at] = " ".join(words)
            case 3 if lines:
                lines[at] = lines[at].replace(chance.choice("{}[]:#+/."), chance.choice("{}[]:#+/.\t"))
            case _:
                lines.insert(at, chance.choice(MAPPING_WORDS))
    return "\n".join(lines)


MAPPING_WORDS: Final = (
    *(
        "null",
        "[]",
        "{}",
        "1",
        "-1",
        "true",
        "'",
        '"#"',
        '"{a}"',
        '"{a...}"',
        '"{a...}/{b...}"',
        '"+/#"',
        "&a",
        "*a",
    ),
    *(
        '"{topic}"',
        '"{routing_key...}"',
        '"a.{b}"',
        "!!python/object:os.system",
        "1e999",
        '"\\ud800"',
        '"\\0"',
        "? :",
    ),
    *(
        '"' + "#." * 60 + 'a"',
        '"' + "{x}" * 9 + '"',
        "from:",
        "to:",
        "when: body.a",
        "when: '[1].all(x, true)'",
    ),
    *(
        "headers: {a: '{b}'}",
        "qos: 3",
        "endpoint: mqtt",
        "endpoint: nowhere",
        "<<: *a",
        "- - -",
        "<<: [1]",
        "2001-01-01",
    ),
)
ENDPOINTS: Final = {
    "mqtt": "mqtt",
    "amqp091": "amqp091",
    "amqpfast": "amqpfast",
    "erp": "amqp091",
    "plant": "mqtt",
}
ADDRESSES: Final = (
    *(
        topic_address("a/b"),
        topic_address("plant/l1/m.2/telemetry/x"),
        topic_address("/"),
        topic_address("$SYS/x"),
    ),
    *(amqp_address("amq.topic", "a.b"), amqp_address("", "q"), amqp_address("telemetry", "")),
    *(fast_address("topic", "a.b"), fast_address("queue", "")),
)


def test_a_mapping_file_is_refused_or_routes() -> None:
    chance = random.Random(SEED)
    texts = [path.read_text() for path in sorted((ROOT / "mappings").glob("*.yaml"))]
    taken = 0
    for _ in range(COUNT // 3):
        text = pieces(chance.choice(texts), chance)
        try:
            router = Router([parse(text, "fuzzed.yaml")], ENDPOINTS)
        except MappingError:
            continue
        taken += 1
        for endpoint in ENDPOINTS:
            for address in ADDRESSES:
                for resolved in router.resolve(endpoint, address, ""):
                    with_message = message(chance)
                    try:
                        resolved.cross(with_message)
                    except RemoteProtocolError:
                        continue
    assert taken > COUNT // 50


def test_a_configuration_is_refused_or_read(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    file = tmp_path / "gateway.yaml"
    for _ in range(COUNT // 6):
        file.write_text(pieces(CONFIGURATION, chance))
        try:
            load_settings(file, {})
        except ConfigurationError:
            continue


CONFIGURATION: Final = """
listeners:
  mqtt: {protocol: mqtt, host: 127.0.0.1, port: 1883}
  amqp: {protocol: amqp091, host: "::", port: 5672, virtual_hosts: ["/", other]}
  fast: {protocol: amqpfast, port: 3018}
  all: {protocol: shared, port: 7000, listeners: [mqtt, amqp, fast]}
links:
  erp: {url: "amqp://user@localhost:5673/prod", required: true}
  plant: {url: "mqtt://localhost:1884", client_id: "gateway-{replica}"}
users:
  alice: {password_hash: "$argon2id$v=19$m=65536,t=3,p=4$c2FsdHNhbHQ$x"}
mappings: ["mappings/*.yaml"]
store: {path: ./data}
http: {host: 127.0.0.1, port: 8080}
limits: {connections_max: 100, message_bytes_max: 1000000}
journal: {enabled: false}
dead_letters: {}
"""
