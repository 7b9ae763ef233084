"""RabbitMQ's policies: arguments that queues and exchanges get by their names, as far as they exist here.

Of the policies whose pattern is found in a queue's name the one with the highest priority applies, as in
RabbitMQ. A queue's own arguments have precedence; of two numbers the smaller one applies. A policy changes
the behaviour of a queue, but not how it was declared. Exchanges get an alternate exchange, unless they were
declared with one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.broker.amqp091.arguments import (
    ALIEN,
    ALTERNATE,
    DEAD_LETTER_EXCHANGE,
    NAME_BYTES_MAX,
    QUEUE_ARGUMENTS,
)
from gateway.broker.amqp091.exports import content_of
from gateway.errors import ConfigurationError
from gateway.model.properties import Headers, Value, ValueType, string
from gateway.regexes import Regex

KEYS: Final = {
    "max-length": "x-max-length",
    "max-length-bytes": "x-max-length-bytes",
    "message-ttl": "x-message-ttl",
    "expires": "x-expires",
    "overflow": "x-overflow",
    "dead-letter-exchange": DEAD_LETTER_EXCHANGE,
    "dead-letter-routing-key": "x-dead-letter-routing-key",
    "dead-letter-strategy": "x-dead-letter-strategy",
    "delivery-limit": "x-delivery-limit",
}
"""Keys of a policy, and the equivalent argument of each."""
TYPES: Final = ("classic", "quorum")
EXCHANGES: Final = "exchange"
APPLIES_TO: Final[Mapping[str, Collection[str]]] = {
    "all": (*TYPES, EXCHANGES),
    "queues": TYPES,
    "classic_queues": ("classic",),
    "quorum_queues": ("quorum",),
    "exchanges": (EXCHANGES,),
}


class PolicyError(ValueError):
    """Error of a value in a policy that is invalid for the queue's argument."""


class Policy(NamedTuple):
    """Policy for queues of some types, or exchanges, whose names match a pattern.

    `types` has the types of queues, and EXCHANGES for exchanges. Queues get `arguments`; exchanges get
    `alternate` as their alternate exchange. `document` is the policy's JSON object in RabbitMQ's export.
    """

    pattern: Regex
    types: Collection[str]
    priority: int
    arguments: Mapping[str, Value]
    document: Mapping[str, Any]
    alternate: str | None = None


def read_policies(file: Path) -> dict[str, list[Policy]]:
    """Return the policies of an export, by virtual host. Raises ConfigurationError."""
    found: dict[str, list[Policy]] = {}
    for at, document in enumerate(content_of(file).get("policies", [])):
        try:
            policy = _policy(document)
        except PolicyError as error:
            raise ConfigurationError(f"policies[{at}]: {error}", file=str(file)) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = (
                f"policies[{at}]: does not have the form of a RabbitMQ export: {type(error).__name__}"
                f": {error}"
            )
            raise ConfigurationError(reason, file=str(file)) from error
        found.setdefault(document.get("vhost", "/"), []).append(policy)
    return found


def _policy(document: dict[str, Any]) -> Policy:
    arguments = {}
    for key, value in document["definition"].items():
        name = KEYS.get(key)
        if name is None:
            continue
        argument = string(value) if isinstance(value, str) else Value(ValueType.INT64, int(value))
        if fault := QUEUE_ARGUMENTS[name](argument):
            raise PolicyError(f"{key}: {fault}")
        arguments[name] = argument
    alternate = document["definition"].get(ALTERNATE)
    if not (alternate is None or (isinstance(alternate, str) and len(alternate.encode()) <= NAME_BYTES_MAX)):
        raise PolicyError(f"{ALTERNATE}: must be the name of an exchange")
    types = APPLIES_TO.get(document.get("apply-to", "all"), ())
    priority = int(document.get("priority", 0))
    return Policy(Regex(document["pattern"]), types, priority, arguments, document, alternate)


def policy_of_exchange(policies: Iterable[Policy], name: str) -> Policy | None:
    """Return the policy that applies to the exchange of this name, or None."""
    matching = [one for one in policies if EXCHANGES in one.types and one.pattern.search(name)]
    return max(matching, key=lambda one: one.priority) if matching else None


def alternate_of(policies: Iterable[Policy], name: str) -> str | None:
    """Return the alternate exchange that a policy gives to the exchange of this name, or None."""
    policy = policy_of_exchange(policies, name)
    return None if policy is None else policy.alternate


def applicable_policy(policies: Iterable[Policy], name: str, arguments: Headers) -> Policy | None:
    """Return the policy that applies to a queue with this name and these arguments, or None."""
    kind = _kind(dict(arguments))
    matching = [one for one in policies if kind in one.types and one.pattern.search(name)]
    return max(matching, key=lambda one: one.priority) if matching else None


def _kind(own: Mapping[str, Value]) -> str:
    return str(own["x-queue-type"].value) if "x-queue-type" in own else "classic"


def with_policy(policies: Iterable[Policy], name: str, arguments: Headers) -> Headers:
    """Return a queue's arguments together with the arguments of the policy that applies to it.

    If both have an argument, the declared value applies, but of two numbers the lower one.
    """
    policy = applicable_policy(policies, name, arguments)
    if policy is None:
        return arguments
    own = dict(arguments)
    kind = _kind(own)
    for key, value in policy.arguments.items():
        if key in ALIEN.get(kind, ()):
            continue
        stated = own.get(key)
        numbers = stated is not None and isinstance(stated.value, int) and isinstance(value.value, int)
        if stated is None or (numbers and value.value < stated.value):
            own[key] = value
    if DEAD_LETTER_EXCHANGE not in own:
        own.pop("x-dead-letter-routing-key", None)
    return tuple(own.items())


def merge_policies(several: Sequence[Mapping[str, Sequence[Policy]]]) -> dict[str, list[Policy]]:
    """Return the policies of several exports together, by virtual host."""
    found: dict[str, list[Policy]] = {}
    for one in several:
        for host, policies in one.items():
            found.setdefault(host, []).extend(policies)
    return found
