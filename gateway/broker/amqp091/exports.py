"""RabbitMQ's exported definitions (`definitions.json`) as declarations.

Queues, exchanges and bindings are read for the virtual hosts that listeners serve here. Parameters are
ignored and counted, as are queues with names that RabbitMQ generated, and users, permissions and policies
unless they are read elsewhere. The default exchange and the `amq.` exchanges are never in such a file; the
file of a single virtual host does not contain the host's name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
from pydantic import ValidationError

from gateway.documents import complaints
from gateway.errors import ConfigurationError
from gateway.settings.declare import DeclaredBinding, DeclaredExchange, DeclaredQueue

EXPORT_BYTES_MAX: Final = 64 * 1024 * 1024  # bytes; bindings_max with the longest names is less
KINDS: Final = (
    ("exchanges", DeclaredExchange),
    ("queues", DeclaredQueue),
    ("bindings", DeclaredBinding),
)
ExportedObject = DeclaredExchange | DeclaredQueue | DeclaredBinding


class Export(NamedTuple):
    """Content of an exported file.

    `objects` has the declarations as (kind, number in the file's list, declaration), `faults` the errors, and
    `ignored_text` is a text about ignored content.
    """

    objects: list[tuple[str, int, ExportedObject]]
    faults: list[str]
    ignored_text: str


def read_export(file: Path, hosts: Collection[str], *, others_take: Collection[str] = ()) -> Export:
    """Read the declarations in a file that RabbitMQ has exported.

    `hosts` are the virtual hosts that listeners serve; `others_take` are the lists in the file that other
    parts of the gateway read. Raises ConfigurationError if the file is not an export.
    """
    document = content_of(file)
    things: list[tuple[str, int, ExportedObject]] = []
    faults: list[str] = []
    not_ours: Counter[str] = Counter()
    for kind, model in KINDS:
        several = document.get(kind, [])
        if not isinstance(several, list):
            faults.append(f"{kind}: must be a list")
            continue
        for at, one in enumerate(several):
            place = f"{kind}[{at}]"
            if not isinstance(one, dict):
                faults.append(f"{place}: must be a table")
            elif kind == "queues" and str(one.get("name", "")).startswith("amq."):
                not_ours["queues with server-generated names"] += 1
            elif one.get("vhost") is not None and one["vhost"] not in hosts:
                not_ours[f"objects in virtual host {one['vhost']!r}, which no listener serves"] += 1
            else:
                try:
                    things.append((kind, at, model.model_validate(_known_fields(one, model))))
                except ValidationError as error:
                    called = f"{place} ({one.get('name', '')!r})" if "name" in one else place
                    faults += [f"{called}: {found.text}" for found in complaints(error, model)]
    return Export(things, faults, _ignored_lists(document, not_ours, others_take))


def content_of(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file that RabbitMQ has exported.

    Raises ConfigurationError if the file cannot be read or is not an export.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(EXPORT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", file=str(file)) from error
    if len(data) > EXPORT_BYTES_MAX:
        raise ConfigurationError(f"more than {EXPORT_BYTES_MAX} bytes", file=str(file))
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        reason = f"not JSON: {error.msg}"
        raise ConfigurationError(reason, file=str(file), line=error.lineno, column=error.colno) from error
    if not (isinstance(content, dict) and any(kind in content for kind, _ in KINDS)):
        raise ConfigurationError(
            "not a RabbitMQ definitions file: it must be a table with queues, exchanges and bindings",
            file=str(file),
        )
    return content


def _known_fields(one: dict[str, Any], model: type[ExportedObject]) -> dict[str, Any]:
    """Return the fields of an exported object that the declaration `model` has, as `model` accepts them.

    Newer versions of RabbitMQ export more fields.
    """
    fields = {key: value for key, value in one.items() if key in model.model_fields}
    if not fields.get("arguments", True):
        fields["arguments"] = {}  # an empty table of Erlang is sometimes written as a list
    if model is DeclaredQueue and isinstance(fields.get("arguments", {}), dict) and "type" in one:
        arguments = fields.get("arguments", {})
        if one["type"] != "classic":  # the default type
            fields["arguments"] = {"x-queue-type": one["type"]} | arguments
    return fields


def _ignored_lists(document: dict[str, Any], not_ours: Counter[str], others_take: Iterable[str]) -> str:
    """Return a text about the lists and objects of an export that are ignored, or "".

    `not_ours` counts ignored objects by reason.
    """
    known_kinds = {"vhosts", *others_take, *(kind for kind, _ in KINDS)}
    others = [
        f"{kind} ({len(several)})"
        for kind, several in document.items()
        if kind not in known_kinds and isinstance(several, list) and several
    ]
    others += [f"{what} ({count})" for what, count in not_ours.items()]
    return ", ".join(others)
