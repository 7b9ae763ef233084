"""Importer of RabbitMQ's definitions.json.

The gateway itself reads queues, exchanges, bindings, users and policies from this file (`declare`); dynamic
shovels and federated exchanges become links with routes.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from gateway.cli.importing.import_result import ImportResult, name_of, unused_name
from gateway.mapping.linter import Severity
from gateway.protocols.amqp091.dialect import AMQP091
from gateway.protocols.mqtt.dialect import MQTT
from gateway.regexes import Regex, RegexError
from gateway.settings import parse_url

HERE: Final = AMQP091.name  # name of the AMQP 0-9-1 listener
LISTS: Final = ("queues", "exchanges", "bindings", "users", "permissions", "policies", "parameters", "vhosts")
DEFINITIONS: Final = "imported-definitions.json"
SHOVEL, UPSTREAM = "shovel", "federation-upstream"


def import_file(file: Path, folder: Path) -> ImportResult:
    """Import a definitions.json of RabbitMQ, and return the result. Faults become findings.

    `folder` is the folder to which the result will be written.
    """
    made = ImportResult(file, folder)
    try:
        document = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        made.refuse_file(f"cannot be read: {error}")
        return made
    if not isinstance(document, dict):
        made.refuse_file("definitions must be a JSON object of lists")
        return made
    if document.keys().isdisjoint(LISTS):
        made.refuse_file(f"not a definitions file: it has none of {', '.join(LISTS)}")
        return made
    document = _without_streams(made, document)
    definitions = folder / DEFINITIONS if made.definitions else file.resolve()
    declare: dict[str, Any] = {"definitions": str(definitions)}
    if document.get("users"):
        declare["users"] = True
    if document.get("policies"):
        declare["policies"] = True
    made.configuration |= {
        "listeners": {name: {"protocol": name} for name in (HERE, MQTT.name)},
        "declare": declare,
        "mappings": ["identity.yaml"],  # as RabbitMQ's MQTT plug-in has it: topics are keys of amq.topic
    }
    for one in _rows(document, "parameters"):
        component, name = str(one.get("component")), str(one.get("name"))
        value = one.get("value")
        if component == SHOVEL and isinstance(value, dict):
            _shovel(made, name_of(name), value)
        elif component == UPSTREAM and isinstance(value, dict):
            _upstream(made, one, value, document)
        else:
            made.leave_out(f"parameter {component} {name!r} is not supported and was not imported")
    return made


def _without_streams(made: ImportResult, document: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions without streams and their bindings, which the gateway does not support.

    If there are streams, also store the result in `made.definitions`, to be written as a file of its own.
    """
    streams = {
        (one.get("vhost"), one.get("name")): one for one in _rows(document, "queues") if _is_stream(one)
    }
    if not streams:
        return document
    for _, name in streams:
        text = (
            f"queue {name!r} is a stream, which is not supported; the queue and its bindings were not"
            " imported"
        )
        made.leave_out(text)
    result = {
        **document,
        "queues": [one for one in _rows(document, "queues") if not _is_stream(one)],
        "bindings": [one for one in _rows(document, "bindings") if not _is_bound(one, streams)],
    }
    made.definitions = orjson.dumps(result, option=orjson.OPT_INDENT_2)
    return result


def _is_stream(queue: dict[str, Any]) -> bool:
    arguments = queue.get("arguments")
    kinds = (queue.get("type"), arguments.get("x-queue-type") if isinstance(arguments, dict) else None)
    return "stream" in kinds


def _is_bound(binding: dict[str, Any], queues: Container[tuple[Any, Any]]) -> bool:
    """Return True if the destination of a binding is one of these queues, given by virtual host and name."""
    return (
        binding.get("destination_type", "queue") == "queue"
        and (binding.get("vhost"), binding.get("destination")) in queues
    )


def _rows(document: dict[str, Any], word: str) -> list[dict[str, Any]]:
    rows = document.get(word)
    return [one for one in rows if isinstance(one, dict)] if isinstance(rows, list) else []


def _end(made: ImportResult, name: str, side: str, value: dict[str, Any]) -> str | None:
    """Return the name of the endpoint at one side of a shovel, and add a link for it if needed.

    `side` is `src` or `dest`, `value` the shovel's parameters. If this side cannot be imported, add a finding
    and return None.
    """
    uris = value.get(f"{side}-uri", [])
    urls = [uris] if isinstance(uris, str) else [str(one) for one in uris]
    protocol = value.get(f"{side}-protocol", HERE)
    if protocol != HERE:
        made.leave_out(
            f"shovel {name!r}: {side}-protocol {protocol} is not supported; the shovel was not imported"
        )
        return None
    if all(not urlsplit(one).hostname for one in urls):
        return HERE  # a URI without a host is the broker itself
    return _link(made, f"{name}-{side}", urls)


def _link(made: ImportResult, name: str, urls: list[str]) -> str | None:
    """Add a link to these URLs, and return its name.

    If a URL is invalid, add a finding and return None.
    """
    plain = [one.partition("?")[0] for one in urls if urlsplit(one).hostname]
    try:
        for one in plain:
            parse_url(one)
    except ValueError as error:
        made.leave_out(f"link {name!r}: {error}")
        return None
    if any("?" in one for one in urls):
        made.add_finding(
            Severity.NOTE,
            "otherwise",
            (
                f"link {name!r}: the query (?...) of its address was not imported; set the options of"
                " `tls` instead"
            ),
        )
    links = made.configuration.setdefault("links", {})
    name = unused_name(name, links)  # another virtual host may have a shovel of this name
    links[name] = {"urls": plain}
    return name


def _shovel(made: ImportResult, name: str, value: dict[str, Any]) -> None:
    """Add a route for a dynamic shovel, with links to its brokers. `value` are the shovel's parameters."""
    source, target = _end(made, name, "src", value), _end(made, name, "dest", value)
    if source is None or target is None:
        return
    queue, exchange = value.get("src-queue"), value.get("src-exchange")
    origin: dict[str, Any] = {"endpoint": source}
    captures = ""
    if exchange is not None:
        key = _pattern(str(value.get("src-exchange-key", "#")))
        captures = key
        origin |= {"exchange": str(exchange), "binding_key": key}
    elif queue is None:
        made.leave_out(f"shovel {name!r}: not imported, because it names neither a queue nor an exchange")
        return
    elif source == HERE:
        origin |= {"exchange": "", "routing_key": str(queue)}
        text = (
            f"shovel {name!r}: only messages published directly to queue {queue!r} are routed, not"
            " messages from its bindings"
        )
        made.add_finding(Severity.WARNING, "otherwise", text)
    else:
        origin["queue"] = str(queue)
    to: dict[str, Any] = {"endpoint": target}
    if value.get("dest-queue") is not None:
        to["queue"] = str(value["dest-queue"])
    else:
        routing_key = value.get("dest-exchange-key")
        to |= {
            "exchange": str(value.get("dest-exchange", "")),
            "routing_key": str(routing_key)
            if routing_key is not None
            else captures or str(origin.get("queue", "")),
        }
    made.route(name, origin, to)


def _upstream(
    made: ImportResult, parameter: dict[str, Any], value: dict[str, Any], document: dict[str, Any]
) -> None:
    """Add a link to a federation upstream, and a route for each exchange that is federated from it.

    `parameter` is the upstream's entry in the definitions, and `value` the parameters in it. Only policies
    and exchanges of the upstream's virtual host are considered.
    """
    upstream, host = str(parameter.get("name")), parameter.get("vhost", "/")
    uris = value.get("uri", [])
    urls = [uris] if isinstance(uris, str) else [str(one) for one in uris]
    name = _link(made, name_of(upstream), urls)
    if name is None:
        return
    found = 0
    for policy in _rows(document, "policies"):
        if policy.get("vhost", "/") != host:
            continue
        definition = policy.get("definition") or {}
        is_federated = (
            definition.get(UPSTREAM) == upstream or definition.get("federation-upstream-set") == "all"
        )
        if not is_federated:
            continue
        if policy.get("apply-to") == "queues":
            text = (
                f"policy {policy.get('name')!r}: federated queues are not supported; the policy was"
                " not imported"
            )
            made.leave_out(text)
            continue
        try:
            pattern = Regex(str(policy.get("pattern", "")))
        except RegexError as error:
            text = f"policy {policy.get('name')!r}: its pattern is not a valid regular expression: {error}"
            made.leave_out(text)
            continue
        for exchange in _rows(document, "exchanges"):
            if exchange.get("vhost", "/") == host and pattern.search(str(exchange.get("name"))):
                where = str(exchange["name"])
                source = {"endpoint": name, "exchange": where, "binding_key": "{key...}"}
                made.route(f"{name}-{where}", source, {**source, "endpoint": HERE} | _keyed())
                made.routes[-1]["to"].pop("binding_key")
                found += 1
    if not found:
        made.add_finding(
            Severity.NOTE,
            "otherwise",
            (f"upstream {upstream!r}: no policy selects an exchange for it, so no route was created"),
        )


def _keyed() -> dict[str, str]:
    return {"routing_key": "{key...}"}


def _pattern(key: str) -> str:
    """Return the binding key with named captures instead of its wildcards."""
    words = key.split(".")
    return ".".join(
        f"{{word{at}}}" if one == "*" else "{key...}" if one == "#" else one for at, one in enumerate(words)
    )
