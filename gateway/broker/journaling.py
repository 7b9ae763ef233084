"""What the journal is told of: which lanes, and what each lane's messages have in common."""

from __future__ import annotations

from pathlib import Path

import structlog
import trio

from gateway.mapping.crossings import Route
from gateway.mapping.router import Router
from gateway.model.batch import Lane
from gateway.model.message import Message
from gateway.model.outcome import Outcome
from gateway.settings.journal import Journal
from gateway.store.journal.gathering import Facts
from gateway.store.journal.writer import JournalWriter, Options

log = structlog.get_logger()


class Journaling:
    """Ties lanes to the journal. `all`: also routes that do not ask for it, and what takes no route."""

    def __init__(self, writer: JournalWriter, router: Router, *, all_: bool) -> None:
        self.writer = writer
        self.router = router  # the one in force
        self._all = all_

    def note(self, lane: Lane, route: Route | None, endpoint: str) -> None:
        """Have the journal hear of a new lane; `endpoint` is where its messages stay without a route."""
        if route is None:
            if self._all:
                lane.journal = self.writer
                lane.facts = Facts("", "", endpoint, self.router.endpoints.get(endpoint, ""), False)
        elif self._wanted(route):
            lane.journal = self.writer
            lane.facts = self._facts(route)

    def refuse(self, route: Route, message: Message, outcome: Outcome, received: float, slot: int) -> None:
        """A route would not let a message cross."""
        if self._wanted(route):
            self.writer.refuse(self._facts(route), [message], outcome, received, [slot])

    def left(self, route: Route, messages: list[Message], outcome: Outcome, received: float) -> None:
        """Messages have left the outbox of a route."""
        if self._wanted(route):
            self.writer.record(self._facts(route), messages, outcome, received)

    def _wanted(self, route: Route) -> bool:
        return self._all or route.rule.journal

    def _facts(self, route: Route) -> Facts:
        return Facts(
            route.name,
            self.router.versions.get(route.file, ""),
            route.target_endpoint,
            route.target.dialect.name,
            route.guarantee is not None or route.retain is not None,
        )


def open_journal(settings: Journal, folder: Path, router: Router) -> Journaling:
    """The journal in `folder`. Raises JournalError when it cannot be written."""
    options = Options(**settings.model_dump(exclude={"enabled", "all", "path", "shard"}))
    writer = JournalWriter(
        folder,
        settings.shard,
        options,
        clock=trio.current_time,
        tell=lambda text: log.error("journal", what=text),
    )
    if writer.cut:
        log.warning("the journal's end was incomplete and has been cut off", octets=writer.cut)
    return Journaling(writer, router, all_=settings.all)
