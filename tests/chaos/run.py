"""One run of one row: probe, send while things go wrong at moments of chance, mend everything, wait, judge.

The seed and the row's name decide which faults strike when. In the quiet phase nothing goes wrong any more:
everything that the sender has must be acknowledged, and everything acknowledged must arrive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from tests.chaos.checker import Verdict, judge, owed
from tests.chaos.replicas.rig import ReplicaRig, replicas_rigged
from tests.chaos.replicas.rows import ReplicaRow
from tests.chaos.rig import Rig, rigged
from tests.chaos.scenarios import Row
from tests.interop.cluster import RabbitCluster
from tests.interop.servers import RabbitMQ

PROBED_SECS_MAX: Final = 30.0
# So long nothing has come before it counts as quiet: a late repeat is found within it.
QUIET_SECS: Final = 0.7
POLL_SECS: Final = 0.02
IDLE_SECS_MAX: Final = 10.0  # after which nothing may wait in a gateway any more
# Half of the faults strike while the receiver lags behind by so much.
BACKLOG_SECS: Final = (0.1, 0.6)
LOG_SHOWN: Final = 3_000


AnyRow = Row | ReplicaRow
AnyRig = Rig | ReplicaRig
Brokers = RabbitMQ | RabbitCluster | None


class Result(NamedTuple):
    """What came of a run."""

    row: AnyRow
    seed: str
    verdict: Verdict
    notes: list[str]
    struck: list[str]  # what went wrong, with the second of the run
    seconds: float
    log: str
    account: str = ""  # what became of all that was accepted

    @property
    def sound(self) -> bool:
        """Nothing is wrong with the gateway."""
        return not self.verdict.faults and not self.notes

    def __str__(self) -> str:
        told = [f"{self.row.name}, CHAOS_SEED={self.seed}, {self.seconds:.1f} s", str(self.verdict)]
        told += [self.account] if self.account else []
        if not self.sound:
            told += [*self.notes, f"struck: {', '.join(self.struck)}", f"log: ...{self.log[-LOG_SHOWN:]}"]
        return "\n".join(told)


def run(row: AnyRow, seed: str, folder: Path, rabbitmq: Brokers) -> Result:
    """Run a row in an empty folder, with the RabbitMQ or the cluster that it needs. Raises what keeps it from
    being run at all."""
    began = time.monotonic()
    chance = Random(f"{seed}/{row.name}")
    with _rig_of(row, folder, chance, rabbitmq) as rig:
        struck: list[str] = []
        try:
            _open_the_way(rig)
            rig.sender.start()
            rig.beside.start()
            struck = _strike(rig, chance)
            rig.mend()
            _drain(rig)
        finally:
            for worker in rig.workers:
                if worker.is_alive():
                    worker.stop()
        for worker in rig.workers:
            worker.check()
            rig.notes += worker.notes
        log = rig.end()
        verdict = judge(
            rig.history.records,
            once=row.once,
            ordered=row.ordered,
            flagged=row.flagged,
            deduplicated=row.deduplicate,
            excused=rig.excused,
            clock_error_secs=rig.clock_error_secs,
        )
        verdict = verdict._replace(lost=tuple(id for id in verdict.lost if id not in rig.accounted))
        seconds = time.monotonic() - began
        return Result(row, seed, verdict, rig.notes, struck, seconds, log, rig.account)


def _rig_of(row: AnyRow, folder: Path, chance: Random, rabbitmq: Brokers) -> AbstractContextManager[AnyRig]:
    if isinstance(row, ReplicaRow):
        assert rabbitmq is not None
        return replicas_rigged(row, folder, chance, rabbitmq)
    assert not isinstance(rabbitmq, RabbitCluster)
    return rigged(row, folder, chance, rabbitmq)


def _open_the_way(rig: AnyRig) -> None:
    """Return when what is sent arrives: subscriptions, links and queues are there."""
    rig.receiver.start()
    rig.beside.watcher.start()
    _until(rig.beside.watcher.ready.is_set, PROBED_SECS_MAX)
    _until(rig.receiver.ready.is_set, PROBED_SECS_MAX)
    rig.prober.start()
    opened = _until(rig.receiver.probed.is_set, PROBED_SECS_MAX)
    assert opened, f"nothing crosses: {rig.prober.why}; {rig.receiver.why}; {rig.log[-LOG_SHOWN:]}"
    rig.prober.finish()
    _until(lambda: rig.prober.done, PROBED_SECS_MAX)
    rig.prober.stop()


def _strike(rig: AnyRig, chance: Random) -> list[str]:
    """Let every fault of the row happen at its moments; returns which did, and when."""
    row = rig.row
    rig.prepare(partial(_until, seconds=PROBED_SECS_MAX))
    began = time.monotonic()
    due = sorted((chance.uniform(0.0, row.seconds), name) for name in row.faults for _ in range(row.times))
    struck = []
    for at, name in due:
        time.sleep(max(0.0, began + at - time.monotonic()))
        struck.append(f"{name} at {time.monotonic() - began:.2f}")
        backlog_secs = chance.choice((0.0, chance.uniform(*BACKLOG_SECS)))
        rig.receiver.slow_secs = 1.5 * backlog_secs
        time.sleep(backlog_secs)
        rig.strike(name, chance)
    time.sleep(max(0.0, began + row.seconds - time.monotonic()))
    return struck


def _drain(rig: AnyRig) -> None:
    """Wait until all is acknowledged and has arrived and nothing comes any more, or for long enough; then
    close the books."""
    sender, receiver, patience = rig.sender, rig.receiver, rig.row.quiet_secs_max
    _until(lambda: sender.done, patience)
    sender.finish()
    rig.beside.finish()
    if not _until(rig.redriven, patience):
        rig.notes.append("dead letters cannot be redriven")
    wanted = owed(rig.history.records, rig.excused)
    lasting = wanted - rig.may_expire(wanted)
    _until(lambda: len(lasting - receiver.heard) <= rig.discarded, patience)
    _until(lambda: time.monotonic() - receiver.last_at > QUIET_SECS, patience)
    beside, excused = rig.beside, rig.wills_excused
    _until(lambda: beside.is_complete(excused), patience)
    rig.notes += beside.faults(rig.clock_error_secs, excused)
    if not _until(lambda: not rig.idle_report(), IDLE_SECS_MAX):
        rig.notes += [f"not idle: {line}" for line in rig.idle_report()]
    rig.close_books(wanted, partial(_until, seconds=IDLE_SECS_MAX))


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_SECS)
    return True
