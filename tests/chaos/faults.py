"""What goes wrong: one function per fault, each of which also ends what it began.

A fault is given the rig, which has everything that can be broken, and chance, which says where and for how
long. Mosquitto writes what it holds to disk now and then, so what it acknowledged shortly before a kill is
its own loss: the checker excuses that much and no more.
"""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Final, Self

from tests.chaos.gateway_operator import LEFT, ROUTE
from tests.chaos.workers.amqp import PREFETCH
from tests.chaos.workers.mqtt import client_id_of

if TYPE_CHECKING:
    from tests.chaos.rig import Rig
    from tests.interop.gateway_process import GatewayProcess

DISK_BYTES: Final = 24 * 1024 * 1024
PIECE: Final = bytes(65_536)
# Mosquitto saves when more than a second has passed (autosave_interval 1), and counts whole ones.
MOSQUITTO_SAVES_SECS: Final = 2.5
AWAY_SECS: Final = (0.1, 1.0)
STALL_SECS: Final = (0.3, 2.5)
DELAY_SECS: Final = (0.01, 0.1)
SLOW_SECS: Final = (0.5, 1.5)
CLOCK_SECS: Final = 3_600.0
CLOCK_DAYS_SECS: Final = 10 * 86_400.0
FROZEN_SECS: Final = (0.2, 4.0)  # some longer than it takes clients to give up
SYNC_SECS: Final = (0.05, 0.5)  # of one sync, on a disk that is slow
NOTICED_SECS: Final = 1.0  # after which the gateway has noticed that its disk works again
POLL_SECS: Final = 0.01

Fault = Callable[["Rig", Random], None]


class DiskError(Exception):
    """A small file system is not permitted here."""


class Disk:
    """A file system of DISK_BYTES at a folder, which can be filled up. Raises DiskError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
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


def _written(file: int, data: bytes) -> bool:
    try:
        return os.write(file, data) > 0
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
    began = time.monotonic()
    rig.disk.fill()
    time.sleep(chance.uniform(*STALL_SECS))
    rig.disk.free()
    rig.unwritable.append((began, time.monotonic() + NOTICED_SECS))


def step_clock(rig: Rig, chance: Random) -> None:
    """The gateway's clock jumps by up to an hour, forward or back."""
    assert rig.clock is not None
    rig.clock.step(chance.uniform(-CLOCK_SECS, CLOCK_SECS))


def step_clock_by_days(rig: Rig, chance: Random) -> None:
    """The gateway's clock jumps by up to ten days, forward or back."""
    assert rig.clock is not None
    seconds = chance.uniform(-CLOCK_DAYS_SECS, CLOCK_DAYS_SECS)
    rig.clock_error_secs += abs(seconds)
    rig.clock.step(seconds)


def freeze_gateway(rig: Rig, chance: Random) -> None:
    """SIGSTOP, and awake again."""
    rig.gateway.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(chance.uniform(*FROZEN_SECS))
    finally:
        rig.gateway.process.send_signal(signal.SIGCONT)


def slow_disk(rig: Rig, chance: Random) -> None:
    """Each sync of the store takes long for a while."""
    assert rig.failing_disk is not None
    rig.failing_disk.set(delay_secs=chance.uniform(*SYNC_SECS))
    time.sleep(chance.uniform(*STALL_SECS))
    rig.failing_disk.set()


def disk_error(rig: Rig, chance: Random) -> None:
    """Writes to the store fail with EIO for a while, or its syncs do, or both."""
    assert rig.failing_disk is not None
    writes, syncs = chance.choice(((errno.EIO, 0), (0, errno.EIO), (errno.EIO, errno.EIO)))
    began = time.monotonic()
    rig.failing_disk.set(write_error=writes, sync_error=syncs)
    time.sleep(chance.uniform(*STALL_SECS))
    rig.failing_disk.set()
    rig.unwritable.append((began, time.monotonic() + NOTICED_SECS))


def damage_row(rig: Rig, chance: Random) -> None:
    """SIGKILL, one byte of the messages in one row of the store is spoiled, and another one is started."""
    rig.receiver.slow_secs = 2.0  # so that messages are stored
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.gateway.kill()
    rig.discarded += spoil(rig.store / "gateway.db", chance)
    rig.gateway.start()


def spoil(database: Path, chance: Random) -> int:
    """Change a byte behind the checksum of a row; return how many messages it has."""
    with closing(sqlite3.connect(database)) as connection, connection:
        found = "SELECT id, count, messages FROM rows WHERE length(messages) > 4"
        own = "(SELECT id FROM logs WHERE name NOT LIKE '%watcher%')"  # wills have a promise of their own
        rows = connection.execute(f"{found} AND log IN {own}").fetchall()
        if not rows:
            return 0
        row, count, messages = chance.choice(rows)
        at = chance.randrange(4, len(messages))
        spoiled = messages[:at] + bytes((messages[at] ^ 0x55,)) + messages[at + 1 :]
        connection.execute("UPDATE rows SET messages = ? WHERE id = ?", (spoiled, row))
        return int(count)


def pause_route(rig: Rig, chance: Random) -> None:
    """An operator pauses the route, until `resume-route` or the end."""
    rig.operator.post("routes/pause", name=ROUTE)


def resume_route(rig: Rig, chance: Random) -> None:
    """An operator resumes the route, if it is paused."""
    rig.operator.post("routes/resume", name=ROUTE)


def reload_mapping(rig: Rig, chance: Random) -> None:
    """The mapping gets another route in front of the row's, or loses it, and is read again."""
    rig.change_mapping()
    if chance.random() < 0.5:
        rig.gateway.process.send_signal(signal.SIGHUP)
    else:
        rig.operator.post("mappings/reload")


def delete_session(rig: Rig, chance: Random) -> None:
    """Another session wants the same messages, is owed them for a while, and is deleted."""
    rig.leave_session()
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.operator.post("sessions/remove", client=LEFT, exact=True, in_use=True)


def delete_member(rig: Rig, chance: Random) -> None:
    """The session of one of the members of a shared subscription is deleted, connected or not."""
    member = chance.choice(rig.members)
    member.forgotten()
    rig.operator.post("sessions/remove", client=client_id_of(member), exact=True, in_use=True)


def cut_member(rig: Rig, chance: Random) -> None:
    """The connection of one of the members of a shared subscription ends."""
    chance.choice(rig.members).cut()


def leave_member(rig: Rig, chance: Random) -> None:
    """One of the members is away for a while, and comes back to its session or to a new one."""
    member = chance.choice(rig.members)
    member.leave(clean=chance.random() < 0.5)
    time.sleep(chance.uniform(*STALL_SECS))
    member.come_back()


def purge_queue(rig: Rig, chance: Random) -> None:
    """An operator purges the receiver's queue: what was ready there is gone, and the answer says how much."""
    rig.discarded += rig.operator.post("queues/purge", queue=rig.queue, exact=True).get("messages", 0)


def delete_queue(rig: Rig, chance: Random) -> None:
    """An operator deletes the receiver's queue while its receiver is away, which declares it again."""
    rig.proxies[1].shut()
    deleted = rig.operator.post("queues/remove", queue=rig.queue, exact=True, in_use=True)
    # What was delivered and not acknowledged is gone as well.
    rig.discarded += deleted["messages"] + PREFETCH if deleted else 0
    time.sleep(chance.uniform(*AWAY_SECS))
    rig.proxies[1].open()


def redrive(rig: Rig, chance: Random) -> None:
    """An operator redrives the dead letters."""
    rig.operator.redrive()


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
    "clock-days": step_clock_by_days,
    "freeze-gateway": freeze_gateway,
    "slow-disk": slow_disk,
    "disk-error": disk_error,
    "damage-row": damage_row,
    "pause-route": pause_route,
    "resume-route": resume_route,
    "reload": reload_mapping,
    "delete-session": delete_session,
    "delete-member": delete_member,
    "cut-member": cut_member,
    "leave-member": leave_member,
    "purge-queue": purge_queue,
    "delete-queue": delete_queue,
    "redrive": redrive,
}
