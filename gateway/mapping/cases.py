"""Tests of a mapping file: each publishes one message, and compares the delivered messages with `expect`.

A test needs only the routes: no connection and no clock. In `publish` and `expect`, the delivery guarantee is
given by the protocol's own key: MQTT's `qos`; AMQP's `delivery_mode` 1 or 2; AMQP/Fast's `persistent`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from gateway.mapping.conditions import plain_headers
from gateway.mapping.loader import Mapping
from gateway.mapping.router import Router
from gateway.mapping.schema import Case, Expected, PublishedMessage
from gateway.mapping.templates import typed_value
from gateway.model.delivery_mode import DURABLE_AT_QOS, QOS_OF_DURABLE
from gateway.model.dialect import NameRefused
from gateway.model.message import Message, Sender
from gateway.model.outcome import Outcome
from gateway.model.properties import Properties, property_set
from gateway.protocols import DIALECT_OF_WORD, DIALECTS, dialect_of, show

_ABSENT: Final = "absent"


class CaseResult(NamedTuple):
    """Result of one test of a mapping file: the test's name and position, and the differences that it found.

    Each difference is a text that states what was expected and what arrived instead. Without differences, the
    test has passed.
    """

    name: str
    file: str
    line: int
    column: int
    differences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if the messages that arrived are exactly those that the test expects."""
        return not self.differences


class CrossedMessage(NamedTuple):
    """Message that a route has delivered, with the names of the route and of the target endpoint."""

    route: str
    endpoint: str
    message: Message


def endpoints_of(mappings: Iterable[Mapping]) -> dict[str, str]:
    """Return the protocol of each endpoint that the routes name, by the endpoint's name.

    The protocol is derived from the keys of the addresses in the routes, such as `topic`. Tests of mapping
    files therefore need no configuration.
    """
    found: dict[str, str] = {}
    for mapping in mappings:
        for rule in mapping.document.routes:
            for words in (rule.source, rule.to):
                found.setdefault(words.name, words.dialect.name)
    return found


def run_cases(mapping: Mapping) -> list[CaseResult]:
    """Run the tests in `mapping` against the routes in the same file.

    Raises MappingError if the routes do not compile.
    """
    router = Router([mapping], endpoints_of([mapping]))
    return [
        CaseResult(case.name, mapping.file, *mapping.position(("tests", at)), tuple(_run(router, case)))
        for at, case in enumerate(mapping.document.tests)
    ]


def _run(router: Router, case: Case) -> list[str]:
    """Run one test. Return the differences between the messages that it expects and those that arrived."""
    try:
        message, queue = _published(router, case.publish)
    except (NameRefused, ValueError) as error:
        return [f"publish: {error}"]
    arrivals: list[CrossedMessage] = []
    refusals: list[str] = []
    for resolved in router.resolve(case.publish.endpoint, message.address, queue):
        crossed = resolved.cross(message)
        if isinstance(crossed, Message):
            arrivals.append(CrossedMessage(resolved.route.name, resolved.route.target_endpoint, crossed))
        elif isinstance(crossed, Outcome):
            refusals.append(crossed.reason.value)
    differences = _compare_all(case.expect, arrivals)
    if refusals != case.refused:
        differences.append(f"refused: expected {case.refused}, got {refusals}")
    return differences


def _published(router: Router, words: PublishedMessage) -> tuple[Message, str]:
    """Build the message that a test publishes. Return it, and the queue from which it is consumed.

    The queue is "" unless the test names a queue of a link. Raises ValueError if the endpoint is unknown, or
    if its protocol is not that of the address. Raises NameRefused if the protocol refuses the address.
    """
    protocol = router.endpoints.get(words.endpoint)
    if protocol is None:
        raise ValueError(f"unknown endpoint {words.endpoint!r}")
    address_words = words.given_words()
    if not address_words or any(DIALECT_OF_WORD[word].name != protocol for word in address_words):
        raise ValueError(
            f"endpoint {words.endpoint!r} uses {protocol}, but the address is "
            f"{', '.join(address_words) or 'missing'}"
        )
    address, queue = DIALECTS[protocol].published(address_words)
    durable = bool(words.persistent) if words.delivery_mode is None else words.delivery_mode == 2
    assurance = words.qos if words.qos is not None else QOS_OF_DURABLE[durable]
    properties = Properties(
        content_type=words.content_type,
        reply_to=words.reply_to,
        headers=tuple((name, typed_value(value)) for name, value in words.headers.items()),
    )
    message = Message(
        address,
        words.body.encode(),
        property_set(properties),
        assurance=assurance,
        durable=durable or DURABLE_AT_QOS[words.qos or 0],
        retain=words.retain,
        hops=words.hops,
        sender=Sender(words.endpoint, words.client_id, words.user),
    )
    return message, queue


def _compare_all(expected: list[Expected], arrivals: list[CrossedMessage]) -> list[str]:
    """Compare the expected messages, in order, with those that arrived. Return the differences."""
    differences: list[str] = []
    for at in range(max(len(expected), len(arrivals))):
        if at >= len(arrivals):
            differences.append(f"expect[{at}]: no message was delivered to {expected[at].endpoint!r}")
        elif at >= len(expected):
            name, endpoint, message = arrivals[at]
            where = show(message.address)
            differences.append(f"not expected: route {name!r} delivered {where!r} to {endpoint!r}")
        else:
            differences.extend(f"expect[{at}].{text}" for text in _compare(expected[at], arrivals[at]))
    return differences


def _compare(expected: Expected, arrival: CrossedMessage) -> list[str]:
    """Compare a message that arrived with the entry of `expect` at the same position.

    Return a text of the form `KEY: expected X, got Y` for each key that differs.
    """
    got = words_of(arrival.endpoint, arrival.message)
    fields: dict[str, Any] = expected.model_dump(exclude_unset=True, exclude={"headers"})
    pairs = [(word, value, got.get(word, _ABSENT)) for word, value in fields.items()]
    headers = plain_headers(arrival.message.properties.headers)
    pairs += [
        (f"headers.{name}", value, headers.get(name, _ABSENT)) for name, value in expected.headers.items()
    ]
    return [f"{word}: expected {want!r}, got {have!r}" for word, want, have in pairs if not _same(want, have)]


def _same(want: Any, have: Any) -> bool:
    return bool(want == have) and isinstance(want, bool) == isinstance(have, bool)


def words_of(endpoint: str, message: Message) -> dict[str, Any]:
    """Return a message that was delivered to `endpoint` as values by the keys of `expect`, such as `body`."""
    address = message.address
    words: dict[str, Any] = {
        "endpoint": endpoint,
        "body": message.body.decode("utf-8", "backslashreplace"),
        "qos": message.assurance,
        "delivery_mode": 2 if message.durable else 1,
        "persistent": message.durable,
        "retain": message.retain,
        "content_type": message.properties.content_type,
        "reply_to": message.properties.reply_to,
    }
    dialect = dialect_of(address)
    words.update(dialect.words_of(address))
    if dialect.queue_word is not None and not address.scope:
        words[dialect.queue_word] = address.name
    return words
