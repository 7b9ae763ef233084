"""A server that knows what clients may do, asked as RabbitMQ's `rabbitmq_auth_backend_http` asks its own.

Three questions: may this user enter a virtual host (`vhost`), may it configure, write or read a queue or an
exchange (`resource`), and with which routing key at a topic exchange (`topic`). The answer is `allow` or
`deny`. Any other, or none in time, is no: who asks for something that nobody can decide does not get it.

A request takes its time, and a check is synchronous: it raises Pending, and is repeated when the response
is known, which it stays for a while.
"""

from __future__ import annotations

import time
from typing import Final, Literal, NamedTuple, Protocol

import structlog
import trio

from gateway.access.asking import Asker, Unanswered
from gateway.access.turns import Crowded, Turns
from gateway.settings.access import HttpAuthorizer

KNOWN_SECS_MIN: Final = 1.0  # or whoever asked would ask again, for ever
DENIED_SHARE: Final = 0.1  # of the time that `allow` is remembered: who was denied may be allowed soon

log = structlog.get_logger(limited=True)


class Question(NamedTuple):
    """Which of the three, and what is said with it."""

    kind: Literal["vhost", "resource", "topic"]
    fields: tuple[tuple[str, str], ...]


class Authorizer(Protocol):
    """Somebody else who knows what clients may do."""

    mqtt_host: str
    """The virtual host in which MQTT is."""

    def known(self, question: Question) -> bool | None:
        """The answer; None: it has to be asked for."""

    async def ask(self, question: Question) -> None:
        """See to it that the answer is known."""


class AuthorizerResponse:
    """The authorizer's response to one question, as something to wait for."""

    def __init__(self, question: Question, authorizer: Authorizer) -> None:
        self._question = question
        self._authorizer = authorizer

    async def wait(self) -> None:
        """Have the authorizer asked, unless its response is known."""
        await self._authorizer.ask(self._question)


class HttpQuestions:
    """The server. `failures` counts questions that it has not answered."""

    def __init__(self, options: HttpAuthorizer, asker: Asker) -> None:
        self.failures = 0
        self.mqtt_host = options.mqtt_virtual_host
        self._options = options
        self._asker = asker
        self._urls = {
            "vhost": options.vhost_url,
            "resource": options.resource_url,
            "topic": options.topic_url,
        }
        self._answers: dict[Question, tuple[bool, float]] = {}
        self._asked: dict[Question, trio.Event] = {}
        self._turns = Turns(options.connections_max, options.waiting_max)
        self._down = False

    @property
    def remembered(self) -> int:
        """How many answers are kept."""
        return len(self._answers)

    def known(self, question: Question) -> bool | None:
        """What it has said not long ago."""
        found = self._answers.get(question)
        return None if found is None or found[1] <= time.monotonic() else found[0]

    async def ask(self, question: Question) -> None:
        """Ask it; of many that want to know the same, one asks."""
        while self.known(question) is None and question in self._asked:
            await self._asked[question].wait()
        if self.known(question) is not None:
            return
        asked = self._asked[question] = trio.Event()
        try:
            allowed, secs = await self._answer(question)
            self._remember(question, allowed, secs)
        finally:
            del self._asked[question]
            asked.set()

    async def _answer(self, question: Question) -> tuple[bool, float]:
        """What it says, and for how long that is good."""
        options = self._options
        fields = dict(question.fields)
        try:
            await self._turns.take("", fields.get("username", ""))
        except Crowded:
            self._failed("too many questions wait")
            return False, KNOWN_SECS_MIN
        try:
            url = self._urls[question.kind]
            if options.method == "get":
                body = await self._asker.get(url, fields)
            else:
                body = await self._asker.post(url, fields)
            allowed = read_verdict(body)
        except Unanswered as error:
            self._failed(str(error))
            return False, KNOWN_SECS_MIN
        finally:
            self._turns.give_back()
        if self._down:
            self._down = False
            log.info("the authorizer answers again")
        secs = options.cache_secs if allowed else options.cache_secs * DENIED_SHARE
        return allowed, max(secs, KNOWN_SECS_MIN)

    async def close(self) -> None:
        """Nothing is asked any more."""
        await self._asker.close()

    def _remember(self, question: Question, allowed: bool, secs: float) -> None:
        self._answers.pop(question, None)
        if len(self._answers) >= self._options.cache_entries_max:
            del self._answers[next(iter(self._answers))]
        self._answers[question] = (allowed, time.monotonic() + secs)

    def _failed(self, why: str) -> None:
        self.failures += 1
        self._down = True
        log.error("the authorizer does not answer, what it would decide is refused", error=why)


def read_verdict(body: bytes) -> bool:
    """What `allow` or `deny` says. Raises Unanswered for anything else."""
    word = body.decode(errors="replace").split(maxsplit=1)[:1]
    if word and word[0].lower() in ("allow", "deny"):
        return word[0].lower() == "allow"
    raise Unanswered("the answer is neither allow nor deny")
