"""What goes wrong: one function per fault, each of which also ends what it began.

A fault is given the rig, which has everything that can be broken, and chance, which says where and for how
long. Mosquitto writes what it holds to disk now and then, so what it acknowledged shortly before a kill is
its own loss: the checker excuses that much and no more.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from tests.chaos.rig import Rig
    from tests.interop.gateway_process import GatewayProcess

DISK_OCTETS: Final = 24 * 1024 * 1024
PIECE: Final = bytes(65_536)
# Mosquitto saves when more than a second has passed (autosave_interval 1), and counts whole ones.
MOSQUITTO_SAVES_SECS: Final = 2.5
AWAY_SECS: Final = (0.1, 1.0)
STALL_SECS: Final = (0.3, 2.5)
DELAY_SECS: Final = (0.01, 0.1)
SLOW_SECS: Final = (0.5, 1.5)
CLOCK_SECS: Final = 3_600.0
POLL_SECS: Final = 0.01

Fault = Callable[["Rig", Random], None]


class DiskError(Exception):
    """A small file system is not permitted here."""


class Disk:
    """A file system of DISK_OCTETS at a folder, which can be filled up. Raises DiskError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_OCTETS}", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            raise DiskError("mounting a small file system is not permitted here")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def fill(self) -> None:
        """Leave no room for anything."""
        with (self.folder / "ballast").open("ab", buffering=0) as ballast:
            for size in (len(PIECE), 512, 1):
                while _written(ballast.fileno(), PIECE[:size]):
                    continue

    def free(self) -> None:
        """Give the room back."""
        (self.folder / "ballast").unlink()


def _written(file: int, octets: bytes) -> bool:
    try:
        return os.write(file, octets) > 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False


def kill_gateway(rig: Rig, chance: Random) -> None:
    """SIGKILL, and another one a moment later."""
    rig.gateway.kill()
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.gateway.start()


def stop_gateway(rig: Rig, chance: Random) -> None:
    """SIGTERM: it drains and says goodbye."""
    _terminate(rig, rig.gateway)
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.gateway.start()


def _terminate(rig: Rig, gateway: GatewayProcess) -> None:
    code = gateway.terminate()
    if code:
        rig.notes.append(f"the gateway ended with {code} after SIGTERM")


def kill_rabbitmq(rig: Rig, chance: Random) -> None:
    """SIGKILL for all of RabbitMQ, and back."""
    assert rig.rabbitmq is not None
    rig.rabbitmq.stop(kill=True)
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.rabbitmq.start()


def stop_rabbitmq(rig: Rig, chance: Random) -> None:
    """SIGTERM for RabbitMQ, and back."""
    assert rig.rabbitmq is not None
    rig.rabbitmq.restart()


def kill_mosquitto(rig: Rig, chance: Random) -> None:
    """SIGKILL for Mosquitto, and back; what it had not saved is its own loss."""
    assert rig.mosquitto is not None
    rig.mosquitto.stop(kill=True)
    killed = time.monotonic()
    time.sleep(chance.uniform(*AWAY_SECS))
    # What it acknowledged before is noted a little later, by threads that have to get their turn.
    rig.excused.append((killed - MOSQUITTO_SAVES_SECS, time.monotonic()))
    rig.mosquitto.start()


def crash_mosquitto(rig: Rig, chance: Random) -> None:
    """SIGKILL for a Mosquitto that has just written everything, for nobody is connected to it any more: it
    comes back with all that it held, and nothing is excused."""
    mosquitto = rig.mosquitto
    assert mosquitto is not None
    proxies = [proxy for proxy in rig.proxies if proxy.target == mosquitto.port]
    for proxy in proxies:
        proxy.shut()
    while mosquitto.connected:
        for proxy in proxies:
            proxy.cut()
        time.sleep(POLL_SECS)
    mosquitto.save()
    mosquitto.stop(kill=True)
    time.sleep(chance.uniform(*AWAY_SECS))
    mosquitto.start()
    for proxy in proxies:
        proxy.open()


def stop_mosquitto(rig: Rig, chance: Random) -> None:
    """SIGTERM: Mosquitto saves what it holds. And back."""
    assert rig.mosquitto is not None
    rig.mosquitto.restart()


def cut(rig: Rig, chance: Random) -> None:
    """The connections of one leg end."""
    chance.choice(rig.proxies).cut()


def cut_all(rig: Rig, chance: Random) -> None:
    """All connections end."""
    for proxy in rig.proxies:
        proxy.cut()


def stall(rig: Rig, chance: Random) -> None:
    """One leg stands still for a while, in one direction or both, and goes on."""
    proxy = chance.choice(rig.proxies)
    proxy.stall(chance.choice(("up", "down", "both")))
    time.sleep(chance.uniform(*STALL_SECS))
    proxy.resume()


def half_open(rig: Rig, chance: Random) -> None:
    """One leg's connections are dead and nobody is told: heartbeats have to find out."""
    chance.choice(rig.proxies).stall("both")


def delay(rig: Rig, chance: Random) -> None:
    """One leg is slow for a while."""
    proxy = chance.choice(rig.proxies)
    proxy.delay(chance.uniform(*DELAY_SECS))
    time.sleep(chance.uniform(*STALL_SECS))
    proxy.delay(0.0)


def slow_consumer(rig: Rig, chance: Random) -> None:
    """The receiver reads nothing for a while."""
    rig.receiver.slow_secs = chance.uniform(*SLOW_SECS)


def full_disk(rig: Rig, chance: Random) -> None:
    """The store's disk is full for a while."""
    assert rig.disk is not None
    rig.disk.fill()
    time.sleep(chance.uniform(*STALL_SECS))
    rig.disk.free()


def step_clock(rig: Rig, chance: Random) -> None:
    """The gateway's clock jumps by up to an hour, forward or back."""
    assert rig.clock is not None
    rig.clock.step(chance.uniform(-CLOCK_SECS, CLOCK_SECS))


def kill_other(rig: Rig, chance: Random) -> None:
    """SIGKILL for the remote gateway, and back."""
    assert rig.other is not None
    rig.other.kill()
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.other.start()


def stop_other(rig: Rig, chance: Random) -> None:
    """SIGTERM for the remote gateway, and back."""
    assert rig.other is not None
    _terminate(rig, rig.other)
    rig.other.start()


FAULTS: Final[dict[str, Fault]] = {
    "kill-gateway": kill_gateway,
    "stop-gateway": stop_gateway,
    "kill-rabbitmq": kill_rabbitmq,
    "stop-rabbitmq": stop_rabbitmq,
    "kill-mosquitto": kill_mosquitto,
    "crash-mosquitto": crash_mosquitto,
    "stop-mosquitto": stop_mosquitto,
    "kill-other": kill_other,
    "stop-other": stop_other,
    "cut": cut,
    "cut-all": cut_all,
    "stall": stall,
    "half-open": half_open,
    "delay": delay,
    "slow-consumer": slow_consumer,
    "full-disk": full_disk,
    "clock": step_clock,
}
