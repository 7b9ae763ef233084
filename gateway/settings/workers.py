"""Settings of one worker, derived from the settings of the gateway.

A worker is a replica with folders of its own that shares the ports of the listeners. Limits apply to each
worker; only the memory is divided, because all workers use the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.settings.tree import HealthSettings, Settings


def settings_of_worker(
    settings: Settings, number: int, ports: Mapping[str, int], memory_bytes_max: int
) -> Settings:
    """Return the settings for one worker process. `number` is its number, starting at 1.

    `ports` has the port to which each listener is bound, by name. `memory_bytes_max` is the memory limit of
    all workers together, in bytes.
    """
    name = f"worker-{number}"  # also of its folders
    changes: dict[str, Any] = {
        "replica": f"{settings.replica}-{number}",
        "listeners": {
            listener: given.model_copy(update={"port": ports[listener]})
            for listener, given in settings.listeners.items()
        },
        "limits": settings.limits.model_copy(
            update={"memory_bytes_max": max(memory_bytes_max // settings.workers, 1)}
        ),
        "store": settings.store.model_copy(update={"path": settings.store.path / name}),
    }
    http: dict[str, Any] = {"port": settings.http.port and settings.http.port + number}
    if settings.http.tokens_path is not None:
        http["tokens_path"] = settings.http.tokens_path / name
    # Without a health port the console's port would serve health to clients without a login.
    if settings.http.health is not None:
        http["health"] = HealthSettings(host="127.0.0.1", port=0)
    changes["http"] = settings.http.model_copy(update=http)
    if settings.journal.path is not None:
        changes["journal"] = settings.journal.model_copy(update={"path": settings.journal.path / name})
    if (path := settings.audit.path) is not None:
        changes["audit"] = settings.audit.model_copy(update={"path": _worker_path(path, name)})
    return settings.model_copy(update=changes)


def _worker_path(path: Path, name: str) -> Path:
    """Return the path with the worker's name inserted before the suffix, such as in `audit.worker-1.log`."""
    return path.with_name(f"{path.stem}.{name}{path.suffix}")
