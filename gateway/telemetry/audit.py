"""Audit log: which clients connected, were refused or disconnected, and which user did what.

Each event is one line. `EVENTS` lists all events with the facts that they may have; another event or fact is
a programming error and raises ValueError. No fact is a password, a token or a body. Text that a peer chose is
cut, made printable, and masked where it looks like a token, because people enter tokens as user names.

Peers can cause events at will, so at most `per_second_max` lines of one kind are written per second. Further
events are counted, and one line of that kind reports their number: in the next second that has such an event,
or when `Trail.write_omitted` is called.

If there are several users, each has a share of these lines, and of the bytes of a file. A user whose share of
the current file is full gets one line of each kind per second until the next file. No user can thus suppress
the lines of others, or push them out of the last file. A refused client is counted by its address, because
the user name that it sent is not verified.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import structlog

from gateway import clock as clocks
from gateway.telemetry.logs import write_json

LOGGER: Final = "gateway.audit"
FACT_MAX: Final = 200  # characters
TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*")  # a JWT, complete or cut
TOKEN_MIN: Final = 18  # minimum length of a token in characters
HOLDERS_MAX: Final = 10_000  # users and addresses whose bytes in the current file are counted
MASK: Final = "***"
Fact = str | int | float | bool | None | list[str]


log = structlog.get_logger()


class AuditEvent(NamedTuple):
    """Kind of event in the audit log: its meaning, and the names of the facts that an event may have."""

    meaning: str
    facts: tuple[str, ...]


PEER: Final = ("endpoint", "user", "client", "remote")
EVENTS: Final[dict[str, AuditEvent]] = {
    "connected": AuditEvent(
        "A client was accepted; `backend` identified it.", (*PEER, "backend", "version", "roles", "expires")
    ),
    "refused": AuditEvent("A client was refused, with the reason.", (*PEER, "backend", "reason")),
    "renewed": AuditEvent("A connected client re-authenticated.", (*PEER, "backend", "expires")),
    "disconnected": AuditEvent(
        "An accepted client disconnected, with the reason.", (*PEER, "reason", "secs")
    ),
    "denied": AuditEvent(
        "A client lacks a right; `rule` is the rule that decided.",
        (*PEER, "action", "target", "rule"),
    ),
    "logged_in": AuditEvent("A user logged in to the console.", ("user", "remote", "backend")),
    "logged_out": AuditEvent("A user logged out of the console.", ("user", "remote")),
    "administered": AuditEvent(
        "A user changed, deleted or disconnected something over HTTP; `status` is that of the response.",
        ("user", "credential", "remote", "action", "target", "count", "status"),
    ),
    "mapping_changed": AuditEvent("Routes were changed.", ("routes", "files")),
    "rules_changed": AuditEvent("Roles, or roles of users, were changed.", ("roles",)),
    "users_changed": AuditEvent("Users, or secrets of users, were changed.", ("path", "users")),
}


KNOWN: Final = {name: frozenset(event.facts) for name, event in EVENTS.items()}


class Trail:
    """Audit log of this process: counts all events, and writes a limited number of them per second.

    `write` is called with the name and the facts of each event that is written.
    """

    def __init__(
        self,
        write: Callable[[str, dict[str, Any]], None],
        per_second_max: int = 0,
        clock: Callable[[], float] | None = None,
        *,
        user_share: float = 1.0,
        several: Callable[[], bool] = bool,
        file: AuditFile | None = None,
    ) -> None:
        """Set the limits of the audit log.

        `per_second_max` is the maximum number of lines for one kind of event per second; 0 means no limit.
        `user_share` is the fraction of these lines, and of the bytes of `file`, that one user may cause,
        while there are several users: while `several` returns True. `clock` returns monotonic seconds.
        """
        self.counts: dict[str, int] = dict.fromkeys(EVENTS, 0)
        self.dropped: dict[str, int] = dict.fromkeys(EVENTS, 0)
        self._write = write
        self._per_second_max = per_second_max
        self._clock = clock or clocks.monotonic
        self._seconds: dict[str, tuple[int, int]] = {}  # by event: the current second, and the lines in it
        self._lines: dict[str, dict[str, int]] = {}  # lines in that second, by event and holder
        self._user_share = user_share
        self._several = several
        self._file = file
        self._omitted: dict[str, int] = {}

    def add(self, event: str, facts: dict[str, Fact]) -> None:
        """Count an event, and write it unless a limit is reached.

        Raises ValueError for an event that is not in `EVENTS`, and for a fact that `EVENTS` does not list for
        the event.
        """
        fields = KNOWN.get(event)
        if fields is None or not facts.keys() <= fields:
            raise ValueError(f"no audit event {event} with the fields {sorted(facts)}")
        self.counts[event] += 1
        if self._per_second_max:
            second = int(self._clock())
            second_at, lines = self._seconds.get(event, (second, 0))
            of_holders = self._lines.setdefault(event, {})
            if second_at != second:
                self._write_omitted_event(event)
                lines = 0
                of_holders.clear()
            holder = _holder(event, facts) if self._several() else ""
            mine = of_holders.get(holder, 0)
            if lines >= self._per_second_max or (holder and mine >= self._lines_max(holder)):
                self.dropped[event] += 1
                self._omitted[event] = self._omitted.get(event, 0) + 1
                return
            self._seconds[event] = (second, lines + 1)
            of_holders[holder] = mine + 1
            if self._file is not None:
                self._file.holder = holder
        self._write(event, {name: sanitized(fact) for name, fact in facts.items()})

    def _lines_max(self, holder: str) -> int:
        """Return how many lines for one kind of event per second `holder`, a user or address, may cause."""
        if self._file is not None and self._file.share_of(holder) >= self._user_share:
            return 1
        return max(int(self._per_second_max * self._user_share), 1)

    def write_omitted(self) -> None:
        """Write how many lines for each kind of event were omitted, unless this was written before.

        Call this periodically, and at the end of the process.
        """
        for event in list(self._omitted):
            self._write_omitted_event(event)

    def _write_omitted_event(self, event: str) -> None:
        if more := self._omitted.pop(event, 0):
            self._write(event, {"more": more})


def _holder(event: str, facts: dict[str, Fact]) -> str:
    """Return the user or address to whose limit in the audit log an event counts.

    This is the address if the client has no verified user. Return "" if the facts contain neither.
    """
    user, remote = facts.get("user"), facts.get("remote")
    if user and event != "refused":
        return f"user {user}"
    return f"address {str(remote).rpartition(':')[0]}" if remote else ""


def sanitized(value: Fact) -> Fact:
    """Return the value of a fact in a form that is safe for the audit log.

    Text is cut to FACT_MAX characters, and a list to 32 items. Characters that are not printable are escaped,
    and tokens are masked.
    """
    if isinstance(value, list):
        return [str(sanitized(one)) for one in value[:32]]
    if not isinstance(value, str):
        return value
    text = value
    if len(value) >= TOKEN_MIN:
        text = TOKEN.sub(MASK, value[: 4 * FACT_MAX])  # mask tokens before the text is cut
    if not text.isprintable():
        text = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)
    return text if len(text) <= FACT_MAX else f"{text[:FACT_MAX]}..."


def _to_log(event: str, facts: dict[str, Any]) -> None:
    """Write an audit event to the general log.

    A line of a JSON log is written without structlog, because this is faster and each client causes two
    lines.
    """
    line = {"audit": event, **facts, "event": "audit", "level": "info", "logger": LOGGER, "timestamp": _now()}
    if not write_json(line):
        structlog.get_logger(LOGGER).info("audit", audit=event, **facts)


def _now() -> str:
    return (
        datetime.fromtimestamp(clocks.unix_time(), UTC)
        .isoformat(timespec="microseconds")
        .replace("+00:00", "Z")
    )


def _discard(event: str, facts: dict[str, Any]) -> None:
    """Discard an audit event. Used while the audit log is disabled."""


class _OwnFile(RotatingFileHandler):
    """Rotating log file that only its owner may read.

    If the operator changes the permissions of the file, the files that follow it get the same ones.
    """

    mode_bits = 0o600

    def _open(self) -> TextIOWrapper:
        try:
            self.mode_bits = stat.S_IMODE(os.stat(self.baseFilename).st_mode)
        except FileNotFoundError:
            descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, self.mode_bits)
            os.fchmod(descriptor, self.mode_bits)
            os.close(descriptor)
        return super()._open()


class AuditFile:
    """File of the audit log, with one JSON object in each line.

    The file is rotated before it exceeds `bytes_max` bytes. The last `files` earlier files are preserved as
    `path.1` and so on.
    """

    def __init__(self, path: Path, bytes_max: int, files: int) -> None:
        """Open the file. Raises OSError."""
        self._file = _OwnFile(path, maxBytes=bytes_max, backupCount=files, encoding="utf-8")
        self._byte_count = path.stat().st_size
        self._bytes_max = bytes_max
        self._failure_logged = False
        self.holder = ""  # user or address of the next line
        self._of_holders: dict[str, int] = {}  # bytes of the current file, by holder

    def share_of(self, holder: str) -> float:
        """Return the fraction of `bytes_max` that a user or address has written to the current file."""
        return self._of_holders.get(holder, 0) / self._bytes_max

    def _count(self, byte_count: int) -> None:
        holder, self.holder = self.holder, ""
        of_holders = self._of_holders
        of_holders[holder] = of_holders.get(holder, 0) + byte_count
        if len(of_holders) > HOLDERS_MAX:  # forget holders with few bytes
            least = self._bytes_max // HOLDERS_MAX
            self._of_holders = {name: has for name, has in of_holders.items() if has > least}

    def write(self, event: str, facts: dict[str, Any]) -> None:
        """Write an event as one line.

        If this fails, log an error, but only the first one after a line that was written.
        """
        line = orjson.dumps({"timestamp": _now(), "audit": event, **facts}, default=str).decode() + "\n"
        try:
            if self._byte_count and self._byte_count + len(line) > self._bytes_max:
                self._file.doRollover()
                self._byte_count = 0
                self._of_holders.clear()
            assert self._file.stream is not None, "it is opened at once"
            self._file.stream.write(line)
            self._file.stream.flush()
        except (OSError, ValueError) as error:
            if not self._failure_logged:
                self._failure_logged = True
                log.error("audit log not writable", error=str(error))
        else:
            self._byte_count += len(line)
            self._count(len(line))
            self._failure_logged = False

    def close(self) -> None:
        """Close the file. Do not call `write` afterwards."""
        self._file.close()


class _Current:
    """Audit log of this process, and its file. `configure_audit` replaces both."""

    trail: Trail = Trail(_to_log)
    file: AuditFile | None = None


def audit(event: str, **facts: Fact) -> None:
    """Write an event with its facts to the audit log of this process.

    Raises ValueError if `EVENTS` does not list the event or one of the facts.
    """
    _Current.trail.add(event, facts)


def trail() -> Trail:
    """Return the audit log of this process, for example to read how many events were counted."""
    return _Current.trail


def configure_audit(
    *,
    enabled: bool = True,
    path: Path | None = None,
    bytes_max: int = 0,
    files: int = 0,
    per_second_max: int = 0,
    user_share: float = 1.0,
    several: Callable[[], bool] = bool,
) -> None:
    """Replace the audit log of this process.

    Events are written to the file `path`, or to the general log if `path` is None. If `enabled` is False,
    events are only counted. The other parameters are those of `AuditFile` and `Trail`. Raises OSError if the
    file cannot be opened.
    """
    file = AuditFile(path, bytes_max, files) if enabled and path is not None else None
    if _Current.file is not None:
        _Current.file.close()
    _Current.file = file
    write = _to_log if file is None else file.write
    _Current.trail = Trail(
        write if enabled else _discard, per_second_max, user_share=user_share, several=several, file=file
    )
