"""Alarms: problems of this gateway that exist now, since when, and what to do.

An alarm has the name of an alert of deploy/prometheus/alerts.yaml, so the runbook has a section for it. The
conditions are computed from the metrics every few seconds. Alerts whose condition is a rate are left to
Prometheus, because a rate cannot be seen at one moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import trio

from gateway import clock
from gateway.telemetry.metrics import Metrics

TICK_SECS: Final = 5.0
OUTBOX_OLD_SECS: Final = 600.0
UNCONSUMED_MAX: Final = 1_000  # messages in queues without consumers
DISK_FREE_MIN: Final = 0.1
LIMIT_USED_MAX: Final = 0.9
CERTIFICATE_SECS_MIN: Final = 14 * 86_400.0
PAGE: Final = "docs/guides/runbook.md"


class Alarm(NamedTuple):
    """Problem of the gateway at present.

    `name` is the name of the alert rule and of the section in the runbook. `of` is the object with the
    problem, or "" if it concerns the whole gateway. `text` describes the problem, `act` what to do. `since`
    is the time when the problem was detected, in wall-clock seconds.
    """

    name: str
    of: str
    text: str
    act: str
    since: float

    @property
    def page(self) -> str:
        """URL of the runbook's section about this alarm."""
        return f"{PAGE}#{self.name.lower()}"


class Alarms:
    """Present alarms of a gateway, computed from its metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._alarms: dict[tuple[str, str], Alarm] = {}

    async def run(self) -> None:
        """Compute the alarms every TICK_SECS seconds until this task is cancelled."""
        while True:
            self.tick(clock.wall())
            await trio.sleep(TICK_SECS)

    def tick(self, utc: float) -> None:
        """Compute the present alarms from the metrics. `utc` is the time now, in wall-clock seconds."""
        previous = self._alarms
        self._alarms = {}
        for name, of, text in self._conditions(utc):
            before = previous.get((name, of))
            began_at = utc if before is None else before.since
            self._alarms[name, of] = Alarm(name, of, text, ACTS[name], began_at)

    def present(self) -> list[Alarm]:
        """Return the present alarms, the oldest first."""
        return sorted(self._alarms.values(), key=lambda one: (one.since, one.name, one.of))

    def _conditions(self, utc: float) -> Iterator[tuple[str, str, str]]:
        """Yield alarm name, object and description of each present problem.

        `utc` is the time now, in wall-clock seconds.
        """
        yield from self._of_links()
        yield from self._of_work()
        yield from self._of_disks()
        sources = self._metrics.sources
        for limit, ratio in sources.limit_ratios().items():
            if ratio > LIMIT_USED_MAX:
                yield "GatewayLimitNear", limit, f"{ratio:.0%} of {limit} is used"
        for key, end in sources.certificates().items():
            days = (end - utc) / 86_400
            if end - utc < CERTIFICATE_SECS_MIN:
                text = (
                    f"the certificate expires in {days:.1f} days"
                    if days > 0
                    else "the certificate has expired"
                )
                yield "GatewayCertificateExpires", key, text

    def _of_links(self) -> Iterator[tuple[str, str, str]]:
        """Yield alarm name, object and description of each present problem with a link."""
        paused = set(self._metrics.sources.paused_links())
        for name, stats in self._metrics.links.items():
            if not stats.up and stats.is_elected is not False and name not in paused:
                alarm = "GatewayLinkDown" if stats.required else "GatewayOptionalLinkDown"
                last = stats.last_error
                yield alarm, name, "not connected" + (f": {last.text}" if last is not None else "")
            if stats.blocked:
                yield "GatewayLinkBlocked", name, "the broker blocks publishing (connection.blocked)"
            if stats.filters_refused:
                yield "GatewayLinkFiltersRefused", name, f"filters refused: {stats.filters_refused}"
            for missing, why in stats.missing_objects.items():
                yield "GatewayLinkLacking", f"{name}: {missing}", why
        for name in paused:
            yield "GatewayPaused", f"link {name}", "paused by an operator"

    def _of_work(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems with messages that wait or are not delivered, and with blocked publishers.

        Each is a tuple of alarm name, object and description.
        """
        sources, gauges = self._metrics.sources, self._metrics.sources.gauges
        for route, count in sources.paused_routes().items():
            yield "GatewayPaused", f"route {route}", f"paused by an operator; messages held: {count}"
        for outbox in sources.outboxes():
            if outbox.messages and (outbox.oldest_secs or 0.0) > OUTBOX_OLD_SECS:
                text = f"messages waiting: {outbox.messages}, the oldest for {outbox.oldest_secs:.0f} s"
                yield "GatewayOutboxOld", f"{outbox.route} to {outbox.link}", text
        letters = int(self._gauge("gateway_dead_letters") - self._gauge("gateway_dead_letters_unwanted"))
        if letters > 0:
            yield "GatewayDeadLetters", "", f"messages not delivered: {letters}"
        unconsumed = int(self._gauge("gateway_queue_unconsumed_messages"))
        if unconsumed > UNCONSUMED_MAX:
            yield "GatewayQueueUnconsumed", "", f"messages in queues without consumers: {unconsumed}"
        if self._gauge("gateway_memory_blocked"):
            yield "GatewayMemoryBlocked", "", "memory is short, publishers are paused"
        if "gateway_state_up" in gauges and not self._gauge("gateway_state_up"):
            yield "GatewayStateDown", "", "the database of shared state is unreachable"

    def _of_disks(self) -> Iterator[tuple[str, str, str]]:
        """Yield the problems with the store, the journal and free disk space.

        Each is a tuple of alarm name, object and description.
        """
        disks = self._metrics.disks()
        if "store" in disks and not disks["store"]["healthy"]:
            yield "GatewayStoreUnhealthy", "", "the store is not writable; durable messages are refused"
        if "journal" in disks and not disks["journal"]["healthy"]:
            yield "GatewayJournalLosesRows", "", "the journal is not writable"
        for of, (free, whole) in self._metrics.sources.disk_space().items():
            if free < DISK_FREE_MIN * whole:
                yield "GatewayDiskFills", of, f"{free / 1e9:.1f} GB of {whole / 1e9:.1f} GB are free"

    def _gauge(self, name: str) -> float:
        read = self._metrics.sources.gauges.get(name)
        return 0.0 if read is None else +read()


ACTS: Final = {
    "GatewayLinkDown": "Remove the cause, which the log names; the link retries by itself.",
    "GatewayOptionalLinkDown": "Remove the cause, which the log names; the link retries by itself.",
    "GatewayLinkBlocked": "Give the broker memory or disk space.",
    "GatewayLinkFiltersRefused": "Give the link's user the right to subscribe.",
    "GatewayLinkLacking": "Create it at the broker, or give the link's user the right to declare it.",
    "GatewayPaused": "Resume it when the reason for the pause no longer applies.",
    "GatewayOutboxOld": "Make the link's broker accept messages.",
    "GatewayDeadLetters": "Fix the cause that their reason names, then redrive them.",
    "GatewayQueueUnconsumed": "Start the consumers, or delete the queue.",
    "GatewayMemoryBlocked": "Consume the queues, or raise memory_bytes_max.",
    "GatewayStateDown": "Restore the connection to the database.",
    "GatewayStoreUnhealthy": "Free space on the disk, or replace it.",
    "GatewayJournalLosesRows": "Free space on the disk, or replace it.",
    "GatewayDiskFills": "Consume the waiting messages, or enlarge the disk.",
    "GatewayLimitNear": "Find the client or user that uses it, or raise the limit.",
    "GatewayCertificateExpires": "Replace the certificate; it is loaded within a second.",
}
"""Advice for operators, by alarm; the runbook has more."""
