"""The parts of the documentation that the code says.

`make docs-reference` writes them, `--check` names the pages that are stale. A page has a part between
`<!-- generated: KIND WHAT -->` and `<!-- end -->`; all else in it is written by hand. The kinds are those in
KINDS; what follows is theirs to read.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import typer

from gateway.admin import (
    Admission,
    ClientsApi,
    LettersApi,
    MappingsApi,
    NamespacesApi,
    ProcessApi,
    QueuesApi,
    RatesApi,
    RetainedApi,
    SessionsApi,
)
from gateway.admin.events import EventsApi
from gateway.admin.logins import LoginsApi
from gateway.admin.operations import description_of
from gateway.cli import commands
from gateway.mapping.schema import json_schema
from gateway.protocols import DIALECTS
from gateway.settings import LinkSettings, ListenerSettings, Settings
from gateway.store.journal import format as journal_format
from gateway.telemetry import audit, metrics
from gateway.telemetry.stats import Latency
from tests.clauses import tables

DOCS: Final = Path(__file__).resolve().parent
ROOT: Final = DOCS.parent
PART: Final = re.compile(r"(<!-- generated: (\S+)(?: ([^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL)
Schema = Mapping[str, Any]

PLACES: Final = {
    "Truncate": "`{truncate: number}`",
    "StateDatabase": "[database](#the-database-of-replicas)",
    "AmqpPermissions": "[permissions](roles.md#amqp-0-9-1)",
    "Audit": "[audit log](audit-log.md)",
    "ListenerGroup": "`{protocol: …}`",
    "CertificatesBackend": "[certificates](authentication.md#certificates)",
    "Case": "[test](#a-test)",
    "DeadLetterSettings": "[dead letters](#dead-letters)",
    "Declare": "[what is there](#declare)",
    "DeclaredBinding": "[binding](#a-binding)",
    "DeclaredExchange": "[exchange](#an-exchange)",
    "DeclaredQueue": "[queue](#a-queue)",
    "Deduplicate": "[deduplication](#deduplicate)",
    "DefaultRoles": "[default roles](roles.md#who-has-which-role)",
    "DeliveryGuarantee": "[delivery](#delivery)",
    "DestinationNames": "[names](#destinations)",
    "Destinations": "[destinations](roles.md#destinations)",
    "FastPermissions": "[permissions](roles.md#amqpfast)",
    "FastVirtualHost": "[virtual host](#virtual-hosts)",
    "Forward": "[address](#copies-of-dead-letters)",
    "From": "[pattern](#from)",
    "HealthSettings": "[health](#health-and-metrics-on-a-port-of-their-own)",
    "HttpTls": "[TLS](#tls-of-http)",
    "HttpBackend": "[HTTP](authentication.md#a-server-that-knows-the-users)",
    "Http": "[HTTP](#http)",
    "HttpAuthorizer": "[authorizer](roles.md#an-authorizer)",
    "Journal": "[journal](#journal)",
    "JwtBackend": "[tokens](authentication.md#tokens)",
    "Limits": "[limits](limits.md)",
    "EmbeddedEngine": "[embedded](#broker)",
    "LinkTls": "[TLS](links.md#tls)",
    "ListenerTls": "[TLS](#tls)",
    "LogSettings": "[log](#log)",
    "LoginSettings": "[logins](#logins)",
    "MqttRules": "[rules](roles.md#mqtt)",
    "OutOfBand": "[folder](#out-of-band)",
    "OutboxSettings": "[outbox](#outbox)",
    "OutboxRule": "[outbox](#outbox)",
    "PeerService": "[peer](#peers)",
    "RabbitEngine": "[RabbitMQ](#broker)",
    "Role": "[role](roles.md#a-role)",
    "RouteRule": "[route](#a-route)",
    "StoreSettings": "[store](#store)",
    "To": "[target](#to)",
    "TopicPermission": "[topic permission](roles.md#topic-permissions)",
    "TracingSettings": "[tracing](#tracing)",
    "User": "[user](#users)",
    "UsersBackend": "[users](authentication.md#users-and-their-file)",
}
"""What people call a part that has keys of its own, and where it is explained."""
ENDPOINTS: Final = {"Link": "[link](links.md)", "Listener": "[listener](listeners.md)"}
"""The same of endpoints, each of which is a part of its own for every protocol."""
FORMATS: Final = {"path": "path", "password": "secret"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table in Markdown; a bar within a cell is no border."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


# Configuration and mapping files


@cache
def definitions(kind: str) -> dict[str, Schema]:
    """The parts of the configuration (`settings`) or of a mapping file (`mapping`), as JSON Schema."""
    if kind != "settings":
        whole = json_schema()
        return {**whole["$defs"], whole["title"]: whole}
    found: dict[str, Schema] = {}
    for model in (
        ListenerSettings,
        LinkSettings,
        Settings,
    ):  # the first two are what those of all protocols have in common
        whole = model.model_json_schema(by_alias=True)
        found |= {**whole["$defs"], whole["title"]: whole}
    return found


def keys(kind: str, names: str) -> Iterator[str]:
    """The keys of one part, what is required first: type, default and meaning of each. With the name of
    another one behind it: those that this does not have, too.
    """
    name, _, base = names.partition(" ")
    part = definitions(kind)[name]
    known = definitions(kind)[base]["properties"] if base else {}
    needed = part.get("required", ())
    yield from table(
        ("key", "type", "default", "meaning"),
        (
            (
                f"`{key}`",
                type_of(given),
                "required" if key in needed else default_of(given),
                meaning_of(kind, given),
            )
            for key, given in sorted(part["properties"].items(), key=lambda pair: pair[0] not in needed)
            if key not in known
        ),
    )


def ports() -> Iterator[str]:
    """The ports that listeners have when they name none."""
    ways = ("plain", "tls", "websocket", "websocket+tls")
    yield from table(
        ("protocol", *ways),
        ((f"`{name}`", *(str(one.port(way) or "-") for way in ways)) for name, one in DIALECTS.items()),
    )


def meaning_of(kind: str, given: Schema) -> str:
    """What its author says of a key, in one line; else, of a part that has keys of its own, what that is."""
    text = given.get("description")
    if text is None and "$ref" in given:
        text = definitions(kind)[given["$ref"].rpartition("/")[2]]["description"]
    return " ".join((text or "").split())


def default_of(given: Schema) -> str:
    """The default of a key; of a part that has keys of its own, those have them."""
    default = given.get("default")
    if default is None or default in ([], {}, ""):
        return "-"
    if isinstance(default, dict):
        return "see there"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, list) and isinstance(default[0], dict):
        return ", ".join(f"`{one['backend']}`" for one in default)
    if isinstance(default, list):
        return ", ".join(f"`{one}`" for one in default)
    return f"`{default}`"


def type_of(given: Schema) -> str:
    """What may stand there, in words."""
    if "$ref" in given:
        name = given["$ref"].rpartition("/")[2]
        endings = (word for word in ENDPOINTS if name.endswith(word))
        return PLACES.get(name) or ENDPOINTS[next(endings)]
    if (several := given.get("oneOf") or given.get("anyOf")) is not None:
        return " or ".join(dict.fromkeys(type_of(one) for one in several if one.get("type") != "null"))
    if "enum" in given:
        return ", ".join(f"`{one}`" for one in given["enum"])
    if "const" in given:
        return f"`{given['const']}`"
    match given.get("type"):
        case "array":
            return f"list of {type_of(given['items'])}"
        case "object":
            inner = given.get("additionalProperties") or next(iter(given["patternProperties"].values()))
            return f"name: {'value' if inner is True else type_of(inner)}"
        case "boolean":
            return "bool"
        case "integer" | "number" as number:
            return number + bounds_of(given)
        case "string":
            text = f"text, at most {given['maxLength']}" if "maxLength" in given else "text"
            return FORMATS.get(given.get("format", ""), text)
    raise ValueError(f"no words for {given}")


def bounds_of(given: Schema) -> str:
    """How large a number may be; "": any."""
    low, high = given.get("minimum"), given.get("maximum")
    if low is not None and high is not None:
        return f", {low} to {high}"
    if low is not None:
        return f", from {low}"
    if high is not None:
        return f", to {high}"
    if "exclusiveMinimum" in given:
        return f", above {given['exclusiveMinimum']}"
    return ""


# Metrics


def metric_table() -> Iterator[str]:
    """All metrics, with the names that Prometheus sees."""
    store = metrics.STORE_COUNTERS | metrics.STORE_GAUGES
    journal = metrics.JOURNAL_COUNTERS | metrics.JOURNAL_GAUGES
    sources = metrics.Sources(
        store=SimpleNamespace(**{attribute: 0 for _, attribute in store.values()}),
        journal=SimpleNamespace(**{attribute: 0 for _, attribute in journal.values()}),
        redaction=SimpleNamespace(**{attribute: 0 for _, attribute in metrics.REDACTION_COUNTERS.values()}),
        turns=Latency(),
        gauges=dict.fromkeys(metrics.BROKER_GAUGES, float),
    )
    asked = metrics.Metrics("", sources)
    labels = {name: given for name, (_, given) in (metrics.COUNTERS | metrics.GAUGES).items()}
    labels |= {metrics.SETTLE_SECONDS: metrics.ENDPOINT, metrics.ROUTE_SECONDS: ("route",)}
    labels["gateway_build"] = ("version", "python")
    endings = {"counter": "_total`", "info": "_info`", "histogram": "` (histogram)"}
    yield from table(
        ("metric", "labels", "meaning"),
        sorted(
            (
                f"`{one.name}{endings.get(one.type, '`')}",
                ", ".join(labels.get(one.name, ())),
                one.documentation,
            )
            for one in asked.collect()
        ),
    )


def detailed_table() -> Iterator[str]:
    """Those that are there on request alone."""
    rows = [
        (name, kind, labels, text)
        for series, labels in (
            (metrics.QUEUE_SERIES, metrics.QUEUE_LABELS),
            (metrics.SESSION_SERIES, metrics.SESSION_LABELS),
        )
        for name, (kind, text) in series.items()
    ]
    rows.append((metrics.LEFT_OUT, "gauge", ("series",), metrics.LEFT_OUT_TEXT))
    yield from table(
        ("metric", "labels", "meaning"),
        [
            (f"`{name}{'_total' if kind == 'counter' else ''}`", ", ".join(labels), text)
            for name, kind, labels, text in rows
        ],
    )


def worker_table() -> Iterator[str]:
    """Those of the process that has started workers."""
    yield from table(
        ("metric", "labels", "meaning"),
        [
            (f"`{name}{'_total' if kind == 'counter' else ''}`", ", ".join(labels), text)
            for name, (kind, text, labels) in metrics.WORKER_SERIES.items()
        ],
    )


# Logs

LEVELS: Final = ("error", "warning", "info", "debug")


class Logged(NamedTuple):
    """An event of the log: its text, its level, and its facts, as some call has them."""

    event: str
    level: str
    facts: tuple[str, ...]
    elsewhere: bool
    """There may be more facts than the call names."""


def logged(source: str, name: str = "") -> Iterator[Logged]:
    """The events that a module logs. Raises ValueError for one whose text is no constant."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        logger = ast.unparse(call.func.value)
        if call.func.attr not in LEVELS or not (logger == "log" or "get_logger(" in logger):
            continue
        first = call.args[0] if call.args else None
        text = constants.get(first.id) if isinstance(first, ast.Name) else getattr(first, "value", None)
        if not isinstance(text, str):
            raise ValueError(f"{name}:{call.lineno}: the text of an event is constant, its facts are keys")
        facts = tuple(word.arg for word in call.keywords if word.arg not in (None, "exc_info"))
        yield Logged(text, call.func.attr, facts, any(word.arg is None for word in call.keywords))


def log_events() -> Iterator[str]:
    """All events, the worst first."""
    found: dict[tuple[int, str], dict[str, None]] = {}
    for path in sorted((ROOT / "gateway").rglob("*.py")):
        for one in logged(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))):
            facts = [f"`{fact}`" for fact in one.facts] + (["…"] if one.elsewhere else [])
            found.setdefault((LEVELS.index(one.level), one.event), {}).update(dict.fromkeys(facts))
    for place, level in enumerate(LEVELS):
        yield f"### {level}"
        yield ""
        yield from table(
            ("event", "facts"),
            ((event, ", ".join(facts)) for (at, event), facts in sorted(found.items()) if at == place),
        )
        yield ""


# The command line


COMMON_MIN: Final = 2  # commands of a page with the same option, from which on it is described once
LONG_OPTION: Final = re.compile(r"--[\w-]+")


def command_list() -> Iterator[str]:
    """All commands and groups of them, with what they are for."""
    yield from table(
        ("command", "does"),
        ((f"`{name}`", _first_line(one)) for name, one in sorted(_commands().items())),
    )


def command_help(names: str) -> Iterator[str]:
    """Return the help of commands and groups whose names are joined by commas; after a `-`, of all others.

    Options of several commands are described once, in front of them.
    """
    others, chosen = names.startswith("-"), names.removeprefix("-").split(",")
    found = [
        one
        for name, command in sorted(_commands().items())
        if (name in chosen) != others
        for one in _single_commands(command, f"gateway {name}")
    ]
    counts = Counter(row for command, path in found for row in _help_rows(command, path) if row[0][0] == "-")
    common = {row for row, count in counts.items() if count >= COMMON_MIN}
    if common:
        yield "## Common options"
        yield ""
        yield from _option_table("option", [row for row in counts if row in common])
        yield ""
    for command, path in found:
        yield from _described(command, path, common)


def _commands() -> dict[str, Any]:
    whole = typer.main.get_command(commands())
    assert isinstance(whole, typer.core.TyperGroup)
    return whole.commands


def _first_line(command: Any) -> str:
    return inspect.cleandoc(command.help or "").partition("\n")[0]


def _single_commands(command: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Return the commands of a group, at any depth, with their names."""
    if isinstance(command, typer.core.TyperGroup):
        for name, one in sorted(command.commands.items()):
            yield from _single_commands(one, f"{path} {name}")
    else:
        yield command, path


def _help_rows(command: Any, path: str) -> list[tuple[str, str]]:
    """Return names and meanings of a command's arguments and options."""
    context = typer.Context(command, info_name=path)
    return [record for one in command.params if (record := one.get_help_record(context)) is not None]


def _option_table(head: str, rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from table((head, "meaning"), ((f"`{names}`", text) for names, text in rows))


def _described(command: Any, path: str, common: Collection[tuple[str, str]]) -> Iterator[str]:
    """Return the help of one command, which only names options that are among the `common` ones."""
    pieces = " ".join(command.collect_usage_pieces(typer.Context(command, info_name=path)))
    yield f"## `{path}`"
    yield ""
    yield inspect.cleandoc(command.help or "").replace("\n\n", "\n")
    yield ""
    if pieces != "[OPTIONS]":
        yield f"`{path} {pieces}`"
        yield ""
    rows = _help_rows(command, path)
    if own := [row for row in rows if row not in common]:
        yield from _option_table("argument or option", own)
        yield ""
    if examples := (command.epilog or "").splitlines()[2:]:
        yield from (f"Example: {', '.join(f'`{line.strip()}`' for line in examples)}", "")
    if shared := [f"`{LONG_OPTION.findall(names)[0]}`" for names, text in rows if (names, text) in common]:
        yield f"[Common options](#common-options): {', '.join(shared)}"
        yield ""


# The interface over HTTP


def operations() -> Iterator[str]:
    """What can be asked below /api/v1: the words of a query or body are what chooses."""
    yield from table(("request", "answer"), (_operation(*one) for one in _operations()))


def _operations() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    none: Any = None
    admission = Admission(none, none)
    apis = (
        ProcessApi(none),
        ClientsApi(none, none),
        SessionsApi(none, none, none),
        RetainedApi(none),
        QueuesApi(none, none, none, none),
        NamespacesApi(none, none),
        LettersApi(none, none, none),
        LoginsApi(admission),
        EventsApi(admission, none),
        RatesApi(none),
        MappingsApi(none),
    )
    described = description_of([one for api in apis for one in api.operations()], "0")
    for path, methods in described["paths"].items():
        for method, one in methods.items():
            yield path, method.upper(), {**one, "schemas": described["components"]["schemas"]}


def _operation(path: str, method: str, one: Mapping[str, Any]) -> tuple[str, str]:
    words = [given["name"] for given in one.get("parameters", ()) if given["in"] == "query"]
    if (body := one.get("requestBody")) is not None:
        schema = body["content"]["application/json"]["schema"]
        named = schema.get("$ref", "").rpartition("/")[2]
        words += list((one["schemas"][named] if named else schema)["properties"])
    told = f"; {', '.join(f'`{word}`' for word in words)}" if words else ""
    return f"`{method} {path}`", f"{one['summary']}{told}"


# The journal, and what the specifications ask for


def journal_bytes() -> Iterator[str]:
    """How the bytes lie: what the module says that writes and reads them."""
    yield inspect.cleandoc(journal_format.__doc__ or "").partition("\n\n")[2]


def audit_table() -> Iterator[str]:
    """The events of the audit log, and their facts."""
    yield from table(
        ("event", "meaning", "facts"),
        (
            (f"`{name}`", event.meaning, ", ".join(f"`{fact}`" for fact in event.facts))
            for name, event in audit.EVENTS.items()
        ),
    )


KINDS: Final[dict[str, Callable[..., Iterator[str]]]] = {
    "settings": lambda name: keys("settings", name),
    "mapping": lambda name: keys("mapping", name),
    "ports": ports,
    "metrics": metric_table,
    "detailed-metrics": detailed_table,
    "worker-metrics": worker_table,
    "audit": audit_table,
    "log-events": log_events,
    "command-list": command_list,
    "commands": command_help,
    "operations": operations,
    "bytes": journal_bytes,
    "clauses": tables.lines,
}


def written(text: str) -> str:
    """The text of a page with its parts as they should be."""

    def made(found: re.Match[str]) -> str:
        head, kind, what, end = found.groups()
        lines = KINDS[kind](*([what] if what else []))
        return "\n".join([head, *lines, "", end])

    return PART.sub(made, text)


def pages() -> list[Path]:
    """All pages."""
    return sorted(DOCS.rglob("*.md"))


def stale() -> list[Path]:
    """The pages that do not say what the code says."""
    return [page for page in pages() if written(text := page.read_text(encoding="utf-8")) != text]


def main(arguments: Sequence[str]) -> int:
    """Write the parts; with `--check` say which pages are stale, and change nothing."""
    found = stale()
    for page in found:
        if "--check" not in arguments:
            page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
        print(page.relative_to(ROOT))
    return int(bool(found) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
