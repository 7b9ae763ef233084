"""Schema of mapping files as their authors write them: names, types, defaults, and keys that exclude others.

The schema does not know the protocol of an endpoint; the router and the linter check that its keys match it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model, model_validator

from gateway.hints import COMMENT
from gateway.mapping.names import Escape
from gateway.model.dialect import Dialect, Word
from gateway.protocols import DIALECT_OF_WORD, DIALECTS

Mode = Literal["transient", "persistent"]
Qos = Annotated[int, Field(ge=0, le=2)]
HeaderValue = str | int | float | bool

# A route's name is a metric label: short, and of characters that need no quoting anywhere.
RouteName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]
WINDOW = r"^[1-9][0-9]{0,6}[smhd]$"
SECONDS_OF = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
QUEUES = tuple(one.queue_word for one in DIALECTS.values() if one.queue_word)


class Strict(BaseModel):
    """Base class of the models. Types are not converted, unknown keys are refused, objects are immutable."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ListenerGroup(Strict):
    """All listeners of one protocol, as the source or target of a route."""

    protocol: str = Field(description="Protocol of the listeners.", examples=list(DIALECTS))


class Addressed(Strict):
    """Base class of models with the keys of an address, such as `topic`.

    Subclasses have the keys of all protocols as fields.
    """

    def given_words(self) -> dict[str, str]:
        """Return those keys of an address, such as `topic`, that the file contains, with their values."""
        fields = vars(self)  # `getattr` of a word that this model lacks would raise and suppress an error
        return {word: text for word in DIALECT_OF_WORD if (text := fields.get(word)) is not None}


class EndpointAddress(Addressed):
    """Source or target of a route: an endpoint, and an address by its keys, such as `topic`."""

    endpoint: str | ListenerGroup = Field(
        description="Name of a listener or link, or all listeners of a protocol."
    )

    @property
    def group(self) -> str | None:
        """Protocol for whose listeners `endpoint` stands, or None if `endpoint` names a single endpoint."""
        return self.endpoint.protocol if isinstance(self.endpoint, ListenerGroup) else None

    @property
    def name(self) -> str:
        """Name of the endpoint, or of the protocol if `endpoint` stands for all listeners of a protocol."""
        return self.endpoint.protocol if isinstance(self.endpoint, ListenerGroup) else self.endpoint

    @property
    def dialect(self) -> Dialect:
        """Description of the protocol to which the keys of the address belong."""
        fields = vars(self)
        return next(one for word, one in DIALECT_OF_WORD.items() if fields.get(word) is not None)

    @model_validator(mode="after")
    def _one_protocol(self) -> Self:
        """Check that all keys of the address belong to one protocol. Raises ValueError."""
        address_words = self.given_words()
        if not address_words:
            words = (one.scope_word if one.queue_word else one.name_word for one in DIALECTS.values())
            empty = [word for word in DIALECT_OF_WORD if word in self.model_fields_set]
            if empty:
                raise ValueError(f"{empty[0]} is empty{COMMENT}")
            raise ValueError(
                f"no address: give {join_alternatives(dict.fromkeys((*filter(None, words), *QUEUES)))}"
            )
        if len({DIALECT_OF_WORD[word].name for word in address_words}) > 1:
            raise ValueError(f"words of different protocols: {', '.join(address_words)}")
        if fault := self.dialect.fault_of(address_words):
            raise ValueError(fault)
        return self


class TargetEndpointAddress(EndpointAddress):
    """Target of a route: endpoint, address and properties of the messages."""

    qos: Qos | None = Field(None, description="QoS of the message in the target; default: unchanged.")
    retain: bool | None = Field(
        None, description="Retain flag of the message in the target; default: unchanged."
    )
    mandatory: bool | None = Field(
        None, description="True if an unroutable message is refused; default: true."
    )

    @model_validator(mode="after")
    def _options(self) -> Self:
        for option in ("qos", "retain", "mandatory"):
            if getattr(self, option) is not None and option not in self.dialect.target_options:
                words = join_alternatives(
                    one.name_word for one in DIALECTS.values() if option in one.target_options
                )
                raise ValueError(f"{option} is only for {words}; for other targets use delivery")
        return self


def join_alternatives(words: Iterable[str]) -> str:
    """Join words with commas and a final "or": `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _fields(meaning: Callable[[Word], str | None]) -> dict[str, Any]:
    """Build pydantic fields for the keys that the protocols use in addresses, such as `topic`.

    `meaning` takes a key, and returns its description, or None if this model does not have the key.
    """
    found: dict[str, Any] = {}
    for name, word in ((name, word) for one in DIALECTS.values() for name, word in one.words.items()):
        stated = meaning(word)
        if stated is not None:
            kind: Any = Literal[word.choices] if word.choices else str
            least = None if word.choices or word.empty else 1
            found[name] = (kind | None, Field(None, description=stated, min_length=least))
    return found


if TYPE_CHECKING:
    From: TypeAlias = EndpointAddress
    To: TypeAlias = TargetEndpointAddress
    Named: TypeAlias = Addressed
else:
    From = create_model(
        "From",
        __base__=EndpointAddress,
        __doc__="Where a route takes messages from.",
        **_fields(lambda word: word.source),
    )
    To = create_model(
        "To",
        __base__=TargetEndpointAddress,
        __doc__=TargetEndpointAddress.__doc__,
        **_fields(lambda word: word.target),
    )
    Named = create_model(
        "Named",
        __base__=Addressed,
        __doc__="Address of a test's message, in the terms of its endpoint's protocol.",
        **_fields(lambda word: word.source or word.target),
    )


class DeliveryGuarantee(Strict):
    """Delivery guarantee that a route gives to messages, by their guarantee at the source.

    A guarantee whose key is absent does not change.
    """

    qos0: Mode | None = Field(
        None, description="Delivery mode of a message received with QoS 0 or an equivalent guarantee."
    )
    qos1: Mode | None = Field(None, description="Delivery mode of a message received with QoS 1.")
    qos2: Mode | None = Field(None, description="Delivery mode of a message received with QoS 2.")
    transient: Qos | None = Field(
        None, description="QoS of a message received as transient; not with `to.qos`."
    )
    persistent: Qos | None = Field(
        None, description="QoS of a message received as persistent; not with `to.qos`."
    )


class OutboxRule(Strict):
    """Limits of a route's outbox. An absent limit is that of the link."""

    messages_max: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of messages in the outbox."
    )
    bytes_max: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Size of the messages in the outbox: bodies, properties, and 256 bytes each."
    )
    age_secs_max: Annotated[float, Field(gt=0, strict=False)] | None = Field(
        None, description="Seconds that a message may wait; default: no limit."
    )
    policy: Literal["reject", "drop_oldest", "dead_letter"] | None = Field(
        None,
        description="At a limit: refuse new messages, drop the oldest, or make them dead letters.",
    )


class Deduplicate(Strict):
    """Options by which a route recognizes that a message repeats one which was accepted before."""

    by: Literal["message_id"] = Field("message_id", description="Property by which repeats are recognized.")
    window: Annotated[str, StringConstraints(pattern=WINDOW)] = Field(
        description="Time for which an id is stored: a number and s, m, h or d.", examples=["10m"]
    )
    ids_max: int = Field(
        1_000_000,
        ge=1,
        description=(
            "Maximum number of stored ids; above it, ids of users with more than an equal share are"
            " removed first."
        ),
    )

    @property
    def window_secs(self) -> float:
        """Time in seconds for which the id of a message is stored to recognize repeats."""
        return float(int(self.window[:-1]) * SECONDS_OF[self.window[-1]])


# Parts of a message that a rule of `private` may name.
PRIVATE = r"^(client|user|remote_address|body(\.[^.]+)*|headers\.[^.].*|properties\.[a-z_]+)$"
PRIVATE_PROPERTIES = ("app_id", "correlation", "message_id", "reply_to", "type", "user_id")


class Truncate(Strict):
    """Rule for a private value: keep only the beginning of a text, and remove a value that is no text."""

    truncate: Annotated[int, Field(ge=1)] = Field(description="Number of characters to keep.")


class RouteRule(Strict):
    """Rule of a mapping file: an address pattern at the source and an address template at the target."""

    name: RouteName = Field(
        description="Name, unique over all files, also in metrics: letters, digits and `_ . -`."
    )
    source: From = Field(alias="from", description="Source of the messages.")
    to: To = Field(description="Target of the messages.")
    delivery: DeliveryGuarantee = Field(
        DeliveryGuarantee(), description="Guarantee that a message has in the target; default: unchanged."
    )
    headers: dict[str, HeaderValue] = Field(
        {},
        description="Headers to set, instead of the sender's headers of these names; texts are templates.",
    )
    when: str | None = Field(None, description="CEL expression; only messages for which it is true cross.")
    settle: Literal["confirmed", "stored"] = Field(
        "confirmed",
        description="Time at which the source gets its acknowledgement: when the target has confirmed, or"
        " (`stored`, for links) when the message is in the link's outbox.",
    )
    outbox: OutboxRule | None = Field(
        None, description="With `settle: stored`: limits of this route's outbox; default: those of the link."
    )
    attempts_max: int = Field(
        5,
        ge=1,
        le=1_000,
        description="With `settle: stored`: attempts to deliver a message that the target refuses, before it"
        " becomes a dead letter.",
    )
    message_id: Literal["keep", "add"] = Field(
        "keep", description="With `add`, messages without a message id get one, equal at each attempt."
    )
    deduplicate: Deduplicate | None = Field(
        None, description="Acknowledge repeated messages without delivering them again."
    )
    journal: bool = Field(False, description="True if the route is recorded also with `journal.all: false`.")
    private: dict[Annotated[str, StringConstraints(pattern=PRIVATE)], Literal["drop", "hash"] | Truncate] = (
        Field(
            {},
            description="Values to drop, hash (needs `journal.hash_key`) or truncate in the journal's rows of"
            " messages that match the route: `client`, `user`, `remote_address`, `body`, `body.FIELD.FIELD`"
            " of JSON (`*`: any), `headers.NAME`, `properties.NAME`.",
            examples=[{"body.patient.name": "drop", "user": "hash", "body.note": {"truncate": 8}}],
        )
    )
    body_schema: str | None = Field(
        None,
        min_length=1,
        description="File with the JSON Schema of the bodies, beside this one, for `gateway pipeline table`;"
        " the gateway itself does not read it.",
    )
    escape: Escape = Field(
        "percent", description="Treatment of a separator or wildcard inside a level of a name."
    )
    answers: Literal["by_route", "direct"] = Field(
        "by_route",
        description="Translation of a reply address. `by_route`: to the address from which a route back leads"
        " to it. `direct`, between listeners: to a return address, from which answers need no route.",
    )
    on_reject: Literal["dead_letter", "retry"] | None = Field(
        None,
        description="Treatment of a message that the target rejects permanently. `dead_letter`: the message"
        " becomes a dead letter and is acknowledged. `retry`: its source gets a refusal, or, for"
        " MQTT 3.x clients, the message is retried. Absent: messages of links and of MQTT 3.x"
        " clients become dead letters; other sources get a refusal.",
    )
    role: str | None = Field(
        None,
        min_length=1,
        description="Role that clients need to publish messages that match the route. Messages of links need"
        " none.",
    )
    optional: bool = Field(
        False,
        description="True if the route is omitted when one of its endpoints is not configured; otherwise the"
        " file is refused.",
    )

    @model_validator(mode="after")
    def _one_qos(self) -> RouteRule:
        if self.to.qos is not None and (
            self.delivery.transient is not None or self.delivery.persistent is not None
        ):
            raise ValueError(
                "to.qos and delivery.transient/persistent both set the QoS; set only one of them"
            )
        return self

    @model_validator(mode="after")
    def _private_properties(self) -> RouteRule:
        for name in self.private:
            head, _, rest = name.partition(".")
            if head == "properties" and rest not in PRIVATE_PROPERTIES:
                raise ValueError(f"private: {name} is not one of {', '.join(PRIVATE_PROPERTIES)}")
        return self

    @model_validator(mode="after")
    def _outbox_words(self) -> RouteRule:
        stated = [word for word in ("outbox", "attempts_max") if word in self.model_fields_set]
        if stated and self.settle != "stored":
            raise ValueError(f"{stated[0]} needs settle: stored, because only such a route has an outbox")
        return self


class PublishedMessage(Named):
    """Message that a test publishes."""

    endpoint: str
    body: str = ""
    qos: Qos | None = None
    delivery_mode: Annotated[int, Field(ge=1, le=2)] | None = None
    persistent: bool | None = None
    retain: bool = False
    headers: dict[str, HeaderValue] = Field({})
    content_type: str | None = None
    reply_to: str | None = None
    client_id: str = ""
    user: str = ""
    hops: int = Field(0, ge=0)


class Expected(Named):
    """Message that a test expects. Keys and headers that are not given are not compared."""

    endpoint: str
    body: str | None = None
    qos: Qos | None = None
    delivery_mode: Annotated[int, Field(ge=1, le=2)] | None = None
    persistent: bool | None = None
    retain: bool | None = None
    headers: dict[str, HeaderValue] = Field({})
    content_type: str | None = None
    reply_to: str | None = None


class Case(Strict):
    """Test in a mapping file: a message to publish, the messages that must arrive, and the refusals."""

    name: str
    publish: PublishedMessage
    expect: list[Expected] = []
    refused: list[Literal["name_invalid", "hops", "malformed"]] = []


class MappingFile(Strict):
    """Whole content of a mapping file."""

    version: Literal[1] = Field(description="Version of the format.")
    routes: list[RouteRule] = Field(
        min_length=1, description="Routes; every one that matches a message applies."
    )
    tests: list[Case] = Field([], description="Tests of the routes of this file.")


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a mapping file, for editors."""
    schema = MappingFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
