"""Loader of the mapping files, which are read again when they change.

`MappingFiles` compiles the files into a router and refuses routes that the configuration cannot serve. It
puts no router in force: the gateway does.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final

import watchfiles

from gateway.broker.dispatcher import log_reply_kept
from gateway.documents import refuse_lost_end
from gateway.errors import ConfigurationError, MappingError
from gateway.mapping import Mapping as MappingFile
from gateway.mapping import load, parse
from gateway.mapping.linter import (
    returning_routes,
    undivided_routes,
    unkeyed_routes,
    unstorable_routes,
)
from gateway.mapping.router import Router
from gateway.mapping.routes import Route
from gateway.reloads import ChangeDetector, Stamp, stamp_if_there
from gateway.settings import Settings

WATCH_MILLISECONDS: Final = 500  # Interval of the watching thread; stopping waits for it.

ID_BYTES: Final = 12  # Random bytes in the prefix of the message ids of this process.

Texts = Mapping[str, str]
NO_TEXTS: Final[Texts] = MappingProxyType({})


def message_ids() -> Iterator[str]:
    """Return an endless iterator of unique message ids, for messages whose senders have set no id.

    Other processes, and later runs of this process, generate other ids.
    """
    prefix = secrets.token_hex(ID_BYTES)
    return (f"{prefix}-{number:x}" for number in count(1))


def refused_routes(routes: Iterable[Route], settings: Settings) -> list[MappingError]:
    """Return an error for each route that the configuration cannot serve.

    An example is a route with an outbox although the store is disabled.
    """
    routes = list(routes)
    shared = settings.shared_outboxes()
    found = unstorable_routes(routes, settings.links, store=settings.store.enabled, shared=shared)
    if settings.one_way:
        found += returning_routes(routes, settings.links)
    found += undivided_routes(routes, settings.divides, settings.workers)
    if settings.journal.enabled and settings.journal.hash_key is None:
        found += unkeyed_routes(routes)
    return found


def _all(errors: list[MappingError]) -> MappingError:
    """Return one MappingError that contains all `errors`."""
    first, *others = errors
    return MappingError(first.reason, file=first.file, line=first.line, column=first.column, others=others)


class MappingFiles:
    """Loader of the mapping files that the configuration names.

    `refused` is the reason why the last `load` failed, or "" if it succeeded.
    """

    def __init__(self, settings: Settings, return_key: bytes) -> None:
        """Create a loader that has read no files; `return_key` signs return addresses."""
        self.settings = settings
        self._return_key = return_key
        self._watched = ChangeDetector(self._fingerprint)
        self._ids = message_ids()
        self.refused = ""  # Reason why the last reading was refused; "" if it was not.
        self._in_force: dict[str, str] = {}  # Texts by file name, of the routes in force.
        self._routed = False  # True once there have been routes.

    def load(self) -> Router:
        """Compile the mapping files, and return the resulting router, which the caller must put in force.

        From then on, `watch` reports only later changes. Raises ConfigurationError for files that are invalid
        or cut off, and if all routes have been removed since the previous `load`.
        """
        self._watched.accept()
        try:
            router, mappings = self._read(NO_TEXTS)
        except ConfigurationError as error:
            self.refused = str(error)
            raise
        self.refused = ""
        self._in_force = {one.file: one.text for one in mappings}
        self._routed = bool(router.routes)
        return router

    def read(self, drafts: Texts = NO_TEXTS) -> Router:
        """Compile the mapping files for a check, and return the resulting router.

        `watch` is not affected. `drafts` has texts by file name, which replace the contents of files or add
        files. Raises ConfigurationError for files that are invalid or truncated, and, without `drafts`, if
        all routes have been removed since the last `load`.
        """
        return self._read(drafts)[0]

    def _read(self, drafts: Texts) -> tuple[Router, list[MappingFile]]:
        """Compile the mapping files, with `drafts` as in `read`. Return the router and the parsed files."""
        settings = self.settings
        endpoints = settings.endpoints()
        remaining = dict(drafts)
        mappings = []
        for path in settings.mapping_files():
            text = remaining.pop(str(path), None)
            mappings += self._load(path) if text is None else [parse(text, str(path))]
        mappings += [parse(text, file) for file, text in remaining.items()]
        hops_max = settings.limits.hops_max
        router = Router(
            mappings,
            endpoints,
            domains=settings.listener_namespaces(),
            hops_max=hops_max,
            ids=self._ids,
            return_key=self._return_key,
            reply_kept=log_reply_kept,
        )
        if refused := refused_routes(router.routes, settings):
            raise _all(refused)
        if self._routed and not drafts and not router.routes:
            raise MappingError("the files have no routes; if that is intended, restart the gateway")
        return router, mappings

    def _load(self, path: Path) -> list[MappingFile]:
        mappings = load([path])
        for one in mappings:
            try:
                refuse_lost_end(self._in_force.get(one.file, ""), one.text, one.file)
            except ConfigurationError as error:
                raise MappingError(error.reason, file=error.file) from error
        return mappings

    def names(self) -> list[str]:
        """Return the paths of the mapping files at present, including missing files configured by name."""
        return [str(path) for path in self.settings.mapping_files()]

    async def watch(self, changed: Callable[[], Awaitable[object]]) -> None:
        """Await `changed` whenever a mapping file differs from its state at the last `load`, until cancelled.

        If a file is a symbolic link, its folder and the folder of its target are both watched, because
        Kubernetes replaces the folder of a ConfigMap behind a symbolic link.
        """
        folders = {path.resolve().parent for path in self.settings.mapping_files()}
        folders |= {path.absolute().parent for path in self.settings.mapping_files()}
        present = [folder for folder in folders if folder.is_dir()]
        # Comparing at every time-out also finds changes before the watch was set up, and changes without an
        # event.
        async for _ in watchfiles.awatch(
            *present,
            recursive=False,
            debounce=200,
            step=WATCH_MILLISECONDS // 10,
            rust_timeout=WATCH_MILLISECONDS,
            yield_on_timeout=True,
        ):
            if self._watched.has_changed():
                await changed()

    def _fingerprint(self) -> dict[Path, Stamp | None]:
        return {path: stamp_if_there(path) for path in self.settings.mapping_files()}
