"""Records of the log besides retained messages: JSON, each with a version and a kind.

Each is the `number`th of a life of a replica. Whoever wrote one knows, when it comes back, that he has read
all that was written before. Times are UTC in seconds.

While replicas are being updated two versions follow one log. A later one may say more in a record, which is
not looked at, and may have other kinds of records, which are passed over and counted. What it may not do is
to mean something else by a kind that is there, or to open or end sessions by another one: then the others
would not see that a client has gone elsewhere. So the version says who wrote a record, not who may read it.

A session belongs to the record that opened it last: its owner, by life and number. Whatever else is said of a
session names the owner, and counts for nothing if that is another one by then. So who has lost a session,
and does not know it yet, changes nothing any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Literal

import structlog
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from gateway.engine.envelope import Number
from gateway.engine.once import PAIR

log = structlog.get_logger(limited=True)

VERSION: Final = 1
Owner = tuple[str, int]
"""The life and number of the record that opened a session."""
Options = tuple[int, bool, bool, int, int]
"""The fields of SubscriptionOptions, in their order."""


def _whole_pairs(octets: bytes) -> bytes:
    if len(octets) % PAIR.size:
        raise ValueError("half a chunk of numbers")
    return octets


Lives = tuple[tuple[bytes, Annotated[bytes, AfterValidator(_whole_pairs)]], ...]
"""What `Recent.lives` returns."""
OCTETS: Final = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


@dataclass(frozen=True)
class WillSaid:
    """What is to be published when a client is lost: `properties` in the octets of MQTT 5, and its sender."""

    __pydantic_config__: ClassVar[ConfigDict] = OCTETS

    topic: str
    body: bytes
    qos: int
    retain: bool
    properties: bytes
    delay_secs: int
    endpoint: str
    user: str
    address: str


@dataclass(frozen=True)
class Mark:
    """Says nothing but that its replica lives."""

    replica: str
    life: str
    number: int
    kind: Literal["mark"] = "mark"


@dataclass(frozen=True)
class Opened:
    """A client has come to a replica, and is connected to none that said so before.

    `clean`: what there was of it ends. Its session outlives its connection by `expiry_secs`. `only_own`: it
    counts for nothing if there is a session of another user.
    """

    client: str
    replica: str
    life: str
    number: int
    clean: bool
    expiry_secs: float
    utc: float
    user: str
    place: str
    will: WillSaid | None
    only_own: bool = False
    kind: Literal["opened"] = "opened"

    @property
    def owner(self) -> Owner:
        """Whose the session is now."""
        return self.life, self.number

    @property
    def lasting(self) -> bool:
        """Something of the client has to be known when its replica is not there."""
        return self.expiry_secs > 0 or self.will is not None


@dataclass(frozen=True)
class Left:
    """A client has gone: its session waits for `expiry_secs`, and its will until `will_at`; 0: there is none
    any more."""

    client: str
    life: str
    number: int
    owner: Owner
    utc: float
    expiry_secs: float
    will_at: float
    kind: Literal["left"] = "left"


@dataclass(frozen=True)
class Freed:
    """An owner does not consume the queue of a session any more, and has given back what it held: messages
    with these prints, if it had to say of each that the queue is to have it again."""

    client: str
    life: str
    number: int
    owner: Owner
    given_back: tuple[int, ...] = ()
    kind: Literal["freed"] = "freed"


@dataclass(frozen=True)
class Changed:
    """What has become of a session: in the order of the fields.

    `subscribed`: filters with their options, None: no longer. By packet ids, of QoS 2: `completed`, which the
    client knows to be over; `sent`, which it is to get, with the numbers of the messages; `released`, which
    it has. `freed` and `taken`: messages of its own, of which nothing is left, or the number that they have.
    """

    __pydantic_config__: ClassVar[ConfigDict] = OCTETS

    client: str
    life: str
    number: int
    owner: Owner
    subscribed: dict[str, Options | None] = field(default_factory=dict)
    completed: tuple[int, ...] = ()
    sent: dict[int, Number | None] = field(default_factory=dict)
    released: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    taken: dict[int, Number] = field(default_factory=dict)
    kind: Literal["changed"] = "changed"


@dataclass(frozen=True)
class Ended:
    """The time of a session is over."""

    client: str
    life: str
    number: int
    owner: Owner
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True)
class Willed:
    """A will has been published."""

    client: str
    life: str
    number: int
    owner: Owner
    kind: Literal["willed"] = "willed"


@dataclass(frozen=True)
class Gone:
    """A life has ended in order; with `wills` that are somebody else's to publish."""

    life: str
    number: int
    utc: float
    kind: Literal["gone"] = "gone"


@dataclass(frozen=True)
class Inherited:
    """Nothing has been heard of life `of`, or it is gone: what was its is this one's. Of several who say so
    the first one counts."""

    life: str
    number: int
    of: str
    utc: float
    kind: Literal["inherited"] = "inherited"


@dataclass(frozen=True)
class Snapshot:
    """All that is known of a session, as its writer knew it when he had read the log up to `as_of`. `had`:
    the last messages of QoS 2 that its client has had."""

    __pydantic_config__: ClassVar[ConfigDict] = OCTETS

    client: str
    life: str
    number: int
    as_of: int
    owner: Owner
    keeper: str
    queue: str
    attached: bool
    utc: float
    expiry_secs: float
    user: str
    place: str
    will: WillSaid | None
    will_at: float
    subscribed: dict[str, Options]
    sent: dict[int, Number | None]
    released: tuple[int, ...]
    taken: dict[int, Number]
    had: Lives = ()
    kind: Literal["standing"] = "standing"


Record = Mark | Opened | Left | Freed | Changed | Ended | Willed | Gone | Inherited | Snapshot


@dataclass(frozen=True)
class _Envelope:
    version: Annotated[int, Field(ge=1)]
    record: Annotated[Record, Field(discriminator="kind")]


ADAPTER: Final = TypeAdapter(_Envelope)


def encode_record(record: Record) -> bytes:
    """The body of a record."""
    return ADAPTER.dump_json(_Envelope(VERSION, record))


def decode_record(body: bytes) -> Record | None:
    """The record; None: it is none that this version knows."""
    try:
        return ADAPTER.validate_json(body, strict=True).record
    except ValidationError as error:
        log.warning(
            "a record of the log is passed over, another version may have written it",
            why=str(error.errors(include_url=False, include_input=False)[0]["msg"]),
        )
        return None
