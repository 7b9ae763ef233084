"""Differences between protocols, as one object for each: names, words, characters, numbers.

A dialect is all that the rest of the gateway knows of a protocol: how its addresses are written and split,
which words a mapping file uses for them, its default ports, and how its properties are read. Each protocol
has one, in its own folder. Code that must treat protocols differently uses the dialect, and never compares
protocol names.

An address has one text form, for people, files and the journal: its name, preceded by the scope and a colon
where the protocol has scopes. A colon or a percent sign inside a scope is percent-encoded, so that the first
colon ends the scope.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Final, Literal, NamedTuple

from gateway.errors import GatewayError
from gateway.model.address import Address
from gateway.model.message import Message
from gateway.model.properties import PropertySet

Levels = tuple[str, ...]
Transport = Literal["plain", "tls", "websocket", "websocket+tls"]


class NameRefused(GatewayError):
    """Error for a name that its protocol cannot encode, or that the policy of a route forbids."""


class Word(NamedTuple):
    """Key that a mapping file may use for a part of an address, such as `topic`.

    `source` describes the key below `from`, `target` the key below `to`; None means that the key is not
    allowed there. `choices` are the permitted values, () if any value is permitted. `empty` is True if the
    value may be "".
    """

    source: str | None
    target: str | None
    choices: tuple[str, ...] = ()
    empty: bool = False


class Scheme(NamedTuple):
    """URL scheme with its transport and default port."""

    name: str
    transport: Transport
    port: int


class FrameCount(NamedTuple):
    """Minimum numbers of frames, packets or commands with which a protocol carries one message.

    `heads` is the number of frames before the body. `pieces_min` is the minimum number of body frames; None
    means that the same frame carries properties and body. `answers` has the numbers of acknowledgements at
    QoS 0, 1 and 2.
    """

    heads: int
    pieces_min: int | None
    answers: tuple[int, int, int]


class Dialect:
    """Description of one protocol for the rest of the gateway.

    Each protocol has a subclass, which overrides the attributes and methods for features that the protocol
    has. The defaults of this class mean that the protocol does not have the feature.
    """

    name: ClassVar[str]
    """Name of the protocol in configuration, metrics and journal."""
    title: ClassVar[str]
    """Name of the protocol for people."""

    # Addresses
    name_word: ClassVar[str]
    """Key in mapping files of a complete name, to which messages are published, such as `topic`."""
    pattern_word: ClassVar[str]
    """Key in mapping files of the pattern of names that a route matches, such as `binding_key`."""
    scope_word: ClassVar[str | None] = None
    scopes: ClassVar[tuple[str, ...]] = ()
    """All scopes, such as service types; () means that any text is a scope, and has levels like a name."""
    scope_default: ClassVar[str] = ""
    queue_word: ClassVar[str | None] = None
    """Key in mapping files of a queue to consume from, which is named instead of scope and name."""
    words: ClassVar[Mapping[str, Word]]
    """Keys of an address in mapping files, in the order in which people write them."""
    assurance_max: ClassVar[int] = 1
    """Strongest assurance that the protocol supports: 0 at most once, 1 at least once, 2 exactly once."""
    message_id_field: ClassVar[str] = "properties.message_id"
    """Name of the field that holds a message's id, for texts that people read."""
    target_options: ClassVar[frozenset[str]] = frozenset()
    """Options that `to` accepts besides the address: `qos`, `retain`, `mandatory`."""
    name_bytes_max: ClassVar[int]

    wire_form: ClassVar[int] = 0
    """Permanent number under which the journal stores the encoded addresses and properties; readers rely on
    it. 0 means that there is none and the journal stores texts. 1 to 3 are in use.
    """
    wire_is_name: ClassVar[bool] = False
    """True if the encoded address is the name and nothing else."""

    # Levels
    separator: ClassVar[str]
    one: ClassVar[str]
    """Wildcard for one level; the wildcard for any number of levels is `#` in all protocols."""
    rest_is_last: ClassVar[bool] = False
    """True if `#` is allowed only at the end of a pattern."""
    hidden: ClassVar[str] = ""
    """Prefix of names that a wildcard in the first level does not match; "" means that there are none."""
    forbidden: ClassVar[str]
    """Characters that a level cannot contain: they would split the name, or the protocol refuses them."""
    guarded: ClassVar[str]
    """Characters that a level should not contain: consumers interpret them as wildcards."""
    wild: ClassVar[str]
    """Characters that a text, such as a client id, must not contain if it is to become one level."""

    # Replies
    return_prefix: ClassVar[str] = ""
    """Prefix of return addresses: reply addresses that the gateway creates for programs of this protocol. No
    other name begins with it. "" means that there are none.
    """

    correlation_is_text: ClassVar[bool] = False
    """True if programs read a correlation as text; one that is not UTF-8 is then written in base64."""

    # Implementations, as `module:name`, for the objects that are created from a configuration
    listener: ClassVar[str]
    """Class of a listener's protocol, a gateway.ingress.source.ListenerSource."""
    on_engine: ClassVar[bool] = False
    """True if the protocol may have listeners where a cluster is behind the gateway."""
    link: ClassVar[str] = ""
    """Class of a link's session; "" means that the protocol has no links."""
    listener_settings: ClassVar[str] = "gateway.settings.endpoints:AnonymousListener"
    """Class of a listener's section of the configuration, a gateway.settings.endpoints.ListenerSettings."""
    link_settings: ClassVar[str] = "gateway.settings.endpoints:LinkSettings"
    """Class of a link's section of the configuration, a gateway.settings.endpoints.LinkSettings."""
    client: ClassVar[str] = ""
    """Class of a blocking connection, for the command line and the data pipeline; "" means that there is
    none.
    """
    commands: ClassVar[str] = ""
    """Class with the parts of the commands `gateway publish` and `subscribe` that only this protocol needs, a
    gateway.cli.publish_subscribe.ProtocolCommands; "" means that there are none.
    """

    trials: ClassVar[str] = ""
    """Function that tests routes at a link's broker without running the gateway; "" means that there is none.
    Its arguments are the link's section of the configuration, its subscriptions and its targets; it yields
    gateway.cli.trials.Trial.
    """

    # Connections
    has_virtual_hosts: ClassVar[bool] = False
    """True if the path of a URL names a virtual host."""
    schemes: ClassVar[tuple[Scheme, ...]]
    meeting: ClassVar[Literal["gateway", "virtual_host", "listener"]] = "listener"
    """Range within which clients of several listeners communicate: the whole gateway, listeners with the same
    first virtual host, or a single listener.
    """
    subprotocols: ClassVar[tuple[str, ...]] = ()
    """Subprotocol names over WebSocket, the preferred one first."""
    first_bytes: ClassVar[tuple[bytes, ...]]
    """First bytes that a client may send, by which a shared port recognizes the protocol."""
    frame_names: ClassVar[tuple[str, ...]] = ()
    """Names of the frames by their numbers, for counters; "" for a number that is not used."""
    frame_count: ClassVar[FrameCount]

    @abstractmethod
    def address(self, scope: str, name: str) -> Address:
        """Return the address `name` within `scope`. Raises NameRefused if the protocol cannot encode it."""

    @abstractmethod
    def read_address(self, wire: bytes) -> Address:
        """Return the address whose encoded form is `wire`. Raises ValueError if it is malformed."""

    @abstractmethod
    def property_set(self, data: bytes) -> PropertySet:
        """Return a property set for `data`, properties that the protocol encoded; decoded on demand."""

    def unread_set(self, data: bytes) -> PropertySet:
        """Return a property set for `data`, encoded properties that were read from disk.

        The properties are decoded on demand. Readers of stored records decode each set only once, so a
        protocol that caches its property sets overrides this method to bypass the cache.
        """
        return self.property_set(data)

    def message_id(self, data: bytes) -> str | None:
        """Return the message id in `data`, properties that the protocol encoded, or None if there is none.

        Raises RemoteProtocolError if `data` is malformed, but an implementation may parse only a part of it.
        """
        return self.unread_set(data).properties.message_id

    def refusal(self, data: bytes, text: str) -> bytes:
        """Return the bytes that refuse a client before its handshake, for the reason `text`.

        `data` are the first bytes that the client has sent. Return b"" if the protocol has no response for
        this case, or if `data` is too short to choose the response.
        """
        return b""

    def losses(self, message: Message) -> tuple[str, ...]:
        """Return the names of the parts of `message` that this protocol cannot express.

        `message` comes from another protocol. The names are those of `Loss` objects, such as
        `header_name_long`.
        """
        return ()

    def return_part(self, address: Address) -> str | None:
        """Return the part of a return address after `return_prefix`.

        Return None if `address` is no return address.
        """
        prefix = self.return_prefix
        return address.name[len(prefix) :] if prefix and address.name.startswith(prefix) else None

    def fault_of(self, address_words: Mapping[str, str]) -> str:
        """Return the reason why an address in a mapping file is invalid, or "" if it is valid.

        `address_words` has the parts of the address by key, such as `exchange` and `routing_key`.
        """
        return ""

    def impossible_reason(self, first: str) -> str:
        """Return the reason why no name can begin with the level `first`, or "" if a name can."""
        return ""

    def parse(self, text: str) -> Address:
        """Return the address that `text`, in the notation of `show`, stands for. Raises NameRefused.

        If the text has no scope, the address has the default scope.
        """
        scope, name = self.split(text)
        return self.address(self.scope_default if scope is None else scope, name)

    def split(self, text: str) -> tuple[str | None, str]:
        """Split `text`, an address in the notation of `show`, into scope and name. Neither is checked.

        The scope is None if the text has none, and "" in a protocol without scopes.
        """
        if self.scope_word is None:
            return "", text
        scope, colon, name = text.partition(":")
        if colon and (not self.scopes or scope in self.scopes):
            return scope.replace("%3A", ":").replace("%25", "%"), name
        return None, text

    def show(self, address: Address) -> str:
        """Return an address as text: its name or, in a protocol with scopes, `scope:name`.

        `parse` is the inverse.
        """
        if self.scope_word is None:
            return address.name
        return f"{address.scope.replace('%', '%25').replace(':', '%3A')}:{address.name}"

    def levels(self, name: str) -> Levels:
        """Return the levels of `name`, split at the protocol's separator; () for an empty name."""
        return tuple(name.split(self.separator)) if name else ()

    def words_of(self, address: Address) -> dict[str, str]:
        """Return the parts of an address by the keys of a mapping file, such as `exchange`."""
        words = {} if self.scope_word is None else {self.scope_word: address.scope}
        return words | {self.name_word: address.name}

    def published(self, stated: Mapping[str, str | None]) -> tuple[Address, str]:
        """Return the address and the queue that an entry of a mapping file describes.

        `stated` has the values of the entry by key. The queue is the one from which the message was consumed,
        or "" if `stated` has none. If `stated` has only a queue, the result is the address of this queue, and
        "". Raises NameRefused for an invalid address.
        """
        scope = stated.get(self.scope_word) if self.scope_word else None
        name = stated.get(self.name_word)
        queue = stated.get(self.queue_word) if self.queue_word else None
        if queue is not None and scope is None and name is None:
            return self.address("", queue), ""
        return self.address(scope or self.scope_default, name or ""), queue or ""

    @property
    def level_words(self) -> tuple[str, ...]:
        """Keys of an address in a mapping file whose values consist of levels, such as `topic`."""
        words = [self.name_word, self.queue_word, None if self.scopes else self.scope_word]
        return tuple(word for word in words if word is not None)

    @property
    def address_words(self) -> tuple[str, ...]:
        """Keys of an address in a mapping file, which are also variables in templates."""
        return tuple(word for word in (self.scope_word, self.name_word, self.queue_word) if word is not None)

    def port(self, transport: str) -> int | None:
        """Return the default port of a listener with this transport, or None if the protocol has none."""
        return next((one.port for one in self.schemes if one.transport == transport), None)


def quote_short(text: str) -> str:
    """Return a peer's text, quoted and cut to about 60 characters, for an error message."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


CONTROLS: Final = "".join(map(chr, range(0x20))) + "\x7f"
