"""The mapping files: read, and read again when they change."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Final

import watchfiles

from gateway.broker.dispatcher import tell_reply_kept
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
from gateway.reloads import Stamp, Watched, stamp_if_there
from gateway.settings import Settings

WATCH_MILLISECONDS: Final = 500  # the watching thread looks up this often; stopping waits for it

ID_OCTETS: Final = 12  # of chance in what every message id of this process begins with

Texts = Mapping[str, str]
NO_TEXTS: Final[Texts] = MappingProxyType({})


def message_ids() -> Iterator[str]:
    """Ids for messages that have none; no other process, and no other life of this one, has the same."""
    prefix = secrets.token_hex(ID_OCTETS)
    return (f"{prefix}-{number:x}" for number in count(1))


def refused_routes(routes: Iterable[Route], given: Settings) -> list[MappingError]:
    """Routes that the configuration has no place for."""
    routes = list(routes)
    shared = given.shared_outboxes()
    found = unstorable_routes(routes, given.links, store=given.store.enabled, shared=shared)
    if given.one_way:
        found += returning_routes(routes, given.links)
    found += undivided_routes(routes, given.divides, given.workers)
    if given.journal.enabled and given.journal.hash_key is None:
        found += unkeyed_routes(routes)
    return found


def _all(errors: list[MappingError]) -> MappingError:
    """One that tells of all."""
    first, *others = errors
    return MappingError(first.reason, file=first.file, line=first.line, column=first.column, others=others)


class MappingFiles:
    """The files that the configuration names."""

    def __init__(self, settings: Settings, return_key: bytes) -> None:
        """`return_key` is what return addresses are made with."""
        self.settings = settings
        self._return_key = return_key
        self._watched = Watched(self._fingerprint)
        self._ids = message_ids()
        self.refused = ""  # why the files were not taken when they were read last
        self._in_force: dict[str, str] = {}  # texts by file, of the routes in force
        self._routed = False  # there are any

    def load(self) -> Router:
        """The routes of the files as they are now, to be put in force. Raises ConfigurationError."""
        self._watched.take()
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
        """The routes of the files as they are now, or of `drafts`, texts by file, in place of some. Raises
        ConfigurationError, also for files that have lost their end, and for none where there were routes.
        """
        return self._read(drafts)[0]

    def _read(self, drafts: Texts) -> tuple[Router, list[MappingFile]]:
        given = self.settings
        endpoints = given.endpoints()
        left = dict(drafts)
        mappings = []
        for path in given.mapping_files():
            text = left.pop(str(path), None)
            mappings += self._load(path) if text is None else [parse(text, str(path))]
        mappings += [parse(text, file) for file, text in left.items()]
        hops_max = given.limits.hops_max
        router = Router(
            mappings,
            endpoints,
            worlds=given.worlds(),
            hops_max=hops_max,
            ids=self._ids,
            return_key=self._return_key,
            reply_kept=tell_reply_kept,
        )
        if refused := refused_routes(router.routes, given):
            raise _all(refused)
        if self._routed and not drafts and not router.routes:
            raise MappingError("there are no routes any more; restart the gateway if that is meant")
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
        """The files, as the configuration finds them."""
        return [str(path) for path in self.settings.mapping_files()]

    async def watch(self, changed: Callable[[], Awaitable[object]]) -> None:
        """Await `changed` when a file is not what was read.

        Kubernetes swaps a ConfigMap's folder behind a symbolic link.
        """
        folders = {path.resolve().parent for path in self.settings.mapping_files()}
        folders |= {path.absolute().parent for path in self.settings.mapping_files()}
        present = [folder for folder in folders if folder.is_dir()]
        # Looking at every time-out too finds what changed before the watch stood, and what no event tells of.
        async for _ in watchfiles.awatch(
            *present,
            recursive=False,
            debounce=200,
            step=WATCH_MILLISECONDS // 10,
            rust_timeout=WATCH_MILLISECONDS,
            yield_on_timeout=True,
        ):
            if self._watched.changed():
                await changed()

    def _fingerprint(self) -> dict[Path, Stamp | None]:
        return {path: stamp_if_there(path) for path in self.settings.mapping_files()}
