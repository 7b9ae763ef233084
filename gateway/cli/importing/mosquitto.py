"""Importer of mosquitto.conf(5): listeners, access rules, limits, and bridges.

Each line of the file is a key and its value. `listener` and `connection` begin a section about this listener
or bridge; lines before them concern the default listener and the whole broker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.cli.importing.import_result import ImportResult, name_of, unused_name
from gateway.mapping.linter import Severity
from gateway.protocols.mqtt.dialect import MQTT

TOPIC_WORDS_MAX: Final = 5  # of a line `topic`
EVERY: Final = {"protocol": MQTT.name}  # endpoint of a route: all listeners of this protocol
SCHEMES: Final = {one.transport: one.name for one in MQTT.schemes}
LIMITS: Final = {
    "max_inflight_messages": ("inflight_max", 65_535),
    "max_keepalive": ("keep_alive_secs_max", 65_535),
    "max_packet_size": ("message_bytes_max", 268_435_455),
    "message_size_limit": ("message_bytes_max", 268_435_455),
    "max_queued_messages": ("queue_messages_max", 1 << 62),
}
LISTENER_FILES: Final = {
    "certfile": "cert_file",
    "keyfile": "key_file",
    "cafile": "client_ca_file",
    "crlfile": "crl_file",
}
BRIDGE_FILES: Final = {
    "bridge_cafile": "ca_file",
    "bridge_certfile": "cert_file",
    "bridge_keyfile": "key_file",
}
VERSIONS: Final = {"mqttv31": "3.1", "mqttv311": "3.1.1", "mqttv50": "5.0"}
MEANINGLESS: Final = frozenset(
    (
        *("user", "pid_file", "log_dest", "log_type", "log_timestamp", "log_timestamp_format"),
        *("connection_messages", "autosave_interval", "autosave_on_changes", "sys_interval"),
        *("set_tcp_nodelay", "per_listener_settings", "allow_zero_length_clientid", "try_private"),
        *("start_type", "notifications", "restart_timeout", "retry_interval", "persistence_file"),
        *("queue_qos0_messages", "upgrade_outgoing_qos", "retain_available"),
    )
)
"""Keys that are ignored without a finding: internals of Mosquitto, or what the gateway does anyway."""


KEY: Final = re.compile(r"[a-z][a-z0-9_]*")


class ConfigurationLine(NamedTuple):
    """Line of a Mosquitto file with a key and a value. `number` and `column` count from 1."""

    file: Path
    number: int
    key: str
    value: str
    column: int = 0

    @property
    def position(self) -> tuple[int, Path, int]:
        """Position of the line for findings: line number, file, column."""
        return self.number, self.file, self.column


class Stanza:
    """Section of mosquitto.conf about one listener or bridge.

    `line` is its first line. `options` has its keys and their values, `topics` its `topic` lines.
    """

    def __init__(self, line: ConfigurationLine) -> None:
        self.line = line
        self.options: dict[str, str] = {}
        self.topics: list[ConfigurationLine] = []


def import_file(file: Path, folder: Path) -> ImportResult:
    """Import a mosquitto.conf, and return the result. Faults become findings.

    `folder` is the folder to which the result will be written.
    """
    made = ImportResult(file, folder)
    listeners: list[Stanza] = [Stanza(ConfigurationLine(file, 0, "listener", "1883"))]
    bridges: list[Stanza] = []
    stanza = listeners[0]
    for line in _lines(file, made):
        if line.key in ("listener", "connection"):
            stanza = Stanza(line)
            (listeners if line.key == "listener" else bridges).append(stanza)
        elif line.key == "topic" and stanza in bridges:
            stanza.topics.append(line)
        elif line.key in LIMITS:
            _limit(made, line)
        elif line.key in _GENERAL:
            _GENERAL[line.key](made, line)
        elif line.key in _OF_LISTENERS or line.key in _OF_BRIDGES:
            stanza.options[line.key] = line.value
        elif not KEY.fullmatch(line.key):
            made.refuse_file("not a line of a mosquitto.conf", *line.position)
        elif line.key not in MEANINGLESS:
            made.leave_out(f"{line.key} is not supported and was not imported", *line.position)
    first = listeners[0].options
    if len(listeners) > 1 and not first.keys() & {"port", "bind_address"}:
        default = listeners.pop(0)  # it does not exist, but its other keys apply to all listeners
        for one in listeners:
            one.options = {**default.options, **one.options}
    made.configuration["listeners"] = {
        name: _listener(made, one) for name, one in zip(_names(listeners), listeners, strict=True)
    }
    for bridge in bridges:
        _bridge(made, bridge)
    return made


def _lines(file: Path, made: ImportResult) -> Iterator[ConfigurationLine]:
    """Yield the lines of a file that are neither empty nor comments.

    A line `include_dir` is replaced by the lines of the files in that folder. A file that cannot be read
    becomes a finding.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if file == made.source:
            made.refuse_file(f"cannot be read: {error}")
        else:
            made.add_finding(Severity.ERROR, "unreadable", f"cannot be read: {error}", file=file)
        return
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().split(None, 1)
        if not words or words[0].startswith("#"):
            continue
        value = words[1].strip() if len(words) > 1 else ""
        if words[0] == "include_dir":
            for inner in sorted(Path(value).glob("*.conf")):
                yield from _lines(inner, made)
        else:
            yield ConfigurationLine(file, number, words[0], value, len(line) - len(line.lstrip()) + 1)


def _names(listeners: list[Stanza]) -> list[str]:
    """Return the names of the gateway's listeners: `mqtt` for a single one, else `mqtt-PORT` for each.

    If several listeners have the same port, at different addresses, a number is added to all names but the
    first.
    """
    if len(listeners) == 1:
        return [MQTT.name]
    names: list[str] = []
    for one in listeners:
        port = (one.options.get("port") or one.line.value).split()[0]
        names.append(unused_name(f"{MQTT.name}-{port}", names))
    return names


def _listener(made: ImportResult, stanza: Stanza) -> dict[str, Any]:
    """Convert a listener of Mosquitto to the settings of a listener of the gateway."""
    options = stanza.options
    port, *host = stanza.line.value.split()
    found: dict[str, Any] = {**EVERY, "port": _number(made, stanza.line, options.get("port", port))}
    if place := options.get("bind_address") or " ".join(host):
        found["host"] = place
    if options.get("protocol") == "websockets":
        found["websocket_path"] = "/mqtt"
        made.add_finding(
            Severity.NOTE, "otherwise", "WebSocket is served only at the path /mqtt", *stanza.line.position
        )
    tls = {ours: options[theirs] for theirs, ours in LISTENER_FILES.items() if theirs in options}
    if "cert_file" in tls:
        if "client_ca_file" in tls and options.get("require_certificate") != "true":
            tls["client_certificate"] = "optional"
        found["tls"] = tls
    found["anonymous"] = "always" if options.get("allow_anonymous") == "true" else "never"
    if (number := _number(made, stanza.line, options.get("max_connections", "0"))) > 0:  # -1: no limit
        found["limits"] = {"connections_max": number}
    return found


def _number(made: ImportResult, line: ConfigurationLine, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        made.add_finding(Severity.ERROR, "invalid", f"{line.key}: {text!r} is not a number", *line.position)
        return 0


def _limit(made: ImportResult, line: ConfigurationLine) -> None:
    name, most = LIMITS[line.key]
    number = _number(made, line, line.value)
    if number > 0:  # 0: no limit
        made.configuration.setdefault("limits", {})[name] = min(number, most)


# Keys that apply to the whole broker.


def _persistence(made: ImportResult, line: ConfigurationLine) -> None:
    made.configuration.setdefault("store", {})["enabled"] = line.value == "true"


def _location(made: ImportResult, line: ConfigurationLine) -> None:
    text = f"{line.key}: stored data of Mosquitto cannot be imported; the gateway's store is in store.path"
    made.add_finding(Severity.NOTE, "otherwise", text, *line.position)


def _passwords(made: ImportResult, line: ConfigurationLine) -> None:
    try:
        names = [one.partition(":")[0] for one in Path(line.value).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        names = []
        made.add_finding(
            Severity.WARNING, "unreadable", f"{line.value} cannot be read: {error}", *line.position
        )
    for name in filter(None, names):
        text = (
            f"user {name}: Mosquitto's password hash cannot be imported; set users.{name}"
            ".password_hash to what `gateway passwd` prints"
        )
        made.add_finding(Severity.WARNING, "password", text, *line.position)


def _rules(made: ImportResult, line: ConfigurationLine) -> None:
    """Import an ACL file as roles.

    There is one role for each user, one for anonymous clients, and one for all clients (`pattern` lines).
    """
    file = Path(line.value)
    role = "anonymous"
    for one in _lines(file, made):
        if one.key == "user":
            role = name_of(one.value)
            made.configuration.setdefault("roles", {}).setdefault(role, {MQTT.name: {}})
            text = f"user {one.value} needs the role {role!r}; add it to users.{one.value}.roles"
            made.add_finding(Severity.NOTE, "role", text, *one.position)
            continue
        if one.key not in ("topic", "pattern"):
            made.leave_out(f"{one.key} is not supported and was not imported", *one.position)
            continue
        words = one.value.split(None, 1)
        access, topic = words if words[0] in _ACCESS and len(words) > 1 else ["readwrite", one.value]
        whose = "everybody" if one.key == "pattern" else role
        topic = topic.replace("%u", "{user}").replace("%c", "{client_id}")
        rules = made.configuration.setdefault("roles", {}).setdefault(whose, {MQTT.name: {}})[MQTT.name]
        for word in _ACCESS[access]:
            rules.setdefault(word, []).append(topic)
    roles = made.configuration.get("roles", {})
    every = ["everybody"] if "everybody" in roles else []
    anonymous = [*(["anonymous"] if "anonymous" in roles else []), *every]
    made.configuration["default_roles"] = {"anonymous": anonymous, "authenticated": every}


_ACCESS: Final = {
    "read": ("subscribe",),
    "write": ("publish",),
    "readwrite": ("publish", "subscribe"),
    "deny": ("deny_publish", "deny_subscribe"),
}
_GENERAL: Final[dict[str, Callable[[ImportResult, ConfigurationLine], None]]] = {
    "persistence": _persistence,
    "persistence_location": _location,
    "password_file": _passwords,
    "acl_file": _rules,
}
_OF_LISTENERS: Final = frozenset(
    (*LISTENER_FILES, "port", "bind_address", "protocol", "require_certificate", "allow_anonymous")
) | {"max_connections"}
_OF_BRIDGES: Final = frozenset(
    (*BRIDGE_FILES, "address", "addresses", "remote_username", "username", "remote_password", "password")
) | {"remote_clientid", "clientid", "cleansession", "keepalive_interval", "bridge_protocol_version"}


# Bridges.


def _bridge(made: ImportResult, stanza: Stanza) -> None:
    """Add a link with the addresses and credentials of a bridge, and routes for its topics."""
    options, name = stanza.options, name_of(stanza.line.value)
    places = (options.get("address") or options.get("addresses") or "").split()
    if not places:
        made.add_finding(
            Severity.ERROR, "invalid", f"connection {name}: no address is set", *stanza.line.position
        )
        return
    tls = {ours: options[theirs] for theirs, ours in BRIDGE_FILES.items() if theirs in options}
    scheme = SCHEMES["tls" if tls else "plain"]
    link: dict[str, Any] = {"urls": [f"{scheme}://{one}" for one in places], "bridge": True}
    if tls:
        link["tls"] = tls
    for ours, theirs in (("username", "remote_username"), ("password", "remote_password")):
        if value := options.get(theirs) or options.get(ours):
            link[ours] = value
    if client := options.get("remote_clientid") or options.get("clientid"):
        link["client_id"] = client
    if version := VERSIONS.get(options.get("bridge_protocol_version", "")):
        link["version"] = version
    if "keepalive_interval" in options:
        link["heartbeat_secs"] = _number(made, stanza.line, options["keepalive_interval"])
    if options.get("cleansession") == "true":
        link["session_expiry_secs"] = 0
    qos_levels = [0]
    for line in stanza.topics:
        qos_levels.append(_topic(made, name, line))
    link["qos"] = max(qos_levels)
    made.configuration.setdefault("links", {})[name] = link


def _topic(made: ImportResult, name: str, line: ConfigurationLine) -> int:
    """Add the routes for a line `topic PATTERN [DIRECTION [QOS [LOCAL [REMOTE]]]]` of the bridge `name`.

    Return the QoS with which the link has to subscribe.
    """
    words = [one.strip('"') for one in line.value.split()]
    if len(words) > TOPIC_WORDS_MAX:
        made.add_finding(
            Severity.ERROR, "invalid", f"topic: more than {TOPIC_WORDS_MAX} words", *line.position
        )
        return 0
    pattern, direction, qos, local, remote = [*words, *("", "out", "0", "", "")[len(words) :]]
    if direction not in ("in", "out", "both"):
        made.add_finding(
            Severity.ERROR,
            "invalid",
            f"topic: {direction!r} is not a direction; write in, out or both",
            *line.position,
        )
        return 0
    here, there = _template(local, pattern), _template(remote, pattern)
    ours, theirs = {"endpoint": dict(EVERY), "topic": here}, {"endpoint": name, "topic": there}
    if direction in ("out", "both"):
        made.route(f"{name}-out", ours, theirs)
    if direction in ("in", "both"):
        made.route(f"{name}-in", theirs, ours)
    return _number(made, line, qos) if direction != "out" else 0


def _template(prefix: str, pattern: str) -> str:
    """Return prefix and topic filter as a topic template, in which named captures replace the wildcards.

    The names of the captures are the same for source and target, so that both refer to the same topic levels.
    """
    levels = pattern.split("/")
    segments = [
        f"{{level{at}}}" if one == "+" else "{rest...}" if one == "#" else one
        for at, one in enumerate(levels)
    ]
    return prefix + "/".join(segments) if pattern else prefix.rstrip("/") or prefix
