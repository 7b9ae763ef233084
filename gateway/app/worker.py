"""Worker process: a gateway that shares the listeners' ports with others on one machine.

The worker reports to its supervisor (`gateway/app/workers.py`) by the messages of `gateway/app/control.py`.
"""

from __future__ import annotations

import trio

from gateway.app.control import JsonLines, SupervisorLink
from gateway.app.descriptors import raise_descriptors
from gateway.app.gateway import Gateway
from gateway.app.process import freeze_objects, run_loop, tune_collector
from gateway.settings import Settings
from gateway.telemetry.worker_metrics import OPENMETRICS


def run_worker(settings: Settings, ordered: SupervisorLink) -> int:
    """Run a gateway with the settings of a worker until it is stopped or its supervisor ends.

    Return the exit code of the process.
    """
    raise_descriptors()
    tune_collector()
    gateway = Gateway(settings)

    async def main() -> None:
        lines = ordered.lines()
        async with trio.open_nursery() as nursery:

            async def serve(*, task_status: trio.TaskStatus[Gateway]) -> None:
                await gateway.run(task_status=task_status)
                nursery.cancel_scope.cancel()

            await nursery.start(serve)
            nursery.start_soon(_answer, gateway, lines)

    freeze_objects()
    return run_loop(main)


async def _answer(gateway: Gateway, lines: JsonLines) -> None:
    """Reply to requests of the supervisor until the supervisor ends, then stop the gateway."""
    try:
        await lines.send(started=True)
        while (request := await lines.receive()) is not None:
            await lines.send(number=request["number"], reply=_response_to(gateway, request["request"]))
    except trio.BrokenResourceError:
        pass
    gateway.stop()


def _response_to(gateway: Gateway, request: str) -> object:
    """Return the reply to a request of the supervisor: `metrics`, `reasons` or `stop`.

    The reply to `metrics` is the metrics as text. The reply to other requests is the list of reasons why the
    worker is not ready; `stop` also begins to drain.
    """
    if request == "metrics":
        return gateway.metrics.exposition(OPENMETRICS)[0].decode()
    if request == "stop":
        gateway.stop()
    return gateway.readiness.reasons()
