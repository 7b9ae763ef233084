"""A gateway whose machine loses its power instead of only its process being killed."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from tests.chaos.power_failure import Disk, DiskRecord
from tests.interop.gateway_process import GatewayProcess


class PowerFailingGateway(GatewayProcess):
    """Gateway whose `kill` leaves on disk what was synced, and any part of what was written since.

    Raises CompilerError if there is no C compiler.
    """

    def __init__(self, folder: Path, seed: int, **more: Any) -> None:
        super().__init__(folder, **more)
        self.is_forked = False  # the recording library is preloaded
        self.failures: list[str] = []
        """What each failure left."""
        self._rng = random.Random(seed)
        self._stored = Path(self.configuration["store"]["path"])

    def start(self) -> None:
        """Start the gateway, and record what it does to its store."""
        self._stored.mkdir(mode=0o700, exist_ok=True)
        self._disk = Disk(self._stored)
        records = self.folder / "records"
        records.mkdir(exist_ok=True)
        self._record = DiskRecord(records / str(len(self.failures)), self._stored)
        self.variables = self._record.environment
        super().start()

    def kill(self) -> None:
        """Kill the gateway, and replace its store by what a power failure would have left."""
        if self._process is None:
            return
        super().kill()
        for call in self._record.calls():
            self._disk.apply(call)
        shutil.rmtree(self._stored)
        self._stored.mkdir(mode=0o700)
        self.failures.append(self._disk.leave(self._stored, self._rng))
        shutil.rmtree(self._record.path.parent)
