"""Mapping files are read in a thread: thousands of routes take seconds, in which clients are served."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import watchfiles

from gateway.app.mappings import MappingFiles
from gateway.errors import MappingError
from gateway.mapping.router import Router
from tests.ingress.clients import connect
from tests.interop.gateway_fixture import Running, running, settings_of

PATIENCE_SECS = 30.0
ROUTE = """version: 1
routes:
  - name: NAME
    from: {endpoint: mqtt, topic: "a/{rest...}"}
    to: {endpoint: amqp091, exchange: amq.topic, routing_key: "a.{rest...}"}
"""


def test_clients_are_served_while_files_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And who asks for it again meanwhile gets what the files say then."""
    mapping = tmp_path / "m.yaml"
    mapping.write_text(ROUTE.replace("NAME", "first"))
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)
    load = MappingFiles.load

    def slowly(files: MappingFiles) -> Router:
        found = load(files)
        begun.release()
        assert go_on.acquire(timeout=PATIENCE_SECS)
        return found

    def reloaded(gateway: Running) -> bool:
        return gateway.await_(gateway.gateway.reload_mappings)

    def routes(gateway: Running) -> list[str]:
        return gateway.ask(lambda: [route.name for route in gateway.gateway.dispatcher.router.routes])

    with (
        running(settings_of(mappings=[str(mapping)])) as gateway,
        connect(gateway, "one")[0] as client,
        ThreadPoolExecutor(2) as threads,
    ):
        monkeypatch.setattr(MappingFiles, "load", slowly)
        mapping.write_text(ROUTE.replace("NAME", "second"))
        every = [threads.submit(reloaded, gateway) for _ in range(2)]
        assert begun.acquire(timeout=PATIENCE_SECS)
        client.ping()
        assert routes(gateway) == ["first"]
        assert not begun.acquire(timeout=0.05), "one at a time"
        mapping.write_text(ROUTE.replace("NAME", "third"))
        go_on.release()
        assert begun.acquire(timeout=PATIENCE_SECS)
        client.ping()
        assert routes(gateway) == ["second"]
        for _ in range(4):  # the watcher has seen the file, too
            go_on.release()
        assert [one.result(PATIENCE_SECS) for one in every] == [True, True]
        assert routes(gateway) == ["third"]


async def test_a_file_is_not_taken_by_halves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever writes it in place has some of the routes in it before the others; each look is one yield."""
    path = tmp_path / "m.yaml"
    path.write_text(ROUTE.replace("NAME", "first"))
    head, route = ROUTE.split("  - ", 1)
    files = MappingFiles(settings_of(mappings=[str(path)]), b"")
    files.load()

    async def looks(*_: object, **__: object) -> AsyncIterator[None]:
        yield
        with path.open("w") as file:
            for text in ("", head, f"  - {route}".replace("NAME", "second")):
                file.write(text)
                file.flush()
                yield
            file.write(f"  - {route}".replace("NAME", "third"))
        for _look in range(4):
            yield

    taken: list[list[str]] = []

    async def changed() -> None:
        taken.append([one.name for one in files.load().routes])

    monkeypatch.setattr(watchfiles, "awatch", looks)
    await files.watch(changed)
    assert taken == [["second", "third"]]


TWO: Final = ROUTE.replace("NAME", "first") + ROUTE.split("routes:\n")[1].replace("NAME", "second")
LOST: Final = {
    "empty": "",
    "comments alone": "# nothing\n",
    "no routes": "version: 1\nroutes: []\n",
    "in the middle of a line": TWO[:-12],
    "in the middle of a route": TWO + "    role: erp\n",
}


@pytest.mark.parametrize("lost", LOST)
def test_mapping_files_that_have_lost_a_part_leave_the_old_routes(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "m.yaml"
    before, after = (LOST[lost], TWO) if lost == "in the middle of a route" else (TWO, LOST[lost])
    path.write_text(before)
    files = MappingFiles(settings_of(mappings=[str(path)]), b"")
    assert len(files.load().routes) == 2
    path.write_text(after)
    with pytest.raises(MappingError):
        files.load()
    assert files.refused
    path.unlink()
    with pytest.raises(MappingError):
        files.load()
    path.write_text(ROUTE.replace("NAME", "first"))  # whole routes at the end may go
    assert len(files.load().routes) == 1


def test_all_files_of_a_folder_never_vanish(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(ROUTE.replace("NAME", "first"))
    two.write_text(ROUTE.replace("NAME", "second"))
    files = MappingFiles(settings_of(mappings=[str(tmp_path / "*.yaml")]), b"")
    assert len(files.load().routes) == 2
    two.unlink()
    assert len(files.load().routes) == 1
    one.unlink()
    with pytest.raises(MappingError, match="have no routes"):
        files.load()


def test_no_routes_may_stay_none(tmp_path: Path) -> None:
    """As with the shipped file, and listeners of one protocol alone."""
    path = tmp_path / "m.yaml"
    path.write_text(ROUTE.replace("NAME", "first") + "    optional: true\n")
    mqtt = settings_of().listeners["mqtt"]
    files = MappingFiles(settings_of(listeners={"mqtt": mqtt}, mappings=[str(path)]), b"")
    assert not files.load().routes
    assert not files.load().routes
