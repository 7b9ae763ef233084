"""A gateway under attack, and what it costs: who else had to wait, how large it grew, what it said.

An attack is a function that takes an Arena and does its worst, from this process. Meanwhile another process
(probe.py) is the client that must not notice. `attacked` tells what it saw.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.interop.gateway_fixture import LOOPBACK
from tests.interop.gateway_process import ROOT, GatewayProcess, environment

SOON_SECS: Final = 20.0  # what the probe may need to end


class Arena(GatewayProcess):
    """A gateway with all its listeners and HTTP, on a fresh folder."""

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **({"http": {"host": LOOPBACK, "port": 0}} | more))

    @property
    def alive(self) -> bool:
        """The process has not ended."""
        return self.process.poll() is None

    @property
    def peak_bytes(self) -> int:
        """The most memory that it has had, resident."""
        return self._status("VmHWM")

    @property
    def resident_bytes(self) -> int:
        """What it has now."""
        return self._status("VmRSS")

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
        assert found, text
        return int(found[1]) * 1_024

    def metrics(self, name: str) -> dict[str, float]:
        """The samples of one metric by their labels, as the exposition writes them."""
        url = f"http://{LOOPBACK}:{self.port('http')}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            text = answer.read().decode()
        rows = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in rows}

    def counted(self, name: str, label: str = "") -> float:
        """The sum of the samples of a metric whose labels contain `label`."""
        return sum(value for labels, value in self.metrics(name).items() if label in labels)

    @property
    def log_lines(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]


@dataclass
class Seen:
    """What one attack cost. Times are seconds, of the client that had nothing to do with it."""

    mqtt: list[float] = field(default_factory=list)
    http: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    grown_bytes: int = 0  # the peak beyond what it had before
    internal_errors: dict[str, float] = field(default_factory=dict)
    lines: int = 0

    def quantile(self, share: float) -> float:
        """Of all round trips."""
        times = sorted(self.mqtt + self.http)
        return times[min(int(len(times) * share), len(times) - 1)] if times else 0.0

    @property
    def longest(self) -> float:
        """The longest that anybody had to wait."""
        return max(self.mqtt + self.http, default=0.0)


def attacked(arena: Arena, attack: Callable[[Arena], None]) -> Seen:
    """Do it, while the probe looks on. AssertionError when the gateway has ended."""
    before = arena.resident_bytes
    probe = subprocess.Popen(
        (
            *(sys.executable, "-m", "tests.adversary.probe"),
            *(str(arena.port("mqtt")), str(arena.port("http"))),
        ),
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert probe.stdout is not None
        assert probe.stdout.readline() == "ready\n"
        attack(arena)
        assert arena.alive, f"the gateway ended: {arena.log[-2_000:]}"
        seen = _ended(probe)
    finally:
        probe.kill()
        probe.wait()
    seen.peak_bytes = arena.peak_bytes
    seen.grown_bytes = seen.peak_bytes - before
    found = arena.metrics("gateway_internal_errors_total")
    seen.internal_errors = {labels: count for labels, count in found.items() if count}
    seen.lines = len(arena.log_lines)
    return seen


def _ended(probe: subprocess.Popen[str]) -> Seen:
    try:
        out, _ = probe.communicate(timeout=SOON_SECS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"nobody else was answered for {SOON_SECS:.0f} s after the attack") from None
    assert out, f"the probe ended with {probe.returncode}"
    said = json.loads(out)
    return Seen(said["round_trips"]["mqtt"], said["round_trips"]["http"], said["failures"])
