"""Exclusive use of folders by jobs that write: exclusive creation of files, and leases based on it.

A disk creates a file exclusively, and so does S3 by Spark's client (`put_once`). For stores and processes
without that, a run writes a claim for the name first, and two runs that see each other's claims both fail.

A lease is a file `_lease/<number>.json` in each folder that a job writes to; the highest number is valid. A
run creates the next number, and fails while the holder of the newest one is alive. A holder renews its file.
A holder on the same machine is checked by its process; any other is alive if it renewed its file recently.

Ages of files are differences of times of the store, never of this machine's clock, which may be a day ahead.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Self
from uuid import uuid4

from pyarrow import fs

from gateway.boot import boot_id
from gateway.errors import PipelineError
from gateway.pipeline.columns import Arrow
from gateway.pipeline.stores import StoreFolder, put_once

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

DRAFTS: Final = "staging"
CLAIMS: Final = "claims"
PROBE: Final = ".tmp"  # End of the name of a file that exists only to be dated.
CLAIM_SECS: Final = 600.0  # Seconds that a claim is valid; its run may have been killed.
LEASES: Final = "_lease"
LEASE_SECS: Final = 60.0  # Seconds without renewal after which the holder of a lease counts as killed.
RENEW_SECS: Final = 10.0
OWN_PROCESSES: Final = Path("/proc/self/ns/pid")


class InUseError(PipelineError):
    """Error of a run that needs a folder to which another run is writing."""


def create(place: StoreFolder, folder: str, name: str, data: bytes, run: str) -> None:
    """Create the file `name`, with the content `data`, in the subfolder `folder` of `place`.

    `run` is the id of the run that creates it. Raises FileExistsError if the file exists, or if another run
    is creating it.
    """
    system, root = place.arrow()
    within = f"{root}/{folder}"
    staged, whole = f"{within}/{DRAFTS}/{name}.{run}", f"{within}/{name}"
    system.create_dir(f"{within}/{DRAFTS}", recursive=True)
    with system.open_output_stream(staged) as stream:
        stream.write(data)
    try:
        if not (place.is_local and _try_link(staged, whole)):
            _move_claimed(place, folder, name, staged, run)
    finally:
        _delete(system, staged)


def _try_link(staged: str, whole: str) -> bool:
    """Create the local file `whole` as a hard link to the file `staged`. Return True if this succeeded.

    Return False if the file system does not support hard links. Raises FileExistsError if `whole` exists.
    """
    try:
        os.link(staged, whole)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _move_claimed(place: StoreFolder, folder: str, name: str, staged: str, run: str) -> None:
    """Move the file `staged` to the file `name` in `folder`, protected by a claim file against other runs.

    Claims are needed because most stores cannot create a file only if it does not exist. In a store that can,
    this is used too, and the claim protects against runs that cannot. Raises FileExistsError if another run
    has a claim for the same name, if the file exists, or if this run was suspended for so long that others
    may ignore its claim.
    """
    system, root = place.arrow()
    claims, claim = f"{root}/{folder}/{CLAIMS}", f"{name}.{run}"
    whole = f"{root}/{folder}/{name}"
    system.create_dir(claims, recursive=True)
    begun = time.monotonic()
    with system.open_output_stream(f"{claims}/{claim}") as stream:
        stream.write(run.encode())
    try:
        dates = {info.base_name: written_at(info) for info in system.get_file_info(fs.FileSelector(claims))}
        oldest = dates.pop(claim, 0.0) - CLAIM_SECS
        others = [one for one, date in dates.items() if one.startswith(f"{name}.") and date > oldest]
        # In this order: a claim is deleted once its file exists.
        if others or system.get_file_info(whole).type != fs.FileType.NotFound:
            raise FileExistsError(whole)
        with system.open_input_stream(staged) as stream:
            data = stream.read()
        if put_once(place, f"{folder}/{name}", data):
            return
        if time.monotonic() - begun > CLAIM_SECS / 2:
            raise FileExistsError(whole)
        system.move(staged, whole)
    finally:
        _delete(system, f"{claims}/{claim}")


def written_at(info: Arrow) -> float:
    """Return when a file was written, in UTC seconds; the present time if the store reports no times."""
    return time.time() if info.mtime is None else float(info.mtime.timestamp())


def store_time(system: Arrow, folder: str) -> float:
    """Return the present time by the clock of a store, in UTC seconds.

    A file is written into `folder` and deleted to find it out, because this machine's clock may differ.
    """
    path = f"{folder}/time-{uuid4().hex}{PROBE}"
    system.create_dir(folder, recursive=True)
    with system.open_output_stream(path) as stream:
        stream.write(PROBE.encode())  # A store may leave out an empty file.
    try:
        return written_at(system.get_file_info(path))
    finally:
        _delete(system, path)


def _delete(system: Arrow, path: str) -> None:
    with suppress(FileNotFoundError):  # Another run has deleted it in between, or it was moved.
        if system.get_file_info(path).type != fs.FileType.NotFound:
            system.delete_file(path)


class _LeaseFile(NamedTuple):
    """Lease file: the folder that is leased, and the name of the file in that folder's own lease folder."""

    place: StoreFolder
    name: str


_running: Final[dict[str, Callable[[], bool]]] = {}
"""Runs of this process that hold leases, with what returns True while they write."""


class FolderLease:
    """Exclusive use of folders by one run, by means of lease files in the folders.

    The leases last for a `with` block, or as long as the stream that `start_stream` starts.
    """

    def __init__(self, places: Iterable[StoreFolder]) -> None:
        """Create a lease in each of the folders `places`.

        Raises InUseError if another run has a lease in one of them; then no lease of this run remains.
        """
        self._run = uuid4().hex[:12]
        self._lease_files: list[_LeaseFile] = []
        self._done = threading.Event()
        _running[self._run] = lambda: True
        try:
            for place in dict.fromkeys(places):
                self._acquire(place)
        except BaseException:
            self._release()
            raise

    def __enter__(self) -> Self:
        self._renew_until(self._done.wait)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        places = [place for place, _ in self._lease_files]
        self._release()
        for place in places:
            if place.is_local:
                for below in (f"{LEASES}/{DRAFTS}", LEASES, ""):
                    with suppress(OSError):  # Something else is in it.
                        os.rmdir(f"{place.uri}/{below}")

    def start_stream(self, start: Callable[[], StreamingQuery]) -> StreamingQuery:
        """Call `start`, and return the stream that it has started. The leases end when the stream ends."""
        try:
            query = start()
        except BaseException:
            self._release()
            raise
        _running[self._run] = lambda: bool(query.isActive)
        self._renew_until(lambda secs: bool(query.awaitTermination(int(secs))))
        return query

    def check(self) -> None:
        """Raise InUseError if another run has created a lease in one of the folders meanwhile.

        Another run does this if it assumes that this run was killed.
        """
        for place, name in self._lease_files:
            if _names(place)[-1:] != [name]:
                raise _in_use(place)

    def _acquire(self, place: StoreFolder) -> None:
        names = _names(place)
        if names and _is_alive(place, names[-1]):
            raise _in_use(place)
        name = f"{int(names[-1][:20]) + 1 if names else 1:020}.json"
        try:
            create(place, LEASES, name, self._content, self._run)
        except (FileExistsError, FileNotFoundError) as error:  # The other one may be removing its folder.
            raise _in_use(place) from error
        self._lease_files.append(_LeaseFile(place, name))
        self.check()
        for old in names:
            _delete(place.arrow().system, _path(place, old))

    @property
    def _content(self) -> bytes:
        return json.dumps({"run": self._run, "host": _machine(), "process": os.getpid()}).encode()

    def _renew_until(self, ended: Callable[[float], bool]) -> None:
        threading.Thread(target=self._renew, args=(ended,), name="lease", daemon=True).start()

    def _renew(self, ended: Callable[[float], bool]) -> None:
        """Renew the leases every RENEW_SECS seconds until `ended` returns True, then release them.

        `ended` waits for the number of seconds that it is given, or until the run has ended.
        """
        with suppress(Exception):  # The stream has failed, which is reported to those who wait for it.
            while not ended(RENEW_SECS):
                for lease_file in self._lease_files:
                    with suppress(OSError):  # A full disk, or a store out of reach: the run goes on.
                        self._renew_one(*lease_file)
        self._release()

    def _renew_one(self, place: StoreFolder, name: str) -> None:
        if _names(place)[-1:] == [name]:
            with place.arrow().system.open_output_stream(_path(place, name)) as stream:
                stream.write(self._content)

    def _release(self) -> None:
        lease_files, self._lease_files = self._lease_files, []
        for place, name in lease_files:
            with suppress(OSError):  # The store is unreachable: the lease ends by time.
                _delete(place.arrow().system, _path(place, name))
        _running.pop(self._run, None)


def _path(place: StoreFolder, name: str) -> str:
    return f"{place.arrow().path}/{LEASES}/{name}"


def _names(place: StoreFolder) -> list[str]:
    system, root = place.arrow()
    infos = system.get_file_info(fs.FileSelector(f"{root}/{LEASES}", allow_not_found=True))
    return sorted(info.base_name for info in infos if info.base_name.endswith(".json"))


def _is_alive(place: StoreFolder, name: str) -> bool:
    """Return True if the run that wrote the lease file `name` is alive, or may be alive."""
    system, path = place.arrow().system, _path(place, name)
    try:
        renewed = written_at(system.get_file_info(path))
        with system.open_input_stream(path) as stream:
            holder = json.loads(stream.read() or b"{}")  # Empty while it is being renewed.
    except FileNotFoundError:  # It was released just now.
        return False
    if holder.get("host") == _machine():
        if holder["process"] == os.getpid():
            writes = _running.get(holder["run"])
            return writes is not None and writes()
        if not _exists(holder["process"]):
            return False
    try:
        return store_time(system, f"{place.arrow().path}/{LEASES}/{DRAFTS}") - renewed < LEASE_SECS
    except FileNotFoundError:  # Its holder is removing the folder.
        return False


@cache
def _machine() -> str:
    """Return an identifier of the system (boot and PID namespace) in which process ids are unique.

    A host name is not enough, because several containers or machines may have the same one.
    """
    name = socket.gethostname()
    with suppress(OSError):  # Another system than Linux.
        name = f"{name} {boot_id()} {OWN_PROCESSES.readlink()}"
    return name


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _in_use(place: StoreFolder) -> InUseError:
    return InUseError(
        f"another run writes to {place.uri}: stop it first, or give another folder; a run that was killed on"
        f" another machine counts as running for {LEASE_SECS:.0f} seconds"
    )
