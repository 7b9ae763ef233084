"""What one protocol says differently from the others, as a value: names, words, characters, numbers.

A dialect is what the rest of the gateway knows of a protocol: how its addresses are written and split, which
words a mapping file uses for them, where it listens by default, and how its properties are read. Each
protocol has one, in its own folder; whoever must treat protocols differently asks the dialect, and never
compares names.

An address has one text form, for people, files and the journal: its name, and before it, where the protocol
has scopes, the scope and a colon. A colon or a percent sign inside a scope is percent-encoded, so that the
first colon ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final, Literal, NamedTuple

from gateway.errors import GatewayError
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.model.properties import PropertySet

Levels = tuple[str, ...]
Transport = Literal["plain", "tls", "websocket", "websocket+tls"]


class NameRefused(GatewayError):
    """A name that the protocol, or the policy of a route, does not allow."""


class Word(NamedTuple):
    """A word of an address in a mapping file: what it means in `from` and in `to`.

    None: it has no place there. `choices` are all that it may be, () anything; `empty`: also "".
    """

    source: str | None
    target: str | None
    choices: tuple[str, ...] = ()
    empty: bool = False


class Scheme(NamedTuple):
    """A scheme of URLs, the transport that it means, and its port."""

    name: str
    transport: Transport
    port: int


class FrameCount(NamedTuple):
    """The fewest frames, packets or commands that carry one message: `heads`, one for each piece of the body
    (at least `pieces_min`; None: the body travels in the heads), and the answers by assurance."""

    heads: int
    pieces_min: int | None
    answers: tuple[int, int, int]


class Dialect(ABC):
    """One protocol, as far as the others need to know it. What a subclass does not say it does not have."""

    name: ClassVar[str]
    """As configuration, metrics and journal have it."""
    title: ClassVar[str]
    """As people write it."""

    # Addresses
    name_word: ClassVar[str]
    """The word of a whole name: what a message is published to."""
    pattern_word: ClassVar[str]
    """The word by which a route says which names it takes."""
    scope_word: ClassVar[str | None] = None
    scopes: ClassVar[tuple[str, ...]] = ()
    """All scopes that there are; (): any text is one, and has levels like a name."""
    scope_default: ClassVar[str] = ""
    queue_word: ClassVar[str | None] = None
    """The word of a place that is consumed from, and that is named by itself instead of scope and name."""
    words: ClassVar[Mapping[str, Word]]
    """The words of an address in a mapping file, in the order in which people write them."""
    assurance_max: ClassVar[int] = 1
    """The strongest assurance that it can say: 0 at most once, 1 at least once, 2 once."""
    message_id_field: ClassVar[str] = "properties.message_id"
    """Where a message has its id, in words for people."""
    target_options: ClassVar[frozenset[str]] = frozenset()
    """What `to` may say beside the address: `qos`, `retain`, `mandatory`."""
    name_octets_max: ClassVar[int]

    wire_form: ClassVar[int] = 0
    """The number under which the journal keeps octets of its addresses and properties, for ever: readers go
    by it. 0: it has none, and the journal keeps texts. 1 to 3 are taken."""
    wire_is_name: ClassVar[bool] = False
    """Whether the octets of an address are its name and nothing else."""

    # Levels
    separator: ClassVar[str]
    one: ClassVar[str]
    """The wildcard of one level; that of any number of levels is `#` everywhere."""
    rest_is_last: ClassVar[bool] = False
    """Whether `#` stands only at the end of a pattern."""
    hidden: ClassVar[str] = ""
    """Names that begin with this are not matched by a wildcard in their first level; "": there are none."""
    forbidden: ClassVar[str]
    """Characters that a level cannot hold: they would split the name, or the protocol refuses them."""
    guarded: ClassVar[str]
    """Characters that a level had better not hold: consumers take them for wildcards."""
    wild: ClassVar[str]
    """What text that is no name cannot hold when it becomes one level."""

    # Answers
    return_prefix: ClassVar[str] = ""
    """What the name of a return address begins with: a reply address that the gateway has made for programs
    of this protocol. Nothing else has such a name. "": there are none."""

    correlation_is_text: ClassVar[bool] = False
    """Whether programs read a correlation as text; one that is no UTF-8 is then written in base64."""

    # Where the rest of it lives, as `module:name`, for what is made of a configuration
    listener: ClassVar[str]
    """The class of a listener's protocol, a gateway.ingress.source.ListenerSource."""
    on_engine: ClassVar[bool] = False
    """Whether listeners of it can be where a cluster is behind the gateway."""
    link: ClassVar[str] = ""
    """The class of a link's session; "": it has no links."""
    listener_settings: ClassVar[str] = "gateway.settings.endpoints:AnonymousListener"
    """The part of the configuration that a listener is, a gateway.settings.endpoints.Listener."""
    link_settings: ClassVar[str] = "gateway.settings.endpoints:Link"
    """The same of a link."""
    client: ClassVar[str] = ""
    """The class of a connection that blocks, for the command line and the data pipeline; "": it has none."""
    commands: ClassVar[str] = ""
    """The class of what `gateway publish` and `subscribe` do beyond what such a connection can, a
    gateway.cli.sending.Commands; "": nothing."""

    trials: ClassVar[str] = ""
    """What of routes can be tried at a link's broker before anything runs: a function of the link's part of
    the configuration, its subscriptions and its targets, which yields gateway.cli.trials.Trial; "": nothing.
    """

    # Connections
    has_virtual_hosts: ClassVar[bool] = False
    """Whether the path of a URL names one."""
    schemes: ClassVar[tuple[Scheme, ...]]
    meeting: ClassVar[Literal["gateway", "virtual_host", "listener"]] = "listener"
    """Where clients of several listeners meet: everywhere in the gateway, or where their listeners' first
    virtual hosts are the same, or only at one listener."""
    subprotocols: ClassVar[tuple[str, ...]] = ()
    """Its names over WebSocket, the best first."""
    first_octets: ClassVar[tuple[bytes, ...]]
    """What a client may begin with, by which a shared port knows it."""
    frame_names: ClassVar[tuple[str, ...]] = ()
    """Names of its frames by their numbers, for counters; "" where there is none."""
    frame_count: ClassVar[FrameCount]

    @abstractmethod
    def address(self, scope: str, name: str) -> Address:
        """The address `name` within `scope`. Raises NameRefused for what the protocol cannot carry."""

    @abstractmethod
    def read_address(self, wire: bytes) -> Address:
        """The address whose `wire` this is. Raises ValueError when it is none."""

    @abstractmethod
    def property_set(self, octets: bytes) -> PropertySet:
        """The properties that the protocol wrote as `octets`, decoded when something asks."""

    def losses(self, message: Message) -> tuple[str, ...]:
        """The names of what a message of another protocol loses in this one."""
        return ()

    def returned(self, address: Address) -> str | None:
        """What the name of a return address says behind `return_prefix`; None: the address is none."""
        prefix = self.return_prefix
        return address.name[len(prefix) :] if prefix and address.name.startswith(prefix) else None

    def fault_of(self, given: Mapping[str, str]) -> str:
        """Why these words, each with what it says, are no address in a mapping file; "" when they are one."""
        return ""

    def never(self, first: str) -> str:
        """Why no address begins with the level `first`; "" when one may."""
        return ""

    def parse(self, text: str) -> Address:
        """The address that `show` wrote; without a scope it is in the default one. Raises NameRefused."""
        scope, name = self.split(text)
        return self.address(self.scope_default if scope is None else scope, name)

    def split(self, text: str) -> tuple[str | None, str]:
        """Scope and name as a text has them, whether or not there is such an address; None: it says no
        scope."""
        if self.scope_word is None:
            return "", text
        scope, colon, name = text.partition(":")
        if colon and (not self.scopes or scope in self.scopes):
            return scope.replace("%3A", ":").replace("%25", "%"), name
        return None, text

    def show(self, address: Address) -> str:
        """An address as text: the inverse of `parse`."""
        if self.scope_word is None:
            return address.name
        return f"{address.scope.replace('%', '%25').replace(':', '%3A')}:{address.name}"

    def levels(self, name: str) -> Levels:
        """The levels of a name; "" has none."""
        return tuple(name.split(self.separator)) if name else ()

    def words_of(self, address: Address) -> dict[str, str]:
        """An address in the words of a mapping file."""
        words = {} if self.scope_word is None else {self.scope_word: address.scope}
        return words | {self.name_word: address.name}

    def published(self, stated: Mapping[str, str | None]) -> tuple[Address, str]:
        """The address that a publisher says in these words, and the queue that it was consumed from instead,
        if both are named; "": it was not. Raises NameRefused."""
        scope = stated.get(self.scope_word) if self.scope_word else None
        name = stated.get(self.name_word)
        queue = stated.get(self.queue_word) if self.queue_word else None
        if queue is not None and scope is None and name is None:
            return self.address("", queue), ""
        return self.address(scope or self.scope_default, name or ""), queue or ""

    @property
    def level_words(self) -> tuple[str, ...]:
        """The words that stand for several levels."""
        words = [self.name_word, self.queue_word, None if self.scopes else self.scope_word]
        return tuple(word for word in words if word is not None)

    @property
    def address_words(self) -> tuple[str, ...]:
        """The words that a template may use for the address that a message came with."""
        return tuple(word for word in (self.scope_word, self.name_word, self.queue_word) if word is not None)

    def port(self, transport: str) -> int | None:
        """The port that a listener has when none is said; None: it has none of its own."""
        return next((one.port for one in self.schemes if one.transport == transport), None)


def short(text: str) -> str:
    """A text of a peer's, quoted, at a length that an error may have."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


CONTROLS: Final = "".join(map(chr, range(0x20))) + "\x7f"
