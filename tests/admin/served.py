"""The HTTP interface with some operations, and a client of an operator who may do everything."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import trio

from gateway.admin import AdminState, Readiness, serve
from gateway.settings import Http
from tests.operator import admitting
from tests.telemetry.samples import metrics_with_traffic

LOOPBACK: Final = "127.0.0.1"


@asynccontextmanager
async def serving(api: Any) -> AsyncIterator[httpx.AsyncClient]:
    admission, headers = admitting()
    state = AdminState(metrics_with_traffic(), Readiness(), admission, (api,))
    async with trio.open_nursery() as nursery:
        port = await nursery.start(serve, Http(host=LOOPBACK, port=0), state)
        url = f"http://{LOOPBACK}:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, headers=headers) as client:
            yield client
        nursery.cancel_scope.cancel()
