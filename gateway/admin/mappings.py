"""Operations on mapping files: showing them, explaining the route of a message, and reloading.

Drafts, texts that are in no file, can be tried in place of files. No operation writes a file: files belong to
the operator or a ConfigMap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import structlog
import trio
from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.messages import message_of, parse_request, plain
from gateway.admin.models import DryRun, ExplainRequest, ExplainResult, MappingRow, ReloadResult
from gateway.admin.operations import ServedOperation
from gateway.admin.process import Process
from gateway.admin.responses import json_body, json_response
from gateway.admin.selection import page_of, query_of
from gateway.errors import ConfigurationError
from gateway.mapping.explain import explain
from gateway.operations import DRY_RUN, EXPLAIN, MAPPINGS, RELOAD
from gateway.transport.computation import computed

TEXT_BYTES_MAX: Final = 262_144  # Bytes of a file that is shown.

log = structlog.get_logger()


class MappingsApi:
    """API operations on the mapping files of a running gateway."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def operations(self) -> Sequence[ServedOperation]:
        """Return the operations on mapping files, each with the function that serves it."""
        return [
            ServedOperation(MAPPINGS, self._list, MappingRow),
            ServedOperation(EXPLAIN, self._explain, ExplainResult, ExplainRequest),
            ServedOperation(RELOAD, self._reload, ReloadResult),
            ServedOperation(DRY_RUN, self.dry_run, DryRun),
        ]

    async def _list(self, request: Request) -> Response:
        _, count, after = await query_of(request, MAPPINGS.words)
        rows = await trio.to_thread.run_sync(lambda: [_file(name) for name in self._process.mapping_files()])
        page = await page_of(
            rows, lambda _: True, lambda row: str(row["file"]), lambda row: row, count, after
        )
        return page.to_response()

    async def _explain(self, request: Request) -> Response:
        """Return the routes that a message would take and those that it would not take.

        The routes are those of the mapping in force, or of the draft in the request.
        """
        choice = parse_request(await json_body(request), ExplainRequest)
        process = self._process
        message = message_of(choice, process.protocols, choice.client, choice.user)
        router = process.router()
        if choice.files is not None:
            try:
                router = await computed(partial(process.candidate, choice.files))
            except ConfigurationError as error:
                return json_response({"faults": _faults(error), "address": "", "matches": [], "misses": []})
        found = explain(router, choice.endpoint, message.address, choice.queue or "", message.sender, message)
        return json_response(
            {
                "faults": [],
                "address": found.address,
                "matches": [plain(asdict(one)) for one in found.matches],
                "misses": [asdict(one) for one in found.misses],
            }
        )

    async def _reload(self, _: Request) -> Response:
        why = await self._process.reload()
        routes = len(self._process.router().routes)
        log.info("operator reloaded mappings", accepted=not why)
        return json_response({"taken": not why, "why": why, "routes": routes})

    async def dry_run(self, _: Request | None) -> Response:
        """Return the routes that a reload of the mapping files would add, remove or change.

        If the files are faulty, return their faults instead. The request is not used.
        """
        try:
            candidate = await computed(partial(self._process.candidate, {}))
        except ConfigurationError as error:
            return json_response(
                {"good": False, "faults": _faults(error), "added": [], "removed": [], "changed": []}
            )
        now = {one.name: one.rule for one in self._process.router().routes}
        then = {one.name: one.rule for one in candidate.routes}
        return json_response(
            {
                "good": True,
                "faults": [],
                "added": sorted(then.keys() - now.keys()),
                "removed": sorted(now.keys() - then.keys()),
                "changed": sorted(name for name in now.keys() & then.keys() if now[name] != then[name]),
            }
        )


def _faults(error: ConfigurationError) -> list[dict[str, Any]]:
    return [
        {"file": one.file, "line": one.line, "column": one.column, "message": one.reason}
        for one in (error, *error.others)
    ]


def _file(name: str) -> dict[str, Any]:
    """Return the name and text of a mapping file, or the reason why the file cannot be shown.

    The function reads the disk, so call it in a thread.
    """
    try:
        with Path(name).open("rb") as file:
            data = file.read(TEXT_BYTES_MAX + 1)
        if len(data) > TEXT_BYTES_MAX:
            return {"file": name, "text": None, "why": f"the file has more than {TEXT_BYTES_MAX} bytes"}
        return {"file": name, "text": data.decode(), "why": ""}
    except OSError as error:
        return {"file": name, "text": None, "why": error.strerror or str(error)}
    except UnicodeDecodeError as error:
        return {"file": name, "text": None, "why": str(error)}
