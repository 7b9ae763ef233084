"""Generation of mapping tests from recorded messages, in the form that `gateway test` reads.

A test contains the present result of the mapping, so that a later change of it makes the test fail. Parts of
a message that a test cannot express (a binary body, a repeated header) are left out, or the whole message is.
"""

from __future__ import annotations

from collections.abc import Mapping as Map
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import yaml

from gateway import documents
from gateway.errors import RemoteProtocolError
from gateway.mapping.cases import run_cases
from gateway.mapping.loader import Mapping, parse
from gateway.mapping.routes import Route
from gateway.model.dialect import Dialect
from gateway.model.message import Message
from gateway.model.properties import ValueType
from gateway.pipeline.traffic.fates import CandidateMapping, Fate, fates_of
from gateway.pipeline.traffic.rows import message_of
from gateway.protocols import dialect_of

PLAIN: Final = frozenset(
    (
        *(ValueType.STRING, ValueType.BOOL, ValueType.DOUBLE, ValueType.FLOAT),
        *(ValueType.INT8, ValueType.INT16, ValueType.INT32, ValueType.INT64),
        *(ValueType.UINT8, ValueType.UINT16, ValueType.UINT32),
    )
)
REFUSALS: Final = frozenset(("name_invalid", "hops", "malformed"))
Case = dict[str, Any]


class GeneratedTests(NamedTuple):
    """Result of generating mapping tests from recorded messages.

    `text` is the text of the mapping file with the tests, `tests` the number of tests, and `left_out` the
    number of messages that a test cannot express.
    """

    text: str
    tests: int
    left_out: int


def with_tests(
    mapping: Mapping, text: str, candidate: CandidateMapping, rows: Sequence[Map[str, Any]]
) -> GeneratedTests:
    """Append a test for each of the recorded `rows` to `text`, the text of the mapping file `mapping`.

    Only tests that pass are included. `candidate` is the same mapping in compiled form.
    """
    own = {rule.name for rule in mapping.document.routes}
    used_names = {case.name for case in mapping.document.tests}
    cases: list[Case] = []
    for row in rows:
        case = _case(row, candidate, own, used_names)
        if case is not None:
            used_names.add(case["name"])
            cases.append(case)
    while True:
        made = _appended(text, mapping.file, cases)
        results = run_cases(parse(made, mapping.file))[len(mapping.document.tests) :]
        passed = [case for case, result in zip(cases, results, strict=True) if result.passed]
        if len(passed) == len(cases):
            return GeneratedTests(made, len(cases), len(rows) - len(cases))
        cases = passed


def _appended(text: str, file: str, cases: Sequence[Case]) -> str:
    if not cases:
        return text
    document = documents.parse(text, file).content
    if "tests" not in document:  # Appended text preserves comments.
        return f"{text.rstrip()}\n{_dumped({'tests': list(cases)})}"
    document["tests"] = [*(document["tests"] or []), *cases]
    return _dumped(document)


def _dumped(document: Any) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=110)


def _case(
    row: Map[str, Any], candidate: CandidateMapping, own: set[str], used_names: set[str]
) -> Case | None:
    if row["body"] is None and row["body_size"]:
        return None
    message = message_of(row)
    try:
        published = _published(message, row, candidate)
    except (UnicodeDecodeError, RemoteProtocolError):
        return None
    resolved_routes = candidate.resolve(message.sender.endpoint, message.address, row["route"] or "")
    fates = [fate for fate in fates_of(resolved_routes, message) if fate.route in own]
    routes = {route.name: route for route in candidate.router.routes}
    arrivals = [_expected(fate, routes[fate.route]) for fate in fates if fate.address is not None]
    refused = [fate.refused for fate in fates if fate.address is None]
    if any(reason not in REFUSALS for reason in refused):
        return None
    to = " and ".join(dict.fromkeys(fate.route for fate in fates)) or "no route"
    name = f"recorded {row['shard']}:{row['sequence']}: {row['source_address']} takes {to}"
    if name in used_names:
        return None
    case: Case = {"name": name, "publish": published, "expect": arrivals}
    return case | {"refused": refused} if refused else case


def _published(message: Message, row: Map[str, Any], candidate: CandidateMapping) -> dict[str, Any]:
    """Return the part `publish` of a mapping test: the recorded message as it was received.

    `row` is the journal row of `message`. Raises UnicodeDecodeError for a binary body, and
    RemoteProtocolError for properties that were not recorded.
    """
    address, properties = message.address, message.properties
    words: dict[str, Any] = {"endpoint": message.sender.endpoint}
    dialect = dialect_of(address)
    words |= dialect.words_of(address)
    queue = candidate.queue_of(message.sender.endpoint, row["route"] or "")
    words |= {dialect.queue_word: queue} if queue and dialect.queue_word else {}
    words |= _guarantee(dialect, message.assurance, message.durable)
    words["body"] = message.body.decode()
    if message.retain:
        words["retain"] = True
    for field in ("content_type", "reply_to"):
        value = getattr(properties, field)
        if value is not None:
            words[field] = value
    headers = {name: one.value for name, one in properties.headers if one.type in PLAIN and _plain(one.value)}
    if headers:
        words["headers"] = headers
    if candidate.per_sender:
        words |= {"client_id": message.sender.client, "user": message.sender.user}
    if message.hops:
        words["hops"] = message.hops
    return words


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _expected(fate: Fate, route: Route) -> dict[str, Any]:
    assert fate.address is not None
    words: dict[str, Any] = {"endpoint": fate.endpoint}
    dialect = route.target.dialect
    address = dialect.parse(fate.address)
    if dialect.queue_word is not None and not address.scope:
        words[dialect.queue_word] = address.name
    else:
        words |= dialect.words_of(address)
    words |= _guarantee(dialect, fate.assurance, fate.durable)
    return words | {"retain": fate.retain} if "retain" in dialect.target_options else words


def _guarantee(dialect: Dialect, assurance: int, durable: bool) -> dict[str, Any]:
    """Return the QoS and durability of a message as keys and values of a mapping test, such as `qos: 1`.

    The keys are those of the protocol that `dialect` describes; `assurance` is the QoS.
    """
    if "qos" in dialect.target_options:
        return {"qos": assurance}
    return {"delivery_mode": 2 if durable else 1} if dialect.queue_word else {"persistent": durable}
